"""What goes wrong with one group, request or write costs that one thing, and the run goes on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import watch, worker
from grpo_jax.rollouts.sample import GroupId
from grpo_jax.rollouts.tasks import Problem, problem_at
from grpo_jax.storage.spool import SpoolWriter, group_ids
from tests.rollouts import toys
from tests.rollouts.scripted import Reply, ScriptedProxy, completions, error, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner, on_a_run, record_of, whole_run

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


class Brittle(Sequence[Problem]):
    """Problems of which one cannot be had."""

    def __init__(self, size: int = 6):
        self._problems = toys.letters(size)["train"]

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: Any) -> Any:
        if self._problems[index].id == "p3":
            raise ConnectionError("the data set's server is away")
        return self._problems[index]


def test_a_problem_that_cannot_be_scored_is_skipped_after_its_redraws(make_config: MakeConfig) -> None:
    rewards = [{"source": "tests.rollouts.toys:none_for", "args": {"problem": 3}}]
    config = make_config(rewards=rewards, rollouts={"max_redraws": 1}, steps=3)
    proxy, learner = whole_run(config)
    problems = toys.letters()["train"]
    (bad,) = [d for d in range(6) if problem_at(problems, 0, d)[1].id == "p3"]
    assert learner.indices == [d for d in range(7) if d != bad]
    record = record_of(learner)
    assert record["skipped"] == [[0, bad, "0 of 3 samples are scorable, 2 are needed"]]
    assert record["redraws"] == 1
    wasted = record["wasted_tokens"]
    assert isinstance(wasted, int)
    assert wasted > 0
    assert not any(GroupId.parse(text).index == bad for text in group_ids(learner.run_bucket))
    assert len(proxy.requests) == 6 + 2


def test_rewards_that_raise_or_hang_cost_their_samples_and_are_counted(make_config: MakeConfig) -> None:
    rewards = [{"source": "tests.rollouts.toys:raises_for", "args": {"problem": 3}}]
    config = make_config(rewards=rewards, rollouts={"max_redraws": 0}, steps=3)
    _, learner = whole_run(config)
    record = record_of(learner)
    assert record["reward_failures"] == 3
    (skipped,) = record["skipped"]
    assert "ValueError('cannot score 3')" in skipped[2]


def test_a_group_with_enough_scorable_samples_is_kept_and_says_what_failed(make_config: MakeConfig) -> None:
    config = make_config(steps=1)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def spoil(request: dict[str, Any]) -> Reply:
            body = completions(request)
            body["choices"][1]["logprobs"]["token_logprobs"][0] = None
            return 200, body

        proxy.script = spoil

    _, learner = whole_run(config, prepare)
    for group, _ in learner.trained:
        assert [sample.finish_reason == "failed" for sample in group.samples] == [False, True, False]
        assert group.samples[1].reward is None
        assert group.provenance.failures == ("sample 1: a log-probability is not finite",)
    assert record_of(learner)["request_failures"] == 2


def test_a_problem_source_that_fails_costs_that_problem_only(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(task={"source": "tests.rollouts.test_worker_failures:Brittle"}, rollouts={"max_redraws": 0})
    _, learner = whole_run(config)
    assert len(learner.trained) == 6
    assert "p3" not in {group.provenance.problem_id for group, _ in learner.trained}
    assert any(record.exc_text and "the data set's server is away" in record.exc_text for record in caplog.records)


def test_a_refused_request_drops_its_group_without_trying_again(make_config: MakeConfig) -> None:
    config = make_config(steps=1, rollouts={"max_redraws": 0})

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def refuse_first(request: dict[str, Any]) -> Reply | None:
            return (400, error("too long")) if len(proxy.requests) == 1 else None

        proxy.script = refuse_first

    proxy, learner = whole_run(config, prepare)
    assert len(proxy.requests) == 3
    record = record_of(learner)
    assert record["skipped"] == [[0, 0, "HTTP 400: too long"]]
    assert record["request_failures"] == 1


def test_a_group_whose_policy_is_retired_is_started_again_under_the_newer_one(make_config: MakeConfig) -> None:
    config = make_config(steps=2, max_staleness=1)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> SimulatedLearner:
        retired = asyncio.Event()

        async def gone_at_last(request: dict[str, Any]) -> Reply | None:
            if request["model"] == policy_name(0) and len(proxy.requests) <= 2:
                await retired.wait()
                return 404, error("retired")
            return None

        proxy.script = gone_at_last
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: learner.step == 1)
        retired.set()
        assert await working == 0
        await learning
        return learner

    learner = on_a_run(config, body)
    assert sorted(group.version for group, _ in learner.trained) == [0, 0, 1, 1]
    assert [group.id.index for group, _ in learner.trained if group.version == 1] == [0, 1]
    assert record_of(learner)["redraws"] == 0


def test_a_policy_that_is_named_but_never_served_ends_as_a_dropped_group(make_config: MakeConfig) -> None:
    config = make_config(steps=1, rollouts={"max_redraws": 0, "retry_deadline_s": 0.05})

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        async def deny(request: dict[str, Any]) -> Reply | None:
            first = proxy.requests[0]["seed"]
            return (404, error("who?")) if request["seed"] == first else None

        proxy.script = deny

    _, learner = whole_run(config, prepare)
    ((_, _, reason),) = record_of(learner)["skipped"]
    assert "each policy that was named was gone at once" in reason


def test_a_restart_of_the_proxy_loses_no_group(make_config: MakeConfig) -> None:
    config = make_config(steps=2)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> SimulatedLearner:
        async def block(request: dict[str, Any]) -> Reply | None:
            await asyncio.sleep(60)
            return None

        proxy.script = block
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: len(proxy.requests) == 4)
        await proxy.stop()
        proxy.script = None
        await asyncio.sleep(0.1)
        await proxy.start()
        assert await working == 0
        await learning
        return learner

    learner = on_a_run(config, body)
    assert learner.indices == [0, 1, 2, 3]
    record = record_of(learner)
    assert record["redraws"] == record["request_failures"] == 0


def test_a_bucket_that_fails_loses_no_group(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config, failures, write = make_config(steps=2), [0], SpoolWriter.write

    def fail_thrice(self: SpoolWriter, group: Any) -> None:
        failures[0] += 1
        if failures[0] <= 3:
            raise OSError("503 from the store")
        write(self, group)

    monkeypatch.setattr(SpoolWriter, "write", fail_thrice)
    proxy, learner = whole_run(config)
    assert learner.indices == [0, 1, 2, 3]
    assert len(proxy.requests) == 4
    assert failures[0] == 3 + 4


def test_records_that_cannot_be_read_for_a_while_do_no_harm(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reads, read = make_config(steps=2), [0], watch.RunWatch.read

    def fail_often(self: watch.RunWatch) -> None:
        reads[0] += 1
        if reads[0] % 3:
            raise OSError("503 from the store")
        read(self)

    monkeypatch.setattr(watch.RunWatch, "read", fail_often)
    _, learner = whole_run(config)
    assert learner.indices == [0, 1, 2, 3]
