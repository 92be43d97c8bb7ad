"""The judge against a real server on loopback: what it is asked, what its answers mean, and where the key goes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from experiments.rewards import judge
from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.rollouts.rewards import Completion, load_rewards
from grpo_jax.rollouts.scoring import Score, Scorer

KEY = "sk-secretsecret"
COMPLETION = Completion("<think>hm</think>It is {answer}.\nScore: 10", [1], "1+1=?", 2, {"topic": "sums"}, "stop")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def says(text: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    return handler


def ask(handler: Handler, completion: Completion = COMPLETION, **args: Any) -> tuple[Score, list[dict[str, Any]]]:
    """The score by the whole path of a reward, and what the server was asked."""
    asked: list[dict[str, Any]] = []

    async def recorded(request: web.Request) -> web.StreamResponse:
        asked.append({"path": request.path, "key": request.headers.get("Authorization"), **await request.json()})
        return await handler(request)

    async def run() -> Score:
        app = web.Application()
        app.router.add_post("/{path:.*}", recorded)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config = RewardConfig(
            source="experiments.rewards.judge:judged",
            args={"url": url, "model": "judge-1", "key_env": "JUDGE_KEY", **args},
            timeout_s=30.0,
        )
        try:
            (score,) = await Scorer(load_rewards([config]), 1.0).score([completion])
        finally:
            await runner.cleanup()
        return score

    return asyncio.run(run()), asked


def test_the_judge_is_asked_with_the_key_and_its_score_is_scaled() -> None:
    score, (asked,) = ask(says("It agrees.\nScore: 7.5"))
    assert score.reward == 0.75
    assert (asked["path"], asked["key"], asked["model"]) == ("/v1/chat/completions", f"Bearer {KEY}", "judge-1")
    prompt = asked["messages"][0]["content"]
    assert "1+1=?" in prompt
    assert "It is {answer}." in prompt  # what the model wrote is no template
    assert "hm" not in prompt.split("======")[1]
    assert (asked["temperature"], asked["max_tokens"]) == (0.0, 512)


def test_template_and_options_are_the_user_s() -> None:
    template = "{topic}: {completion} / {prompt}"
    score, (asked,) = ask(says("-3"), template=template, thinking=True, pattern=r"(-?\d+)", low=-4, high=4, options={})
    assert score.reward == 0.125
    assert asked["messages"][0]["content"] == f"sums: {COMPLETION.text} / 1+1=?"
    assert asked.keys() == {"path", "key", "model", "messages"}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Score: 3, no, score: 4", 0.4),
        ("**Score:** 10", 1.0),
        ("Score: 99", 1.0),
        ("I cannot say.", None),
        (None, None),
    ],
)
def test_what_an_answer_means(text: Any, reward: float | None) -> None:
    score, _ = ask(says(text))
    assert score.reward == reward
    assert score.errors == ()


def test_what_fails_in_passing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([503, 429, 200])

    async def handler(request: web.Request) -> web.StreamResponse:
        status = next(statuses)
        return await says("Score: 5")(request) if status == 200 else web.Response(status=status)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(judge.asyncio, "sleep", lambda seconds: real_sleep(0))
    score, asked = ask(handler)
    assert score.reward == 0.5
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (401, {}, f"wrong key {KEY}"),
        (307, {"Location": "/elsewhere"}, ""),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": []}'),
    ],
)
def test_a_failure_is_told_without_the_key(
    status: int, headers: dict[str, str], body: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers=headers, text=body)

    with caplog.at_level(logging.DEBUG):
        score, asked = ask(handler, attempts=1)
    assert score.reward is None
    assert len(asked) == 1
    (error,) = score.errors
    assert "JudgeFailed" in error
    assert KEY not in error
    assert KEY not in caplog.text


def test_nobody_listening_is_told_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        score, _ = ask(says(""), url="http://127.0.0.1:1/v1", attempts=1)
    assert "ClientConnectorError" in score.errors[0]
    assert KEY not in score.errors[0] + caplog.text


def test_the_key_goes_to_https_and_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    score, _ = ask(says(""), url="http://judge.invalid/v1")
    assert "the key in JUDGE_KEY is sent to https only, not to http://judge.invalid" in score.errors[0]
    monkeypatch.delenv("JUDGE_KEY")
    score, asked = ask(says(""))
    assert "the environment variable JUDGE_KEY is not set" in score.errors[0]
    assert asked == []


def test_a_local_judge_needs_no_key() -> None:
    score, (asked,) = ask(says("Score: 1"), key_env=None)
    assert score.reward == 0.1
    assert asked["key"] is None
