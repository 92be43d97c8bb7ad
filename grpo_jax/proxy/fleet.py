"""Keeps the router's table true: heartbeats, the window and the run's end from the bucket; servers without an agent."""

import asyncio
import logging
import re
import threading
import time
from dataclasses import replace
from typing import Any

import aiohttp
from yarl import URL

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator.client import EngineClient
from grpo_jax.generator.policies import Wanted
from grpo_jax.generator.sources import Mounted
from grpo_jax.proxy.addresses import may_be_sent_token, replica_url
from grpo_jax.proxy.heartbeats import Heartbeat, HeartbeatReader, Sighting
from grpo_jax.proxy.routing import Replica, Router
from grpo_jax.proxy.run_end import RunEnd
from grpo_jax.proxy.stock import StockServer, describe
from grpo_jax.proxy.tokens import TOKEN_VARIABLE, read_token
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S, _REMOTE_POLL_S = 0.1, 0.5
# A few replicas on a local bucket are read in a moment, and what was just proved is routed to the sooner.
_SOONEST_POLL_S, _SHARE_OF_TIME = 0.02, 0.05
STATIC_POLL_S = 1.0
# Some mounts remember an absence: what is not there yet is not asked for more often.
_ABSENT_POLL_S = 1.0


class Fleet:
    """Two kinds of observers, which hand what they see to the router on the event loop.

    A daemon thread reads the bucket, so that a slow one holds up neither requests nor the exit (asyncio would wait for
    its own threads). A task for each static URL looks after the server there.
    """

    def __init__(self, config: Config, router: Router):
        bucket = Bucket(config.bucket)
        self._is_local = bucket.is_local
        run = bucket.child(config.run)
        self._config, self._router = config, router
        self._name, self._run, self._silent_s = config.fleet_name, config.run, config.fleet.silent_s
        self._static = _static_urls(config.fleet.replicas)
        self._source = Mounted(run, config.run, config.fleet.mount)
        self._heartbeats = HeartbeatReader(bucket, self._name, self._silent_s)
        self._policy, self._policy_due = RecordReader(run, layout.POLICY), float("-inf")
        self._wanted: Wanted | None = None
        self._run_end = RunEnd(run, self._silent_s)
        self._sightings: dict[str, Sighting] = {}
        self._unobserved = {"heartbeats", *self._static}
        self._stop = threading.Event()
        self._stock: dict[str, StockServer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.run_over = asyncio.Event()

    def start(self) -> None:
        """Call on the event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch_bucket, args=(loop,), name="proxy-bucket", daemon=True).start()
        if self._static:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
            self._stock = {id: self._server(self._session, id, url) for id, url in self._static.items()}
        self._tasks = [loop.create_task(self._look_after(id, server)) for id, server in self._stock.items()]

    async def stop(self) -> None:
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def describe(self) -> dict[str, Any]:
        """The table as JSON, for people."""
        now = time.monotonic()
        return {
            "fleet": self._name,
            "run": self._run,
            "replicas": [self._describe(replica, now) for _, replica in sorted(self._router.replicas.items())],
        }

    def _server(self, session: aiohttp.ClientSession, id: str, url: URL) -> StockServer:
        headers, token = {"Accept-Encoding": "identity"}, read_token(TOKEN_VARIABLE)
        if token and may_be_sent_token(url, self._config.fleet.allowed_hosts):
            headers["Authorization"] = f"Bearer {token}"
        client = EngineClient(session, str(url), headers=headers, priority=None)
        return StockServer(id, url, self._config, self._source, client, self._router, lambda: self._wanted)

    async def _look_after(self, id: str, server: StockServer) -> None:
        await server.run(lambda: self._observed(id), STATIC_POLL_S)

    def _watch_bucket(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            # The window after the heartbeats: then it holds all that these can name.
            sightings, wanted, over = self._heartbeats.poll(), self._read_policy(), self._run_end.over()
            try:
                loop.call_soon_threadsafe(self._apply, sightings, wanted, self._heartbeats.listed, over)
            except RuntimeError:  # the loop has been closed
                return
            self._stop.wait(self._pause_s(time.monotonic() - began))

    def _pause_s(self, took_s: float) -> float:
        """After a reading of the whole fleet that took `took_s`."""
        if not self._is_local:
            return _REMOTE_POLL_S
        return min(HEARTBEAT_POLL_S, max(_SOONEST_POLL_S, took_s / _SHARE_OF_TIME))

    def _read_policy(self) -> Wanted | None:
        """The newest that is known. A bucket that fails is one that has nothing new."""
        now = time.monotonic()
        if now < self._policy_due:
            return self._wanted
        try:
            record = self._policy.read()
            if record is not None:
                return Wanted.of(record)
        except Exception as error:  # each kind of bucket raises its own errors
            log.debug("%s cannot be read: %r", layout.POLICY, error)
        if self._wanted is None:
            self._policy_due = now + _ABSENT_POLL_S
        return self._wanted

    def _apply(self, sightings: list[Sighting], wanted: Wanted | None, listed: bool, over: bool) -> None:
        now = time.monotonic()
        seen = {
            sighting.heartbeat.id: replace(sighting, heartbeat=self._of_this_run(sighting.heartbeat))
            for sighting in sightings
            if sighting.heartbeat.id not in self._static
        }
        for id in self._sightings.keys() - seen.keys():
            self._router.forget(id)
        for id, sighting in seen.items():
            beat = sighting.heartbeat
            before = self._sightings[id].state if id in self._sightings else "silent"
            if sighting.state != before:
                log.info("fleet: replica %s is %s", id, sighting.state)
            ready = sighting.state == "ready"
            self._router.observe(id, beat.url, ready, beat.proved, now, beat.quarantined, beat.loaded)
        self._sightings, self._wanted = seen, wanted
        if wanted is not None:
            self._router.set_window(wanted.window)
        if listed:
            self._observed("heartbeats")
        if over:
            self.run_over.set()

    def _of_this_run(self, heartbeat: Heartbeat) -> Heartbeat:
        """Without the policies of other runs that share the fleet."""
        ours = f"{self._run}."
        return heartbeat.model_copy(
            update={
                "proved": [name for name in heartbeat.proved if name.startswith(ours)],
                "loaded": [name for name in heartbeat.loaded if name.startswith(ours)],
                "quarantined": {name: why for name, why in heartbeat.quarantined.items() if name.startswith(ours)},
                "proved_at": {name: at for name, at in heartbeat.proved_at.items() if name.startswith(ours)},
            }
        )

    def _observed(self, source: str) -> None:
        self._unobserved.discard(source)
        self._router.complete = not self._unobserved

    def _describe(self, replica: Replica, now: float) -> dict[str, Any]:
        sighting, server = self._sightings.get(replica.id), self._stock.get(replica.id)
        source: dict[str, Any] = {}
        if server is not None:
            source = describe(server, now)
        elif sighting is not None:
            beat = sighting.heartbeat
            source = {
                "source": "heartbeat",
                "state": sighting.state,
                "heartbeat_age_s": round(now - sighting.changed_at, 3),
                **beat.model_dump(include={"loaded", "engine", "engine_version", "dtype", "running", "waiting"}),
                **beat.model_dump(include={"restarts", "error", "proofs", "proved_at", "refused_total"}),
            }
        return {
            "id": replica.id,
            "url": str(replica.url),
            **source,
            "ready": replica.ready,
            "proved": list(replica.proved),
            "quarantined": dict(replica.quarantined),
            "in_flight": replica.in_flight,
            "strikes": replica.health.count,
            "struck_policies": {name: backoff.count for name, backoff in replica.denied.items()},
            "blocked_s": round(max(0.0, replica.health.until - now), 3),
            "last_error": replica.last_error,
        }


def _static_urls(urls: list[str]) -> dict[str, URL]:
    """By id: host, port and path, in characters that a heartbeat's id may have."""
    found: dict[str, URL] = {}
    for i, text in enumerate(urls):
        try:
            url = replica_url(text)
        except ValueError as error:
            raise UsageError(f"fleet.replicas.{i}: {error}") from None
        id = re.sub(r"[^A-Za-z0-9._]+", "-", f"{url.raw_host}:{url.port}{url.raw_path}").strip("-._")[:128]
        if found.get(id, url) != url:
            raise UsageError(f"fleet.replicas.{i}: it cannot be told apart from {found[id]} by the name {id}")
        found[id] = url
    return found
