"""What a step will take of a device's memory, from the shapes alone: nothing is loaded, placed or run.

The functions of the step are lowered with abstract arrays, on a mesh of the shape that the config asks for, and
compiled ahead of time; the compiler says what they need. Where the machine has fewer devices than that, the mesh is
made of host devices, and the numbers are those of the CPU's compiler: an estimate of what another's would say.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding

from grpo_jax.config.schema import Config
from grpo_jax.config.schema import Mesh as MeshSizes
from grpo_jax.errors import UsageError
from grpo_jax.learner.packing import TrainSample
from grpo_jax.learner.probe import canary_tokens
from grpo_jax.learner.setup import choose_attention, layout_of, lora_config, step_of
from grpo_jax.learner.sharding import (
    check_divisible,
    lora_shardings,
    make_mesh,
    param_shardings,
    replicated,
    row_sharding,
    row_shards,
    state_shardings,
)
from grpo_jax.learner.step import LearnerState, Step, StepArrays
from grpo_jax.models.attention_backends import BACKENDS
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.layout import param_leaves
from grpo_jax.models.lora import init_lora
from grpo_jax.models.quantize import stored_dtype, stored_leaves

Tree = Any

# The CPU's compiler has laid out all buffers before it makes machine code, and this code is never run.
_HASTE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


@dataclass(frozen=True)
class Compiled:
    """Bytes on each device of one compiled function, as its compiler says."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int  # outputs that take the place of donated arguments

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary - self.aliased


@dataclass(frozen=True)
class Estimate:
    """Bytes on each device, and on what they were found.

    Attributes:
      dtype: of the compute.
      platform: "cpu", "gpu" or "tpu": of the devices that were compiled for.
      attention: the backend that was compiled.
      share_prompt: whether a row holds a prompt once for all samples of its group.
      elsewhere: platform → both of them there, where they are others.
      base: the frozen base as it is stored.
      adapter: the float32 masters of A and B.
      optimizer: Adam's moments and counters.
      accumulate, apply: None where nothing was compiled, or the compiler does not say.
    """

    mesh: Mapping[str, int]
    dtype: str
    platform: str
    attention: str
    share_prompt: bool
    elsewhere: Mapping[str, tuple[str, bool]]
    base: int
    adapter: int
    optimizer: int
    accumulate: Compiled | None = None
    apply: Compiled | None = None

    @property
    def peak(self) -> int | None:
        """Of a step: the larger of its two functions, with what lies on the device beside its arguments."""
        if self.accumulate is None or self.apply is None:
            return None
        return max(self.accumulate.total + self.optimizer, self.apply.total)

    def rows(self) -> list[tuple[str, str]]:
        """(What, value) for people."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        held = ", ".join(
            f"{name} {_size(size)}"
            for name, size in (("base", self.base), ("adapter", self.adapter), ("optimizer", self.optimizer))
        )
        attention = _attention_words(self.attention, self.platform, self.share_prompt)
        for platform, (backend, share) in self.elsewhere.items():
            attention += f"; {_attention_words(backend, platform, share)}"
        rows = [("a device holds", f"{held} (mesh {sizes})"), ("attention", attention)]
        if self.peak is not None and self.accumulate is not None:
            caveat = ""
            if self.platform == "cpu":
                caveat = "; an accelerator's compiler lays out temporaries otherwise, so this is an estimate"
                caveat += ", with plain XLA operations for the kernel of attention" if self.elsewhere else ""
                caveat += (
                    f", and the CPU holds float32 copies of {self.dtype} weights" if self.dtype != "float32" else ""
                )
            rows.append(
                (
                    "compiled step",
                    f"{_size(self.peak)} a device at most, {_size(self.accumulate.temporary)} of them temporary; "
                    f"compiled on {self.platform} with attention {self.attention}{caveat}",
                )
            )
        return rows


def force_host_devices(sizes: MeshSizes) -> None:
    """Lets the CPU appear as as many devices as the mesh has; to be called before jax has looked for any.

    Where it has, or the environment has said how many there are, that stays.
    """
    # An accelerator is asked what it compiles to, not taken away from whoever computes on it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", _least(sizes))
    except RuntimeError:
        pass


def memory_estimate(config: Config, model: ModelConfig, *, compile: bool = True) -> Estimate:
    """Bytes on each device of the learner that `config` asks for.

    Args:
      model: of the base.
      compile: False leaves out what only a compiler knows, and takes no time.

    Raises:
      UsageError: the mesh, the model, the attention backend or the loss do not go together.
    """
    lora, dtype, scheme = lora_config(config), jnp.dtype(config.model.dtype), config.learner.quantization
    mesh = _mesh(config.learner.mesh)
    check_divisible(mesh.shape, model, scheme)
    platform = mesh.devices.flat[0].platform
    attention, share_prompt, elsewhere = _attention(config, model, platform)
    step = step_of(config, model, lora, mesh, attention)
    base, state = abstract_base(mesh, model, dtype, scheme), _abstract_state(step, model, lora)
    found = Estimate(
        mesh=dict(mesh.shape),
        dtype=dtype.name,
        platform=platform,
        attention=attention,
        elsewhere=elsewhere,
        share_prompt=share_prompt,
        base=bytes_per_device(base),
        adapter=bytes_per_device(state.lora),
        optimizer=bytes_per_device(state.opt_state),
    )
    if not compile:
        return found
    acc = jax.eval_shape(step.zeros, state, jax.ShapeDtypeStruct((), np.float32))
    acc = _placed(acc, state_shardings(mesh, acc, step.lora_shardings))
    everywhere = replicated(mesh)
    rate = jax.ShapeDtypeStruct((), np.float32, sharding=everywhere)
    tokens = jax.ShapeDtypeStruct(canary_tokens(model).shape, np.int32, sharding=everywhere)
    arrays = _abstract_arrays(config, mesh, share_prompt)
    return replace(
        found,
        accumulate=_memory(platform, step.accumulate, base, state.lora, acc, arrays),
        apply=_memory(platform, step.apply, base, state, acc, rate, tokens),
    )


def abstract_base(mesh: Mesh, model: ModelConfig, dtype: Any, quantization: str) -> Tree:
    """The base's tree of shapes, dtypes and shardings, as `load_params` would have placed it."""
    flat = {
        part.path: jax.ShapeDtypeStruct(part.tree_shape(model), stored_dtype(part, dtype))
        for leaf in param_leaves(model)
        for part in stored_leaves(leaf, quantization)
    }
    return _placed(unflatten_dict(flat), param_shardings(mesh, model, quantization))


