"""The client against a real server that fails in every way a proxy can."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from grpo_jax.config.schema import Rollouts, Sampling
from grpo_jax.rollouts import client as client_module
from grpo_jax.rollouts.answers import Answer
from grpo_jax.rollouts.client import Client, PolicyGone, RequestFailed, RequestRefused
from tests.rollouts.scripted import Reply, ScriptedProxy, completions, error, eventually, policy_name

V1 = policy_name(1)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LONGEST_WAIT_S", 0.02)


def with_proxy(test: Callable[[ScriptedProxy, Client], Awaitable[Any]], current: str | None = V1, **config: Any) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(60),
            ScriptedProxy(current) as proxy,
            Client(proxy.url + "/", "toy", Rollouts(**config)) as client,
        ):
            return await test(proxy, client)

    return asyncio.run(run())


async def ask(client: Client, n: int = 3, **sampling: Any) -> Answer:
    return await client.sample(V1, [1, 2, 3], n, 99, Sampling(max_tokens=5, **sampling))


def replies(*scripted: Reply | None) -> Callable[[dict[str, Any]], Awaitable[Reply | None]]:
    """Answers with one after the other, then as usual."""
    remaining: Iterator[Reply | None] = iter(scripted)

    async def script(request: dict[str, Any]) -> Reply | None:
        return next(remaining, None)

    return script


def test_one_request_asks_for_all_samples_of_a_group() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        answer = await ask(client, stop=["\n"], temperature=0.5)
        assert proxy.requests == [
            {
                "model": V1,
                "prompt": [1, 2, 3],
                "max_tokens": 5,
                "temperature": 0.5,
                "n": 3,
                "seed": 99,
                "logprobs": 0,
                "return_token_ids": True,
                "stop": ["\n"],
                # Else a server takes them from the model's card.
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            }
        ]
        assert float(proxy.headers[0]["x-grpo-deadline-s"]) > 0
        assert (answer.policy, answer.replica, len(answer.choices), answer.failures) == (V1, "r7", 3, ())
        await ask(client)
        assert "stop" not in proxy.requests[1]

    with_proxy(test)


@pytest.mark.parametrize("status", [400, 403, 413, 422])
def test_the_request_s_own_fault_is_not_tried_again(status: int) -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        proxy.script = replies((status, error("prompt too long")))
        with pytest.raises(RequestRefused, match=f"HTTP {status}: prompt too long"):
            await ask(client)
        assert len(proxy.requests) == 1

    with_proxy(test)


def test_a_policy_that_nobody_serves_is_gone_and_not_asked_for_again() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        with pytest.raises(PolicyGone, match=V1):
            await ask(client)
        assert len(proxy.requests) == 1

    with_proxy(test, current=policy_name(2))


@pytest.mark.parametrize(
    "reply",
    [
        (500, error()),
        (502, b"<html>bad gateway</html>"),
        (503, error("no replica")),
        (429, error("too many")),
        (408, error("timeout")),
        (404, b"not found"),  # no OpenAI object: not the proxy's word on a policy
        (400, {"detail": "no OpenAI object"}),
        (200, b"<html>hello</html>"),
        (200, b"\xff\xfe"),
        (200, {"choices": []}),
        (200, {"model": policy_name(2), "choices": []}),
        (302, {}),
    ],
)
def test_what_may_pass_is_tried_again(reply: Reply) -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        proxy.script = replies(reply, reply)
        answer = await ask(client)
        assert answer.failures == ()
        assert len(proxy.requests) == 3
        assert proxy.requests[0] == proxy.requests[2]

    with_proxy(test)


def test_trying_again_ends_at_the_deadline() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        async def fail(request: dict[str, Any]) -> Reply:
            return 503, error("no replica has it")

        proxy.script = fail
        with pytest.raises(RequestFailed, match="HTTP 503: no replica has it"):
            await ask(client)
        assert len(proxy.requests) > 1

    with_proxy(test, retry_deadline_s=0.3)


def test_the_deadline_counts_from_the_first_failure_not_from_the_start() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        async def slow_then_cut(request: dict[str, Any]) -> Reply | None:
            if len(proxy.requests) > 1:
                return None
            await asyncio.sleep(0.3)
            return 503, error("the replica died after a long time")

        proxy.script = slow_then_cut
        assert (await ask(client)).failures == ()

    with_proxy(test, retry_deadline_s=0.2)


def test_a_restart_of_the_proxy_loses_no_request() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        blocked = asyncio.Event()

        async def block(request: dict[str, Any]) -> Reply | None:
            await blocked.wait()
            return None

        proxy.script = block
        asking = [asyncio.create_task(ask(client)) for _ in range(4)]
        await eventually(lambda: len(proxy.requests) == 4)
        await proxy.stop()
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in asking)
        proxy.script = None
        await proxy.start()
        answers = await asyncio.gather(*asking)
        assert [answer.failures for answer in answers] == [()] * 4

    with_proxy(test)


def test_a_request_of_which_nothing_is_heard_is_tried_again() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        async def hang_once(request: dict[str, Any]) -> Reply | None:
            if len(proxy.requests) == 1:
                await asyncio.sleep(60)
            return None

        proxy.script = hang_once
        assert (await ask(client)).failures == ()
        assert len(proxy.requests) >= 2

    with_proxy(test, request_timeout_s=0.05, retry_deadline_s=0.2)


def test_more_requests_than_a_default_connector_allows_are_in_flight_at_one_time() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        all_there = asyncio.Event()

        async def wait_for_all(request: dict[str, Any]) -> Reply | None:
            if len(proxy.requests) == 150:
                all_there.set()
            await all_there.wait()
            return None

        proxy.script = wait_for_all
        await asyncio.gather(*(ask(client, n=1) for _ in range(150)))

    with_proxy(test)


def test_a_bad_choice_does_not_cost_the_others() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        async def spoil(request: dict[str, Any]) -> Reply:
            body = completions(request)
            body["choices"][1]["token_ids"].append(3)
            return 200, body

        proxy.script = spoil
        answer = await ask(client)
        assert [choice is None for choice in answer.choices] == [False, True, False]

    with_proxy(test)


def test_the_current_policy_is_waited_for() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        waiting = asyncio.create_task(client.current_policy())
        await eventually(lambda: proxy.policy_requests >= 2)
        await proxy.stop()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        proxy.current = policy_name(12)
        await proxy.start()
        assert await waiting == (policy_name(12), 12)

    with_proxy(test, current=None)


@pytest.mark.parametrize(
    "reply",
    [
        (200, {"policy": policy_name(1, run="other"), "version": 1}),
        (200, {"policy": "toy.probe.00000001", "version": None}),
        (200, {"policy": "HuggingFaceTB/SmolLM2"}),
        (200, {}),
        (200, []),
        (200, b""),
        (404, error("no such route")),
        (400, error()),
    ],
)
def test_no_other_name_is_taken_for_a_policy_of_this_run(reply: Reply) -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        proxy.policy_reply = reply
        waiting = asyncio.create_task(client.current_policy())
        await eventually(lambda: proxy.policy_requests >= 2)
        assert not waiting.done()
        proxy.policy_reply = None
        assert await waiting == (V1, 1)

    with_proxy(test)


def test_a_group_is_sent_where_its_policy_was_found() -> None:
    async def test(proxy: ScriptedProxy, client: Client) -> None:
        def sent() -> list[str | None]:
            return [headers.get("x-grpo-replica") for headers in proxy.headers]

        await ask(client)
        await client.current_policy()
        proxy.script = replies((503, error()))
        await ask(client)  # and tried again, wherever that may be
        await ask(client)
        assert sent() == [None, "r7", None, None]
        await client.current_policy()
        with pytest.raises(PolicyGone):
            await client.sample(policy_name(5), [1], 1, 1, Sampling(max_tokens=5))  # an older policy, of an evaluation
        assert sent()[4:] == [None]

    with_proxy(test)


@pytest.mark.parametrize("token", ["open-sesame", None])
def test_the_client_token_goes_along_with_every_request(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.delenv("GRPO_JAX_CLIENT_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("GRPO_JAX_CLIENT_TOKEN", token)

    async def test(proxy: ScriptedProxy, client: Client) -> None:
        await client.current_policy()
        await ask(client)
        expected = None if token is None else f"Bearer {token}"
        assert [h.get("Authorization") for h in (*proxy.policy_headers, *proxy.headers)] == [expected, expected]

    with_proxy(test)


def test_the_client_token_is_in_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GRPO_JAX_CLIENT_TOKEN", "open-sesame")
    caplog.set_level("DEBUG")

    async def test(proxy: ScriptedProxy, client: Client) -> None:
        proxy.script = replies((401, error("who are you")))
        with pytest.raises(RequestRefused) as refused:
            await ask(client)
        await proxy.stop()
        with pytest.raises(RequestFailed) as failed:
            await ask(client)
        assert "open-sesame" not in f"{refused.value!r} {failed.value!r} {caplog.text}"

    with_proxy(test, retry_deadline_s=0.1)


def test_an_answer_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_ANSWER", 10_000)

    async def test(proxy: ScriptedProxy, client: Client) -> None:
        proxy.script = replies((200, b" " * 20_000))
        assert (await ask(client)).failures == ()
        assert len(proxy.requests) == 2

    with_proxy(test)
