"""The agent of one generator: a server, the policies on it, and a heartbeat that says what is proved.

Four tasks share one state and never wait for each other: the supervisor keeps the server running, the observer reads
what the run wants, the reconciler makes the server hold that, the heartbeat tells the fleet. So a canary that queues
behind a full batch, or a bucket that hangs, delays nothing else.
"""

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, UsageError
from grpo_jax.generator.client import UNREACHABLE, Load, ServerError
from grpo_jax.generator.engines import require_engine, server_command, server_version
from grpo_jax.generator.runs import Runs, require_agreement
from grpo_jax.generator.supervisor import Supervisor
from grpo_jax.generator.vllm import Limits
from grpo_jax.models.source import base_digest, resolve_model
from grpo_jax.rollouts.threads import in_daemon_thread
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordWriter, next_incarnation

log = logging.getLogger(__name__)

_TICK_S = 0.05
_METRICS_S = 1.0
_HEARTBEAT_S = 1.0
_LAST_WORD_S = 5.0
# So many canaries or loads in a row, each of which was waited for so long at least, are an engine that hangs.
_UNANSWERED, _LONG_S = 2, 100.0


def run_generator(configs: Sequence[Config], replica_id: str, work_dir: Path, advertise_url: str | None = None) -> int:
    """Serves the policies of runs until all of them are over. Blocks; to be called in the main thread.

    Args:
        configs: of the runs, most often of one; those of several agree in what the server is.
        replica_id: names the heartbeat; unique in the fleet.
        work_dir: local disk, for adapters and the server's log.
        advertise_url: where others reach the server; by default `generator.host` and the port.

    Returns:
        0 when the runs are over or all learners have been silent for `fleet.idle_exit_s`, 75 after SIGTERM or SIGINT.
        Nothing is left running in either case.

    Raises:
        RunFailed: the server cannot be started.
        UsageError: the model or the engine is not here, nobody could reach this replica, or the runs do not agree.
    """
    require_agreement(configs)
    config = configs[0]
    if advertise_url is None and config.generator.host in ("0.0.0.0", "::"):
        raise UsageError("generator.host is a wildcard address: an address for others to reach is needed beside it")
    require_engine(config)
    return asyncio.run(_Agent(configs, replica_id, work_dir, advertise_url).run())


