"""The decoder of the Llama, Qwen2 and Qwen3 families, from tokens to the hidden states before the head.

Two collections: "params" is the frozen base, "lora" what is trained. Used only through pure calls,
`Decoder(config, lora, dtype).apply({"params": base, "lora": adapter}, tokens, positions, prompt_ids, branch_ids)`;
without the collection "lora" the same call computes the base.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax.models.attention import apply_rope, rope_tables
from grpo_jax.models.attention_backends import attend_rows, shared_mask
from grpo_jax.models.config import PROJECTIONS, LoraConfig, ModelConfig, projection_shapes
from grpo_jax.models.layout import param_leaves
from grpo_jax.models.lora import LoraDense

Array = jax.Array


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · scale, normalised in float32 or wider (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x_xD: Array) -> Array:
        scale_D = self.param("scale", nn.initializers.ones, x_xD.shape[-1:], self.dtype)
        wide_xD = x_xD.astype(jnp.promote_types(self.dtype, jnp.float32))
        wide_xD *= jax.lax.rsqrt(jnp.mean(jnp.square(wide_xD), axis=-1, keepdims=True) + self.eps)
        return scale_D.astype(self.dtype) * wide_xD.astype(self.dtype)


class Reads(NamedTuple):
    """Who may read whom, for all layers alike; the mask if the backend uses one."""

    prompt_ids_BxT: Array
    branch_ids_BxT: Array
    mask_BxTxT: Array | None


class _Part(nn.Module):
    """What the parts of a block share: the config, and linear layers by path."""

    config: ModelConfig
    lora: LoraConfig | None
    dtype: Any
    attention: str
    mesh: Any
    quantization: str = "none"

    def linear(self, module: str) -> LoraDense:
        """The projection of a path such as "self_attn.q_proj", to be called in a compact method of its parent."""
        return LoraDense(
            features=projection_shapes(self.config)[module][1],
            use_bias=module in self.config.biased,
            lora=self.lora if self.lora and self.lora.adapts(module) else None,
            dtype=self.dtype,
            quantization=self.quantization,
            name=module.rpartition(".")[2],
        )

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.norm_eps, self.dtype, name=name)


class Attention(_Part):
    @nn.compact
    def __call__(self, x_BxTxD: Array, rope: tuple[Array, Array], reads: Reads) -> Array:
        def heads(name: str, count: int) -> Array:
            y_BxTxF = self.linear(f"self_attn.{name}")(x_BxTxD)
            return y_BxTxF.reshape(*y_BxTxF.shape[:2], count, self.config.head_dim)

        q_BxTxHxh = heads("q_proj", self.config.num_heads)
        k_BxTxKxh = heads("k_proj", self.config.num_kv_heads)
        v_BxTxKxh = heads("v_proj", self.config.num_kv_heads)
        if self.config.qk_norm:
            q_BxTxHxh, k_BxTxKxh = self.norm("q_norm")(q_BxTxHxh), self.norm("k_norm")(k_BxTxKxh)
        out_BxTxHxh = attend_rows(
            apply_rope(q_BxTxHxh, rope),
            apply_rope(k_BxTxKxh, rope),
            v_BxTxKxh,
            reads.prompt_ids_BxT,
            reads.branch_ids_BxT,
            backend=self.attention,
            mask_BxTxT=reads.mask_BxTxT,
            mesh=self.mesh,
        )
        return self.linear("self_attn.o_proj")(out_BxTxHxh.reshape(*x_BxTxD.shape[:2], -1))


class MLP(_Part):
    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        gate_BxTxF, up_BxTxF = self.linear("mlp.gate_proj")(x_BxTxD), self.linear("mlp.up_proj")(x_BxTxD)
        return self.linear("mlp.down_proj")(jax.nn.silu(gate_BxTxF) * up_BxTxF)


class Block(_Part):
    """One layer, in the form that `nn.scan` wants: (carry, …) to (carry, nothing)."""

    @nn.compact
    def __call__(self, x_BxTxD: Array, rope: tuple[Array, Array], reads: Reads) -> tuple[Array, None]:
        parts = (self.config, self.lora, self.dtype, self.attention, self.mesh, self.quantization)
        x_BxTxD += Attention(*parts, name="self_attn")(self.norm("input_layernorm")(x_BxTxD), rope, reads)
        x_BxTxD = on_rows(x_BxTxD, self.mesh)
        x_BxTxD += MLP(*parts, name="mlp")(self.norm("post_attention_layernorm")(x_BxTxD))
        return on_rows(x_BxTxD, self.mesh), None


def layer_inputs(
    config: ModelConfig, dtype: Any, attention: str, positions_BxT: Array, prompt_ids_BxT: Array, branch_ids_BxT: Array
) -> tuple[tuple[Array, Array], Reads]:
    """What a `Block` is given beside its activations, in every layer alike."""
    rope = rope_tables(positions_BxT, config.head_dim, config.rope_theta, dtype, config.rope_scaling)
    return rope, Reads(prompt_ids_BxT, branch_ids_BxT, shared_mask(prompt_ids_BxT, branch_ids_BxT, attention))


def on_rows(x_Bx: Array, mesh: Mesh | None) -> Array:
    """Activations lie where their rows do, whole: weights come to them, sharded over "fsdp" as they may be."""
    if mesh is None:
        return x_Bx
    return jax.lax.with_sharding_constraint(x_Bx, NamedSharding(mesh, P(("data", "fsdp"))))


_REMAT: dict[str, Callable[..., Any] | None] = {
    # All products with a weight, but not the scores of attention, which are as large as the row is long, squared.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
}


class Decoder(nn.Module):
    """Embedding, blocks and final norm. Every leaf under "layers" has the layers on axis 0."""

    config: ModelConfig
    lora: LoraConfig | None = None
    dtype: Any = jnp.float32
    """What is computed in; norms, rotations and softmax in float32 if this is narrower."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass computes again: nothing, all but the products with weights, or all but a block's input."""
    attention: str = "xla"
    """A backend that can honour the rows, see `attention_backends.choose`."""
    mesh: Mesh | None = None
    """Of axes "data", "fsdp" and "tensor": rows lie over the first two. None: no constraint on where anything lies."""
    quantization: str = "none"
    """What the kernels of the layers are stored as, see `quantize`."""

    @nn.compact
    def __call__(self, tokens_BxT: Array, positions_BxT: Array, prompt_ids_BxT: Array, branch_ids_BxT: Array) -> Array:
        """hidden_BxTxD after the final norm, in the compute dtype; the state at t predicts the token after t.

        Args:
            tokens_BxT: int32. An id of the vocabulary's size or more turns its row into NaN.
            positions_BxT: int32, rotary positions, whatever the place in the row.
            prompt_ids_BxT: int32, see `attention_mask`.
            branch_ids_BxT: int32, see `attention_mask`.

        Raises:
            ValueError: "lora" is passed, but its modules are not the targets.
        """
        config = self.config
        adapted = self.is_initializing()
        if "lora" in self.variables:
            _check_modules(self.variables["lora"], self.lora)
            adapted = True
        x_BxTxD = nn.Embed(config.vocab_size, config.hidden_size, self.dtype, self.dtype, name="embed")(tokens_BxT)
        x_BxTxD = on_rows(x_BxTxD, self.mesh)
        layers = nn.scan(
            # Inside a scan no common subexpression can undo the recomputation, and the guard against it costs time.
            nn.remat(Block, prevent_cse=False, policy=_REMAT[self.remat]) if self.remat != "none" else Block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True, "lora": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
        )(
            config,
            self.lora if adapted else None,
            self.dtype,
            self.attention,
            self.mesh,
            self.quantization,
            name="layers",
        )
        shared = layer_inputs(config, self.dtype, self.attention, positions_BxT, prompt_ids_BxT, branch_ids_BxT)
        x_BxTxD, _ = layers(x_BxTxD, *shared)
        return RMSNorm(config.norm_eps, self.dtype, name="final_norm")(x_BxTxD)


