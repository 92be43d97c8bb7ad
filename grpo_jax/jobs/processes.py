"""Local processes: each in a session of its own, stopped as a whole, and gone when its parent is gone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PARENT = "GRPO_JAX_PARENT_PID"


class Process:
    """A started command. Its output goes to a log file."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cpus: Sequence[int] = ()):
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
        """SIGTERM to the process itself: it stops its own children in its own order."""
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._popen.wait()


def stop_all(processes: Sequence[Process], grace_s: float) -> None:
    """SIGTERM to all at once; what has not ended after `grace_s` seconds is killed with its session."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.kill()


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

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