def bytes_per_device(tree: Tree) -> int:
    """Of abstract arrays with shardings, on any one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _least(sizes: MeshSizes) -> int:
    """Devices of a mesh; `data: -1`, all that are left, counts as one."""
    return max(sizes.data, 1) * sizes.fsdp * sizes.tensor


def _mesh(sizes: MeshSizes) -> Mesh:
    """Of the machine's devices if there are enough of them, else of host devices."""
    devices, needed = jax.devices(), _least(sizes)
    if len(devices) < needed:
        devices = jax.devices("cpu")
    if sizes.data != -1:
        devices = devices[:needed]
    return make_mesh(sizes.data, sizes.fsdp, sizes.tensor, devices=devices)


def _attention(config: Config, model: ModelConfig, platform: str) -> tuple[str, bool, dict[str, tuple[str, bool]]]:
    """(Backend to compile with, whether prompts are shared, platform → both, where they are others there).

    A kernel of another platform cannot be compiled on the CPU: it is asked whether it could honour the config, and
    plain XLA operations take its place.
    """
    requested = config.learner.attention
    if platform != "cpu" or requested == "xla":
        return *choose_attention(config, model, platform), {}
    if requested != "auto":
        own = BACKENDS[requested].platforms[0]
        backend, share = choose_attention(config, model, own)
        return "xla", share, {own: (backend, share)}
    here = choose_attention(config, model, platform)
    others = {other: choose_attention(config, model, other) for other in ("gpu", "tpu")}
    return *here, {other: found for other, found in others.items() if found != here}


def _abstract_state(step: Step, model: ModelConfig, lora: LoraConfig) -> LearnerState:
    adapter = jax.eval_shape(lambda: init_lora(jax.random.key(0), model, lora))
    adapter = _placed(adapter, lora_shardings(step.mesh, model, lora))
    state = jax.eval_shape(step.init, adapter)
    return _placed(state, state_shardings(step.mesh, state, step.lora_shardings))


def _abstract_arrays(config: Config, mesh: Mesh, share_prompt: bool) -> StepArrays:
    """A micro-batch: all have the same shapes, those with one short sample too."""
    one = TrainSample(0, 0, np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), 0.0, 0.0)
    (batch,) = layout_of(config, row_shards(mesh), share_prompt).pack([one])
    sharding = row_sharding(mesh)
    arrays = {f.name: getattr(batch, f.name) for f in fields(StepArrays)}
    return StepArrays(**{name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for name, a in arrays.items()})


def _placed(tree: Tree, shardings: Tree) -> Tree:
    def with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, tree, shardings)


def _memory(platform: str, function: Any, *arguments: Tree) -> Compiled | None:
    """Of a jitted function, as donated as it is."""
    try:
        compiled = function.lower(*arguments).compile(compiler_options=_HASTE if platform == "cpu" else None)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"learner: the step cannot be compiled: {reason}") from None
    found = compiled.memory_analysis()
    if found is None:
        return None
    return Compiled(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
    )


def _attention_words(backend: str, platform: str, share_prompt: bool) -> str:
    return (
        f"{backend} on {platform}, prompts {'shared by their samples' if share_prompt else 'repeated for each sample'}"
    )


def _size(count: int) -> str:
    """Decimal units, as device makers and the rest of the plan count."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
