"""Lives of the worker under an exact staleness: every group is sampled by the version that its batch trains on."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from tests.rollouts.scripted import Reply, ScriptedProxy, eventually, policy_name
from tests.rollouts.simulated import SimulatedLearner

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


class ExactLearner(SimulatedLearner):
    """Takes only groups of the version that its batch is to train on; what left its window is served no more."""

    def _train(self) -> None:
        wanted = max(0, self.version - self.config.max_staleness)
        fitting = sorted((g for g in self._offered if g.version == wanted), key=lambda g: g.provenance.started_at)
        batch = fitting[: self.config.batch.prompts_per_step]
        if len(batch) < self.config.batch.prompts_per_step or self.step == self.hold_at:
            return
        self._offered = [group for group in self._offered if group not in batch]
        self.trained += [(group, self.version) for group in batch]
        self.step += 1
        if self.step % self.config.sync_every == 0:
            self.publish()

    def publish(self) -> None:
        oldest = max(0, self.version - self.config.window + 1)
        window = [policy_name(version) for version in range(self.version, oldest - 1, -1)]
        self._policy.write(
            {"run": self.config.run, "current": window[0], "window": window, "probe": "toy.probe.00000000"}
        )
        self.proxy.served &= set(window)
        self.proxy.publish(window[0])

    @property
    def lags(self) -> list[int]:
        return [version - group.version for group, version in self.trained]


def exact(make_config: MakeConfig, k: int, **changes: Any) -> Config:
    return make_config(staleness={"exactly": k}, steps=6, **changes)


def expected(config: Config) -> list[int]:
    batch = config.batch.prompts_per_step
    return [min(step // config.sync_every, config.max_staleness) for step in range(config.steps) for _ in range(batch)]


def run(config: Config, prepare: Callable[[ScriptedProxy, ExactLearner], None], lives: int = 1) -> ExactLearner:
    """A whole run, with so many workers one after the other: each but the last is stopped half-way."""

    async def body() -> ExactLearner:
        async with asyncio.timeout(60), ScriptedProxy() as proxy:
            learner = ExactLearner(config, proxy)
            prepare(proxy, learner)
            learning = asyncio.create_task(learner.run())
            for life in range(1, lives):
                stop, enough = asyncio.Event(), 3 * life
                working = asyncio.create_task(worker.work(config, proxy.url, "w0", stop))
                await eventually(lambda enough=enough: len(proxy.requests) >= enough)
                stop.set()
                assert await working == 75
            assert await worker.work(config, proxy.url, "w0", asyncio.Event()) == 0
            await learning
            return learner

    return asyncio.run(body())


@pytest.mark.parametrize(("k", "sync"), [(0, 1), (1, 1), (3, 1), (1, 2)])
def test_every_batch_is_exactly_so_old(make_config: MakeConfig, k: int, sync: int) -> None:
    config = exact(make_config, k, sync_every=sync)
    assert run(config, lambda proxy, learner: None).lags == expected(config)


def test_a_worker_that_is_behind_names_older_versions(make_config: MakeConfig) -> None:
    dawdle = random.Random(0)

    async def slowly(request: dict[str, Any]) -> Reply | None:
        await asyncio.sleep(dawdle.uniform(0.0, 0.15))
        return None

    def prepare(proxy: ScriptedProxy, learner: ExactLearner) -> None:
        proxy.script = slowly

    config = exact(make_config, 2)
    learner = run(config, prepare)
    assert learner.lags == expected(config)
    assert {request["model"] for request in learner.proxy.requests} == {policy_name(v) for v in range(4)}


def test_groups_that_are_dropped_are_drawn_again_under_their_version(make_config: MakeConfig) -> None:
    def first_attempts(group: Group) -> str | None:
        return "invalid" if group.id.index % 3 == 0 and group.id.attempt == 0 else None

    def prepare(proxy: ScriptedProxy, learner: ExactLearner) -> None:
        learner.drop = first_attempts

    config = exact(make_config, 2)
    learner = run(config, prepare)
    assert learner.lags == expected(config)
    assert len(learner.drops) == 4


def test_a_new_life_of_the_worker_goes_on_with_the_same_versions(make_config: MakeConfig) -> None:
    config = exact(make_config, 2)
    learner = run(config, lambda proxy, learner: None, lives=3)
    assert learner.lags == expected(config)
    assert learner.indices == list(range(12))
    keys = [key.split("/") for key in Bucket(config.bucket).child(config.run).list(layout.ROLLOUTS)]
    assert len({folder for _, folder, _ in keys}) > 1, "no life writes where another one may"
    assert len({file for _, _, file in keys}) == len(keys)
