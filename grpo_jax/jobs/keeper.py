"""Keeps processes alive: who dies or hangs is started again, after a while and not for ever."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_jax.errors import RunFailed
from grpo_jax.jobs.processes import Process
from grpo_jax.jobs.restarts import Restarts

log = logging.getLogger(__name__)


@dataclass
class Role:
    name: str
    argv: list[str]
    log: Path
    restarts: Restarts
    env: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    process: Process | None = None
    began: float = 0.0
    start_at: float = 0.0

    @property
    def title(self) -> str:
        return self.name if "-" in self.name else f"the {self.name}"


class Keeper:
    """Of some roles. What an end means is for the caller to say: `again`, `rest`, or that all is over."""

    def __init__(
        self,
        roles: Sequence[Role],
        hangs: Callable[[Role], str | None],
        steps: Callable[[], int],
        begins: Callable[[Role], None] = lambda role: None,
    ):
        """
        Args:
          hangs: why a role whose process lives is as good as dead; None if it is not.
          steps: how far the run has ever come, see `Restarts`.
          begins: called before each start.
        """
        self.roles = roles
        self._hangs, self._steps, self._begins = hangs, steps, begins

    @property
    def processes(self) -> dict[str, Process]:
        return {role.name: role.process for role in self.roles if role.process is not None}

    def start(self) -> None:
        for role in self.roles:
            self._start(role)

    def ended(self) -> Iterator[tuple[Role, int]]:
        """To be called often. Starts what is due and ends what hangs; the roles that have ended, with exit codes.

        RunFailed if a role has used up its restarts.
        """
        for role in self.roles:
            if role.process is None:
                if time.monotonic() >= role.start_at:
                    self._start(role)
                continue
            code = role.process.poll()
            if code is not None:
                role.process.kill()  # what it may have left behind in its session
                yield role, code
            elif (why := self._hangs(role)) is not None:
                self.again(role, f"{role.title} hangs: {why}")

    def rest(self, role: Role, seconds: float) -> None:
        """It has ended by itself, and is started again after a while, if it is still wanted then."""
        role.process, role.start_at = None, time.monotonic() + seconds

    def again(self, role: Role, reason: str) -> None:
        """Ends what there is of a role; it is started again in a while. RunFailed if that has not helped before."""
        if role.process is not None:
            role.process.kill()
        pause_s = role.restarts.ended(time.monotonic() - role.began, self._steps())
        if pause_s is None:
            raise RunFailed(f"{reason} ({role.restarts.most} restarts in a row did not help; see {role.log})")
        log.warning("%s; it is started again", reason)
        self.rest(role, pause_s)

    def _start(self, role: Role) -> None:
        role.began = time.monotonic()
        self._begins(role)
        try:
            role.process = Process(role.argv, role.log, role.env, role.cpus)
        except OSError as error:  # no memory, no process number, no room for the log
            self.again(role, f"{role.title} cannot be started: {error}")


def last_line(path: Path) -> str:
    """The last line of a log that says something (a traceback's last line names the error)."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else f"{path} is empty"
