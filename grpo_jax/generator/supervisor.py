"""Keeps one server running: starts it, waits until it answers, starts another when it has died."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from grpo_jax.errors import RunFailed
from grpo_jax.generator.client import EngineClient
from grpo_jax.generator.process import ServerProcess, free_port, is_free, last_error_line, told_exit
from grpo_jax.generator.stoppage import Stoppage, family
from grpo_jax.generator.vllm import Command

log = logging.getLogger(__name__)

_FAILED_STARTS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_HEALTH_POLL_S = 0.2
_WATCH_S = 2.0
# So long a server may leave its health unanswered before anybody is told.
_TOLD_S = 15.0


class Supervisor:
    """`client` is the server to talk to, None while there is none; `life` counts the servers that got ready."""

    def __init__(
        self,
        command: Callable[[int, int], Command],
        log_file: Path,
        session: aiohttp.ClientSession,
        *,
        host: str,
        port: int,
        start_timeout_s: float,
        hung_s: float = 120.0,
    ):
        """
        Args:
            command: makes the server's command from a port and the number of the start.
            host: where it listens; a wildcard address is talked to on loopback.
            port: 0 for a free one, which is kept from start to start as long as it works.
            hung_s: a server that computes for long still answers; one that has not done so for this time never will.
        """
        self._command, self._log_file, self._session = command, log_file, session
        self._fixed_port, self._start_timeout_s, self._hung_s = port, start_timeout_s, hung_s
        self._local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.port = port or free_port(self._local_host)
        self.client: EngineClient | None = None
        self.life = 0
        self.restarts = 0
        self.error: str | None = None
        self.hang: str | None = None
        """Why the server that answers now is as good as dead, if somebody has found out: it is started again."""
        self._process: ServerProcess | None = None

    async def run(self) -> None:
        """Never returns. Raises RunFailed when a start takes too long, or has failed several times in a row."""
        failures = 0
        while True:
            try:
                problem = await self._until_ready()
                if problem is None:
                    failures = 0
                    problem = await self._until_dead()
                else:
                    failures += 1
            finally:
                self.client = None
                await self.stop()
            self.error = f"the server {problem}; {self._log_file.name}: {last_error_line(self._log_file)}"
            log.warning("%s", self.error)
            if failures >= _FAILED_STARTS:
                raise RunFailed(
                    f"the server did not start in {failures} attempts; "
                    f"{self._log_file}: {last_error_line(self._log_file)}"
                )
            self.restarts += 1
            if failures and not self._fixed_port:  # perhaps somebody else took it
                self.port = free_port(self._local_host)
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))

    async def stop(self) -> None:
        """Ends the server and all of its children."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.shield(process.stop())

    async def _until_ready(self) -> str | None:
        """Starts a server. None once it answers; otherwise what became of it."""
        if not is_free(self._local_host, self.port):  # else the server that is there would be taken for ours
            return f"cannot be started: port {self.port} is taken"
        command = self._command(self.port, self.restarts)
        process = self._process = await ServerProcess.start(command, self._log_file)
        log.info("started the server on port %d (pid %d, log %s)", self.port, process.pid, self._log_file)
        host = f"[{self._local_host}]" if ":" in self._local_host else self._local_host
        client = EngineClient(self._session, f"http://{host}:{self.port}")
        started, stoppage = time.monotonic(), Stoppage()
        exited = asyncio.create_task(process.wait())
        try:
            while not await client.healthy():
                await asyncio.wait({exited}, timeout=_HEALTH_POLL_S)
                if exited.done():
                    return f"{told_exit(exited.result())} while it started"
                if (why := stoppage.reason(family(process.pid), self._hung_s)) is not None:
                    return f"does not get ready: {why}"
                if time.monotonic() - started > self._start_timeout_s:
                    raise RunFailed(
                        f"the server was not ready after {self._start_timeout_s:.0f} s (generator.start_timeout_s); "
                        f"{self._log_file}: {last_error_line(self._log_file)}"
                    )
        finally:
            exited.cancel()
        log.info("the server is ready after %.1f s", time.monotonic() - started)
        self.client, self.error, self.hang = client, None, None
        self.life += 1
        return None

    async def _until_dead(self) -> str:
        assert self.client is not None
        assert self._process is not None
        answered, stoppage = time.monotonic(), Stoppage()
        exited = asyncio.create_task(self._process.wait())
        try:
            while True:
                await asyncio.wait({exited}, timeout=min(_WATCH_S, self._hung_s / 4))
                if exited.done():
                    return told_exit(exited.result())
                # Its engine may be a process of its own, without which it answers all the same.
                if (why := stoppage.reason(family(self._process.pid), self._hung_s)) is not None:
                    return f"does nothing any more: {why}"
                if self.hang is not None:
                    return self.hang
                if await self.client.healthy():
                    answered, self.error = time.monotonic(), None
                    continue
                silent_s = time.monotonic() - answered
                if silent_s > self._hung_s:
                    return f"has not answered for {silent_s:.0f} s"
                if silent_s > _TOLD_S:
                    self.error = f"the server has not answered for {silent_s:.0f} s"
        finally:
            exited.cancel()
