"""What `check` says of a config before anything is fetched, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from grpo_jax.config.load import parse_config
from grpo_jax.config.plan import check_config
from grpo_jax.errors import UsageError
from grpo_jax.models.config import parameter_count
from grpo_jax.models.source import resolve_config, shipped_config
from tests.jobs.harness import tiny_config

REPO = Path(__file__).parents[2]

# As the model cards or the safetensors headers on the Hub give them.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
}


def parsed(source, tmp_path, **changes):
    return parse_config(tiny_config(Path(source), tmp_path / "bucket", **changes), "test")


@pytest.fixture
def no_hub(monkeypatch):
    """The Hub cannot be reached. Returns what it was asked."""
    asked = []

    def fail(repository, **options):
        asked.append((repository, options))
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    return asked


@pytest.mark.parametrize("source", PUBLISHED)
def test_the_shipped_facts_make_the_published_number_of_parameters(source):
    assert parameter_count(shipped_config(source)) == PUBLISHED[source]


def test_every_shipped_file_is_among_them_and_names_outside_the_folder_are_none():
    files = {path.stem.replace("--", "/") for path in (REPO / "configs" / "models").iterdir()}
    assert files == set(PUBLISHED)
    assert shipped_config("../models/Qwen--Qwen3-0.6B") is None
    assert shipped_config("Qwen/Qwen9") is None


def test_llama_3_keeps_its_rope_scaling():
    for source, factor in (("meta-llama/Llama-3.1-8B", 8.0), ("meta-llama/Llama-3.2-1B", 32.0)):
        scaling = shipped_config(source).rope_scaling
        assert (scaling.kind, scaling.factor, scaling.original_max_positions) == ("llama3", factor, 8192)


def test_no_weights_are_fetched_to_check(no_hub):
    with pytest.raises(UsageError, match="cannot be fetched"):
        resolve_config("Qwen/Qwen3-0.6B")
    ((_, options),) = no_hub
    files = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "config.json", "tokenizer.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(wanted) == ["model.safetensors.index.json", "config.json", "tokenizer.json"]


def test_without_a_hub_the_facts_serve_and_the_prompts_are_unchecked(no_hub, tmp_path):
    plan = check_config(parsed("Qwen/Qwen2.5-1.5B", tmp_path))
    assert plan.model == shipped_config("Qwen/Qwen2.5-1.5B")
    assert "configs/models" in dict(plan.rows)["model"]
    assert any("no route to host" in item for item in plan.unchecked)
    assert any("prompts" in item for item in plan.unchecked)


def test_what_is_to_run_needs_more_than_facts(no_hub, tmp_path):
    with pytest.raises(UsageError, match=r"model\.source: .*no route to host$"):
        check_config(parsed("Qwen/Qwen2.5-1.5B", tmp_path), weights=True)


def test_a_model_in_neither_place_is_said_to_be_in_neither(no_hub, tmp_path):
    config = parsed("some/model", tmp_path)
    with pytest.raises(UsageError, match=r"no route to host; nor is there a configs/models/some--model\.json"):
        check_config(config)
    plan = check_config(config, offline=True)
    assert plan.model is None
    assert any("nor is there a configs/models/some--model.json" in item for item in plan.unchecked)


def test_check_offline_needs_neither_network_nor_cache(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(Path("Qwen/Qwen2.5-1.5B"), tmp_path / "bucket")))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XLA_FLAGS"))}
    done = subprocess.run(
        [sys.executable, "-m", "grpo_jax.cli", "check", str(path), "--offline", "--no-compile", "learner.mesh.fsdp=2"],
        cwd=REPO,
        env={**environment, "HF_HOME": str(tmp_path / "hub"), "http_proxy": "", "https_proxy": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1,543,714,304; 6.17 GB in float32" in done.stdout
    assert "base 3.09 GB" in done.stdout  # half, on each of two devices
    assert "not checked: whether the prompts fit into a row" in done.stdout
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    assert not (tmp_path / "bucket").exists()


def test_operations_and_adapter_of_a_token_are_counted_by_hand(no_hub, tmp_path):
    rows = dict(check_config(parsed("Qwen/Qwen2.5-0.5B", tmp_path)).rows)
    # 24 layers of rank 8: q, o 896 to 896, k and v 896 to 128, gate, up and down 896 and 4864.
    adapter = 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert f"{adapter:,} parameters" in rows["adapter"]
    assert f"{(4 * 494_032_768 + 6 * adapter) / 1e9:.2f} G" in rows["FLOPs a token"]


def test_the_objective_is_one_line_with_its_numbers(no_hub, tmp_path):
    rows = dict(check_config(parsed("Qwen/Qwen2.5-0.5B", tmp_path, algorithm={"preset": "precision_rl"})).rows)
    assert rows["objective"] == (
        "ppo_clip(clip_low 0.2, clip_high 0.28) against log-probabilities recomputed at arrival, "
        "times token_tis(cap 2), advantages dr_grpo, aggregation constant"
    )
    assert rows["updates a step"].startswith("1 ")
    assert "ratio is always 1" in rows["warning"]
    several = {"preset": "precision_rl", "num_iterations": 2, "kl_coef": 0.1}
    rows = dict(check_config(parsed("Qwen/Qwen2.5-0.5B", tmp_path, algorithm=several)).rows)
    assert "warning" not in rows
    assert "KL to the base 0.1 × k3" in rows["objective"]


@pytest.mark.parametrize(
    ("loss", "args", "message"),
    [
        ("no_such_module:loss", {}, r"^algorithm\.loss: no_such_module:loss cannot be imported: No module named"),
        ("tests.toy_losses:none", {}, r"^algorithm\.loss: tests\.toy_losses:none cannot be imported: .*'none'"),
        ("grpo_jax.errors:EXIT_USAGE", {}, r"^algorithm\.loss: grpo_jax\.errors:EXIT_USAGE is no function"),
        ("tests.toy_losses:likelihood", {"strenth": 2.0}, r"^algorithm\.loss_args: .*'strenth'"),
        ("grpo_jax.algorithms.policy_losses:ppo_clip", {"clip_low": 0.2}, r"^algorithm\.loss_args: .*'clip_high'"),
    ],
)
def test_a_loss_of_ones_own_that_cannot_be_called_is_refused(no_hub, tmp_path, loss, args, message):
    config = parsed("Qwen/Qwen2.5-0.5B", tmp_path, algorithm={"loss": loss, "loss_args": args})
    with pytest.raises(UsageError, match=message) as refusal:
        check_config(config)
    assert "\n" not in str(refusal.value)
