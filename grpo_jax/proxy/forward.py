"""One client's completion request: choose a replica, try, judge the answer, try elsewhere."""

import asyncio
import json
import logging
import time

from grpo_jax.adapters.names import parse_policy
from grpo_jax.proxy.answers import ReplicaFault, error_object, judge
from grpo_jax.proxy.calls import Call, RequestError
from grpo_jax.proxy.messages import Request, Response
from grpo_jax.proxy.metrics import Metrics
from grpo_jax.proxy.routing import Lease, Route, Router
from grpo_jax.proxy.table import LATEST
from grpo_jax.proxy.upstream import Answer, Upstream

log = logging.getLogger(__name__)

REPLICA_HEADER = "x-grpo-replica"
_WAIT_S = 0.1  # between two looks for a replica while there is none
_MAX_LOST = 3  # connections that one request may break: it may be what kills the servers


class Forwarder:
    """Sends calls to the replicas that the router chooses.

    A call is tried again for `retry_s`, counted from its first failure (or from when no replica was found): a
    completion that is lost after minutes of work gets the same chance as one that is refused at once.
    """

    def __init__(self, run: str, router: Router, upstream: Upstream, metrics: Metrics):
        self._run, self._router, self._upstream, self._metrics = run, router, upstream, metrics

    async def forward(self, request: Request, call: Call, retry_s: float) -> tuple[Response | None, str]:
        """The answer (None: it was streamed) and its outcome, a key of the metrics; RequestError if there is none."""
        self._check_model(call.model)
        named = call.named
        if named is not None:
            self._router.claim(named, call.samples)
        give_up_at: float | None = None
        cause: str | None = None
        lost = 0
        while True:
            route = self._router.choose(call.model, time.monotonic(), call.chain, named)
            if route is not None:
                try:
                    return await self._attempt(request, call, route)
                except ReplicaFault as fault:
                    if cause is None:
                        give_up_at = None  # waiting for the first replica was no failure
                    cause = f"replica {route.replica.id} {fault}"
                    lost += fault.lost
                    named = None
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

    def strike_stalled(self) -> None:
        """Looks for replicas that swallow requests, once; what one has held for very long is tried elsewhere."""
        struck, given_up = self._router.strike_stalled(time.monotonic())
        for replica in struck:
            self._metrics.strikes += 1
            log.warning("replica %s %s while others have", replica.id, replica.last_error)
        for replica in given_up:
            self._upstream.abandon(replica.url, replica.last_error or "has stalled")

    def _check_model(self, model: str) -> None:
        if model == LATEST or self._router.named_lately(model):
            return
        try:
            policy = parse_policy(model)
        except ValueError:
            policy = None
        if policy is None or policy.run != self._run or policy.version is None or self._router.complete:
            message = f"run {self._run} has no policy {model[:200]!r} in its fleet; ask for 'latest' or see /v1/models"
            raise RequestError(404, message, "model_not_found", "not_found", "model")

    async def _attempt(self, request: Request, call: Call, route: Route) -> tuple[Response | None, str]:
        """ReplicaFault, and a strike, when the replica does not do its work before the client has received anything."""
        replica, policy = route
        lease = self._router.begin(route, call.samples, time.monotonic(), call.chain)
        try:
            try:
                answer = await self._upstream.post(replica.url, call.path, call.body(policy), whole=not call.stream)
            except ReplicaFault:
                raise
            except Exception as error:  # whatever its address does: who fails at once must not be the least busy
                log.exception("replica %s could not be asked", replica.id)
                raise ReplicaFault(f"could not be asked ({type(error).__name__})") from None
            try:
                if call.stream and answer.status == 200:
                    return await self._stream(request, answer, lease)
                body = await answer.body()
            finally:
                answer.close()
            good = judge(answer.status, body, policy, call.fields.get("return_token_ids") is True)
            if good:
                self._succeeded(lease)
            else:
                self._router.progressed(lease, time.monotonic())
        except ReplicaFault as fault:
            self._strike(lease, fault)
            raise
        finally:
            self._router.end(lease)
        headers = {"Content-Type": "application/json", REPLICA_HEADER: replica.id}
        return Response(answer.status, body, headers), "ok" if good else "request_error"

    async def _stream(self, request: Request, answer: Answer, lease: Lease) -> tuple[Response | None, str]:
        """Passes a stream on. Once it has begun a failure cannot be retried: it becomes the stream's last event."""
        head, client = await answer.first_event(lease.policy), request.connection
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", REPLICA_HEADER: lease.replica.id}
        client.begin_stream(headers)
        await client.write(head)
        outcome = "ok"
        try:
            while chunk := await answer.chunk():
                self._router.progressed(lease, time.monotonic())
                await client.write(chunk)
            self._succeeded(lease)
        except ReplicaFault as fault:
            outcome = "unavailable"
            self._strike(lease, fault)
            event = json.dumps(error_object(f"replica {lease.replica.id} {fault}", "server_error", "replica_failed"))
            await client.write(f"\n\ndata: {event}\n\n".encode())
        client.end_stream()
        return None, outcome

    def _succeeded(self, lease: Lease) -> None:
        if lease.replica.health.count:
            log.info("replica %s answers again", lease.replica.id)
        self._router.succeeded(lease, time.monotonic())

    def _strike(self, lease: Lease, fault: ReplicaFault) -> None:
        self._metrics.strikes += 1
        if self._router.strike(lease, time.monotonic(), str(fault), fault.policy_only):
            log.warning("replica %s %s", lease.replica.id, fault)
