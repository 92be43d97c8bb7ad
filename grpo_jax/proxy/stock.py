"""A server without an agent of ours, looked after from here: the agent's own reconciling, proofs and heartbeat.

Where the servers see the bucket (`fleet.mount`), policies are loaded on them from there; elsewhere only proved.
Either way what such a server lists is not believed: only what its canary proves is routed to.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from yarl import URL

from grpo_jax.config.schema import Config
from grpo_jax.generator.client import UNREACHABLE, EngineClient, Load, ServerError
from grpo_jax.generator.policies import Policies, Wanted
from grpo_jax.generator.sources import Source
from grpo_jax.proxy.routing import Router
from grpo_jax.rollouts.threads import in_daemon_thread
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordWriter, next_incarnation

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_LAST_WORD_S = 2.0


class StockServer:
    """One task, `run`. Whatever blocks (the bucket) does so in threads that nobody waits for at the end."""

    def __init__(
        self,
        id: str,
        url: URL,
        config: Config,
        source: Source,
        client: EngineClient,
        router: Router,
        wanted: Callable[[], Wanted | None],
    ):
        """
        Args:
            id: names the heartbeat; unique in the fleet.
            wanted: the newest `policy.json`, None as long as there is none.
        """
        self._id, self._url, self._config, self._client = id, url, config, client
        self._router, self._wanted = router, wanted
        self._bucket, self._key = Bucket(config.bucket), layout.replica(config.fleet_name, id)
        self._writer: RecordWriter | None = None
        self._policies = Policies(
            source, config.run, dtype=config.model.dtype, slots=config.slots, reproof_s=config.fleet.reproof_s
        )
        self._load = Load()
        self._held: list[str] = []
        self._started_at = time.time()
        self._losses = 0
        self._error: str | None = None
        self.answered_at: float | None = None
        """Monotonic seconds."""

    async def run(self, observed: Callable[[], None], poll_s: float) -> None:
        """Never returns. `observed` is called whenever the router has been told anew."""
        leaving = asyncio.Event()
        heartbeat = asyncio.create_task(self._beat(leaving))
        try:
            while True:
                busy = await self._turn()
                self._tell_router()
                observed()
                await asyncio.sleep(0 if busy else poll_s)
        finally:
            leaving.set()
            await asyncio.wait([heartbeat], timeout=_LAST_WORD_S)
            await self._remove_heartbeat()

    @property
    def live(self) -> bool:
        answered = self.answered_at
        return answered is not None and time.monotonic() - answered < self._config.fleet.silent_s

    def record(self) -> Record:
        """The heartbeat, with an agent's fields.

        As `loaded` it names all whose files the server may still read, and goes on to do so while the server is away:
        they must not be deleted from the bucket under it.
        """
        return {
            "id": self._id,
            "url": str(self._url),
            "state": "ready" if self.live else "starting",
            "runs": [self._config.run],
            "base_digest": None,
            "engine": "stock",
            "engine_version": None,
            "dtype": self._config.model.dtype,
            **self._policies.record(),
            "loaded": self._held,
            "running": self._load.running,
            "waiting": self._load.waiting,
            "restarts": self._losses,
            "started_at": self._started_at,
            "error": self._error,
        }

    async def _turn(self) -> bool:
        """Looks at the server and does one thing about it; returns whether there was any."""
        policies, busy = self._policies, False
        try:
            if await policies.compare(self._client):
                self._lost("it has lost policies that it held")
                await policies.compare(self._client)
            self.answered_at, self._error = time.monotonic(), None
            self._tell_router()  # what follows may take minutes
            if (wanted := self._wanted()) is not None:
                busy = await policies.step(self._client, wanted)
                self.answered_at = time.monotonic()
            await self._measure()
            await policies.sweep(self._load)
            self._held = policies.held
        except TimeoutError:  # it is slow; what it has proved it still serves
            self._error = "the server did not answer in time"
        except (ServerError, *UNREACHABLE) as error:
            self._lost(str(error) if isinstance(error, ServerError) else type(error).__name__)
        except Exception as error:  # of the bucket, or a bug: neither may end the looking after
            log.exception("a policy on %s could not be dealt with, and is tried again", self._id)
            self._error = f"{type(error).__name__}: {error}"
        return busy

    async def _measure(self) -> None:
        try:
            self._load = await self._client.load_now()
        except ServerError as error:
            log.debug("fleet: no metrics from %s: %s", self._id, error)

    def _lost(self, why: str) -> None:
        """What answers next may be another process, with another base: everything has to be proved again."""
        if self._policies.proved:
            log.warning("fleet: everything on %s has to be proved again: %s", self._id, why)
            self._losses += 1
        self._policies.forget_server()
        self._error = why

    def _tell_router(self) -> None:
        policies = self._policies
        self._router.observe(
            self._id,
            self._url,
            self.live,
            policies.proved,
            time.monotonic(),
            policies.quarantined,
            policies.loaded,
        )

    async def _beat(self, leaving: asyncio.Event) -> None:
        while not leaving.is_set():
            try:
                await in_daemon_thread(self._write, self.record())
            except Exception as error:  # every kind of bucket raises errors of its own
                log.warning("fleet: the heartbeat of %s cannot be written: %r", self._id, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), _HEARTBEAT_S)

    def _write(self, record: Record) -> None:
        if self._writer is None:
            self._writer = RecordWriter(self._bucket, self._key, next_incarnation(self._bucket, self._key))
        self._writer.write(record)

    async def _remove_heartbeat(self) -> None:
        try:
            await asyncio.wait_for(in_daemon_thread(self._bucket.delete, self._key), _LAST_WORD_S)
        except Exception as error:  # it will be found silent instead
            log.warning("fleet: the heartbeat of %s could not be removed: %r", self._id, error)


def describe(server: StockServer, now: float) -> dict[str, Any]:
    """Its row in the table, as far as the router does not know it."""
    record, answered = server.record(), server.answered_at
    shown = ("loaded", "engine", "engine_version", "dtype", "running", "waiting", "restarts", "error")
    return {
        "source": "static",
        "state": "ready" if server.live else "silent",
        "heartbeat_age_s": None if answered is None else round(now - answered, 3),
        **{field: record[field] for field in (*shown, "proofs", "proved_at", "refused_total")},
    }
