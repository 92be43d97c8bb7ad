"""The rollout worker: draws groups of completions under served policies, scores them, fills the spool."""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.rollouts.admission import Admission, Ticket
from grpo_jax.rollouts.client import Client
from grpo_jax.rollouts.drawing import Drawer
from grpo_jax.rollouts.evaluation import Evaluator
from grpo_jax.rollouts.groups import GroupDropped, GroupMaker
from grpo_jax.rollouts.rewards import verifiers
from grpo_jax.rollouts.sample import GroupId
from grpo_jax.rollouts.scoring import Scorer
from grpo_jax.rollouts.setup import Plugins, load_plugins
from grpo_jax.rollouts.state import Previous, read_previous, record_body, record_writer
from grpo_jax.rollouts.threads import in_daemon_thread, until_it_works
from grpo_jax.rollouts.watch import RunWatch
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolReader, SpoolWriter, group_ids

log = logging.getLogger(__name__)

# Between two looks at the bucket, and between two questions to the proxy while no group may start.
_LOCAL_POLL_S, _REMOTE_POLL_S = 0.2, 1.0
_POLICY_POLL_S = 0.2
_RECORD_EVERY_S = 1.0
# Between a signal and the return: what is in flight is cancelled, the record is written a last time.
_STOP_S, _LAST_RECORD_S = 1.0, 0.5


def run_worker(config: Config, proxy_url: str, worker_id: str) -> int:
    """Works until the run has ended (0) or a signal comes (75).

    Raises:
      UsageError: task, rewards, model or a prompt are not what the config needs.
      RunFailed: the learner has been silent for `fleet.idle_exit_s`, or problem after problem could not be scored.
    """
    return asyncio.run(_until_signal(config, proxy_url, worker_id))


async def _until_signal(config: Config, proxy_url: str, worker_id: str) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await work(config, proxy_url, worker_id, stop)


async def work(config: Config, proxy_url: str, worker_id: str, stop: asyncio.Event) -> int:
    """`run_worker` on a running event loop; `stop` stands for the signal."""
    working = asyncio.create_task(_work(config, proxy_url, worker_id))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait({working}, timeout=_STOP_S + _LAST_RECORD_S)
        log.info("worker %s stops: signal", worker_id)
        return EXIT_RESUMABLE
    finally:
        working.cancel()
        stopping.cancel()


async def _work(config: Config, proxy_url: str, worker_id: str) -> int:
    run = Bucket(config.bucket).child(config.run)
    plugins = await in_daemon_thread(load_plugins, config)
    previous = await until_it_works("reading the worker's record", read_previous, run, worker_id)
    async with Client(proxy_url, config.run, config.rollouts) as client:
        return await _Worker(config, worker_id, run, plugins, previous, client).run()