def _check_modules(adapter: Mapping[str, Any], lora: LoraConfig | None) -> None:
    """Adapted wholly or not at all: a module that is missing would compute the base, one too many would be ignored."""
    given = {".".join(path[1:-1]) for path in flatten_dict(adapter)}
    expected = {module for module in PROJECTIONS if lora and lora.adapts(module)}
    if given != expected:
        raise ValueError(f'"lora" holds {sorted(given)}, but the decoder adapts {sorted(expected)}')


@partial(jax.jit, static_argnames=("config", "dtype"))
def init_params(key: Array, config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """A random base for tests, with the structure of a loaded one (head included); activations stay of order one."""
    leaves = param_leaves(config)
    shapes = [leaf.tree_shape(config) for leaf in leaves]
    ends = list(accumulate(map(math.prod, shapes)))
    # One draw cut into pieces, because compiling a draw for each shape takes far longer than drawing.
    noise = jnp.split(jax.random.normal(key, (ends[-1],), dtype), ends[:-1])
    flat = {}
    for leaf, shape, values in zip(leaves, shapes, noise, strict=True):
        array = values.reshape(shape)
        if leaf.name == "kernel":
            array *= leaf.shape[0] ** -0.5
        # Norm scales and biases vary too: were they all ones and zeros, a misplaced one would go unnoticed.
        flat[leaf.path] = 1 + 0.1 * array if leaf.name == "scale" else array
    return unflatten_dict(flat)
