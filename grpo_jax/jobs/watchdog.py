"""What the parts of a run show of themselves: which are dead although their processes live, and who waits for whom.

A thread reads the run's records, so that a bucket that hangs holds up nobody. Silence is measured on this process's own
monotonic clock, and only while the bucket answers and takes writes: else it is the bucket's, and nobody is to blame.
"""

import logging
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException

from grpo_jax.config.schema import Config
from grpo_jax.generator.stoppage import Stoppage
from grpo_jax.jobs.waits import View, state_of, waits
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, Limits
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

WORKER, LOCAL_REPLICA = "worker-0", "local-{}"
_LOCAL_PERIOD_S, _REMOTE_PERIOD_S = 0.5, 2.0
# Of a verb: what takes longer is no news any more.
_LIMITS = Limits(attempt_s=10.0, total_s=10.0)
_HEALTH_S = 5.0
_STOP_S = 1.0
# Before its first sign of life a process imports, loads a model or a data set.
_FIRST_SIGN_S = 600.0
# A look that comes so late, for the machine slept or swapped, tells nothing about the silence of others.
_LATE_S = 10.0
# A listing may leave out for a while what has just been written.
_GONE_S = 30.0
_TRIAL = "logs/watchdog"
# So many times as long as the last few steps took is no standstill yet.
_MANY, _STEPS = 3.0, 9
# Loopback only: a proxy of the environment has no business here.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class _Sign:
    """When a part last gave a sign of life, and since when the process lives that is to give it; monotonic seconds."""

    began: float = float("-inf")
    seen: float = float("-inf")
    after: int = -1
    """The incarnation of the life before: what that one has written may still be on its way."""
    stoppage: Stoppage = field(default_factory=Stoppage)


@dataclass
class _Entry:
    """A record. What stood there at the start (`old`) is of an earlier life, and counts once it changes."""

    reader: RecordReader
    listed_at: float
    changed_at: float
    old: Record | None = None
    fresh: Record | None = None


