"""The proxy's HTTP server: one OpenAI-compatible address for all replicas of a run."""

import asyncio
import ipaddress
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, UsageError
from grpo_jax.proxy.answers import error_object
from grpo_jax.proxy.fleet import Fleet
from grpo_jax.proxy.forward import REPLICA_HEADER, Forwarder, RequestError, parse_call
from grpo_jax.proxy.metrics import Metrics
from grpo_jax.proxy.routing import LATEST, Router
from grpo_jax.proxy.upstream import TOKEN_VARIABLE, Upstream

log = logging.getLogger(__name__)

DEADLINE_HEADER = "x-grpo-deadline-s"
_DEFAULT_RETRY_S = 60.0
_MAX_BODY = 32 * 2**20  # bytes
_GRACE_S = 5.0  # for requests in flight when the proxy stops

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """Handlers over one router. `fleet` keeps the router's table, `forwarder` sends requests by it."""

    def __init__(self, config: Config):
        self._config = config
        self.metrics = Metrics()
        self.router = Router(config.run, memory_s=config.rollouts.retry_deadline_s)
        self.upstream = Upstream(
            config.rollouts.request_timeout_s, os.environ.get(TOKEN_VARIABLE), config.fleet.allowed_hosts
        )
        self.fleet = Fleet(config, self.router, self.upstream.models)
        self.forwarder = Forwarder(config.run, self.router, self.upstream, self.metrics)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        started = time.monotonic()
        outcome = "internal_error"
        self.metrics.in_flight += 1
        try:
            retry_s = self._retry_s(request)
            call = parse_call(request.path, await request.read())
            response, outcome = await self.forwarder.forward(request, call, retry_s)
            return response
        except RequestError as error:
            outcome = error.outcome
            return web.json_response(error.body, status=error.status)
        except web.HTTPException:
            outcome = "request_error"
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "cancelled"
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.finished(outcome, time.monotonic() - started)

    async def models(self, request: web.Request) -> web.Response:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "grpo_jax"} for name in self.router.policies()
        ]
        return web.json_response({"object": "list", "data": data})

    async def policy(self, request: web.Request) -> web.Response:
        route = self.router.choose(LATEST, time.monotonic())
        if route is None:
            body = error_object(self.router.why_none(LATEST), "server_error", "no_replica")
            return web.json_response(body, status=503)
        replica, name = route
        body = {"policy": name, "version": replica.proved[name], "replica": replica.id}
        return web.json_response(body, headers={REPLICA_HEADER: replica.id})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "replicas_ready": self.router.ready_count()})

    async def prometheus(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text(self.router.ready_count()), content_type="text/plain")

    async def table(self, request: web.Request) -> web.Response:
        return web.json_response(self.fleet.describe())

    def _retry_s(self, request: web.Request) -> float:
        most = self._config.rollouts.retry_deadline_s
        text = request.headers.get(DEADLINE_HEADER)
        if text is None:
            return min(_DEFAULT_RETRY_S, most)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:
            message = f"{DEADLINE_HEADER} must be a number of seconds"
            raise RequestError(400, message, "invalid_deadline", "request_error")
        return min(seconds, most)


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error leaves as an OpenAI error object, those of the framework too (unknown path, body too large)."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        body = error_object(error.reason, "invalid_request_error", error.reason.lower().replace(" ", "_"))
        return web.json_response(body, status=error.status)
    except ConnectionResetError:  # the client has gone while it was being written to
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response(error_object("the proxy failed", "server_error", "internal_error"), status=500)


def build_runner(config: Config) -> tuple[web.AppRunner, Proxy]:
    """The server, not yet listening, and what it serves from; its fleet is observed from `setup` to `cleanup`.

    Call it on the event loop.
    """
    proxy = Proxy(config)

    async def observe(app: web.Application) -> AsyncIterator[None]:
        proxy.fleet.start()
        yield
        await proxy.fleet.stop()
        await proxy.upstream.close()

    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_openai_errors])
    app.cleanup_ctx.append(observe)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/v1/policy", proxy.policy)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.prometheus)
    app.router.add_get("/fleet", proxy.table)
    # handler_cancellation: a client that goes away ends its request to the replica too.
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S), proxy


def run_proxy(config: Config, host: str, port: int) -> int:
    """Serves until a signal (75) or until the run is over (0). UsageError if the address may not or cannot be used.

    Listens beyond loopback only where `proxy.host` says so: whoever reaches the proxy may use the fleet and its token.
    """
    if host != config.proxy.host and not _is_loopback(host):
        raise UsageError(f"proxy.host: {host} is not a loopback address and is not what the config says")
    return asyncio.run(_serve(config, host, port))


async def _serve(config: Config, host: str, port: int) -> int:
    runner, proxy = build_runner(config)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
