"""Where arrays lie on the devices: one table of logical axes, and the shardings that follow from it.

The mesh has three axes. `data`: copies of the base, each with rows of its own. `fsdp`: shards of the base that also
have rows of their own, gathered layer by layer. `tensor`: shards of heads, MLP and vocabulary that work on the same
rows.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax.errors import UsageError
from grpo_jax.models.config import LoraConfig, ModelConfig, projection_shapes
from grpo_jax.models.layout import PROJECTION_AXES, param_leaves
from grpo_jax.models.quantize import BLOCK, stored_leaves

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis → mesh axes. Everything below derives from this table.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "hidden": ("fsdp",),
    "heads": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "layers": (),
    "rank": (),
}


def make_mesh(data: int, fsdp: int, tensor: int, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of data × fsdp × tensor devices; data −1 takes all that are left.

    Raises:
      UsageError: the sizes do not fit the devices, or leave some of them idle.
    """
    devices = jax.devices() if devices is None else devices
    inner = fsdp * tensor
    if data == -1:
        data = len(devices) // inner
    if data * inner != len(devices):
        raise UsageError(
            f"learner.mesh: data {data or -1} x fsdp {fsdp} x tensor {tensor} does not make up the {len(devices)} "
            "devices there are"
        )
    return Mesh(np.array(devices).reshape(data, fsdp, tensor), MESH_AXES)


def row_shards(mesh: Mesh) -> int:
    """Shards that have rows of their own."""
    return math.prod(mesh.shape[axis] for axis in RULES["rows"])


def check_divisible(sizes: Mapping[str, int], config: ModelConfig, quantization: str = "none") -> None:
    """UsageError, naming the key, unless the mesh sizes divide what they shard and cut no block that shares a scale.

    Args:
      sizes: axis → size, such as `mesh.shape`.
      quantization: of the base, see `models.quantize`.
    """
    for axis, what, size in (
        ("fsdp", "hidden_size", config.hidden_size),
        ("tensor", "num_attention_heads", config.num_heads),
        ("tensor", "num_key_value_heads", config.num_kv_heads),
        ("tensor", "intermediate_size", config.intermediate_size),
        ("tensor", "vocab_size", config.vocab_size),
    ):
        if size % sizes[axis]:
            raise UsageError(f"learner.mesh.{axis}: {sizes[axis]} does not divide the model's {what}, {size}")
    for leaf in param_leaves(config):
        if any(part.name == "kernel_nf4" for part in stored_leaves(leaf, quantization)):
            for axis in RULES[leaf.axes[0] or "layers"]:
                if leaf.shape[0] // sizes[axis] % BLOCK:
                    raise UsageError(
                        f"learner.mesh.{axis}: {sizes[axis]} would cut blocks of {BLOCK} out of the {leaf.shape[0]} "
                        f"inputs of {leaf.module}, which share a scale in learner.quantization {quantization}"
                    )


def spec(axes: tuple[str | None, ...]) -> P:
    """The partition of an array whose dimensions have these logical axes; no mesh axis may shard two of them."""
    used = [mesh_axis for axis in axes if axis for mesh_axis in RULES[axis]]
    if len(set(used)) < len(used):
        raise ValueError(f"the axes {axes} would shard an array twice over the same mesh axis")
    return P(*(RULES[axis] or None if axis else None for axis in axes))


def param_shardings(mesh: Mesh, config: ModelConfig, quantization: str = "none") -> dict[str, Any]:
    """The tree of the base's shardings, of what it is stored as."""
    stored = [part for leaf in param_leaves(config) for part in stored_leaves(leaf, quantization)]
    return unflatten_dict({leaf.path: NamedSharding(mesh, spec(leaf.tree_axes)) for leaf in stored})


def lora_shardings(mesh: Mesh, config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """The tree of the adapter's shardings: A is sharded like the input of its projection, B like the output."""
    flat = {}
    for module in projection_shapes(config):
        if lora.adapts(module):
            rows, columns = PROJECTION_AXES[module]
            path = ("layers", *module.split("."))
            flat[*path, "a"] = NamedSharding(mesh, spec(("layers", rows, "rank")))
            flat[*path, "b"] = NamedSharding(mesh, spec(("layers", "rank", columns)))
    return unflatten_dict(flat)


def state_shardings(mesh: Mesh, state: Any, lora: Any) -> Any:
    """Shardings for a tree that holds copies of the adapter's tree (Adam's moments) among replicated scalars.

    Args:
      state: arrays or shapes; a leaf whose path ends like a leaf of the adapter is sharded like it.
      lora: the adapter's shardings.
    """
    known = {tuple(path): sharding for path, sharding in flatten_dict(lora).items()}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return known.get(keys, NamedSharding(mesh, P()))

    return jax.tree.map_with_path(place, state)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis over the shards that have rows of their own."""
    return NamedSharding(mesh, spec(("rows",)))


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array, the same on every process, onto the mesh: each device takes its own part and no more."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