class _Agent:
    def __init__(self, configs: Sequence[Config], replica_id: str, work_dir: Path, advertise_url: str | None):
        self._config, self._id, self._work_dir, self._advertise_url = configs[0], replica_id, work_dir, advertise_url
        self._limits = Limits.of(configs)
        self._bucket = Bucket(self._config.bucket)
        self._started_at = time.time()
        self._heartbeat_key = layout.replica(self._config.fleet_name, replica_id)
        self._incarnation = next_incarnation(self._bucket, self._heartbeat_key)
        self._writer = RecordWriter(self._bucket, self._heartbeat_key, self._incarnation)
        self._adapters = work_dir / "adapters"
        # What an earlier agent has left there may be of another run.
        shutil.rmtree(self._adapters, ignore_errors=True)
        self._runs = Runs(configs, self._adapters)
        self._supervisor: Supervisor | None = None
        self._base_digest: str | None = None
        self._load = Load()
        self._error: str | None = None
        self._life = 0  # of the server that `_runs` speaks of
        self._leaving = asyncio.Event()
        self._soonest_s = 0.05 if self._bucket.is_local else _HEARTBEAT_S

    async def run(self) -> int:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        heartbeat = asyncio.create_task(self._beat())
        watch = asyncio.create_task(self._runs.watch())
        tasks = [watch, asyncio.create_task(stopped.wait()), asyncio.create_task(self._serve())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Exception as error:
            self._error = str(error)
            raise
        finally:
            self._leaving.set()
            self._runs.changed.set()
            await _cancelled(tasks)
            await asyncio.wait([heartbeat], timeout=_LAST_WORD_S)
        log.info("leaving: %s", watch.result() if watch in done else "stopped by a signal")
        await self._remove_heartbeat()
        return EXIT_DONE if watch in done else EXIT_RESUMABLE

    async def _serve(self) -> None:
        """Never returns; raises what makes it impossible to serve. Leaves no process behind."""
        config = self._config
        model_dir = await in_daemon_thread(resolve_model, config.model.source)
        async with aiohttp.ClientSession(trust_env=False) as session:
            self._supervisor = supervisor = Supervisor(
                lambda port, start: server_command(
                    config,
                    model_dir,
                    self._id,
                    port=port,
                    start=self._incarnation + start,
                    adapters=self._adapters,
                    limits=self._limits,
                ),
                self._work_dir / f"{config.generator.engine}-{self._id}.log",
                session,
                host=config.generator.host,
                port=config.generator.port,
                start_timeout_s=config.generator.start_timeout_s,
                hung_s=config.generator.hung_s,
            )
            tasks = [
                asyncio.create_task(self._digest(model_dir)),
                asyncio.create_task(supervisor.run()),
                asyncio.create_task(self._reconcile(supervisor)),
                asyncio.create_task(self._measure(supervisor)),
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                await _cancelled(tasks)

    async def _digest(self, model_dir: Path) -> None:
        self._base_digest = await in_daemon_thread(base_digest, model_dir)

    async def _reconcile(self, supervisor: Supervisor) -> None:
        unanswered = 0
        while True:
            busy, began = False, time.monotonic()
            self._runs.asked.clear()
            if self._life != supervisor.life:
                self._runs.forget_server()
                self._life, unanswered = supervisor.life, 0
            self._runs.compare_base(self._base_digest)
            try:
                if (client := supervisor.client) is not None and self._base_digest is not None:
                    busy = await self._runs.step(client, self._load)
                    unanswered = 0 if busy else unanswered
            except UNREACHABLE as error:
                log.info("the server does not answer: %r", error)
                if isinstance(error, TimeoutError) and time.monotonic() - began >= _LONG_S:
                    unanswered += 1
                if unanswered >= _UNANSWERED:  # its API answers, its engine does not
                    supervisor.hang, unanswered = "has answered no canary and no load for minutes", 0
                await asyncio.sleep(_TICK_S)
            if not busy:
                await _set_within(self._runs.asked, _TICK_S)

    async def _measure(self, supervisor: Supervisor) -> None:
        while True:
            if (client := supervisor.client) is not None:
                try:
                    self._load = await client.load_now()
                except (ServerError, *UNREACHABLE) as error:
                    log.debug("no metrics: %r", error)
            await asyncio.sleep(_METRICS_S)

    async def _beat(self) -> None:
        """Writes the heartbeat until the agent leaves, sooner when something changed, and a last time then."""
        while True:
            last = self._leaving.is_set()
            self._runs.changed.clear()
            try:
                await in_daemon_thread(self._writer.write, self._record())
            except Exception as error:  # every kind of bucket raises errors of its own
                log.warning("the heartbeat cannot be written: %r", error)
            if last:
                return
            await _set_within(self._leaving, self._soonest_s)
            await _set_within(self._runs.changed, _HEARTBEAT_S - self._soonest_s)

    def _record(self) -> Record:
        config, supervisor = self._config, self._supervisor
        ready = supervisor is not None and supervisor.client is not None and supervisor.life == self._life
        host = f"[{config.generator.host}]" if ":" in config.generator.host else config.generator.host
        port = supervisor.port if supervisor is not None else config.generator.port
        error = self._error or self._runs.error or (supervisor.error if supervisor is not None else None)
        return {
            "id": self._id,
            "url": self._advertise_url or f"http://{host}:{port}",
            "state": "draining" if self._leaving.is_set() else "ready" if ready else "starting",
            "base_digest": self._base_digest,
            "engine": config.generator.engine,
            "engine_version": server_version(config),
            "dtype": config.model.dtype,
            **self._runs.record(),
            **({} if ready else {"proved": [], "loaded": []}),
            "running": self._load.running if ready else 0,
            "waiting": self._load.waiting if ready else 0,
            "restarts": supervisor.restarts if supervisor is not None else 0,
            "started_at": self._started_at,
            "error": error,
        }

    async def _remove_heartbeat(self) -> None:
        try:
            await asyncio.wait_for(in_daemon_thread(self._bucket.delete, self._heartbeat_key), _LAST_WORD_S)
        except Exception as error:  # it will be found silent instead
            log.warning("the heartbeat could not be removed: %r", error)


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return


async def _cancelled(tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
