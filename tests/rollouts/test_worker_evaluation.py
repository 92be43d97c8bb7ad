"""Evaluations of the base and of the last policy, by whole lives of the worker."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.evaluation import Evaluator
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from tests.rollouts.scripted import Reply, ScriptedProxy, choice, error, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner, on_a_run, put_evaluation, whole_run

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


def evaluations(config: Config) -> dict[str, dict[str, Any]]:
    """The results that are in the bucket, by policy."""
    bucket = Bucket(config.bucket).child(config.run)
    found = [json.loads(bucket.read(key)) for key in bucket.list(layout.EVALUATIONS)]
    return {evaluation["policy"]: evaluation for evaluation in found}


def with_evaluation(make_config: MakeConfig, **changes: Any) -> Config:
    task = {"source": "tests.rollouts.toys:letters", "args": {"held_out": 3}}
    return make_config(**{"task": task, "evaluation": {"samples": 2}, "steps": 2, **changes})


def test_base_and_last_policy_are_evaluated_on_the_held_out_split(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)
    proxy, _ = whole_run(config)
    found = evaluations(config)
    assert set(found) == {policy_name(0), policy_name(2)}
    drawn = {name: [r for r in proxy.requests if r["n"] == 2 and r["model"] == name] for name in found}
    for name, result in found.items():
        assert result["rewards"] == {"length": result["reward"]}
        expected = {"policy": name, "split": "eval", "problems": 3, "samples": 2, "unscorable": 0}
        assert {key: result[key] for key in expected} == expected
        assert len(drawn[name]) == 3
    # The same seeds for every policy, so what differs is the policy; none of them a training group's.
    seeds = {name: sorted(r["seed"] for r in requests) for name, requests in drawn.items()}
    assert seeds[policy_name(0)] == seeds[policy_name(2)]
    assert not set(seeds[policy_name(0)]) & {r["seed"] for r in proxy.requests if r["n"] == 3}
    # This server's answers depend on the seed alone, so the means are known.
    lengths = [len(choice(i, seed, 5)["token_ids"]) for seed in seeds[policy_name(0)] for i in range(2)]
    assert found[policy_name(0)]["reward"] == pytest.approx(sum(lengths) / len(lengths))


def test_the_first_training_groups_go_before_the_evaluation_of_the_base(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, max_staleness=1)
    proxy, _ = whole_run(config)
    assert [request["n"] for request in proxy.requests[:4]] == [3] * 4
    assert 2 in [request["n"] for request in proxy.requests[4:]]


def test_the_base_is_evaluated_once_however_long_it_is_current(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        asked_later = asyncio.Event()

        async def slow_evaluation(request: dict[str, Any]) -> Reply | None:
            if request["n"] == 2:
                await asked_later.wait()
            return None

        proxy.script, learner.hold_at = slow_evaluation, 0
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: [request["n"] for request in proxy.requests].count(2) == 3)
        polled = proxy.policy_requests
        await eventually(lambda: proxy.policy_requests > polled + 5)
        asked_later.set()
        learner.hold_at = None
        assert await working == 0
        await learning
        drawn = [request for request in proxy.requests if request["n"] == 2 and request["model"] == policy_name(0)]
        assert len(drawn) == 3

    on_a_run(config, body)


def test_an_evaluation_that_exists_is_not_made_again(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        put_evaluation(learner.run_bucket, policy_name(0), "eval")
        put_evaluation(learner.run_bucket, policy_name(2), "eval")

    proxy, _ = whole_run(config, prepare)
    assert [result["reward"] for result in evaluations(config).values()] == [-1.0, -1.0]
    assert not [request for request in proxy.requests if request["n"] == 2]


def test_the_base_is_not_evaluated_once_it_is_no_longer_current(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        # A replica that lags still names v0 while the learner has published v1.
        publish = learner.publish

        def ahead() -> None:
            learner.step += 1
            publish()
            learner.step -= 1
            proxy.publish(policy_name(learner.version))

        learner.publish = ahead  # type: ignore[method-assign]
        put_evaluation(learner.run_bucket, policy_name(3), "eval")
        put_evaluation(learner.run_bucket, policy_name(2), "eval")

    whole_run(config, prepare)
    assert policy_name(0) not in evaluations(config)


def test_an_evaluation_of_the_base_that_is_overtaken_records_nothing(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def retire(request: dict[str, Any]) -> Reply | None:
            gone = request["n"] == 2 and request["model"] == policy_name(0) and len(proxy.requests) % 2
            return (404, error("retired")) if gone else None

        proxy.script = retire

    whole_run(config, prepare)
    assert set(evaluations(config)) == {policy_name(2)}


def test_the_last_policy_is_asked_for_until_it_is_served(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        refused = [0]

        async def late(request: dict[str, Any]) -> Reply | None:
            if request["model"] == policy_name(2) and refused[0] < 8:
                refused[0] += 1
                return 404, error("not yet")
            return None

        proxy.script = late

    whole_run(config, prepare)
    assert evaluations(config)[policy_name(2)]["unscorable"] == 0


def test_what_cannot_be_scored_is_left_out_of_an_evaluation_s_means(make_config: MakeConfig) -> None:
    rewards = [
        {"source": "tests.rollouts.toys:none_for", "args": {"problem": 1}},
        {"source": "tests.rollouts.toys:length", "weight": 0.0},
    ]
    config = with_evaluation(make_config, rewards=rewards, rollouts={"max_redraws": 0})

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def refuse_the_first(request: dict[str, Any]) -> Reply | None:
            evaluated = [r["seed"] for r in proxy.requests if r["n"] == 2]
            return (422, error("no")) if evaluated and request["seed"] == evaluated[0] else None

        proxy.script = refuse_the_first

    whole_run(config, prepare)
    result = evaluations(config)[policy_name(2)]
    # e1 is unscorable; the problem that was asked first (e0) is refused; e2 is left.
    assert (result["problems"], result["unscorable"], result["reward"]) == (3, 4, 1.0)
    assert set(result["rewards"]) == {"none_for", "length"}


def test_an_evaluation_that_fails_in_an_unforeseen_way_does_not_end_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, result = with_evaluation(make_config), Evaluator._result

    def fail_for_the_base(self: Evaluator, policy: str, samples: Any) -> dict[str, Any]:
        if policy == policy_name(0):
            raise ZeroDivisionError("unforeseen")
        return result(self, policy, samples)

    monkeypatch.setattr(Evaluator, "_result", fail_for_the_base)
    whole_run(config)
    assert set(evaluations(config)) == {policy_name(2)}
    assert any(record.exc_text and "unforeseen" in record.exc_text for record in caplog.records)
