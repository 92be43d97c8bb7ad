"""What the proxy answers to each request: one OpenAI-compatible address for all replicas of a run."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from grpo_jax.config.schema import Config
from grpo_jax.proxy.answers import error_object
from grpo_jax.proxy.calls import CHAT_PATH, COMPLETIONS_PATH, RequestError, parse_call
from grpo_jax.proxy.fleet import Fleet
from grpo_jax.proxy.forward import REPLICA_HEADER, Forwarder
from grpo_jax.proxy.messages import Request, Response, json_response
from grpo_jax.proxy.metrics import Metrics
from grpo_jax.proxy.routing import Router
from grpo_jax.proxy.status import describe, render
from grpo_jax.proxy.table import LATEST
from grpo_jax.proxy.tokens import CLIENT_TOKEN_VARIABLE, TOKEN_VARIABLE, carries, read_token
from grpo_jax.proxy.upstream import Upstream

log = logging.getLogger(__name__)

DEADLINE_HEADER = "x-grpo-deadline-s"
_DEFAULT_RETRY_S = 60.0
_TEND_S = 1.0

_Handler = Callable[[Request], Awaitable[Response | None]]


class Proxy:
    """Handlers over one router. `fleet` keeps the router's table, `forwarder` sends requests by it."""

    def __init__(self, config: Config):
        self._config = config
        self._client_token = read_token(CLIENT_TOKEN_VARIABLE)
        self.metrics = Metrics()
        self.router = Router(config.run, memory_s=config.rollouts.retry_deadline_s)
        self.upstream = Upstream(
            config.rollouts.request_timeout_s, read_token(TOKEN_VARIABLE), config.fleet.allowed_hosts
        )
        self.fleet = Fleet(config, self.router)
        self.forwarder = Forwarder(config.run, self.router, self.upstream, self.metrics)
        self._routes: dict[str, tuple[str, _Handler]] = {
            COMPLETIONS_PATH: ("POST", self._complete),
            CHAT_PATH: ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            "/v1/policy": ("GET", self._policy),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._prometheus),
            "/fleet": ("GET", self._table),
            "/": ("GET", self._page),
        }

    async def answer(self, request: Request) -> Response | None:
        """Lets in who carries the clients' token. Every error leaves as an OpenAI error object."""
        token = self._client_token
        if token is not None and request.path != "/health" and not carries(request.header("authorization"), token):
            self.metrics.finished("unauthorized", 0.0)
            body = error_object("this proxy asks for its client token", "invalid_request_error", "invalid_api_key")
            return json_response(body, 401, {"WWW-Authenticate": "Bearer"})
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            return refusal(404)
        if request.method != method:
            return refusal(405)
        try:
            return await handler(request)
        except ConnectionResetError:  # the client has gone while it was being written to
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return json_response(error_object("the proxy failed", "server_error", "internal_error"), 500)

    async def tend(self) -> None:
        """What has to be looked at now and then, without end."""
        while True:
            await asyncio.sleep(_TEND_S)
            try:
                self.forwarder.strike_stalled()
                self.upstream.tidy()
            except Exception:
                log.exception("looking after the replicas failed, and is tried again")

    async def _complete(self, request: Request) -> Response | None:
        started = time.monotonic()
        outcome = "internal_error"
        self.metrics.in_flight += 1
        try:
            retry_s = self._retry_s(request)
            call = parse_call(request.path, request.body, request.header(REPLICA_HEADER))
            response, outcome = await self.forwarder.forward(request, call, retry_s)
            return response
        except RequestError as error:
            outcome = error.outcome
            return json_response(error.body, error.status)
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "cancelled"
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.finished(outcome, time.monotonic() - started)

    async def _models(self, request: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "grpo_jax"} for name in self.router.policies()
        ]
        return json_response({"object": "list", "data": data})

    async def _policy(self, request: Request) -> Response:
        """What a group that starts now should name, and where: its request may carry the replica in REPLICA_HEADER."""
        route = self.router.name(time.monotonic())
        if route is None:
            return json_response(error_object(self.router.why_none(LATEST), "server_error", "no_replica"), 503)
        replica, name = route
        body = {"policy": name, "version": replica.proved[name], "replica": replica.id}
        return json_response(body, headers={REPLICA_HEADER: replica.id})

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "replicas_ready": self.router.ready_count()})

    async def _prometheus(self, request: Request) -> Response:
        text = self.metrics.text(self.router)
        return Response(200, text.encode(), {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _table(self, request: Request) -> Response:
        return json_response(describe(self.fleet.describe(), self.router))

    async def _page(self, request: Request) -> Response:
        text = render(describe(self.fleet.describe(), self.router), self.metrics.in_flight)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
        }
        return Response(200, text.encode(errors="replace"), headers)

    def _retry_s(self, request: Request) -> float:
        most = self._config.rollouts.retry_deadline_s
        text = request.header(DEADLINE_HEADER)
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


def refusal(status: int, why: str | None = None) -> Response:
    """The answer to a request that no handler takes."""
    phrase = HTTPStatus(status).phrase
    return json_response(error_object(why or phrase, "invalid_request_error", phrase.lower().replace(" ", "_")), status)
