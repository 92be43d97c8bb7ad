"""The commands around a run, on a tiny model: sample, report, export, and the same from Python."""

import json
import subprocess
import sys

import pytest
import yaml

import grpo_jax
from grpo_jax import cli
from grpo_jax.errors import UsageError
from tests.jobs.harness import REPO, tiny_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("from-python")
    return grpo_jax.run(tiny_config(tiny_model, folder / "bucket", steps=2, evaluation__samples=0))


def test_a_run_from_python_returns_where_its_report_is(result):
    assert result.exit_code == 0, result.message
    assert result.report.html_path.is_file()
    assert result.report.html_path.parent == result.run_dir


def test_an_exported_adapter_is_a_peft_directory_of_the_last_policy(result, tmp_path, capsys):
    assert cli.main(["export", str(result.run_dir), "--to", str(tmp_path / "adapter")]) == 0
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files
    current = json.loads((result.run_dir / "policy.json").read_text())["current"]
    published = result.run_dir / "adapters" / current / "adapter_model.safetensors"
    assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == published.read_bytes()
    assert cli.main(["export", str(result.run_dir), "--to", str(tmp_path / "adapter")]) == 2
    assert cli.main(["export", str(tmp_path / "nothing"), "--to", str(tmp_path / "other")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_report_can_be_written_again(result, capsys):
    result.report.html_path.unlink()
    assert cli.main(["report", str(result.run_dir)]) == 0
    assert result.report.html_path.is_file()
    assert "report.html" in capsys.readouterr().out


def test_sample_prints_completions_rewards_and_the_share_of_mixed_groups(tiny_model, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_model, tmp_path / "bucket")))
    command = [sys.executable, "-m", "grpo_jax.cli", "sample", str(path), "--n", "16"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "16 completions of 4 prompts: mean reward" in done.stdout
    assert not (tmp_path / "bucket").exists()


def test_wrong_use_from_python_raises_and_starts_nothing(tiny_model, tmp_path):
    with pytest.raises(UsageError, match=r"lora\.ranc: unknown key"):
        grpo_jax.run(tiny_config(tiny_model, tmp_path / "bucket", lora__ranc=1))
    with pytest.raises(UsageError, match="overrides go with a config file"):
        grpo_jax.run(tiny_config(tiny_model, tmp_path / "bucket"), "steps=2")
    assert not (tmp_path / "bucket").exists()
