"""One run from its start to its end, under blows."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments.chaos.command import RELAY
from experiments.chaos.growth import Growth
from experiments.chaos.inject import Blow, Injector
from experiments.chaos.parts import MARK, PARTS, by_part, held, marked
from experiments.chaos.relay import Relay
from experiments.chaos.settings import ROOT, make_config, store
from experiments.chaos.sightings import Committed, Signs
from experiments.chaos.verdict import Verdict, judge
from grpo_jax.generator.process import free_port
from grpo_jax.jobs.keeper import last_line
from grpo_jax.storage.bucket import Bucket

_TICK_S, _LOOK_S, _WEIGH_S = 0.25, 1.0, 2.0
_CONNECTION_S = 20.0
"""Mean life of a connection between worker and proxy."""
_START_S, _STUCK_S, _GONE_S = 900.0, 600.0, 3.0
_LAST_STEPS = 2
"""At the end of a run nobody is hit: there is not enough of it left to see a recovery."""


@dataclass(frozen=True)
class Outcome:
    name: str
    wall_s: float
    served_s: float
    """Since all of its parts were in service for the first time."""
    verdict: Verdict
    blows: list[Blow]
    connections_broken: int
    orphans: list[str]
    temporary: int
    """Files left in the folder for temporary ones."""


class Ordeal:
    """`python -m experiments.chaos.command` and all that it starts, looked at from outside."""

    def __init__(self, folder: Path, name: str, engine: str, steps: int, seed: int, every_s: float, growth: Growth):
        self._store, self._run_dir, self._name, self._steps = store(folder), folder / "runs" / name, name, steps
        self._growth, self._mark = growth, f"{folder}/{name}"
        self._served_since: float | None = None
        port = free_port("127.0.0.1")
        self._relay = Relay(port, _CONNECTION_S, seed)
        self._signs = Signs(self._store, name, port)
        self._committed = Committed(Bucket(str(self._store)).child(name))
        self._injector = Injector(seed, every_s)
        self._temporary = folder / "tmp" / name
        self._temporary.mkdir(parents=True)
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(make_config(engine, folder, name, steps, seed, port)))
        self.log = folder / f"{name}.log"
        environment = {**os.environ, MARK: self._mark, RELAY: self._relay.url, "TMPDIR": str(self._temporary)}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.chaos.command", str(config), "--dir", str(self._run_dir)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def go(self, for_s: float) -> Outcome:
        """To the end of the run; blows fall in the first `for_s` seconds after all of it was in service."""
        started = time.monotonic()
        try:
            self._to_its_end(for_s)
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            code = self._process.wait()
            self._relay.close()
            ended, served_s = time.monotonic(), self._served_s
            self._injector.end()
            orphans = self._orphans()
        self._committed.look()
        verdict = judge(self._store, self._run_dir, self._name, self._steps, code, self._committed)
        temporary = sum(path.is_file() for path in self._temporary.rglob("*"))
        return Outcome(
            self._name, ended - started, served_s, verdict, self._injector.blows, self._relay.broken, orphans, temporary
        )

    @property
    def _served_s(self) -> float:
        return 0.0 if self._served_since is None else time.monotonic() - self._served_since

    def _to_its_end(self, for_s: float) -> None:
        began = stepped_at = time.monotonic()
        look_at = weigh_at = 0.0
        step = 0
        while self._process.poll() is None:
            now = time.monotonic()
            pids = by_part(marked(self._mark))
            if self._served_since is None and all(part in pids and self._signs.answers(part) for part in PARTS):
                self._served_since = now
                self._injector.begin()
                print(f"{self._name}: all parts are in service after {now - began:.0f} s", flush=True)
            self._relay.breaking = self._served_since is not None and self._served_s < for_s
            if self._served_since is not None:
                self._injector.tend(pids, self._signs, self._relay.breaking and step < self._steps - _LAST_STEPS)
            if now >= look_at:
                look_at = now + _LOOK_S
                self._committed.look()
                if self._signs.step() > step:
                    step, stepped_at = self._signs.step(), now
            if now >= weigh_at and step < self._steps:  # at the end the report is made, by the same process
                weigh_at = now + _WEIGH_S
                for part, pid in pids.items():
                    if (holds := held(pid)) is not None:
                        self._growth.note(part, pid, holds, now)
            if now - stepped_at > (_STUCK_S if step else _START_S):
                print(f"{self._name}: no step for {now - stepped_at:.0f} s; {last_line(self.log)}", flush=True)
                return
            time.sleep(_TICK_S)

    def _orphans(self) -> list[str]:
        """What of the run lives after its end; it is killed then."""
        deadline = time.monotonic() + _GONE_S
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            os.kill(process.pid, signal.SIGKILL)
        return [" ".join(process.words).strip() for process in left]
