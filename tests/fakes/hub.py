"""A Hugging Face Hub on loopback for the real client: what it serves lies in a directory, one module per area."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from aiohttp import web

from tests.fakes.hub_buckets import Buckets
from tests.fakes.hub_cas import Cas
from tests.fakes.hub_jobs import Jobs

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Area(Protocol):
    """A part of the Hub. `routes` are added to the application when the hub starts."""

    def routes(self) -> Iterable[web.RouteDef]: ...


@dataclass
class Fault:
    """Answers `times` requests whose "METHOD path" matches `requests` (a regular expression) with `status`.

    The first `skip` of them are let through. With `late` a request is carried out, and only its answer gets lost.
    """

    requests: str
    status: int
    times: int = 1
    skip: int = 0
    late: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def takes(self, method: str, path: str) -> bool:
        if self.times <= 0 or not re.search(self.requests, f"{method} {path}"):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class FakeHub:
    """Serves in a thread of its own from `with` to its end. Only requests with `token` are answered.

    Buckets are made by the client (`HfApi.create_bucket`). `page_size`: entries of one page of a listing; `port`: a
    free one by default.
    """

    def __init__(self, folder: Path, *, token: str, page_size: int = 1000, port: int = 0):
        self.token, self._port = token, port
        self.requests: list[tuple[str, str]] = []
        """(method, path) of all requests so far."""
        self.cas = Cas(self, folder / "cas")
        self.buckets = Buckets(self, self.cas, folder / "buckets", page_size)
        self.jobs = Jobs(self, folder / "jobs", page_size)
        self.areas: list[Area] = [self.cas, self.buckets, self.jobs]
        self.faults: list[Fault] = []
        """Faults to come; those that have happened so often are left with `times` 0."""
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
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        await self.jobs.start()
        self._started.set()
        await self._stop.wait()
        await self.jobs.close()
        await runner.cleanup()

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        wanted = self.cas.access(request) if request.path.startswith(self.cas.path) else self.token
        if wanted is not None and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Invalid credentials in Authorization header"}, status=401)
        for fault in self.faults:
            if fault.takes(request.method, request.path):
                if fault.late:
                    await handler(request)
                error = {"error": f"{fault.status} as ordered"}
                return web.json_response(error, status=fault.status, headers=fault.headers)
        return await handler(request)
