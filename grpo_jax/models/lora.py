"""Low-rank adaptation of a linear layer (Hu et al. 2021, arXiv:2106.09685)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from grpo_jax.models.config import PROJECTIONS, LoraConfig, ModelConfig, projection_shapes
from grpo_jax.models.layout import Leaf
from grpo_jax.models.quantize import dequantize, stored_dtype, stored_leaves

Array = jax.Array


class LoraDense(nn.Module):
    """y = x W (+ bias) + scale · (x A) B.

    W and bias lie in the collection "params", W as what `quantize` stores it as. A and B lie in "lora" as float32
    masters, whatever the compute dtype, and are cast where they are used: an optimiser step is far smaller than
    bfloat16 can add.
    """

    features: int
    use_bias: bool
    lora: LoraConfig | None
    """None: not adapted. Otherwise "lora" must hold this module's A and B."""
    dtype: Any
    quantization: str = "none"
    """Of W, see `quantize`."""

    @nn.compact
    def __call__(self, x_xD: Array) -> Array:
        """(…, in) to (…, features), both in the compute dtype.

        Raises:
            flax.errors.ScopeVariableNotFoundError: "lora" lacks this module's matrices.
            ValueError: their rank is not the config's, so the scale would be wrong.
        """
        size = x_xD.shape[-1]
        y_xF = self._product(x_xD)
        if self.use_bias:
            y_xF += self.param("bias", nn.initializers.zeros, (self.features,), self.dtype).astype(self.dtype)
        if self.lora is None:
            return y_xF
        rank = self.lora.rank
        a_DxR = self.variable("lora", "a", lambda: _kaiming_uniform(self.make_rng("lora"), (size, rank))).value
        b_RxF = self.variable("lora", "b", lambda: jnp.zeros((rank, self.features), jnp.float32)).value
        given, expected = (a_DxR.shape, b_RxF.shape), ((size, rank), (rank, self.features))
        if given != expected:
            raise ValueError(f"A and B of {self.name} have the shapes {given}, not {expected}")
        return y_xF + low_rank(x_xD, a_DxR, b_RxF, self.lora.scale)

    def _product(self, x_xD: Array) -> Array:
        """x W. A quantised W is whole only in here, forward and backward: what is kept between is what it is stored as.

        Raises:
            UsageError: W cannot be stored so.
        """
        shape = x_xD.shape[-1], self.features
        if self.quantization == "none":
            return x_xD @ self.param("kernel", nn.initializers.lecun_normal(), shape, self.dtype).astype(self.dtype)
        parts = stored_leaves(Leaf(self.name or "the layer", "kernel", shape, (None, None)), self.quantization)
        stored = {
            part.name: self.param(part.name, nn.initializers.zeros, part.shape, stored_dtype(part, self.dtype))
            for part in parts
        }

        # The layers are scanned, and forward and backward are two loops: nothing could undo the recomputation.
        @partial(jax.checkpoint, prevent_cse=False)
        def product(x_xD: Array, stored: dict[str, Array]) -> Array:
            return x_xD @ dequantize(stored, self.quantization, self.dtype)

        return product(x_xD, stored)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def low_rank(x_xD: Array, a_DxR: Array, b_RxF: Array, scale: float) -> Array:
    """scale · (x A) B in the dtype of x; A and B float32.

    The gradient is written out for three reasons. A's and B's sum over tokens in float32, whatever the compute dtype.
    x A is computed again instead of kept. And each product has the thin matrix on the left: derived automatically, the
    gradient of B is a transposed product, for which the compiler copies all of dy in an order that misses every cache.
    """
    return (x_xD @ a_DxR.astype(x_xD.dtype)) @ b_RxF.astype(x_xD.dtype) * scale


def _low_rank_fwd(x_xD: Array, a_DxR: Array, b_RxF: Array, scale: float) -> tuple[Array, tuple[Array, Array, Array]]:
    return low_rank(x_xD, a_DxR, b_RxF, scale), (x_xD, a_DxR, b_RxF)


def _low_rank_bwd(scale: float, kept: tuple[Array, Array, Array], dy_xF: Array) -> tuple[Array, Array, Array]:
    x_xD, a_DxR, b_RxF = kept
    a, b = a_DxR.astype(x_xD.dtype), b_RxF.astype(x_xD.dtype)
    h_xR, dh_xR = (x_xD @ a) * scale, (dy_xF @ b.T) * scale

    def over_tokens(thin_xR: Array, wide_xN: Array, dtype: Any) -> Array:
        tokens = tuple(range(thin_xR.ndim - 1))
        wide = jnp.promote_types(thin_xR.dtype, jnp.float32)
        product = jax.lax.dot_general(thin_xR, wide_xN, ((tokens, tokens), ((), ())), preferred_element_type=wide)
        return product.astype(dtype)

    return dh_xR @ a.T, over_tokens(dh_xR, x_xD, a_DxR.dtype).T, over_tokens(h_xR, dy_xF, b_RxF.dtype)


low_rank.defvjp(_low_rank_fwd, _low_rank_bwd)


def init_lora(key: Array, config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """A fresh adapter that changes nothing yet: B is zero, A is drawn as peft draws it.

    Each module has a key of its own, so adding a target leaves the others' A unchanged.

    Returns:
        The decoder's collection "lora", {"layers": {"self_attn": {"q_proj": {"a": LxDxR, "b": LxRxF}, …}, …}}, float32.
    """
    shapes = projection_shapes(config)
    flat = {}
    for index, module in enumerate(PROJECTIONS):
        if not lora.adapts(module):
            continue
        rows, columns = shapes[module]
        path = ("layers", *module.split("."))
        module_key = jax.random.fold_in(key, index)
        flat[*path, "a"] = _kaiming_uniform(module_key, (config.num_layers, rows, lora.rank))
        flat[*path, "b"] = jnp.zeros((config.num_layers, lora.rank, columns), jnp.float32)
    return unflatten_dict(flat)


def _kaiming_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform within ±1/sqrt(in): Kaiming's bound with a = sqrt(5), which is torch's and peft's default."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
