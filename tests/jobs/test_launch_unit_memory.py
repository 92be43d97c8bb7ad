"""Whether a flavor is refused for its memory, or for what it cannot compute."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_jax.config.plan import Plan
from grpo_jax.config.schema import Config
from grpo_jax.jobs.preflight_memory import memory_problems
from grpo_jax.models.config import ModelConfig, parameter_count
from tests.jobs.test_launch_unit import config_of

MODEL = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=64,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rope_theta=1e4,
    norm_eps=1e-5,
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    max_positions=4096,
)
PLAN = Plan([], [], MODEL)
BYTES = 2 * parameter_count(MODEL)  # bfloat16, 26 GB


def gpu(name: str, total_gb: float, quantity: int = 1) -> Any:
    accelerator = SimpleNamespace(vram=f"{total_gb:g} GB", quantity=str(quantity))
    return SimpleNamespace(name=name, ram="8 GB", accelerator=accelerator)


def cpu(name: str, ram: str) -> Any:
    return SimpleNamespace(name=name, ram=ram, accelerator=None)


def on(generator: str, learner: str = "roomy", **changes: Any) -> Config:
    config = config_of(generator={"flavor": generator}, learner={"flavor": learner})
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    return config.model_copy(update={"model": model, "generator": config.generator.model_copy(update=changes)})


HARDWARE = [
    cpu("roomy", "512 GB"),
    cpu("small", "16 GB"),
    gpu("one", 24),
    gpu("four", 96, 4),
    gpu("large", 80),
]


def problems(config: Config) -> list[str]:
    return memory_problems(config, PLAN, HARDWARE, compile=False)[0]


@pytest.mark.parametrize(("flavor", "fits"), [("roomy", True), ("small", False), ("one", False), ("large", True)])
def test_weights_have_to_fit_on_a_device(flavor: str, fits: bool) -> None:
    assert BYTES > 24e9
    found = problems(on(flavor))
    assert (found == []) == fits
    assert all("jobs.generator.flavor" in problem and flavor in problem for problem in found)
    assert (problems(on("roomy", flavor)) == []) == fits


def test_several_devices_are_one_only_where_the_weights_are_divided() -> None:
    assert problems(on("four")) != []
    assert problems(on("four", extra_args=["--tensor-parallel-size", "4"])) == []
    assert problems(on("four", extra_args=["--tensor-parallel-size=4"])) == []


def test_the_cache_that_a_config_asks_for_counts() -> None:
    assert problems(on("large", kv_cache_memory_gb=30.0)) == []
    assert problems(on("large", kv_cache_memory_gb=60.0)) != []


def test_float32_is_for_cpus_and_for_other_engines() -> None:
    def found(flavor: str, **changes: Any) -> list[str]:
        config = on(flavor, **changes)
        return problems(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})}))

    assert found("roomy") == found("large", engine="reference") == []
    (problem,) = found("large")
    assert problem.startswith("model.dtype: on a GPU")


def test_an_unknown_flavor_is_named_with_those_that_there_are() -> None:
    (problem,) = problems(on("h9000"))
    assert "h9000" in problem
    assert "large" in problem


def test_what_cannot_be_known_is_said() -> None:
    found, notes = memory_problems(on("one"), Plan([]), HARDWARE, compile=False)
    assert found == []
    assert len(notes) == 2
