"""The learner's side of a run, without the learning: records in a real bucket, consumption of a real spool."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.rollouts import worker
from grpo_jax.rollouts.pinning import Pin
from grpo_jax.rollouts.sample import Group
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordWriter, canonical_json, unseal
from grpo_jax.storage.spool import SpoolReader
from tests.rollouts.scripted import ScriptedProxy, eventually, policy_name


class SimulatedLearner:
    """Trains the oldest groups on offer, publishes through the proxy, and writes the records that a learner writes.

    Attributes:
      drop: called once with each group; a reason drops it.
      hold_at: the step that it waits before, until this is set to None.
      trained: what it has trained, with the version that it was at.
      window: the policies that the pointer names: the newest and, if there is one, the pinned.
    """

    def __init__(self, config: Config, proxy: ScriptedProxy, incarnation: int = 1):
        self.config, self.proxy = config, proxy
        self.run_bucket = Bucket(config.bucket).child(config.run)
        self.drop: Callable[[Group], str | None] = lambda group: None
        self.hold_at: int | None = None
        self.trained: list[tuple[Group, int]] = []
        self.drops: dict[str, str] = {}
        self.step, self.phase = 0, "starting"
        self.window: list[str] = []
        self._run = RecordWriter(self.run_bucket, layout.RUN, incarnation)
        self._policy = RecordWriter(self.run_bucket, layout.POLICY, incarnation)
        self._state = RecordWriter(self.run_bucket, layout.LEARNER_STATE, incarnation)
        self._offered: list[Group] = []
        self.pin = Pin(config, self.run_bucket) if config.evaluation.samples else None
        self._lineage: dict[int, str] = {}

    @property
    def indices(self) -> list[int]:
        """Data indices of what it has trained, sorted."""
        return sorted(group.id.index for group, _ in self.trained)

    @property
    def version(self) -> int:
        return self.step // self.config.sync_every

    @property
    def final_policy(self) -> str:
        return policy_name(self.config.steps // self.config.sync_every)

    def write_run(self, status: str) -> None:
        self._run.write({"run": self.config.run, "status": status, "error": None, "created_at": time.time()})

    def write_state(self) -> None:
        self._state.write(
            {
                "run": self.config.run,
                "step": self.step,
                "version": self.version,
                "total_steps": self.config.steps,
                "phase": self.phase,
                "drops": sorted(self.drops.items()),
            }
        )

    def publish(self) -> None:
        name = policy_name(self.version)
        self._lineage[self.version] = name
        pinned = self.pin and self.pin.choose(self.version, self._lineage)
        self.window = list(dict.fromkeys([name, *([pinned] if pinned else [])]))
        probe = "toy.probe.00000000"
        self._policy.write(
            {"run": self.config.run, "current": name, "window": self.window, "pinned": pinned, "probe": probe}
        )
        self.proxy.publish(name)

    async def run(self) -> None:
        """A whole life, from the run's record to the end of the run."""
        self.write_state()
        self.write_run("running")
        self.publish()
        spool = SpoolReader(self.run_bucket)
        self.phase = "training"
        while self.step < self.config.steps:
            self.write_state()
            await asyncio.sleep(0.01)
            for group in spool.poll():
                reason = self.drop(group)
                if reason is None:
                    self._offered.append(group)
                else:
                    self.drops[str(group.id)] = reason
            self._train()
        self.phase = "draining"
        self.write_state()
        if self.config.evaluation.samples:
            key = layout.evaluation(self.final_policy, self.config.evaluation.split)
            await eventually(lambda: self.run_bucket.read_or_none(key) is not None)
        self.phase = "done"
        self.write_state()
        self.write_run("finished")

    def _train(self) -> None:
        for group in list(self._offered):
            if self.version - group.version > self.config.max_staleness:
                self._offered.remove(group)
                self.drops[str(group.id)] = "stale"
        count = self.config.batch.prompts_per_step
        if len(self._offered) < count or self.step == self.hold_at:
            return
        self._offered.sort(key=lambda group: group.provenance.started_at)
        batch, self._offered = self._offered[:count], self._offered[count:]
        self.trained += [(group, self.version) for group in batch]
        self.step += 1
        if self.step % self.config.sync_every == 0:
            self.publish()


def on_a_run(config: Config, body: Callable[[ScriptedProxy, SimulatedLearner], Awaitable[Any]]) -> Any:
    """Runs `body` with a proxy and a learner that has not begun."""

    async def run() -> Any:
        async with asyncio.timeout(200), ScriptedProxy() as proxy:
            return await body(proxy, SimulatedLearner(config, proxy))

    return asyncio.run(run())


def whole_run(config: Config, prepare: Callable[[ScriptedProxy, SimulatedLearner], None] | None = None) -> Any:
    """Learner and worker from start to end; (proxy, learner) when the worker has exited with 0."""

    async def body(proxy: ScriptedProxy, learner: SimulatedLearner) -> Any:
        if prepare is not None:
            prepare(proxy, learner)
        learning = asyncio.create_task(learner.run())
        code = await worker.work(config, proxy.url, "w0", asyncio.Event())
        await learning
        assert code == 0
        return proxy, learner

    return on_a_run(config, body)


def record_of(learner: SimulatedLearner) -> Record:
    record = unseal(learner.run_bucket.read(layout.worker_state("w0")))
    assert record is not None
    return record


def put_evaluation(bucket: Bucket, policy: str, split: str) -> None:
    bucket.put(layout.evaluation(policy, split), canonical_json({"policy": policy, "split": split, "reward": -1.0}))
