"""Adapters in a bucket and on disk: sound, or refused with the documented error."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from grpo_jax.adapters.initial import initial_adapter
from grpo_jax.adapters.manifest import AdapterError, Canary, Manifest, download_adapter, manifest_bytes, read_manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.adapters.peft import read_adapter
from grpo_jax.adapters.publisher import AdapterSpec, export_adapter_files
from grpo_jax.errors import UsageError
from grpo_jax.generator.index import INDEX, indexed, write_index
from grpo_jax.generator.sameness import read_make
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from tests.fuzz.mutations import as_json, bent, damaged
from tests.fuzz.profile import fuzz, in_a_sentence

LAYERS, RANK = 2, 4
SPEC = AdapterSpec(run="r", rank=RANK, alpha=8.0, rslora=False, scale=2.0, base_model="org/tiny", base_digest="ab" * 32)


def _lora() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(LAYERS, 6, RANK)), rng.normal(size=(LAYERS, RANK, 5))
    return {"layers": {"self_attn": {"q_proj": {"a": a.astype(np.float32), "b": b.astype(np.float32)}}}}


LORA = _lora()
MANIFEST, FILES = export_adapter_files(
    SPEC, LORA, version=3, step=3, canary=Canary(tokens=[1, 2, 3], logprobs=[-1.0, -2.0])
)
NAME = MANIFEST.name


def _mutated(rng: Random, data: bytes) -> bytes:
    return damaged(rng, data) if rng.random() < 0.3 else as_json(bent(rng, json.loads(data)))


def _write(run: Bucket, manifest: bytes, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        run.put(layout.adapter(NAME, name), data)
    run.put(layout.adapter(NAME, layout.MANIFEST), manifest)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def test_the_sound_adapter_is_taken(place: Path) -> None:
    run = Bucket(str(place / "sound"))
    _write(run, manifest_bytes(MANIFEST), FILES)
    folder = download_adapter(run, read_manifest(run, NAME), place / "local")
    tree, _ = read_adapter(folder, LAYERS)
    ours, theirs = (t["layers"]["self_attn"]["q_proj"]["a"] for t in (LORA, tree))
    np.testing.assert_array_equal(theirs, ours)
    assert read_make(MANIFEST, folder).config["r"] == RANK
    assert initial_adapter(str(folder), LORA, rank=RANK, scale=2.0).keys() == LORA.keys()


@fuzz()
def test_a_manifest_is_sound_or_refused(place: Path, rng: Random) -> None:
    run = Bucket(str(place / "manifest"))
    _write(run, _mutated(rng, manifest_bytes(MANIFEST)), FILES)
    try:
        found = read_manifest(run, NAME)
    except AdapterError:
        return
    _check(found)
    try:
        download_adapter(run, found, place / "manifest-local")
    except AdapterError:
        return


def _check(found: Manifest) -> None:
    parsed = parse_policy(NAME)
    assert (found.name, found.version) == (NAME, parsed.version)
    assert found.digest.startswith(parsed.hex)
    assert found.rank >= 1
    assert found.step >= 0
    for value in (found.alpha, found.scale, found.norm, *found.canary.logprobs):
        assert math.isfinite(value)
    assert Manifest.model_validate_json(manifest_bytes(found)) == found


@fuzz()
def test_an_adapter_on_disk_is_sound_or_refused(place: Path, rng: Random) -> None:
    folder = place / "disk"
    folder.mkdir(exist_ok=True)
    config, weights = FILES[layout.ADAPTER_CONFIG], FILES[layout.ADAPTER_WEIGHTS]
    if rng.random() < 0.5:
        config = _mutated(rng, config)
    else:
        weights = _bent_weights(rng, weights)
    (folder / layout.ADAPTER_CONFIG).write_bytes(config)
    (folder / layout.ADAPTER_WEIGHTS).write_bytes(weights)
    try:
        tree, read = read_adapter(folder, LAYERS)
        assert isinstance(read, dict)
        for module in (m for block in tree["layers"].values() for m in block.values()):
            assert {x.ndim for x in module.values()} == {3}
            assert {len(x) for x in module.values()} == {LAYERS}
            assert module["a"].shape[2] == module["b"].shape[1]
    except AdapterError:
        pass
    try:
        read_make(MANIFEST, folder)
    except AdapterError:
        pass
    try:
        tree = initial_adapter(str(folder), LORA, rank=RANK, scale=2.0)
        assert tree["layers"]["self_attn"]["q_proj"]["a"].shape == (LAYERS, 6, RANK)
        assert np.isfinite(tree["layers"]["self_attn"]["q_proj"]["b"]).all()
    except UsageError as error:
        in_a_sentence(error)


def _bent_weights(rng: Random, data: bytes) -> bytes:
    """The header's JSON bent, or bytes anywhere."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        return damaged(rng, data)
    header = as_json(bent(rng, json.loads(data[8 : 8 + size])))
    if rng.random() < 0.3:
        header = header.replace(b".0.", rng.choice((b".1.", b".00.", "².".encode(), b".-1.", b".7.")))
        header = header.replace(b"lora_A.weight", rng.choice((b"lora_A.weight", b"lora_B.weight", b"lora_A.bias")))
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


@fuzz(200)
def test_an_index_of_adapters_names_what_is_there_or_nothing(place: Path, rng: Random) -> None:
    folder = place / "index"
    (folder / NAME).mkdir(parents=True, exist_ok=True)
    write_index(folder, [NAME])
    (folder / INDEX).write_bytes(_mutated(rng, (folder / INDEX).read_bytes()))
    assert indexed(folder, NAME) in (None, str(folder / NAME))
