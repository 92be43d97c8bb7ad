"""Every config that could not work is refused with one sentence that starts with the path of its key."""

import json
from typing import Any

import pytest

from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import VLLM_RANKS, Config
from grpo_jax.errors import UsageError

MINIMAL: dict[str, Any] = {
    "run": "r",
    "model": {"source": "m"},
    "task": {"source": "a.b:c"},
    "rewards": [{"source": "a.b:c"}],
}


def parse(**changes: Any) -> Config:
    return parse_config({**MINIMAL, **changes}, "run.yaml")


def complaint(**changes: Any) -> str:
    with pytest.raises(UsageError) as error:
        parse(**changes)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("run.yaml: ")
    return message.removeprefix("run.yaml: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "stepz: unknown key"),
        (
            {"evaluation": {"samples": 2, "pass_at": [1, 4]}},
            "evaluation: pass_at: 4 of 2 samples; raise 'samples'",
        ),
        ({"batch": {"groups": 3}}, "batch.groups: unknown key"),
        ({"rewards": [{"source": "a:b"}, {"source": "a:c", "wieght": 2}]}, "rewards.1.wieght: unknown key"),
        ({"task": {"source": "a:b", "system": "x"}}, "task.system: unknown key"),
        ({"task": {}}, "task.source: this key is required"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1 (found 0)"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"steps": 2.5}, "steps: Input should be a valid integer"),
        ({"batch": 3}, "batch: "),
        ({"batch": {"group_size": 1}}, "batch.group_size: "),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2: "),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate: "),
        ({"sampling": {"temperature": float("inf")}}, "sampling.temperature: "),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: "),
        ({"sampling": {"stop": "\n"}}, "sampling.stop: Input should be a valid list"),
        (
            {"generator": {"engine": "sglang"}},
            "generator.engine: Input should be 'vllm' or 'reference' ",
        ),
        ({"rewards": []}, "rewards: "),
        ({"rewards": [{"source": "a.b"}]}, "rewards.0.source: expected 'package.module:name'"),
        ({"task": {"source": "a-b:c"}}, "task.source: expected 'package.module:name'"),
        ({"run": "Upper"}, "run: a name is made of"),
        ({"run": "a.b"}, "run: a name is made of"),
        ({"run": "../up"}, "run: a name is made of"),
        ({"fleet": {"name": "a/b"}}, "fleet.name: a name is made of"),
        ({"lora": {"rank": 1024}}, "lora.rank: 1024 is above what vLLM serves"),
        ({"rollouts": {"min_valid": 9}}, "rollouts.min_valid is larger than batch.group_size"),
        ({"rewards": [{"source": "a:same"}, {"source": "b:same"}]}, "rewards: two have the same name"),
    ],
)
def test_what_cannot_work_names_its_key(changes: dict[str, Any], message: str) -> None:
    assert complaint(**changes).startswith(message)


@pytest.mark.parametrize("found", ["linear", 3, {"q_proj": 1}])
def test_a_union_says_what_each_branch_wants_and_what_was_found(found: Any) -> None:
    assert complaint(lora={"targets": found}) == (
        f"lora.targets: Input should be 'all-linear' or Input should be a valid list (found {found!r})"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0.95),
        ("top_k", 20),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
    ],
)
def test_sampler_settings_that_change_the_normalisation_are_refused(key: str, value: float) -> None:
    message = complaint(sampling={key: value})
    assert message.startswith(f"sampling.{key}: must be ")
    assert "normalised" in message


def test_their_neutral_values_are_accepted() -> None:
    neutral = {
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
    }
    parse(sampling=neutral)


def test_the_first_of_several_problems_is_shown_and_the_others_are_counted() -> None:
    message = complaint(steps=0, batch={"group_size": 1, "x": 1})
    assert message.startswith("steps: ")
    assert message.endswith("(and 2 more)")


def test_a_config_survives_json_and_cannot_be_changed() -> None:
    config = parse(sampling={"stop": ["\n"]}, rewards=[{"source": "a:b", "weight": 0.5, "args": {"x": [1, None]}}])
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("rank", range(1, 65))
def test_the_served_rank_is_the_smallest_that_holds_the_adapter(rank: int) -> None:
    served = parse(lora={"rank": rank}).lora.max_rank
    assert served in VLLM_RANKS
    assert not [r for r in VLLM_RANKS if rank <= r < served]


def test_derived_numbers() -> None:
    config = parse(batch={"prompts_per_step": 3}, sync_every=4, max_staleness=2)
    assert config.groups_per_version == 12
    assert config.slots == config.window + 1 == 5
    assert config.fleet_name == "r"
    assert parse(evaluation={"samples": 4}, max_staleness=2).slots == 6
    assert parse(fleet={"name": "shared"}).fleet_name == "shared"


def test_a_reward_is_called_by_its_name_or_its_function_s() -> None:
    config = parse(rewards=[{"source": "a.b:c"}, {"source": "a.b:c", "name": "other"}])
    assert [reward.label for reward in config.rewards] == ["c", "other"]
