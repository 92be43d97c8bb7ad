"""Evaluations of the base and of the last policy, by whole lives of the worker."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.evaluation import Evaluator, pass_at
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
    config = with_evaluation(make_config, evaluation={"samples": 2, "pass_at": [1, 2], "pass_reward": 3.0})
    proxy, _ = whole_run(config)
    found = evaluations(config)
    assert set(found) == {policy_name(0), policy_name(2)}
    drawn = {name: [r for r in proxy.requests if r["n"] == 2 and r["model"] == name] for name in found}
    for name, result in found.items():
        assert result["rewards"] == {"length": result["reward"]}
        expected = {"policy": name, "split": "eval", "problems": 3, "samples": 2, "unscorable": 0, "pass_reward": 3.0}
        assert {key: result[key] for key in expected} == expected
        assert len(drawn[name]) == 3
    # The same seeds for every policy, so what differs is the policy; none of them a training group's.
    seeds = {name: sorted(r["seed"] for r in requests) for name, requests in drawn.items()}
    assert seeds[policy_name(0)] == seeds[policy_name(2)]
    assert not set(seeds[policy_name(0)]) & {r["seed"] for r in proxy.requests if r["n"] == 3}
    # This server's answers depend on the seed alone, so the means are known.
    lengths = np.array([[len(choice(i, seed, 5)["token_ids"]) for i in range(2)] for seed in seeds[policy_name(0)]])
    base, passed = found[policy_name(0)], lengths >= 3
    assert base["reward"] == pytest.approx(lengths.mean())
    assert base["pass_at"] == pytest.approx({"1": passed.mean(), "2": passed.any(1).mean()})


def test_an_evaluation_has_a_sampler_and_a_judge_of_its_own(make_config: MakeConfig) -> None:
    rewards = [
        {"source": "tests.rollouts.toys:length"},
        {"source": "tests.rollouts.toys:none_for", "args": {"problem": -1}, "weight": 1000.0},
    ]
    own = {"samples": 2, "temperature": 0.5, "top_p": 0.9, "pass_on": "length", "pass_reward": 100.0}
    config = with_evaluation(make_config, rewards=rewards, evaluation=own)
    proxy, _ = whole_run(config)
    asked = {(r["n"], r["temperature"], r.get("top_p")) for r in proxy.requests}
    assert asked == {(2, 0.5, 0.9), (3, config.sampling.temperature, 1.0)}
    for result in evaluations(config).values():
        assert (result["temperature"], result["top_p"], result["pass_on"]) == (0.5, 0.9, "length")
        assert result["pass_at"] == {"1": 0.0}, "no text has a length of 100, whatever the other reward gives it"


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"samples": 2, "temperature": 0}, "would be the same at temperature 0"),
        ({"samples": 2, "pass_on": "beauty"}, "there is no reward 'beauty'"),
    ],
)
def test_an_evaluation_that_would_say_nothing_is_refused(
    make_config: MakeConfig, evaluation: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        with_evaluation(make_config, evaluation=evaluation)


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


def test_the_base_is_evaluated_even_if_training_goes_on_without_it(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, steps=6)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def slow(request: dict[str, Any]) -> Reply | None:
            if request["n"] == 2 and request["model"] == policy_name(0):
                await eventually(lambda: learner.version >= 4)
            return None if request["model"] in learner.window else (404, error("retired"))

        proxy.script = slow

    whole_run(config, prepare)
    assert set(evaluations(config)) == {policy_name(0), policy_name(6)}


def test_policies_in_between_are_evaluated_every_so_many_steps(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, steps=7, evaluation={"samples": 2, "every": 2})

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def serve(request: dict[str, Any]) -> Reply | None:
            return None if request["model"] in learner.window else (404, error("retired"))

        proxy.script, publish = serve, learner.publish

        def published() -> None:
            publish()
            if learner.version % 2 == 0:  # the next step waits until this version is evaluated
                learner.hold_at = learner.step
                asyncio.get_running_loop().create_task(goes_on(learner.window[0]))

        async def goes_on(policy: str) -> None:
            await eventually(lambda: policy in evaluations(config))
            learner.hold_at = None

        learner.publish = published  # type: ignore[method-assign]

    whole_run(config, prepare)
    assert set(evaluations(config)) == {policy_name(v) for v in (0, 2, 4, 6, 7)}


def test_an_evaluation_that_hangs_holds_up_neither_training_nor_the_end(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, steps=6)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def hang(request: dict[str, Any]) -> Reply | None:
            if request["n"] == 2 and request["model"] == policy_name(0):
                await asyncio.sleep(1000)
            return None

        proxy.script = hang

    whole_run(config, prepare)
    assert set(evaluations(config)) == {policy_name(6)}


def test_an_evaluation_whose_time_is_over_records_nothing(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, steps=6, evaluation={"samples": 2, "timeout_s": 1e-6})

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def slow(request: dict[str, Any]) -> Reply | None:
            if request["n"] == 2 and request["model"] == policy_name(0) and len(proxy.requests) % 2:
                await eventually(lambda: policy_name(0) not in learner.window)
            return None if request["model"] in learner.window else (404, error("retired"))

        proxy.script = slow

    whole_run(config, prepare)
    assert set(evaluations(config)) == {policy_name(6)}


def test_while_training_uses_its_places_an_evaluation_has_few(make_config: MakeConfig) -> None:
    config = with_evaluation(make_config, task={"args": {"held_out": 12}}, max_staleness=3, steps=4)
    assert config.groups_per_version * 4 * 3 == 24  # samples that training may have on their way; an eighth is 3

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        trains, all_asked, now, most = asyncio.Event(), asyncio.Event(), [0], [0]

        async def counted(request: dict[str, Any]) -> Reply | None:
            if request["n"] == 3:
                await trains.wait()
                return None
            now[0] += 1
            most[0] = max(most[0], now[0])
            if request["model"] != policy_name(0):
                await all_asked.wait()
            else:
                await asyncio.sleep(0.02)
            now[0] -= 1
            return None

        proxy.script = counted
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: policy_name(0) in evaluations(config))
        assert most[0] == 1
        trains.set()
        await eventually(lambda: now[0] == 12)  # at the end nothing else is on its way
        all_asked.set()
        assert await working == 0
        await learning

    on_a_run(config, body)


@pytest.mark.parametrize(("samples", "passed"), [(1, 1), (4, 0), (4, 1), (6, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_in_which_one_passes(samples: int, passed: int) -> None:
    outcomes = [True] * passed + [False] * (samples - passed)
    for k in range(1, samples + 1):
        chosen = [any(choice) for choice in itertools.combinations(outcomes, k)]
        assert pass_at(k, samples, passed) == pytest.approx(sum(chosen) / len(chosen))


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
    config = with_evaluation(
        make_config, rewards=rewards, rollouts={"max_redraws": 0}, evaluation={"samples": 2, "pass_at": [1, 2]}
    )

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def refuse_the_first(request: dict[str, Any]) -> Reply | None:
            evaluated = [r["seed"] for r in proxy.requests if r["n"] == 2]
            return (422, error("no")) if evaluated and request["seed"] == evaluated[0] else None

        proxy.script = refuse_the_first

    whole_run(config, prepare)
    result = evaluations(config)[policy_name(2)]
    # e1 is unscorable; the problem that was asked first (e0) is refused; e2 is left.
    assert (result["problems"], result["unscorable"], result["reward"]) == (3, 4, 1.0)
    assert result["pass_at"] == {"1": 1.0, "2": 1.0}
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
