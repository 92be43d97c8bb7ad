"""Kills and stops the parts of a run at random, and measures how long each takes to be back."""

import os
import random
import signal
import time
from dataclasses import dataclass

from experiments.chaos.parts import PARTS
from experiments.chaos.sightings import Signs

KILL, PAUSE, STOP = "kill", "pause", "stop"
"""SIGKILL; SIGSTOP with SIGCONT some seconds later; SIGSTOP for good."""
_ACTIONS, _WEIGHTS = (KILL, PAUSE, STOP), (0.6, 0.25, 0.15)
_LONGEST_PAUSE_S = 8.0
_LONG_S = 60.0


@dataclass
class Blow:
    """One thing done to one part; times are monotonic seconds."""

    part: str
    action: str
    pid: int
    at: float
    life: tuple[int, int]
    step: int
    under_way: int = 0
    """Samples that were under way to a worker that will not come back for them, by its last record."""
    resume_at: float | None = None
    back_s: float | None = None
    """Until the part was in service again."""
    step_s: float | None = None
    """Until the learner had finished another step."""
    run_over: bool = False
    waited_s: float | None = None
    """`back_s`; or, of a part that was not back when the run ended, what it had had by then, if that was long."""

    @property
    def is_over(self) -> bool:
        return self.run_over or (self.back_s is not None and self.step_s is not None)


class Injector:
    """Call `tend` several times a second. A part is hit again only once it is back in service."""

    def __init__(self, seed: int, every_s: float):
        self._random, self._every_s = random.Random(seed), every_s
        self._next_at = 0.0
        self.blows: list[Blow] = []

    def begin(self) -> None:
        """Of a run whose parts are all in service."""
        self._next_at = time.monotonic() + self._random.expovariate(1 / self._every_s)

    def tend(self, pids: dict[str, int], signs: Signs, hit: bool) -> None:
        """Args:
        pids: of the parts that live. hit: whether another blow may fall.
        """
        now = time.monotonic()
        for blow in self.blows:
            if not blow.is_over:
                self._follow(blow, pids, signs, now)
        if not hit or now < self._next_at:
            return
        self._next_at = now + self._random.expovariate(1 / self._every_s)
        away = {blow.part for blow in self.blows if not blow.run_over and blow.back_s is None}
        # Who has no server to look after cannot be told from a dead one.
        away |= {part.replace("engine", "generator") for part in away} | {
            p.replace("generator", "engine") for p in away
        }
        able = [part for part in PARTS if part in pids and part not in away]
        if able:
            part = self._random.choice(able)
            self._strike(part, self._random.choices(_ACTIONS, _WEIGHTS)[0], pids[part], signs)

    def end(self) -> None:
        """The run is over; who is not back will not come, and was not needed."""
        for blow in self.blows:
            blow.waited_s = blow.back_s
            if blow.back_s is None:
                age_s = time.monotonic() - blow.at
                blow.waited_s = age_s if age_s > _LONG_S else None
            blow.run_over = True

    def _strike(self, part: str, action: str, pid: int, signs: Signs) -> None:
        blow = Blow(part, action, pid, time.monotonic(), signs.life(part), signs.step())
        if not _signal(pid, signal.SIGKILL if action == KILL else signal.SIGSTOP):
            return
        if part == "worker" and action != PAUSE:
            blow.under_way = int((signs.record(part) or {}).get("inflight_samples", 0))
        if action == PAUSE:
            blow.resume_at = blow.at + self._random.uniform(0.5, _LONGEST_PAUSE_S)
        self.blows.append(blow)

    def _follow(self, blow: Blow, pids: dict[str, int], signs: Signs, now: float) -> None:
        if blow.resume_at is not None and now >= blow.resume_at:
            _signal(blow.pid, signal.SIGCONT)
            blow.resume_at = None
        if blow.back_s is None and blow.resume_at is None and _is_back(blow, pids, signs):
            blow.back_s = time.monotonic() - blow.at
        if blow.step_s is None and signs.step() > blow.step:
            blow.step_s = now - blow.at


def _is_back(blow: Blow, pids: dict[str, int], signs: Signs) -> bool:
    if blow.action == PAUSE and pids.get(blow.part) == blow.pid:
        return signs.answers(blow.part)
    if blow.part == "proxy":
        return pids.get("proxy", blow.pid) != blow.pid and signs.answers("proxy")
    return signs.life(blow.part) > blow.life and signs.answers(blow.part)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
