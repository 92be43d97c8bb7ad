"""Keeps the router's table true: heartbeats and the run's end from the bucket, names from servers without an agent."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from yarl import URL

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.proxy.addresses import replica_url
from grpo_jax.proxy.heartbeats import HeartbeatReader, Sighting
from grpo_jax.proxy.routing import Replica, Router
from grpo_jax.proxy.run_end import RunEnd
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S = 0.25
STATIC_POLL_S = 1.0

ListModels = Callable[[URL], Awaitable[list[str]]]


class Fleet:
    """Two kinds of observers, which hand what they see to the router on the event loop.

    A daemon thread reads the bucket, so that a slow one holds up neither requests nor the exit (asyncio would wait for
    its own threads). A task for each static URL asks the server itself.
    """

    def __init__(self, config: Config, router: Router, list_models: ListModels):
        """list_models: the names that the server at a URL lists; any exception means that it did not answer."""
        bucket = Bucket(config.bucket)
        self._name, self._run, self._silent_s = config.fleet_name, config.run, config.fleet.silent_s
        self._router, self._list_models = router, list_models
        self._static = _static_urls(config.fleet.replicas)
        self._heartbeats = HeartbeatReader(bucket, self._name, self._silent_s)
        self._run_end = RunEnd(bucket.child(config.run), self._silent_s)
        self._sightings: dict[str, Sighting] = {}
        self._answered_at: dict[str, float] = {}
        self._unobserved = {"heartbeats", *self._static}
        self._stop = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.run_over = asyncio.Event()

    def start(self) -> None:
        """Call on the event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch_bucket, args=(loop,), name="proxy-bucket", daemon=True).start()
        self._tasks = [loop.create_task(self._watch_server(id, url)) for id, url in self._static.items()]

    async def stop(self) -> None:
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def describe(self) -> dict[str, Any]:
        """The table as JSON, for people."""
        now = time.monotonic()
        return {
            "fleet": self._name,
            "run": self._run,
            "replicas": [self._describe(replica, now) for _, replica in sorted(self._router.replicas.items())],
        }

    def _watch_bucket(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            sightings, over = self._heartbeats.poll(), self._run_end.over()
            try:
                loop.call_soon_threadsafe(self._apply, sightings, self._heartbeats.listed, over)
            except RuntimeError:  # the loop has been closed
                return
            self._stop.wait(HEARTBEAT_POLL_S)

    def _apply(self, sightings: list[Sighting], listed: bool, over: bool) -> None:
        now = time.monotonic()
        seen = {sighting.heartbeat.id: sighting for sighting in sightings if sighting.heartbeat.id not in self._static}
        for id in self._sightings.keys() - seen.keys():
            self._router.forget(id)
        for id, sighting in seen.items():
            beat = sighting.heartbeat
            before = self._sightings[id].state if id in self._sightings else "silent"
            if sighting.state != before:
                log.info("fleet: replica %s is %s", id, sighting.state)
            ready = sighting.state == "ready"
            self._router.observe(id, beat.url, ready, beat.proved, now, beat.quarantined, beat.loaded)
        self._sightings = seen
        if listed:
            self._observed("heartbeats")
        if over:
            self.run_over.set()

    async def _watch_server(self, id: str, url: URL) -> None:
        """A server without an agent counts as having proved what it lists; it is live while it answers."""
        names: list[str] = []
        while True:
            try:
                names = await self._list_models(url)
                self._answered_at[id] = time.monotonic()
            except Exception as error:  # whatever it is, the server did not answer
                log.debug("fleet: %s does not list its models: %s", id, type(error).__name__)
            now = time.monotonic()
            live = now - self._answered_at.get(id, float("-inf")) < self._silent_s
            self._router.observe(id, url, live, names, now)
            self._observed(id)
            await asyncio.sleep(STATIC_POLL_S)

    def _observed(self, source: str) -> None:
        self._unobserved.discard(source)
        self._router.complete = not self._unobserved

    def _describe(self, replica: Replica, now: float) -> dict[str, Any]:
        sighting = self._sightings.get(replica.id)
        if sighting is not None:
            beat = sighting.heartbeat
            source: dict[str, Any] = {
                "source": "heartbeat",
                "state": sighting.state,
                "heartbeat_age_s": round(now - sighting.changed_at, 3),
                **beat.model_dump(include={"loaded", "engine", "engine_version", "dtype", "running", "waiting"}),
                **beat.model_dump(include={"restarts", "error"}),
            }
        else:
            answered = self._answered_at.get(replica.id)
            source = {
                "source": "static",
                "state": "ready" if replica.ready else "silent",
                "heartbeat_age_s": None if answered is None else round(now - answered, 3),
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
    found: dict[str, URL] = {}
    for i, text in enumerate(urls):
        try:
            url = replica_url(text)
        except ValueError as error:
            raise UsageError(f"fleet.replicas.{i}: {error}") from None
        found[f"{url.raw_host}:{url.port}{url.raw_path.rstrip('/')}".replace("/", "_")] = url
    return found
