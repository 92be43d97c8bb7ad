"""HTTP towards and from the proxy: what is no HTTP, no JSON or no completion is refused, and nothing else happens."""

import asyncio
import json
from collections.abc import Mapping
from random import Random
from typing import Any

from grpo_jax.generator.client import parse_metrics
from grpo_jax.proxy.answers import ReplicaFault, judge
from grpo_jax.proxy.calls import CHAT_PATH, COMPLETIONS_PATH, RequestError, parse_call
from grpo_jax.proxy.http1 import Connection as Upstream
from grpo_jax.proxy.http1 import Lost
from grpo_jax.proxy.messages import Request, Response
from grpo_jax.proxy.parsing import BadHttp
from grpo_jax.proxy.server import Connection as Client
from grpo_jax.proxy.server import Server
from grpo_jax.rollouts.answers import BadAnswer, read_answer
from tests.fuzz.mutations import as_json, bent, damaged
from tests.fuzz.profile import fuzz, in_a_sentence

POLICY = "r.v000001.bbbbbbbb"
CALL: dict[str, Any] = {
    "model": POLICY, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 1.0, "n": 2, "seed": 2**62, "logprobs": 0,
    "return_token_ids": True, "stop": ["\n"], "messages": [{"role": "user", "content": "hi"}], "stream": False,
}  # fmt: skip
CHOICE: dict[str, Any] = {
    "index": 0, "text": "a", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -0.5]}, "finish_reason": "stop",
}  # fmt: skip
ANSWER: dict[str, Any] = {"model": POLICY, "choices": [CHOICE, {**CHOICE, "index": 1}], "usage": {"total_tokens": 4}}
ERROR = {"error": {"message": "no", "type": "x", "code": None}}
REQUEST = b'POST /v1/completions?a=b HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nX-Grpo-Deadline-S: 5\r\n\r\n{"a": 1}\n'
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\nT: x\r\n\r\n"
ANSWERED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nabcd"
STREAMED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n0\r\n\r\n"
METRICS = 'vllm:num_requests_running{a="b"} 1.0\nvllm:lora_requests_info{running_lora_adapters="x,y"} 2.5\n# HELP x\n'


def _mutated(rng: Random, value: Any) -> bytes:
    return damaged(rng, as_json(value)) if rng.random() < 0.3 else as_json(bent(rng, value))


@fuzz()
def test_a_request_is_parsed_or_refused(rng: Random) -> None:
    path = rng.choice((COMPLETIONS_PATH, CHAT_PATH))
    try:
        call = parse_call(path, _mutated(rng, CALL), rng.choice((None, "r0", "\xff")))
    except RequestError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.status == 400
        json.dumps(refused.body)
        return
    assert 1 <= call.samples <= 4096
    sent = json.loads(call.body(POLICY))
    assert sent["model"] == POLICY
    assert {**sent, "model": call.model} == call.fields or "nan" in str(sent).lower()


@fuzz()
def test_an_answer_is_judged_and_what_the_worker_keeps_of_it_is_sound(rng: Random) -> None:
    status, value = rng.choice((200, 200, 200, 400, 404, 500, 302)), rng.choice((ANSWER, ANSWER, ANSWER, ERROR))
    body = _mutated(rng, value)
    try:
        own = judge(status, body, POLICY, with_tokens=rng.random() < 0.7)
    except ReplicaFault as fault:
        in_a_sentence(fault)
        return
    assert own == (status == 200)
    if not own:
        return
    try:
        answer = read_answer(json.loads(body), policy=POLICY, replica="r0", n=2, max_tokens=4)
    except BadAnswer:
        return
    for choice in (c for c in answer.choices if c is not None):
        assert len(choice.tokens) == len(choice.logprobs) >= 1
        assert (choice.tokens >= 0).all()
        choice.text.encode()


@fuzz()
def test_the_metrics_of_a_server_are_numbers_or_refused(rng: Random) -> None:
    text = damaged(rng, METRICS.encode()).decode(errors="replace")
    try:
        load = parse_metrics(text)
    except (ValueError, OverflowError):  # `load_now` makes a ServerError of them
        return
    assert isinstance(load.running, int)


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_open = b"", True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.is_open = False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def _pieces(rng: Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


@fuzz(400)
def test_a_client_gets_answers_to_requests_and_refusals_to_the_rest(rng: Random) -> None:
    async def connect() -> None:
        seen: list[Request] = []

        async def handler(request: Request) -> Response:
            seen.append(request)
            return Response(200, b"{}")

        def refuse(status: int, why: str) -> Response:
            assert status in (400, 413)
            return Response(status, why.encode())

        raised: list[Mapping[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        connection, transport = Client(Server(handler, refuse)), _Transport()
        connection.connection_made(transport)
        data = b"".join(rng.choice((REQUEST, CHUNKED)) for _ in range(rng.randint(1, 3)))
        for piece in _pieces(rng, damaged(rng, data)):
            if transport.is_open:
                connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert not raised
        assert transport.written.count(b"HTTP/1.1 200 OK") == len(seen)
        for request in seen:
            assert request.path.startswith("/")
            assert len(request.body) < len(data) + 200

    asyncio.run(connect())


@fuzz(400)
def test_a_replica_that_speaks_no_http_is_at_fault(rng: Random) -> None:
    async def ask() -> None:
        connection, transport = Upstream(), _Transport()
        connection.connection_made(transport)
        asking = asyncio.ensure_future(connection.request(b"x", whole=True))
        await asyncio.sleep(0)
        for piece in _pieces(rng, damaged(rng, rng.choice((ANSWERED, STREAMED)))):
            if transport.is_open:
                connection.data_received(piece)
            await asyncio.sleep(0)
        connection.connection_lost(None)
        try:
            assert 200 <= await asyncio.wait_for(asking, 30) <= 999
            await connection.read()
        except (BadHttp, Lost):
            pass

    asyncio.run(ask())
