"""A server process of an agent: in a session of its own, its output in a file, and gone when it is told to go.

So are its temporary files: a vLLM leaves sockets and more at each of its ends.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import tempfile
import time
from collections import deque
from pathlib import Path

from grpo_jax.generator.vllm import Command
from grpo_jax.scratch import Scratch

log = logging.getLogger(__name__)

# Sockets have paths of 107 bytes at most on Linux; vLLM's have names of 36, and a scratch folder adds 33.
_LONGEST_PARENT = 107 - 36 - 33 - 2
_GRACE_S = 4.0
# For the system to collect what was killed. Where nobody collects orphans they stay as zombies, for ever.
_REAP_S = 1.0
# SIGKILL works at once, but for a process that is inside a system call which does not come back (a dead mount).
_KILL_S = 10.0
# A line that says what went wrong: an exception's last line, or a logger's or argparse's error.
_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception)\b|\berror:|\bERROR\b")
_LINES_LOOKED_AT = 400
_LONGEST_QUOTE = 300


class ServerProcess:
    """Start it from the main thread: the server dies with the thread that started it (see `lifeline`)."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: Scratch):
        self._process, self._scratch = process, scratch
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Command, log_file: Path) -> "ServerProcess":
        log_file.parent.mkdir(parents=True, exist_ok=True)
        parent = tempfile.gettempdir()
        scratch = Scratch(parent if len(parent) <= _LONGEST_PARENT else "/tmp")
        env = dict(command.env)
        if env.get("TMPDIR") == os.environ.get("TMPDIR"):  # else somebody wants another one
            env["TMPDIR"] = str(scratch.path)
        try:
            with log_file.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            scratch.close()
            raise
        return cls(process, scratch)

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """SIGTERM to the whole session, and SIGKILL to what is left of it after the grace or its leader's end.

        Returns when all of them are gone, or have not gone within seconds of SIGKILL.
        """
        try:
            await self._stop(grace_s)
        finally:  # also where nobody waits for that any more
            self._scratch.close()

    async def _stop(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass
        finally:
            self._signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self._process.wait(), _KILL_S)
        except TimeoutError:
            log.warning("the server %d was killed and does not end: it hangs in a system call", self.pid)
        deadline = time.monotonic() + _REAP_S
        while self._signal(0) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _signal(self, number: int) -> bool:
        """Whether there was anybody to receive it."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def told_exit(code: int) -> str:
    """What an exit code means, as the end of a sentence that begins with who has ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at the moment."""
    with _bound(host, 0) as listener:
        return listener.getsockname()[1]


def is_free(host: str, port: int) -> bool:
    try:
        _bound(host, port).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Connections of an earlier server that linger are no listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def last_error_line(log_file: Path) -> str:
    """The last line of a log that names an error, or its last line at all."""
    try:
        with log_file.open(errors="replace") as file:
            lines = [line.strip() for line in deque(file, _LINES_LOOKED_AT) if line.strip()]
    except OSError:
        lines = []
    if not lines:
        return "the log is empty"
    line = next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1])
    return line if len(line) <= _LONGEST_QUOTE else line[: _LONGEST_QUOTE - 1] + "…"
