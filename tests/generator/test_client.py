"""What a client sends to a server that it does not trust, and what it believes of the answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from grpo_jax.generator import client as module
from grpo_jax.generator.client import EngineClient, ServerError

SECRET = "hf_secret"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _ask(answer: Answer, ask: Callable[[EngineClient], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
                return await ask(EngineClient(session, url, **settings))
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_half_a_character_in_a_servers_error_can_be_written_everywhere() -> None:
    with pytest.raises(ServerError) as error:
        _ask(_json({"error": {"message": "no \ud800 such"}}, 400), lambda client: client.load("a", "/a"))
    assert str(error.value) == "HTTP 400: no ? such"


def test_a_long_word_in_the_metrics_is_read_in_no_time() -> None:
    assert module.parse_metrics(f"vllm:lora_requests_info{{{'a' * 2_000_000}}} 1").busy == frozenset()


def _json(body: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return answer


CALLS: dict[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "models": lambda client: client.models(),
    "load": lambda client: client.load("a", "/x"),
    "unload": lambda client: client.unload("a"),
    "canary": lambda client: client.canary("a", [1, 2]),
    "load_now": lambda client: client.load_now(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_redirect_is_an_error_and_is_not_followed(call):
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    with pytest.raises(ServerError, match="HTTP 307"):
        _ask(answer, CALLS[call], headers={"Authorization": f"Bearer {SECRET}"})
    assert len(seen) == 1
    assert seen[0][1] == f"Bearer {SECRET}"
    assert seen[0][0] != "/elsewhere"


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_quotes_the_token_does_not_get_it_into_an_error(call):
    answer = _json({"error": {"message": f"what is Bearer {SECRET}?\nx"}}, 500)
    with pytest.raises(ServerError, match=r"HTTP 500: what is Bearer \*\*\*\? x") as error:
        _ask(answer, CALLS[call], headers={"Authorization": f"Bearer {SECRET}"})
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("call", ["models", "canary", "load_now"])
@pytest.mark.parametrize("text", ["", "<html>", "[" * 100_000, "null", "{}", '{"data": [1], "choices": [{}]}', "5"])
def test_an_answer_that_is_none_is_a_server_error(call, text):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running NaN\n" if call == "load_now" else text)

    with pytest.raises(ServerError):
        _ask(answer, CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_an_endless_answer_is_not_read_to_its_end(call, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ANSWER", 1 << 16)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 4096)

    with pytest.raises(ServerError, match="larger than 65536"):
        _ask(answer, CALLS[call])


@pytest.mark.parametrize(("settings", "priority"), [({}, -1), ({"priority": None}, None)])
def test_a_priority_is_sent_only_where_the_server_schedules_by_it(settings, priority):
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1.5}}]}]})

    assert _ask(answer, CALLS["canary"], **settings) == [-1.5]
    assert bodies[0].get("priority") == priority
    assert ("priority" in bodies[0]) == (priority is not None)
