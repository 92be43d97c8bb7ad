"""What the learner promises about a published adapter. Written last: an adapter without a manifest does not exist."""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_jax.adapters.names import parse_policy
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, ObjectTooLarge
from grpo_jax.storage.records import MAX_RECORD_BYTES, canonical_json

FILES = (layout.ADAPTER_CONFIG, layout.ADAPTER_WEIGHTS)


# Strict: a number that is a text, or none, is no number. (JSON has no NaN, but Python's readers take it.)
_CHECKED = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileEntry(BaseModel):
    model_config = _CHECKED
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Canary(BaseModel):
    """A short prompt and the raw log-probability of each of its tokens after the first, at temperature 1."""

    model_config = _CHECKED
    tokens: list[int] = Field(min_length=2, max_length=32)
    logprobs: list[float]


class Manifest(BaseModel):
    model_config = _CHECKED
    name: str
    version: int | None  # None: the probe
    step: int = Field(ge=0)
    rank: int = Field(ge=1)
    alpha: float
    scale: float
    targets: list[str]
    base_digest: str
    norm: float  # of the effective update of all modules, Frobenius: sqrt(sum |scale * A B|^2)
    digest: str
    files: dict[str, FileEntry]
    canary: Canary


class AdapterError(Exception):
    """An adapter in the bucket or on disk is not what its manifest says. The message names the file."""


def manifest_bytes(manifest: Manifest) -> bytes:
    return canonical_json(manifest.model_dump(mode="json"))


def read_manifest(run: Bucket, name: str) -> Manifest:
    """The checked manifest of `name`; AdapterError if it is not there or not sound."""
    named = parse_policy(name)
    key = layout.adapter(name, layout.MANIFEST)
    data = _read(run, key, MAX_RECORD_BYTES)
    if data is None:
        raise AdapterError(f"{key} does not exist in {run.address}")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise AdapterError(f"{key} is not a manifest: {error.errors()[0]['msg']}") from None
    is_named = (manifest.name, manifest.version) == (name, named.version) and manifest.digest.startswith(named.hex)
    if not is_named or set(manifest.files) != set(FILES):
        raise AdapterError(f"{key} describes another adapter: name {manifest.name!r}, files {sorted(manifest.files)}")
    if len(manifest.canary.logprobs) != len(manifest.canary.tokens) - 1:
        raise AdapterError(f"{key}: the canary has {len(manifest.canary.logprobs)} log-probabilities")
    return manifest


def file_entry(data: bytes) -> FileEntry:
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def download_adapter(run: Bucket, manifest: Manifest, folder: Path) -> Path:
    """Copies an adapter into `folder/<name>` once its files match the manifest and its name matches their digest.

    Returns:
      The directory, in PEFT's layout. AdapterError names the file that does not match; nothing is left behind then.
    """
    contents = {}
    for file in FILES:
        key = layout.adapter(manifest.name, file)
        data = _read(run, key, manifest.files[file].size)
        if data is None:
            raise AdapterError(f"{key} is missing although its manifest exists")
        if file_entry(data) != manifest.files[file]:
            raise AdapterError(f"{key} does not match its manifest: {len(data)} bytes, sha256 differs or size differs")
        contents[file] = data
    digest = hashlib.sha256(contents[layout.ADAPTER_CONFIG] + contents[layout.ADAPTER_WEIGHTS]).hexdigest()
    if digest != manifest.digest or not digest.startswith(parse_policy(manifest.name).hex):
        raise AdapterError(f"the content of {manifest.name} does not have the digest in its name")
    target = folder / manifest.name
    target.mkdir(parents=True, exist_ok=True)
    for file, data in contents.items():
        (target / file).write_bytes(data)
    return target


def _read(run: Bucket, key: str, most: int) -> bytes | None:
    """The bytes of an object that has no reason to be larger; None without one."""
    try:
        return run.read_or_none(key, most, size=most)
    except ObjectTooLarge:
        raise AdapterError(f"{key} is larger than the {most} bytes that it should have") from None
