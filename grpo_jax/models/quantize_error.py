"""What quantising a base does to its log-probabilities, measured without ever holding either whole base.

Layer by layer from the files: the same tokens go through each layer as it is and as it is quantised, so that
embedding, head and one layer are all that is in memory. Shapes: C tokens, N = C − 1 positions, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import Block, RMSNorm, layer_inputs
from grpo_jax.models.layout import param_leaves
from grpo_jax.models.logprobs import logits
from grpo_jax.models.weights import open_leaves

# Positions whose logits exist at one time, for both bases.
_CHUNK = 32


@dataclass(frozen=True)
class QuantizationError:
    """Of given tokens, at temperature 1, in nats; the base without an adapter."""

    logprobs_N: np.ndarray
    """Of each token after the first, under the base as it is."""
    quantized_logprobs_N: np.ndarray
    mean_abs: float
    """Of the differences between the two."""
    max_abs: float
    mean_kl: float
    """KL(as it is ‖ quantised) over the whole vocabulary, mean over the positions."""


def quantization_error(
    path: str | Path, config: ModelConfig, scheme: str, tokens_C: np.ndarray, *, dtype: Any = jnp.float32
) -> QuantizationError:
    """Scores one sequence under the base of a directory, as it is and quantised.

    Args:
        path: as `load_params` takes it.
        config: of the same directory.
        scheme: see `quantize`.
        tokens_C: at least two.
        dtype: what both compute in, and what is not quantised is read in.

    Raises:
        UsageError: as `load_params`.
    """
    tokens_C = np.asarray(tokens_C)
    positions_1xC = jnp.arange(len(tokens_C))[None]
    ids_1xC = jnp.ones_like(positions_1xC)
    inputs = layer_inputs(config, dtype, "xla", positions_1xC, ids_1xC, jnp.zeros_like(ids_1xC))
    leaves = param_leaves(config)
    outside = [leaf for leaf in leaves if not leaf.stacked]
    stacked = [leaf for leaf in leaves if leaf.stacked]

    with open_leaves(path, config) as read:
        flat = {part.path: array for leaf in outside for part, array in read(leaf, dtype).items()}
        around = unflatten_dict(flat)
        x_1xCxD = jnp.asarray(around["embed"]["embedding"][tokens_C[None]])
        apply = {form: jax.jit(Block(config, None, dtype, "xla", None, form).apply) for form in ("none", scheme)}
        states = dict.fromkeys(apply, x_1xCxD)
        for layer in range(config.num_layers):
            for form, block in apply.items():
                parts = [item for leaf in stacked for item in read(leaf, dtype, form, [layer]).items()]
                params = unflatten_dict({part.path[1:]: array[0] for part, array in parts})
                states[form], _ = block({"params": params}, states[form], *inputs)
            # Otherwise the layers to come would be on the device before this one is done.
            jax.block_until_ready(states)

    compare = jax.jit(_comparison(config, dtype))
    full_N, quantized_N, kl_N = compare(around, states["none"][0], states[scheme][0], tokens_C[1:])
    difference_N = np.abs(np.asarray(full_N, np.float64) - np.asarray(quantized_N, np.float64))
    return QuantizationError(
        logprobs_N=np.asarray(full_N),
        quantized_logprobs_N=np.asarray(quantized_N),
        mean_abs=float(difference_N.mean()),
        max_abs=float(difference_N.max()),
        mean_kl=float(np.asarray(kl_N, np.float64).mean()),
    )


def _comparison(config: ModelConfig, dtype: Any) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """(parameters outside the layers, two outputs of the last layer CxD, targets N) to two log-probs and the KL, N."""
    norm = RMSNorm(config.norm_eps, dtype)

    def compare(
        around: Any, full_CxD: Any, quantized_CxD: Any, targets_N: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def one(position: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            full_D, quantized_D, target = position
            full_V, quantized_V = (
                jax.nn.log_softmax(logits(around, norm.apply({"params": around["final_norm"]}, x_D), config))
                for x_D in (full_D, quantized_D)
            )
            return full_V[target], quantized_V[target], jnp.sum(jnp.exp(full_V) * (full_V - quantized_V))

        positions = full_CxD[:-1], quantized_CxD[:-1], targets_N
        return jax.lax.map(one, positions, batch_size=_CHUNK)

    return compare
