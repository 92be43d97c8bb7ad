"""One client's completion request: choose a replica, try, judge the answer, try elsewhere."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from grpo_jax.adapters.names import parse_policy
from grpo_jax.proxy.answers import ReplicaFault, error_object, judge, parse_json
from grpo_jax.proxy.metrics import Metrics
from grpo_jax.proxy.routing import LATEST, Lease, Route, Router
from grpo_jax.proxy.upstream import Answer, Upstream

log = logging.getLogger(__name__)

REPLICA_HEADER = "x-grpo-replica"
_WAIT_S = 0.1  # between two looks for a replica while there is none
_MAX_LOST = 3  # connections that one request may break: it may be what kills the servers
_MAX_SAMPLES = 4096  # bounds what a nonsensical `n` counts for


class RequestError(Exception):
    """The client is told `status` and an OpenAI error object, and is counted under `outcome`."""

    def __init__(self, status: int, message: str, code: str, outcome: str, param: str | None = None):
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.outcome = status, outcome
        self.body = error_object(message, kind, code, param)


@dataclass(frozen=True)
class Call:
    """A completion request as it came. `raw` is sent on unless the model's name has to be filled in."""

    path: str
    raw: bytes
    fields: dict[str, Any]
    model: str
    samples: int
    stream: bool

    def body(self, policy: str) -> bytes:
        if self.model == policy:
            return self.raw
        return json.dumps({**self.fields, "model": policy}, separators=(",", ":")).encode()


def parse_call(path: str, raw: bytes) -> Call:
    """RequestError(400) for what is no JSON object with a `model`."""
    try:
        fields = parse_json(raw)
    except ValueError:
        raise RequestError(400, "the body is not valid JSON", "invalid_json", "request_error") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object", "invalid_json", "request_error")
    model = fields.get("model")
    if not isinstance(model, str):
        raise RequestError(400, "'model' must name a policy", "invalid_model", "request_error", "model")
    n = fields.get("n")
    samples = min(n, _MAX_SAMPLES) if type(n) is int and n > 0 else 1
    return Call(path, raw, fields, model, samples, fields.get("stream") is True)


class Forwarder:
    """Sends calls to the replicas that the router chooses.

    A call is tried again for `retry_s`, counted from its first failure (or from when no replica was found): a
    completion that is lost after minutes of work gets the same chance as one that is refused at once.
    """

    def __init__(self, run: str, router: Router, upstream: Upstream, metrics: Metrics):
        self._run, self._router, self._upstream, self._metrics = run, router, upstream, metrics

    async def forward(self, request: web.Request, call: Call, retry_s: float) -> tuple[web.StreamResponse, str]:
        """The answer and its outcome (a key of the metrics); RequestError when there is none."""
        self._check_model(call.model)
        give_up_at: float | None = None
        cause: str | None = None
        lost = 0
        while True:
            route = self._router.choose(call.model, time.monotonic())
            if route is not None:
                try:
                    return await self._attempt(request, call, route)
                except ReplicaFault as fault:
                    if cause is None:
                        give_up_at = None  # waiting for the first replica was no failure
                    cause = f"replica {route.replica.id} {fault}"
                    lost += fault.lost
            now = time.monotonic()
            give_up_at = now + retry_s if give_up_at is None else give_up_at
            if lost >= _MAX_LOST:
                message = f"{lost} replicas lost the connection while they worked on this request, the last: {cause}"
                raise RequestError(502, message, "replicas_lost", "unavailable")
            if now >= give_up_at:
                message = f"no replica answered within {retry_s:g} s: {cause or self._router.why_none(call.model)}"
                raise RequestError(503, message, "no_replica", "unavailable")
            if route is None:
                await asyncio.sleep(min(_WAIT_S, give_up_at - now))
            else:
                self._metrics.retries += 1

    def _check_model(self, model: str) -> None:
        if model == LATEST:
            return
        try:
            policy = parse_policy(model)
        except ValueError:
            policy = None
        if policy is None or policy.run != self._run or policy.version is None or not self._router.knows(model):
            message = f"run {self._run} has no policy {model[:200]!r} in its fleet; ask for 'latest' or see /v1/models"
            raise RequestError(404, message, "model_not_found", "not_found", "model")

    async def _attempt(self, request: web.Request, call: Call, route: Route) -> tuple[web.StreamResponse, str]:
        """ReplicaFault, and a strike, when the replica does not do its work before the client has received anything."""
        with self._lease(route, call.samples) as lease:
            async with self._upstream.post(route.replica.url, call.path, call.body(route.policy)) as answer:
                if call.stream and answer.status == 200:
                    return await self._stream(request, answer, lease)
                body = await answer.body()
            good = judge(answer.status, body, route.policy)
            if good:
                self._succeeded(lease)
            response = web.Response(
                status=answer.status,
                body=body,
                content_type="application/json",
                headers={REPLICA_HEADER: route.replica.id},
            )
            return response, "ok" if good else "request_error"

    async def _stream(self, request: web.Request, answer: Answer, lease: Lease) -> tuple[web.StreamResponse, str]:
        """Passes a stream on. Once it has begun a failure cannot be retried: it becomes the stream's last event."""
        head = await answer.first_event(lease.policy)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                REPLICA_HEADER: lease.replica.id,
            }
        )
        await response.prepare(request)
        await response.write(head)
        outcome = "ok"
        try:
            while chunk := await answer.chunk():
                await response.write(chunk)
            self._succeeded(lease)
        except ReplicaFault as fault:
            outcome = "unavailable"
            self._strike(lease, fault)
            message = f"replica {lease.replica.id} {fault}"
            event = json.dumps(error_object(message, "server_error", "replica_failed"))
            await response.write(f"\n\ndata: {event}\n\n".encode())
        await response.write_eof()
        return response, outcome

    @contextmanager
    def _lease(self, route: Route, samples: int) -> Iterator[Lease]:
        lease = self._router.begin(route, samples, time.monotonic())
        try:
            yield lease
        except ReplicaFault as fault:
            self._strike(lease, fault)
            raise
        finally:
            self._router.end(lease)

    def _succeeded(self, lease: Lease) -> None:
        if lease.replica.health.count:
            log.info("replica %s answers again", lease.replica.id)
        self._router.succeeded(lease)

    def _strike(self, lease: Lease, fault: ReplicaFault) -> None:
        self._metrics.strikes += 1
        if self._router.strike(lease, time.monotonic(), str(fault), fault.policy_only):
            log.warning("replica %s %s", lease.replica.id, fault)
