"""The public addresses of exposed ports: https on loopback, for bearers of the Hub's token."""

import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.fakes.certificate import write_certificate

_HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length", "authorization", "keep-alive"}


class ExposedPorts:
    """Forwards `https://127.0.0.1:<port>/<job>/<port of the job>/…` to the job.

    401 without the token, 404 for what is not exposed, 502 while nothing listens there. `certificate` is what clients
    must trust. `address` finds the port of this machine of (job, port), None if it is not exposed.
    """

    def __init__(self, folder: Path, token: Callable[[], str], address: Callable[[str, int], int | None]):
        self.certificate, self._key = write_certificate(folder)
        self._token, self._address = token, address
        self.url = ""
        self.refused = 0
        """Requests without the token."""

    async def start(self) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate, self._key)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{job}/{port}{path:.*}", self._forward)
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"https://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self._token()}":
            self.refused += 1
            return web.Response(status=401, text="<html>Unauthorized</html>", content_type="text/html")
        port = self._address(request.match_info["job"], int(request.match_info["port"]))
        if port is None:
            return web.Response(status=404, text="<html>No such job</html>", content_type="text/html")
        url = f"http://127.0.0.1:{port}{request.match_info['path'] or '/'}"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            async with self._session.request(
                request.method, url, params=request.query, data=await request.read(), headers=headers
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            return web.Response(status=502, text="<html>Bad gateway</html>", content_type="text/html")
