"""The section `algorithm`: presets, what may be said beside them, and what is refused with the name of its key."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.algorithms import registry
from grpo_jax.algorithms.policy_losses import cispo
from grpo_jax.config.load import load_config, parse_config
from grpo_jax.config.schema import Algorithm, Config
from grpo_jax.errors import UsageError
from grpo_jax.learner.setup import objective_of
from tests import toy_losses

TOY = "tests.toy_losses:likelihood"


def parse(algorithm: Any, **others: Any) -> Config:
    raw = {
        "run": "r",
        "model": {"source": "m"},
        "task": {"source": "a:b"},
        "rewards": [{"source": "a:b"}],
        "algorithm": algorithm,
        **others,
    }
    return parse_config(raw, "run.yaml")


def complaint(algorithm: Any, **others: Any) -> str:
    with pytest.raises(UsageError) as error:
        parse(algorithm, **others)
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix("run.yaml: ")


@pytest.mark.parametrize("name", registry.PRESETS)
def test_a_preset_is_what_it_says_and_the_defaults_for_the_rest(name: str) -> None:
    found, recipe = parse({"preset": name}).algorithm.model_dump(), registry.PRESETS[name]
    assert found == {**Algorithm().model_dump(), "preset": name, **recipe}


@pytest.mark.parametrize("name", registry.PRESETS)
def test_what_is_said_beside_a_preset_overrides_it(name: str) -> None:
    said = {"advantages": "maxrl", "kl_coef": 0.5, "minibatches": 4, "overlong": "keep", "zero_variance": "drop"}
    assert parse({"preset": name, **said}).algorithm.model_dump().items() >= said.items()


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"preset": name} for name in registry.PRESETS),
        {"preset": "dapo", "loss_args": {"clip_high": 0.5}},
        {"preset": "precision_rl", "weight": "sequence_mis", "weight_args": {"cap": 5}},
        {"preset": "precision_rl", "weight": None, "loss": "cispo"},
        {"masks": {"outlier_veto": {"low": 0.01}}, "loss": TOY, "loss_args": {"strength": 2}},
        {"anchor": "recomputed", "loss": "decoupled_ppo", "max_candidates": 9, "overlong_cache": 3},
    ],
    ids=str,
)
def test_the_resolved_config_reads_back_as_itself(algorithm: dict[str, Any]) -> None:
    config = parse(algorithm)
    again = json.loads(json.dumps(config.model_dump(mode="json")))
    assert parse_config(again, "run.json") == config


def test_numbers_are_added_to_those_of_a_preset_s_own_loss_and_replace_those_of_another() -> None:
    dapo = parse({"preset": "dapo", "loss_args": {"clip_high": 0.5}}).algorithm
    assert dapo.loss_args == {"clip_low": 0.2, "clip_high": 0.5}
    named = parse({"preset": "dapo", "loss": "ppo_clip", "loss_args": {"clip_high": 0.5}}).algorithm
    assert named.loss_args == dapo.loss_args
    other = parse({"preset": "dapo", "loss": "sapo", "loss_args": {"tau_positive": 2.0}}).algorithm
    assert other.loss_args == {"tau_positive": 2.0}
    assert other.loss_numbers == {"tau_positive": 2.0, "tau_negative": 1.05}
    weighted = parse({"preset": "precision_rl", "weight_args": {"cap": 3.0}}).algorithm
    assert weighted.factors == {"token_tis": {"cap": 3.0}}
    exchanged = parse({"preset": "precision_rl", "weight": "token_mis"}).algorithm
    assert exchanged.factors == {"token_mis": {"low": 0.5, "high": 5.0}}
    assert parse({"preset": "precision_rl", "weight": None}).algorithm.factors == {}


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ({"preset": "gppo"}, ["preset 'gppo' is unknown", "dapo"]),
        ({"preset": ["dapo"]}, ["preset"]),
        ({"preset": "dapo", "loss_args": "x"}, ["loss_args"]),
        ({"preset": "dapo", "loss_args": ["x"]}, ["loss_args"]),
        ({"preset": "precision_rl", "weight_args": 3}, ["weight_args"]),
        ({"loss": "ppo"}, ["loss 'ppo' is neither", "dual_clip", "package.module:function"]),
        ({"loss": "a-b:c"}, ["loss 'a-b:c' is neither"]),
        ({"loss_args": {"clip": 0.2}}, ["loss_args: dual_clip has no 'clip'", "clip_low, clip_high, cap"]),
        (
            {"loss": "importance_sampling", "loss_args": {"cap": 1}},
            ["importance_sampling has no 'cap'", "no parameter"],
        ),
        ({"loss_args": {"cap": "much"}}, ["loss_args.cap: Input should be a valid number"]),
        ({"weight": "tis", "anchor": "recomputed"}, ["weight: 'tis' is unknown", "token_tis"]),
        ({"weight": "token_tis", "weight_args": {"low": 1}, "anchor": "recomputed"}, ["weight_args: token_tis", "low"]),
        ({"weight_args": {"cap": 2.0}}, ["weight_args: no weight has no 'cap'"]),
        ({"masks": {"veto": {}}}, ["masks: 'veto' is unknown", "geometric_mask, outlier_veto"]),
        ({"masks": {"outlier_veto": {"cap": 2}}}, ["masks.outlier_veto", "no 'cap'", "low, high"]),
        ({"weight": "token_tis"}, ["weight token_tis needs anchor: recomputed"]),
        ({"loss": "decoupled_ppo"}, ["loss decoupled_ppo needs anchor: recomputed"]),
        ({"loss": "gspo"}, ["loss gspo is defined with aggregation: sequence_mean, not token_mean"]),
        ({"loss": "importance_sampling", "weight": "token_tis", "anchor": "recomputed"}, ["takes no weight"]),
        ({"loss": "decoupled_ppo", "weight": "token_tis", "anchor": "recomputed"}, ["takes no weight"]),
        ({"minibatches": 3}, ["algorithm.minibatches: 3 does not divide 8 prompts a step"]),
        ({"overlong_cache": 17}, ["algorithm.overlong_cache is larger than sampling.max_tokens"]),
        ({"max_candidates": 7}, ["algorithm.max_candidates is smaller than batch.prompts_per_step"]),
        ({"kl_coef": -0.1}, ["algorithm.kl_coef: "]),
        ({"num_iterations": 0}, ["algorithm.num_iterations: "]),
        ({"clip_low": 0.2}, ["algorithm.clip_low: unknown key"]),
    ],
    ids=str,
)
def test_what_is_no_objective_is_refused_with_its_key(algorithm: dict[str, Any], parts: list[str]) -> None:
    message = complaint(algorithm)
    assert message.startswith("algorithm")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("name", registry.LOSSES)
def test_every_loss_is_an_objective_with_its_own_numbers(name: str) -> None:
    known = registry.LOSSES[name]
    anchor = "recomputed" if known.needs_recomputed else "sampler"
    algorithm = parse({"loss": name, "anchor": anchor, "aggregation": known.needs or "token_mean"}).algorithm
    assert objective_of(algorithm).loss.keywords == known.defaults  # type: ignore[attr-defined]


def test_an_objective_holds_what_the_config_says() -> None:
    said = {
        "loss": "cispo",
        "loss_args": {"high": 3.0},
        "anchor": "recomputed",
        "weight": "token_tis",
        "masks": {"outlier_veto": {"high": 50.0}},
        "kl_coef": 0.2,
        "kl_estimator": "k2",
        "entropy_coef": 0.1,
    }
    objective = objective_of(parse(said).algorithm)
    loss, (weight, mask) = objective.loss, objective.factors
    assert (loss.func, loss.keywords) == (cispo, {"low": 0.0, "high": 3.0})  # type: ignore[attr-defined]
    assert weight.keywords == {"cap": 2.0}  # type: ignore[attr-defined]
    assert mask.keywords == {"low": 1e-4, "high": 50.0}  # type: ignore[attr-defined]
    assert (objective.kl_coef, objective.kl_estimator, objective.entropy_coef) == (0.2, "k2", 0.1)
    assert objective.needs_old
    assert objective.needs_reference
    assert not objective_of(Algorithm()).needs_old
    assert not objective_of(Algorithm()).needs_reference


def test_a_loss_of_the_user_s_own_is_named_by_its_import_path() -> None:
    loss = objective_of(parse({"loss": TOY, "loss_args": {"strength": 2.0}}).algorithm).loss
    assert (loss.func, loss.keywords) == (toy_losses.likelihood, {"strength": 2.0})  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["tests.toy_losses:gone", "tests.no_such_module:loss"])
def test_a_loss_that_cannot_be_imported_is_named(path: str) -> None:
    with pytest.raises(UsageError, match=rf"^algorithm\.loss: {path} cannot be imported"):
        objective_of(parse({"loss": path}).algorithm)


@pytest.mark.parametrize(
    ("algorithm", "inert"),
    [
        ({}, False),
        ({"anchor": "recomputed"}, True),
        ({"anchor": "recomputed", "minibatches": 2}, False),
        ({"anchor": "recomputed", "num_iterations": 2}, False),
        ({"preset": "decoupled_ppo"}, False),
    ],
    ids=str,
)
def test_a_clip_is_inert_where_the_ratio_is_always_one(algorithm: dict[str, Any], inert: bool) -> None:
    assert parse(algorithm).algorithm.inert_clip == inert


@pytest.mark.parametrize("preset", sorted(registry.PRESETS))
def test_the_quickstart_says_nothing_that_would_override_a_preset(preset):
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml", [f"algorithm.preset={preset}"])
    assert config.algorithm == Algorithm(preset=preset)
