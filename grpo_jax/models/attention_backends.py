"""Attention backends: what each honours, which one a run gets, and the one call that the decoder makes.

A backend that cannot honour a request says why; it is never replaced by another one behind the caller's back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from grpo_jax.models.attention import LONGEST_WHOLE, attend, attend_in_blocks, attention_mask, tokens_of
from grpo_jax.models.attention_kernels import FLASH_MODULE, SPLASH_MODULE, flash, splash

Array = jax.Array


@dataclass(frozen=True)
class Backend:
    """What a backend honours. None means any."""

    name: str
    platforms: tuple[str, ...]
    """As `jax.default_backend()` names them."""
    shared_prompts: bool
    """Whether it reads branch ids. If not, every sample of a row needs a prompt id of its own."""
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    row_multiple: int = 1
    """What the length of a row must be a multiple of."""
    kernel: Callable[..., Array] | None = None
    """(q, k, v, segment ids, interpret) to out, which XLA cannot partition; None for plain XLA operations."""
    module: str | None = None
    """Where jax keeps the kernel."""

    def against_shapes(self, dtype: Any, head_dim: int, row_tokens: int) -> str | None:
        """Why it cannot take such arrays, or None."""
        name = jnp.dtype(dtype).name
        if self.dtypes and name not in self.dtypes:
            return f"it computes in {_either(self.dtypes)}, not {name}"
        if self.head_dims and head_dim not in self.head_dims:
            return f"it takes heads of size {_either(self.head_dims)}, not {head_dim}"
        if row_tokens % self.row_multiple:
            return f"it takes rows of a multiple of {self.row_multiple} tokens, not {row_tokens}"
        return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("xla", ("cpu", "gpu", "tpu"), shared_prompts=True),
        Backend(
            "flash",
            ("gpu",),
            shared_prompts=False,
            dtypes=("float32", "bfloat16", "float16"),
            # Powers of two, which is what Triton's tiles are; jax's own tests end at 128.
            head_dims=(16, 32, 64, 128),
            row_multiple=128,
            kernel=flash,
            module=FLASH_MODULE,
        ),
        Backend(
            "splash",
            ("tpu",),
            shared_prompts=False,
            dtypes=("float32", "bfloat16"),
            # The sizes of jax's own tests, and rows of whole vector lanes.
            head_dims=(64, 128, 192, 256),
            row_multiple=128,
            kernel=splash,
            module=SPLASH_MODULE,
        ),
    )
}
_FUSED = {"gpu": "flash", "tpu": "splash"}
# Accelerators multiply float32 in TF32 or bfloat16 unless told otherwise, kernels too.
_TOLERANCE = {"float64": 1e-5, "float32": 2e-2, "float16": 2e-2, "bfloat16": 4e-2}


def reason_against(
    backend: str, *, platform: str, dtype: Any, head_dim: int, row_tokens: int, shared_prompts: bool
) -> str | None:
    """Why a backend cannot honour a request, as the end of a sentence, or None if it can.

    Args:
        platform: "cpu", "gpu" or "tpu", as `jax.default_backend()` says.
        dtype: what the decoder computes in.
        shared_prompts: whether several samples of a row may lie behind one copy of their prompt.
    """
    known = BACKENDS[backend]
    if platform not in known.platforms:
        return f"it runs on {_either(known.platforms)}, not {platform}"
    if shared_prompts and not known.shared_prompts:
        return "it reads one segment id a token and so cannot share prompts"
    if reason := known.against_shapes(dtype, head_dim, row_tokens):
        return reason
    if known.module and not _installed(known.module):
        return f"jax {jax.__version__} has no {known.module}"
    return None


def choose(requested: str, *, platform: str, dtype: Any, head_dim: int, row_tokens: int, shared_prompts: bool) -> str:
    """The backend of a run. "auto" takes the platform's fused kernel where that can honour the request, else "xla".

    Raises:
        ValueError: the requested backend is unknown, or cannot honour the request.
    """
    against = partial(
        reason_against,
        platform=platform,
        dtype=dtype,
        head_dim=head_dim,
        row_tokens=row_tokens,
        shared_prompts=shared_prompts,
    )
    if requested == "auto":
        fused = _FUSED.get(platform)
        return fused if fused and against(fused) is None else "xla"
    if requested not in BACKENDS:
        raise ValueError(f"attention {requested!r} is unknown; it is auto or one of {', '.join(BACKENDS)}.")
    if reason := against(requested):
        raise ValueError(f"attention {requested!r} cannot be used here: {reason}.")
    return requested


def shared_mask(prompt_ids_BxT: Array, branch_ids_BxT: Array, backend: str) -> Array | None:
    """What `attend_rows` of all layers would compute alike: mask_BxTxT, or None where no such mask is used."""
    if BACKENDS[backend].kernel or prompt_ids_BxT.shape[1] > LONGEST_WHOLE:
        return None
    return attention_mask(prompt_ids_BxT, branch_ids_BxT)


def attend_rows(
    q_BxTxHxh: Array,
    k_BxTxKxh: Array,
    v_BxTxKxh: Array,
    prompt_ids_BxT: Array,
    branch_ids_BxT: Array,
    *,
    backend: str = "xla",
    mask_BxTxT: Array | None = None,
    interpret: bool = False,
    mesh: Mesh | None = None,
) -> Array:
    """out_BxTxHxh of packed rows: softmax(q kᵀ / sqrt(h)) v over what `attention_mask` lets each token read.

    Args:
        prompt_ids_BxT: int32, see `attention_mask`. The segments of a backend that cannot share prompts, which then
            does not look at the branch ids: whoever packed the rows asked `choose` before.
        mask_BxTxT: what `shared_mask` returned, to not compute it again.
        interpret: run kernels as plain XLA operations, on any platform.
        mesh: of axes "data", "fsdp" and "tensor". A kernel, which XLA cannot partition, runs on each device alone: rows
            over the first two axes, heads over the last. Plain XLA operations are partitioned by XLA.

    Raises:
        ValueError: the backend cannot take such arrays, or the mesh does not divide their rows and heads.
    """
    known = BACKENDS[backend]
    rows, length, _, size = q_BxTxHxh.shape
    if reason := known.against_shapes(q_BxTxHxh.dtype, size, length):
        raise ValueError(f"attention {backend!r} cannot be used here: {reason}.")
    if known.kernel is None:
        if length > LONGEST_WHOLE:
            return attend_in_blocks(q_BxTxHxh, k_BxTxKxh, v_BxTxKxh, tokens_of(prompt_ids_BxT, branch_ids_BxT))
        if mask_BxTxT is None:
            mask_BxTxT = attention_mask(prompt_ids_BxT, branch_ids_BxT)
        return attend(q_BxTxHxh, k_BxTxKxh, v_BxTxKxh, mask_BxTxT)
    kernel = partial(known.kernel, interpret=interpret)
    if mesh is not None:
        over_rows, over_heads = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
        if rows % over_rows or k_BxTxKxh.shape[2] % over_heads:
            raise ValueError(
                f"attention {backend!r} cannot be used here: {rows} rows and {k_BxTxKxh.shape[2]} key heads are not "
                f"divided by {over_rows} devices for rows and {over_heads} for heads."
            )
        ids, qkv = P(("data", "fsdp"), None), P(("data", "fsdp"), None, "tensor", None)
        # Pallas does not say over which axes its outputs vary, so the check has nothing to go by.
        kernel = jax.shard_map(kernel, mesh=mesh, in_specs=(qkv, qkv, qkv, ids), out_specs=qkv, check_vma=False)
    return kernel(q_BxTxHxh, k_BxTxKxh, v_BxTxKxh, prompt_ids_BxT)


def self_test(
    backend: str,
    *,
    dtype: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    row_tokens: int,
    interpret: bool = False,
) -> float:
    """Compares a backend with "xla" in float32 at full precision, on a row of two segments and padding.

    Returns:
        The largest error of outputs and gradients of q, k and v, each relative to the array's largest magnitude.

    Raises:
        RuntimeError: it is above the tolerance of the dtype (a wrong mask or head is wrong by the order of one), or
            not a number.
    """
    # Two groups of heads show whether queries find their own key head; more would only take memory.
    kv_heads = min(num_kv_heads, 2)
    shapes = [(1, row_tokens, count, head_dim) for count in (kv_heads * num_heads // num_kv_heads, kv_heads, kv_heads)]
    shapes.append(shapes[0])
    *qkv, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))
    # Cuts that are no multiple of a kernel's block.
    index_T = jnp.arange(row_tokens)
    ids_1xT = jnp.where(index_T < row_tokens // 3, 1, jnp.where(index_T < row_tokens - row_tokens // 5, 2, 0))[None]

    @partial(jax.jit, static_argnames="name")
    def values(qkv: list[Array], cotangent: Array, name: str) -> tuple[Array, ...]:
        def rows(q: Array, k: Array, v: Array) -> Array:
            return attend_rows(q, k, v, ids_1xT, jnp.zeros_like(ids_1xT), backend=name, interpret=interpret)

        out, pullback = jax.vjp(rows, *qkv)
        return (out, *pullback(cotangent))

    found = values(qkv, cotangent, backend)
    with jax.default_matmul_precision("highest"):
        expected = values([x.astype(jnp.float32) for x in qkv], cotangent.astype(jnp.float32), "xla")
    errors = [
        jnp.max(jnp.abs(x.astype(jnp.float32) - true)) / jnp.max(jnp.abs(true))
        for x, true in zip(found, expected, strict=True)
    ]
    error, tolerance = float(jnp.max(jnp.stack(errors))), _TOLERANCE[jnp.dtype(dtype).name]
    if not error <= tolerance:
        raise RuntimeError(
            f"attention {backend!r} is wrong on this machine: in {jnp.dtype(dtype).name} it is off by {error:.1e} of "
            f"the largest value, and {tolerance:.0e} is allowed."
        )
    return error


def _either(options: tuple[Any, ...]) -> str:
    *head, last = map(str, options)
    return f"{', '.join(head)} or {last}" if head else last


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
