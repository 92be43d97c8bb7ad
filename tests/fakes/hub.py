"""A Hugging Face Hub on loopback for the real client: what it serves lies in a directory, one module per area."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from aiohttp import web

from tests.fakes.hub_buckets import Buckets
from tests.fakes.hub_cas import Cas

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Area(Protocol):
    """A part of the Hub. `routes` are added to the application when the hub starts."""

    def routes(self) -> Iterable[web.RouteDef]: ...


class FakeHub:
    """Serves in a thread of its own from `with` to its end. Only requests with `token` are answered.

    Buckets are made by the client (`HfApi.create_bucket`). `page_size`: entries of one page of a listing.
    """

    def __init__(self, folder: Path, *, token: str, page_size: int = 1000):
        self.token = token
        self.requests: list[tuple[str, str]] = []
        """(method, path) of all requests so far."""
        self.cas = Cas(self, folder / "cas")
        self.buckets = Buckets(self, self.cas, folder / "buckets", page_size)
        self.areas: list[Area] = [self.cas, self.buckets]
        self.url = ""
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-hub", daemon=True)

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        assert self._started.wait(30), "the hub did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._watch], client_max_size=1 << 30)
        for area in self.areas:
            app.add_routes(area.routes())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        wanted = self.cas.access(request) if request.path.startswith("/cas/") else self.token
        if wanted is not None and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Invalid credentials in Authorization header"}, status=401)
        return await handler(request)
