"""Whether an adapter on disk is of the probe's make: keys, shapes, settings. Decided before a server sees it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_jax.adapters.manifest import AdapterError, Manifest
from grpo_jax.storage import layout

_MANIFEST_FIELDS = ("rank", "alpha", "scale", "targets", "base_digest")


@dataclass(frozen=True)
class Make:
    """What all adapters of a run have in common."""

    manifest: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """By key: dtype and shape."""


def read_make(manifest: Manifest, folder: Path) -> Make:
    """Of a downloaded adapter; AdapterError if its files cannot be read as what they should be."""
    try:
        config = json.loads((folder / layout.ADAPTER_CONFIG).read_bytes())
        with safe_open(folder / layout.ADAPTER_WEIGHTS, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            tensors = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise AdapterError(f"the files of {manifest.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{layout.ADAPTER_CONFIG} of {manifest.name} holds no JSON object")
    return Make({field: getattr(manifest, field) for field in _MANIFEST_FIELDS}, config, tensors)


def difference(probe: Make, other: Make) -> str | None:
    """The first way in which an adapter is not of the probe's make, in one sentence; None if it is."""
    missing = sorted(probe.tensors.keys() - other.tensors.keys())
    extra = sorted(other.tensors.keys() - probe.tensors.keys())
    if missing or extra:
        which = f"has the key {extra[0]!r}" if extra else f"lacks the key {missing[0]!r}"
        return (
            f"{layout.ADAPTER_WEIGHTS} {which} unlike the probe "
            f"({len(missing)} keys of the probe are missing, {len(extra)} are unknown)"
        )
    for file, ours, theirs in (
        (layout.MANIFEST, probe.manifest, other.manifest),
        (layout.ADAPTER_CONFIG, probe.config, other.config),
    ):
        for field in sorted(ours.keys() | theirs.keys()):
            if ours.get(field) != theirs.get(field):
                return f"{file} has {field} {theirs.get(field)!r}, and the probe's has {ours.get(field)!r}"
    for key, expected in probe.tensors.items():
        if other.tensors[key] != expected:
            found = "{} {}".format(*other.tensors[key])
            return f"{key} is {found}, and the probe's is {expected[0]} {expected[1]}"
    return None
