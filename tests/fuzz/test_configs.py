"""Configs, overrides and sweeps: a config that can be recorded, or a UsageError in one sentence."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from grpo_jax.config.load import load_config, parse_config
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import load_sweep
from grpo_jax.errors import UsageError
from grpo_jax.storage.records import canonical_json
from tests.fuzz.mutations import ODD, as_json, bent, damaged
from tests.fuzz.profile import fuzz, in_a_sentence

SEED: dict[str, Any] = {
    "run": "tiny",
    "steps": 4,
    "model": {"source": "org/tiny"},
    "lora": {"rank": 8, "targets": ["q_proj"]},
    "task": {"source": "a.b:c", "args": {"n": 1}, "few_shot": {"pairs": [{"question": "a", "answer": "b"}]}},
    "rewards": [{"source": "a.b:d", "weight": 2.0}, {"source": "a.b:e", "args": {"x": [1]}}],
    "algorithm": {"preset": "dapo", "masks": {}, "loss_args": {}},
    "optimizer": {"learning_rate": 1e-4, "stop_at_reward": {"value": 0.5}},
    "staleness": {"exactly": 1},
    "local": {"generator_cpus": [[0], [1]]},
    "generator": {"env": {"A": "b"}},
    "sweep": {"grid": {"lora.rank": [8, 16]}, "variants": {"a": {"lora.alpha": 3}}, "seeds": [0, 1]},
}
_TEXTS = (
    "a: 2001-99-99", "a: !!int x", "a: !!float x", "a: 1:99:99", "a: &a [*a]", "a: {<<: [1]}", "? [1]\n: 2", "- 1",
    "a: 0b_", "a: !!binary '###'", "a: !!timestamp x", "%YAML 9.9\n---\na: 1", "a: *b", "<<: 3", "a: !!set {x}",
    "\ufeffa: 1", "a: 0x_", "a: !!python/name:os x",
    "a: " + "[" * 300, "", "a: 1\na: 2", "a:\n  - b: 1\n    b: 2", "a: " + "1" * 5000,
)  # fmt: skip
_OVERRIDES = (
    "lora.rank=16", "rewards.0.weight=3", "algorithm={}", "task.args.n=[1, 2]", "optimizer.stop_at_reward=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


def _checked(path: Path, overrides: list[str]) -> None:
    found: list[Config] = []
    for load in (load_config, load_sweep):
        try:
            loaded: Any = load(path, overrides)
        except UsageError as error:
            in_a_sentence(error)
            continue
        if isinstance(loaded, Config):
            found.append(loaded)
        elif loaded is not None:
            found += [variant.config for variant in loaded.variants]
    for config in found:
        recorded = json.loads(canonical_json(config.model_dump(mode="json")))
        assert parse_config(recorded, "record") == config


@fuzz(120)
def test_a_config_can_be_recorded_or_is_refused_in_a_sentence(folder: Path, rng: Random) -> None:
    path, value = folder / "config.yaml", bent(rng, SEED) if rng.random() < 0.7 else SEED
    if isinstance(value, dict) and rng.random() < 0.7:
        value = {key: value[key] for key in value if key != "sweep"}
    kind = rng.random()
    if kind < 0.6:
        path.write_bytes(as_json(value).replace(b"[" * 1000, b"").replace(b"]" * 1000, b""))
    elif kind < 0.9:
        path.write_bytes(damaged(rng, yaml.safe_dump(SEED).encode()))
    else:
        path.write_text(rng.choice(_TEXTS), encoding="utf-8")
    _checked(path, [])


@fuzz(80)
def test_overrides_are_taken_or_refused(folder: Path, rng: Random) -> None:
    path = folder / "sound.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SEED.items() if key != "sweep"}))
    text = rng.choice(_OVERRIDES)
    if rng.random() < 0.7:
        text = damaged(rng, text.encode()).decode(errors="replace")
    else:
        text = text.replace("0", rng.choice(("²", "٣", "-1", "9" * 5000)))
    _checked(path, [text])


@fuzz(40)
def test_a_parent_is_found_or_refused(folder: Path, rng: Random) -> None:
    path = folder / "child.yaml"
    parent = rng.choice((*ODD, "child.yaml", ".", "x\0y", "sound.yaml", "/dev/null", "y" * 300))
    path.write_bytes(as_json({"extends": parent, "run": "x"}).replace(b"[" * 1000, b"").replace(b"]" * 1000, b""))
    _checked(path, [])
