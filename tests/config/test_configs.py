"""Every config that is shipped: it passes `check --offline`, and what it says of itself is there to be found."""

from pathlib import Path

import pytest

from grpo_jax.config.load import load_config
from grpo_jax.config.plan import Plan, check_config
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import load_sweep
from grpo_jax.generator.vllm import problem_on_gpu

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
ABLATIONS = {"staleness", "objective", "rank", "learning_rate", "group_size", "precision"}
STUDIES = {"staleness_objective", "rank_learning_rate"}
PAPERS = {path.stem for path in FILES if path.parent.name == "papers"}


def configs(path: Path, *overrides: str) -> list[Config]:
    sweep = load_sweep(path, overrides)
    return [variant.config for variant in sweep.variants] if sweep else [load_config(path, overrides)]


def checked(config: Config) -> Plan:
    return check_config(config, offline=True, lint=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_passes_check_without_a_network(path: Path, no_network: None) -> None:
    for config in configs(path):
        plan = checked(config)
        assert plan.model is not None, "configs/models says nothing of its model"
        # What could not be checked is said, not passed over.
        on_the_hub = not config.model.source.startswith("pypi:")
        assert not on_the_hub or problem_on_gpu(config) is None
        assert any("prompts fit" in item for item in plan.unchecked) == on_the_hub
        assert any(item.startswith("the problems: ") for item in plan.unchecked) == ("hub:" in config.task.source)


@pytest.mark.parametrize("name", sorted(ABLATIONS | STUDIES))
def test_an_ablation_runs_on_a_gpu_model_by_the_override_that_it_names(name: str, no_network: None) -> None:
    path = CONFIGS / "ablations" / f"{name}.yaml"
    overrides = ["model={source: Qwen/Qwen2.5-1.5B-Instruct, dtype: bfloat16}"]
    if name == "precision":
        overrides = ["model.source=Qwen/Qwen2.5-1.5B-Instruct", "sweep.grid.model.dtype=[bfloat16,float16]"]
    assert all(override in path.read_text() for override in overrides)
    for config in configs(path, *overrides):
        assert checked(config).model is not None
        assert problem_on_gpu(config) is None
    seeds = {config.seed for config in configs(path)}
    assert seeds == ({0, 1} if name in STUDIES else {0})


def test_what_an_ablation_of_staleness_says_of_steps_holds() -> None:
    for name in ("staleness", "staleness_objective"):
        for config in configs(CONFIGS / "ablations" / f"{name}.yaml"):
            assert config.staleness is not None
            assert config.steps >= 5 * (config.staleness.exactly + 1)
            assert not any(what == "warning" and "base" in text for what, text in checked(config).rows)


def test_the_ablations_are_those_that_are_named_and_the_readme_lists_every_paper() -> None:
    assert {path.stem for path in FILES if path.parent.name == "ablations"} == ABLATIONS | STUDIES
    readme = (CONFIGS.parent / "experiments" / "papers" / "README.md").read_text()
    assert [name for name in sorted(PAPERS) if f"`{name}.yaml`" not in readme] == []
    for path in FILES:
        if path.parent.name == "papers":
            text = path.read_text()
            for word in ("# Source: ", "# Expected", "# Cost: ", "# Differs: ", "# Not checked"):
                assert word in text, f"{path.name} does not say: {word}"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a network nor what an earlier download may have left in the Hub's cache."""
    import huggingface_hub

    def fail(*_: object, **options: object) -> None:
        assert options.get("local_files_only"), "something was about to be downloaded"
        raise OSError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
