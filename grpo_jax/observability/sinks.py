"""Metrics to dashboards, beside `metrics.jsonl`. A sink may be slow or fail as it likes: training does not notice."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from grpo_jax.observability.scrubbing import scrubbed_config
from grpo_jax.storage.scrub import scrubbed

log = logging.getLogger(__name__)

_KEPT = 10_000  # records that wait for a sink which cannot be opened; older ones are lost, and counted
_OPEN_AGAIN_S = 30.0
_CLOSE_S = 15.0


@dataclass(frozen=True)
class RunInfo:
    """What a dashboard is told of a run. `id` is the same for all lives of a run, and another after `--fresh`."""

    id: str
    name: str
    project: str
    config: dict[str, Any]  # without secrets
    folder: Path  # for local files
    first_step: int
    space: str | None = None


class Sink(Protocol):
    """One dashboard. Called from one thread, which is not the training's; whatever it raises is counted."""

    def log(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Feeds some sinks, each from a thread of its own."""

    def __init__(self, openers: Mapping[str, Callable[[RunInfo], Sink]], info: RunInfo):
        self._feeds = [_Feed(name, opener, info) for name, opener in openers.items()]

    @property
    def failures(self) -> int:
        """Records that a sink did not take, and attempts to open one that failed."""
        return sum(feed.failures for feed in self._feeds)

    def log(self, record: Mapping[str, Any]) -> None:
        """Returns at once."""
        for feed in self._feeds:
            feed.put(record)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Waits for what is still on its way, but not longer than `timeout_s` in all."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.stop()
        for feed in self._feeds:
            feed.join(max(deadline - time.monotonic(), 0.0))


def open_sinks(record: Mapping[str, Any], folder: Path, first_step: int) -> Sinks | None:
    """The sinks that a run's config asks for; None if it asks for none.

    Args:
      record: the run's record (run.json): `run`, `config`, `created_at`, `versions`.
      folder: the run's directory on this machine.
      first_step: the step that comes next; what an earlier life has sent from there on is replaced where that can be.
    """
    from grpo_jax.observability.sink_writers import OPENERS

    logging_config = record["config"].get("logging") or {}
    if not logging_config.get("sinks"):
        return None
    identity = f"{record['config']['bucket']}/{record['run']}@{record['created_at']}"
    info = RunInfo(
        id=f"{record['run']}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}",
        name=record["run"],
        project=logging_config["project"],
        config={**scrubbed_config(record["config"]), "versions": dict(record.get("versions") or {})},
        folder=folder,
        first_step=first_step,
        space=logging_config.get("space"),
    )
    return Sinks({name: OPENERS[name] for name in dict.fromkeys(logging_config["sinks"])}, info)


class _Feed:
    def __init__(self, name: str, opener: Callable[[RunInfo], Sink], info: RunInfo):
        self._name, self._opener, self._info = name, opener, info
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._stopped = self._said = self._given_up = False
        self.failures = 0
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            if self._given_up or len(self._waiting) >= _KEPT:
                self.failures += 1
                if self._given_up:
                    return
                self._waiting.popleft()
            self._waiting.append(record)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the sink %s is still busy; what it has not sent is lost", self._name)

    def _work(self) -> None:
        sink = self._open()
        if sink is None:
            return
        while (record := self._next()) is not None:
            self._guarded("does not take a step", partial(sink.log, record))
        self._guarded("cannot be closed", sink.close)

    def _open(self) -> Sink | None:
        while True:
            sink: Sink | None = self._guarded("cannot be opened", lambda: self._opener(self._info))
            if sink is not None or self._given_up:
                return sink
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped, _OPEN_AGAIN_S):
                    self.failures += len(self._waiting)
                    return None

    def _next(self) -> Mapping[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            return self._waiting.popleft() if self._waiting else None

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of `call`; None if it raised, which is counted, and logged the first time."""
        try:
            return call()
        except Exception as error:
            missing = isinstance(error, ImportError)
            with self._changed:
                self.failures += 1
                if missing:
                    self._given_up = True
                    self.failures += len(self._waiting)
                    self._waiting.clear()
            if not self._said:
                reason = f"the package {self._name} is not installed ({error})" if missing else repr(error)
                log.warning("the sink %s %s: %s; the run goes on", self._name, what, scrubbed(reason)[:500])
            self._said = True
            return None
