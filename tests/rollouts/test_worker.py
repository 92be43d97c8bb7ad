"""Lives of the worker in which all goes well: a real proxy's answers, a real bucket, a learner that keeps the books."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.sample import GroupId
from grpo_jax.rollouts.seeds import sampling_seed
from grpo_jax.rollouts.tasks import problem_at
from grpo_jax.storage.spool import group_ids
from tests.rollouts import toys
from tests.rollouts.scripted import Reply, ScriptedProxy, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner, on_a_run, record_of, whole_run

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(("S", "sync"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_a_run_gets_exactly_its_groups_none_older_than_allowed(make_config: MakeConfig, S: int, sync: int) -> None:
    config = make_config(max_staleness=S, sync_every=sync, steps=4)
    proxy, learner = whole_run(config)
    assert learner.indices == list(range(8))
    assert len(group_ids(learner.run_bucket)) == 8
    assert not learner.drops
    assert all(0 <= version - group.version <= S for group, version in learner.trained)
    assert {request["n"] for request in proxy.requests} == {3}
    assert len(proxy.requests) == 8


def test_a_group_says_where_all_of_it_came_from(make_config: MakeConfig) -> None:
    config = make_config(steps=1, sampling={"max_tokens": 5, "stop": ["\n"], "temperature": 0.75}, seed=3)
    proxy, learner = whole_run(config)
    problems = toys.letters()["train"]
    for group, _ in learner.trained:
        epoch, problem = problem_at(problems, 3, group.id.index)
        assert group.id == GroupId(epoch, group.id.index, 0)
        provenance = group.provenance
        assert (provenance.problem_id, provenance.answer) == (problem.id, problem.answer)
        assert (provenance.policy, provenance.replica) == (policy_name(0), "r7")
        assert provenance.seed == sampling_seed("toy", 3, str(group.id))
        assert provenance.sampler == {"temperature": 0.75, "max_tokens": 5, "stop": ["\n"]}
        assert provenance.started_at <= provenance.finished_at
        assert len(group.prompt_tokens) == 5
        (request,) = [r for r in proxy.requests if r["seed"] == provenance.seed]
        assert request["prompt"] == group.prompt_tokens.tolist()
        for sample in group.samples:
            assert sample.reward == sample.reward_parts["length"] == len(sample.tokens) == len(sample.logprobs)
            assert sample.text == " ".join(f"t{token}" for token in sample.tokens)


def test_starts_are_in_order_of_their_times(make_config: MakeConfig) -> None:
    _, learner = whole_run(make_config(steps=3))
    starts = {group.id.index: group.provenance.started_at for group, _ in learner.trained}
    times = [starts[index] for index in sorted(starts)]
    assert times == sorted(set(times))


def test_the_worker_s_record_counts(make_config: MakeConfig) -> None:
    config = make_config(steps=2)
    _, learner = whole_run(config)
    record = record_of(learner)
    tokens = sum(len(sample.tokens) for group, _ in learner.trained for sample in group.samples)
    expected = {"phase": "done", "inflight_groups": 0, "inflight_samples": 0, "live": 4, "generated_tokens": tokens}
    assert {key: record[key] for key in expected} == expected
    assert record["wasted_tokens"] == record["request_failures"] == record["reward_failures"] == 0
    assert (record["redraws"], record["skipped"]) == (0, [])
    assert isinstance(record["first_served"], dict)
    assert policy_name(0) in record["first_served"]


def backpressure(learner: SimulatedLearner) -> float:
    return record_of(learner)["backpressure_s"]


async def newer_record(learner: SimulatedLearner) -> None:
    """Until the worker has written its record twice: the later one was made after this call."""
    seq = record_of(learner)["seq"]
    await eventually(lambda: record_of(learner)["seq"] >= seq + 2)


def test_waiting_for_the_learner_is_counted_as_backpressure_and_the_end_is_not(make_config: MakeConfig) -> None:
    config = make_config(steps=2, max_staleness=0)

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learner.hold_at = 0
        learning = asyncio.create_task(learner.run())
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", asyncio.Event()))
        await eventually(lambda: len(proxy.requests) == 2)
        await eventually(lambda: backpressure(learner) > 0.2)
        learner.hold_at = 1
        await eventually(lambda: len(proxy.requests) == 4)
        await newer_record(learner)
        counted = backpressure(learner)
        for _ in range(5):
            await newer_record(learner)
        # All groups of the run are started: the learner is waited for, and nothing is held back.
        assert backpressure(learner) == counted
        learner.hold_at = None
        assert await working == 0
        await learning

    on_a_run(config, body)


def test_what_the_learner_drops_is_drawn_again_with_another_seed(make_config: MakeConfig) -> None:
    config = make_config(steps=3)

    def prepare(proxy: ScriptedProxy, learner: SimulatedLearner) -> None:
        learner.drop = lambda group: "stale" if group.id.index in (0, 3) and group.id.attempt < 2 else None

    proxy, learner = whole_run(config, prepare)
    assert learner.indices == list(range(6))
    assert {str(g.id) for g, _ in learner.trained if g.id.attempt} == {"e000.i000000.a02", "e000.i000003.a02"}
    seeds = [request["seed"] for request in proxy.requests]
    assert len(set(seeds)) == len(seeds) == 6 + 4
    assert record_of(learner)["redraws"] == 4


def test_a_stopped_worker_is_resumable_and_its_next_life_repeats_and_loses_nothing(make_config: MakeConfig) -> None:
    _, unscorable = problem_at(toys.letters(20)["train"], 0, 2)
    config = make_config(
        steps=5,
        task={"source": "tests.rollouts.toys:letters", "args": {"count": 20}},
        rewards=[{"source": "tests.rollouts.toys:none_for", "args": {"problem": unscorable.answer}}],
        rollouts={"max_redraws": 1},
        max_staleness=2,
    )

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> SimulatedLearner:
        learner.drop = lambda group: "stale" if (group.id.index, group.id.attempt) == (1, 0) else None
        learner.hold_at = 1

        async def block_one(request: dict[str, Any]) -> Reply | None:
            if len(proxy.requests) == 4:
                await asyncio.sleep(60)
            return None

        proxy.script = block_one
        learning = asyncio.create_task(learner.run())
        stop = asyncio.Event()
        working = asyncio.create_task(worker.work(config, proxy.url, "w0", stop))
        await eventually(lambda: learner.step == 1 and len(group_ids(learner.run_bucket)) >= 6)
        await eventually(lambda: record_of(learner)["skipped"])
        stop.set()
        assert await working == 75
        first_life = record_of(learner)
        spooled = {sampling_seed("toy", 0, text) for text in group_ids(learner.run_bucket)}
        blocked = proxy.requests[3]["seed"]
        proxy.requests.clear()
        proxy.script = None
        learner.hold_at = None
        assert await worker.work(config, proxy.url, "w0", asyncio.Event()) == 0
        await learning
        record = record_of(learner)
        assert record["incarnation"] > first_life["incarnation"]
        assert record["generated_tokens"] > first_life["generated_tokens"]
        seeds = [request["seed"] for request in proxy.requests]
        assert not spooled & set(seeds), "a group that was there was drawn again"
        assert sampling_seed("toy", 0, "e000.i000002.a00") not in seeds, "what was given up was drawn again"
        assert seeds[0] == blocked, "what was in flight is started first, as the same attempt"
        return learner

    learner = on_a_run(config, body)
    trained = learner.indices
    record = record_of(learner)
    assert [index for _, index, _ in record["skipped"]] == [2]
    assert trained == [index for index in range(11) if index != 2]
    spooled = [GroupId.parse(text) for text in group_ids(learner.run_bucket)]
    assert sorted((g.index, g.attempt) for g in spooled) == sorted(
        [(index, 0) for index in trained if index != 1] + [(1, 0), (1, 1)]
    )