class _Worker:
    """One life of the worker. All of it runs on the event loop; the bucket and sync rewards have threads."""

    def __init__(
        self, config: Config, worker_id: str, run: Bucket, plugins: Plugins, previous: Previous, client: Client
    ):
        self._config, self._run, self._previous, self._client = config, run, previous, client
        self._problems = plugins.splits["train"]
        self._counters = previous.counters
        self._scorer = Scorer(plugins.rewards, config.rollouts.reward_timeout_s)
        self._drawer = Drawer(client, self._scorer, config.sampling, self._counters)
        self._maker = GroupMaker(
            config, self._problems, plugins.prompts, client, self._drawer, verifiers(plugins.rewards)
        )
        self._evaluator = None
        if config.evaluation.samples:
            held_out = plugins.splits[config.evaluation.split]
            self._evaluator = Evaluator(config, held_out, plugins.prompts, self._drawer, run)
        self._admission = Admission(
            max_staleness=config.max_staleness,
            groups_per_version=config.groups_per_version,
            total=0,
            max_redraws=config.rollouts.max_redraws,
            exactly=config.staleness is not None,
        )
        follow = config.staleness is not None or self._evaluator is not None
        self._watch = RunWatch(run, config.fleet, follow_policies=follow)
        self._record = record_writer(run, worker_id, previous)
        # A life that was frozen while the next one drew the same groups overwrites none of them: each has its folder.
        self._spool = SpoolWriter(run, f"{worker_id}.{self._record.incarnation}")
        self._poll_s = _LOCAL_POLL_S if run.is_local else _REMOTE_POLL_S
        self._started_at, self._last_start = time.time(), 0.0
        self._phase = "starting"
        self._skipped_in_a_row = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._evaluated: set[str] = set()
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        beat = asyncio.create_task(self._beat())
        live = asyncio.create_task(self._live())
        try:
            done, _ = await asyncio.wait({beat, live, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            result = max(future.result() for future in done)
            self._phase = "done"
            return result
        finally:
            await self._close({beat, live, *self._tasks})
            self._scorer.close()

    async def _live(self) -> int:
        """From the wait for the run to its end."""
        while not self._watch.has_begun:
            await self._look()
            if self._watch.has_ended:
                return EXIT_DONE
        in_spool = await until_it_works("listing the spool", group_ids, self._run)
        versions: dict[Ticket, int] = {}
        if self._config.staleness is not None:
            versions = await until_it_works("reading the spool", _versions, self._run)
        self._admission.restore(_tickets(in_spool), self._watch.drops, self._previous.skipped, versions)
        self._phase = "running"
        log.info("%d groups of this run are there already", self._admission.live)
        starting = asyncio.create_task(self._start_groups())
        self._tasks.add(starting)
        while not self._watch.has_ended:
            if starting.done():
                starting.result()
            await self._look()
        return EXIT_DONE

    async def _look(self) -> None:
        """Reads the run's records, and acts on what has changed; takes as long as one period of polling."""
        await asyncio.sleep(self._poll_s)
        try:
            await in_daemon_thread(self._watch.read)
        except Exception as error:  # every kind of bucket raises errors of its own
            log.warning("the run's records cannot be read: %r", error)
        self._watch.check_alive()
        self._admission.total = self._watch.total_steps * self._config.batch.prompts_per_step
        for ticket, reason in self._watch.drops.items():
            self._admission.drop(ticket, reason)
        self._changed.set()

    # ---- groups

    async def _start_groups(self) -> None:
        while True:
            policy, version = await self._client.current_policy()
            wanted = None if self._watch.is_draining else self._admission.next_version(version)
            named = policy if wanted == version else self._watch.policies.get(wanted)
            ticket = None if named is None else self._admission.start(version)
            if ticket is not None and named is not None:
                self._counters.named(named, time.time())
                self._spawn(self._group(ticket, named))
                continue
            self._evaluate()
            await self._pause(version)

    async def _pause(self, version: int) -> None:
        """Until something may have changed. Counts the time if staleness is all that it waits for."""
        paced, before = not self._watch.is_draining and self._admission.is_paced(version), time.monotonic()
        self._changed.clear()
        try:
            async with asyncio.timeout(_POLICY_POLL_S):
                await self._changed.wait()
        except TimeoutError:
            pass
        if paced:
            self._counters.backpressure_s += time.monotonic() - before

    async def _group(self, ticket: Ticket, policy: str) -> None:
        # The learner consumes by this time, so no two groups may share it, even where the clock steps back.
        started_at = self._last_start = max(time.time(), self._last_start + 1e-6)
        try:
            group = await self._maker.make(ticket, policy, started_at)
        except GroupDropped as dropped:
            self._drop(ticket, str(dropped), dropped.tokens)
            return
        await until_it_works(f"writing group {group.id}", self._spool.write, group)
        self._admission.finish(ticket)
        self._skipped_in_a_row = 0

    def _drop(self, ticket: Ticket, reason: str, tokens: int) -> None:
        log.warning("data index %d, attempt %d is dropped: %s", ticket.index, ticket.attempt, reason)
        self._counters.wasted_tokens += tokens
        self._admission.drop(ticket, reason)
        self._changed.set()
        if ticket.index in self._admission.skipped:
            self._skipped_in_a_row += 1
            # One bad problem is skipped; this many, with no good one between them, are no accident.
            if self._skipped_in_a_row >= max(8, 4 * self._config.batch.prompts_per_step):
                self._fail(
                    RunFailed(f"{self._skipped_in_a_row} problems in a row could not be scored; the last: {reason}")
                )

    # ---- evaluation

    def _evaluate(self) -> None:
        """What is wanted and has not begun; called when the training groups that may start are on their way."""
        if self._evaluator is None:
            return
        if self._watch.is_draining:
            self._phase = "evaluating"
        for policy in self._watch.to_evaluate:
            if policy not in self._evaluated:
                self._evaluated.add(policy)
                self._spawn(self._evaluator.evaluate(policy, partial(self._is_wanted, policy)))

    def _is_wanted(self, policy: str) -> bool:
        return policy in self._watch.to_evaluate

    # ---- life

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except UsageError as error:  # the same for every group to come
            self._fail(error)
        except Exception:
            log.exception("a task of the worker failed; the others go on")

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _beat(self) -> int:
        while True:
            try:
                await in_daemon_thread(self._record.write, self._body())
            except Exception as error:
                log.warning("the worker's record cannot be written: %r", error)
            await asyncio.sleep(_RECORD_EVERY_S)

    def _body(self) -> dict[str, Any]:
        admission = self._admission
        return record_body(
            self._counters,
            phase=self._phase,
            started_at=self._started_at,
            inflight_groups=admission.running,
            inflight_samples=self._drawer.inflight_samples,
            live=admission.live,
            redraws=admission.redraws,
            skipped=admission.skipped,
            epoch_size=len(self._problems),
            scoring_slots=self._scorer.slots,
        )

    async def _close(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_STOP_S)
        try:
            async with asyncio.timeout(_LAST_RECORD_S):
                await in_daemon_thread(self._record.write, self._body())
        except Exception as error:
            log.warning("the worker's last record cannot be written: %r", error)


def _versions(run: Bucket) -> dict[Ticket, int]:
    """What the groups in the spool were sampled with."""
    return {Ticket(group.id.index, group.id.attempt): group.version for group in SpoolReader(run).poll()}


def _tickets(ids: list[str]) -> list[Ticket]:
    found = []
    for text in ids:
        try:
            group = GroupId.parse(text)
        except ValueError:
            log.warning("%s in the spool is no group", text)
            continue
        found.append(Ticket(group.index, group.attempt))
    return found