class Watchdog:
    """Watches the records of one run. What it sees goes to the log, once for each state.

    Attributes:
      steps: how far the run has ever come.
      waits: who waits for whom, as long as the run is stuck.
    """

    def __init__(self, config: Config, proxy_url: str, clock: Callable[[], float] = time.monotonic):
        self._config, self._proxy_url, self._clock = config, proxy_url, clock
        self._root = Bucket(config.bucket, _LIMITS)
        self._run = self._root.child(config.run)
        self._period_s = _LOCAL_PERIOD_S if self._root.is_local else _REMOTE_PERIOD_S
        self._replicas = layout.replicas(config.fleet_name)
        self._keys = {"learner": layout.LEARNER_STATE, "worker": layout.worker_state(WORKER)}
        for i in range(config.generator.replicas):
            self._keys[f"generator-{i}"] = layout.replica(config.fleet_name, LOCAL_REPLICA.format(i))
        self._signs = {name: _Sign(stoppage=Stoppage(clock)) for name in (*self._keys, "proxy")}
        self._entries: dict[str, _Entry] = {}
        self._looks = 0
        self._looked_at = self._good_since = self._stepped_at = clock()
        self._trouble: tuple[str, float] | None = None
        self._proxy_error: str | None = None
        self._steps_s = deque[float](maxlen=_STEPS)
        self._phase = ""
        self._said: set[str] = set()
        self.steps = 0
        self.waits: tuple[str, ...] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Call it before the roles are started: it is to know what an earlier life has left."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def begins(self, role: str) -> None:
        """A new process of a role has been started."""
        entry = self._entries.get(self._keys.get(role, ""))
        before = None if entry is None else entry.fresh or entry.old
        after = -1 if before is None else before["incarnation"]
        self._signs[role] = _Sign(began=self._clock(), after=after, stoppage=Stoppage(self._clock))

    def dead(self, role: str, pid: int) -> str | None:
        """Why a process that lives is as good as dead; None if it is not."""
        sign, hung_s = self._signs[role], self._config.local.hung_s
        if (why := sign.stoppage.reason([pid], hung_s)) is not None:
            return why
        limit_s = hung_s if sign.seen > sign.began else max(hung_s, _FIRST_SIGN_S)
        silent_s = self._silent_s(sign)
        return f"it has given no sign of life for {silent_s:.0f} s" if silent_s >= limit_s else None

    def _silent_s(self, sign: _Sign) -> float:
        return self._looked_at - max(sign.seen, sign.began, self._good_since)

    # ---- the thread

    def _watch(self) -> None:
        # At random times: who looks in step with a writer may always look just before its news can be seen.
        while not self._stop.wait(random.uniform(0.5, 1.5) * self._period_s):
            try:
                self.look()
            except Exception:
                log.exception("the watchdog's look failed")

    def look(self) -> None:
        """One look at everything. Takes no longer than a few deadlines of the bucket's verbs."""
        late = self._clock() - self._looked_at > _LATE_S + self._period_s
        try:
            self._read()
            self._try_writing()
        except OSError as error:
            self._troubled(str(error))
        else:
            now = self._clock()
            if self._trouble is not None:
                if self._said:
                    log.warning("the bucket works again")
                self._trouble, self._good_since, self._stepped_at, self._said = None, now, now, set()
            elif late:
                self._good_since = now
            self._looked_at = now
            self._looks += 1
        self._look_at_proxy()
        self._judge()

    def _read(self) -> None:
        """All records that are there; a path that is not is not asked for, since some mounts remember that."""
        there = [(self._run, key) for key in (*self._run.list(layout.WORKERS), *self._run.list(layout.METRICS))]
        there += [(self._root, key) for key in self._root.list(self._replicas)]
        if self._fresh(layout.LEARNER_STATE).get("phase", "starting") != "starting":
            there.append((self._run, layout.POLICY))
        for bucket, key in there:
            if key.endswith(".json"):
                self._read_one(bucket, key)

    def _read_one(self, bucket: Bucket, key: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            reader = RecordReader(bucket, key)
            entry = _Entry(reader, self._clock(), self._clock(), old=None if self._looks else reader.read())
            self._entries[key] = entry
        entry.listed_at = self._clock()
        record = entry.reader.read()
        if record is None or record is entry.old or record is entry.fresh:
            return
        entry.fresh, entry.changed_at = record, self._clock()
        for role, own in self._keys.items():
            if own == key and record["incarnation"] > self._signs[role].after:
                self._signs[role].seen = entry.changed_at

    def _fresh(self, key: str) -> Record:
        entry = self._entries.get(key)
        if entry is None or entry.fresh is None or self._clock() - entry.listed_at > _GONE_S:
            return {}
        return entry.fresh

    def _try_writing(self) -> None:
        """Where somebody is silent: heartbeats need a bucket that takes them."""
        if any(self._silent_s(self._signs[role]) > self._config.local.hung_s / 2 for role in self._keys):
            self._run.replace(_TRIAL, f"{time.time()}\n".encode())

    def _troubled(self, cause: str) -> None:
        now = self._clock()
        if self._trouble is None:
            self._trouble = cause, now
        elif now - self._trouble[1] >= min(30.0, self._config.local.stuck_s):
            self._say(f"everything waits for the bucket: {cause}", "bucket")

    def _look_at_proxy(self) -> None:
        try:
            with _OPENER.open(f"{self._proxy_url}/health", timeout=_HEALTH_S) as answer:
                answer.read()
        except urllib.error.HTTPError:  # whoever says so lives
            pass
        except (OSError, HTTPException) as error:
            self._proxy_error = str(getattr(error, "reason", error))
            return
        self._proxy_error, self._signs["proxy"].seen = None, self._clock()

    # ---- judgement

    def _judge(self) -> None:
        if self._trouble is not None:
            self.waits = (f"everything waits for the bucket: {self._trouble[0]}",) if self._said else ()
            return
        view, now = self._view(), self._clock()
        step, phase = int(view.learner.get("step", 0)), str(view.learner.get("phase", "starting"))
        if step > self.steps:
            if self.steps:
                self._steps_s.append(now - self._stepped_at)
            if self.waits:
                log.warning("the run gets on again: %d steps are done", step)
        if step > self.steps or phase != self._phase or view.loads():
            self.steps, self._phase, self._stepped_at = max(step, self.steps), phase, now
            self.waits, self._said = (), set()
            return
        without_s = now - self._stepped_at
        usual_s = statistics.median(self._steps_s) if self._steps_s else 0.0  # one standstill does not move it
        if phase == "done" or without_s < max(self._config.local.stuck_s, _MANY * usual_s):
            return
        self.waits = tuple(waits(view))
        self._say(f"no step for {without_s:.0f} s: {'; '.join(self.waits)}", state_of(self.waits))

    def _view(self) -> View:
        fresh = {key: record for key in self._entries if (record := self._fresh(key))}
        workers, replicas = f"{layout.WORKERS}/", f"{self._replicas}/"
        beats = [key for key in fresh if key == layout.LEARNER_STATE or key.startswith((workers, replicas))]
        silent_s = {key: self._looked_at - max(self._entries[key].changed_at, self._good_since) for key in beats}
        return View(
            self._config,
            learner=self._fresh(layout.LEARNER_STATE),
            policy=self._fresh(layout.POLICY),
            workers={key.removeprefix(workers): r for key, r in fresh.items() if key.startswith(workers)},
            replicas={key.removeprefix(replicas): r for key, r in fresh.items() if key.startswith(replicas)},
            silent_s=silent_s,
            proxy_error=self._proxy_error,
        )

    def _say(self, text: str, state: str) -> None:
        if state not in self._said:
            self._said.add(state)
            log.warning("%s", text)
