"""Base weights from Hugging Face safetensors files into our tree, without torch."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError, safe_open

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.layout import Leaf, param_leaves
from grpo_jax.models.quantize import quantize, stored_dtype, stored_leaves

_DTYPES = ("F64", "F32", "F16", "BF16")


def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: Any,
    *,
    quantization: str = "none",
    place: Callable[[tuple[str, ...], np.ndarray], Any] = lambda _, array: jnp.asarray(array),
) -> dict[str, Any]:
    """The base parameter tree of a Hugging Face model directory.

    One array of the tree at a time is in host memory, all layers of it stacked.

    Args:
        path: directory with `model.safetensors`, or with `model.safetensors.index.json` and its shards.
        config: of the same directory.
        dtype: of every array in the tree that is not quantised.
        quantization: of the kernels of the layers, from the values in the files; see `quantize`.
        place: takes an array's path in the tree and the host array, returns what stands in the tree, for instance the
            array sharded over a mesh; by default it goes to the default device.

    Returns:
        Nested dict as `Decoder` wants it: kernels (in, out), leaves under "layers" with the layers on axis 0.

    Raises:
        UsageError: a file is missing or broken; a tensor is missing, unexpected, quantised or of another shape; or the
            model cannot be quantised so.
    """
    flat = {}
    with open_leaves(path, config) as read:
        for leaf in param_leaves(config):
            for part, array in read(leaf, dtype, quantization).items():
                flat[part.path] = place(part.path, array)
    return unflatten_dict(flat)


@contextmanager
def open_leaves(path: str | Path, config: ModelConfig) -> Iterator[Callable[..., dict[Leaf, np.ndarray]]]:
    """Leaf by leaf what `load_params` reads whole.

    Yields:
        read(leaf, dtype, quantization="none", layers=None): the arrays that the leaf is stored as, each contiguous.
        `layers` are the indices of those to stack, by default all.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(path), stack)
        checkpoint.refuse_unexpected(_expected(param_leaves(config), config), config)
        yield partial(_read, checkpoint, config)


class _Checkpoint:
    """The tensors of a directory by name, whichever file each is in."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.origin, files = _weight_files(directory)
        self.tensors: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{file} is missing or no safetensors file ({error}).") from error
            self.tensors.update(dict.fromkeys(handle.keys(), (file, handle)))

    def refuse_unexpected(self, expected: set[str], config: ModelConfig) -> None:
        """Raises for tensors the decoder would not use, but for those that hold no weights of their own."""
        for name, (file, _) in self.tensors.items():
            derived = name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")
            if name not in expected and not derived:
                raise UsageError(f"{file}: tensor {name} has no place in a {config.family} decoder of this config.")

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor in its stored dtype, checked before its data is read."""
        if name not in self.tensors:
            raise UsageError(f"{self.origin}: tensor {name} is missing.")
        file, handle = self.tensors[name]
        header = handle.get_slice(name)
        if header.get_dtype() not in _DTYPES:
            raise UsageError(f"{file}: tensor {name} is {header.get_dtype()}, and only {', '.join(_DTYPES)} are read.")
        if tuple(header.get_shape()) != shape:
            raise UsageError(
                f"{file}: tensor {name} has shape {tuple(header.get_shape())}, but the config says {shape}."
            )
        return handle.get_tensor(name)


def _weight_files(directory: Path) -> tuple[Path, list[Path]]:
    """The file that lists the tensors, and the files that hold them."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return single, [single]
    if not index.is_file():
        raise UsageError(f"{directory} holds neither {single.name} nor {index.name}.")
    try:
        return index, sorted({directory / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is no index of safetensors files ({error!r}).") from error


def _expected(leaves: Iterable[Leaf], config: ModelConfig) -> set[str]:
    return {name for leaf in leaves for name in _hf_names(leaf, config)}


def _hf_names(leaf: Leaf, config: ModelConfig) -> list[str]:
    return [leaf.hf_name(layer) for layer in range(config.num_layers)] if leaf.stacked else [leaf.hf_name()]


def _read(
    checkpoint: _Checkpoint,
    config: ModelConfig,
    leaf: Leaf,
    dtype: Any,
    quantization: str = "none",
    layers: Sequence[int] | None = None,
) -> dict[Leaf, np.ndarray]:
    """Written layer by layer, so that no second copy of all layers exists."""
    names = _hf_names(leaf, config)
    names = names if layers is None else [names[layer] for layer in layers]
    parts = stored_leaves(leaf, quantization)
    arrays = {part: np.empty((len(names), *part.shape), stored_dtype(part, dtype)) for part in parts}
    for layer, name in enumerate(names):
        tensor = checkpoint.tensor(name, leaf.shape[::-1] if leaf.transposed else leaf.shape)
        value = tensor.T if leaf.transposed else tensor
        stored = {leaf.name: value} if parts == (leaf,) else quantize(value, quantization)
        for part, array in arrays.items():
            array[layer] = stored[part.name]
    return arrays if leaf.stacked else {part: array[0] for part, array in arrays.items()}
