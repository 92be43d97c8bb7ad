"""Local processes: each in a session of its own, stopped as a whole, and gone when its parent is gone."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_jax.generator.lifeline import wake_with_parent

log = logging.getLogger(__name__)

_PARENT = "GRPO_JAX_PARENT_PID"
# SIGKILL works at once, but for a process that is inside a system call which does not come back (a dead mount).
_KILL_S = 10.0


class Process:
    """A started command. Its output goes to a log file."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cpus: Sequence[int] = ()):
        """OSError if it cannot be started."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        pin = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
        with open(log, "ab") as output:
            self._popen = subprocess.Popen(
                [*pin, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), _PARENT: str(os.getpid())},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """To the process and all of its session that has not left it."""
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return

    def terminate(self) -> None:
        """SIGTERM to the process itself: it stops its own children in its own order. A stopped one is woken for it."""
        if self._popen.poll() is None:
            self._popen.terminate()
            self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        try:
            self._popen.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and does not end: it hangs in a system call", self.pid)


def stop_all(
    processes: Sequence[Process],
    grace_s: float,
    longer: Mapping[Process, float] | None = None,
    at_once: threading.Event | None = None,
) -> None:
    """SIGTERM to all at once; what has not ended after `grace_s` seconds is killed with its session.

    Args:
      longer: processes with more seconds than the others.
      at_once: once it is set, nobody has any.
    """
    for process in processes:
        process.terminate()
    started, left = time.monotonic(), list(processes)
    while left:
        spent_s = time.monotonic() - started
        hurry = at_once is not None and at_once.is_set()
        for process in list(left):
            if process.poll() is not None or hurry or spent_s >= (longer or {}).get(process, grace_s):
                process.kill()
                left.remove(process)
        if left:
            time.sleep(0.05)


def role_command(role: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "grpo_jax.cli", role, *arguments]


def leave_with_parent(grace_s: float = 5.0) -> None:
    """In a role that a supervisor started: ends this process when the supervisor is gone, however it went."""
    expected = os.environ.get(_PARENT)
    if expected is None:
        return

    def watch() -> None:
        while os.getppid() == int(expected):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)

    wake_with_parent()
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
