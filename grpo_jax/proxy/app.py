"""The proxy as a server and as a process: its routes, where it may listen, and when it ends."""

import asyncio
import gc
import ipaddress
import logging
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, UsageError
from grpo_jax.proxy.handlers import Proxy, refusal
from grpo_jax.proxy.server import Server

log = logging.getLogger(__name__)

_TIDY_S = 10.0
_GRACE_S = 5.0  # for requests in flight when the proxy stops
_BACKLOG = 4096  # clients may connect all at once


class Runner(web.BaseRunner):
    """Lets aiohttp's sites listen for the proxy; its fleet is observed from `setup` to `cleanup`."""

    def __init__(self, proxy: Proxy):
        super().__init__(shutdown_timeout=_GRACE_S)
        self._proxy = proxy
        self._tending: list[asyncio.Task[None]] = []

    async def _make_server(self) -> Any:
        server = Server(self._proxy.answer, refusal)
        self._proxy.fleet.start()
        loop = asyncio.get_running_loop()
        self._tending = [loop.create_task(self._proxy.tend()), loop.create_task(_tidy(server))]
        return server

    async def shutdown(self) -> None:
        """Nothing to do before the requests in flight have ended."""

    async def _cleanup_server(self) -> None:
        for task in self._tending:
            task.cancel()
        await self._proxy.fleet.stop()
        await self._proxy.upstream.close()


async def _tidy(server: Server) -> None:
    while True:
        await asyncio.sleep(_TIDY_S)
        server.tidy()


def build_runner(config: Config) -> tuple[Runner, Proxy]:
    """The server, not yet listening, and what it serves from. Call it on the event loop."""
    proxy = Proxy(config)
    return Runner(proxy), proxy


def run_proxy(config: Config, host: str, port: int) -> int:
    """Serves until a signal (75) or until the run is over (0). UsageError if the address may not or cannot be used.

    Listens beyond loopback only where `proxy.host` says so: whoever reaches the proxy may use the fleet and its token.
    """
    if host != config.proxy.host and not _is_loopback(host):
        raise UsageError(f"proxy.host: {host} is not a loopback address and is not what the config says")
    _allow_many_connections()
    gc.freeze()  # what has been imported stays
    gc.set_threshold(20_000, 20, 20)  # requests leave no cycles; a look at all there is would make others wait
    sys.setswitchinterval(0.001)  # and so would the thread that reads the bucket, 5 ms each time
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, host, port))


async def _serve(config: Config, host: str, port: int) -> int:
    runner, proxy = build_runner(config)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            raise UsageError(f"proxy.port: cannot listen on {host}:{port}: {error.strerror}") from None
        log.info("proxy of run %s listens on http://%s:%d", config.run, host, runner.addresses[0][1])
        waits = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(proxy.fleet.run_over.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        log.info("proxy of run %s stops: %s", config.run, "signal" if stopped.is_set() else "the run is over")
    finally:
        await runner.cleanup()
    return EXIT_RESUMABLE if stopped.is_set() else EXIT_DONE


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (vLLM brings it)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _allow_many_connections() -> None:
    """Each request under way takes two: that of the client and that to the replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
