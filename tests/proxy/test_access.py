"""Who may use the proxy, and what it shows."""

import asyncio
import logging
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.proxy.app import build_runner
from grpo_jax.proxy.status import render
from grpo_jax.proxy.tokens import CLIENT_TOKEN_VARIABLE, TOKEN_VARIABLE
from grpo_jax.rollouts.client import Client
from tests.proxy.harness import V0, V1, Harness, make_config, run_async
from tests.proxy.replica import FakeReplica, answer_always, openai_error

TOKEN = "open-sesame"
ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/policy"),
    ("GET", "/metrics"),
    ("GET", "/fleet"),
    ("GET", "/"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \xff"],
)
@run_async
async def test_without_the_client_token_nothing_but_health_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authorization: str | None
) -> None:
    monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, TOKEN)
    headers = {} if authorization is None else {"Authorization": authorization}
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a"), V0)
        for method, path in ROUTES:
            body = {"model": V0, "prompt": [1]} if method == "POST" else None
            async with h.session.request(method, h.url + path, json=body, headers=headers) as response:
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                payload = await response.json()
                assert set(payload["error"]) == {"message", "type", "param", "code"}
                assert payload["error"]["code"] == "invalid_api_key"
        assert replica.requests == []
        assert h.proxy.metrics.requests["unauthorized"] == len(ROUTES)
        async with h.session.get(h.url + "/health") as response:
            assert response.status == 200


@run_async
async def test_with_the_client_token_all_is_answered_and_the_token_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, f"{TOKEN}\n")  # as it comes from a file
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": f"bearer {TOKEN}"}
    async with Harness(tmp_path) as h:
        bad = await h.add(FakeReplica("a", answer_always(500, openai_error("no"))), V0)
        good = await h.add(FakeReplica("b"), V0)
        for method, path in ROUTES[:-1]:
            body = {"model": V0, "prompt": [1], "messages": []} if method == "POST" else None
            async with h.session.request(method, h.url + path, json=body, headers=headers) as response:
                assert response.status == 200, path
                assert TOKEN not in await response.text()
        async with Client(h.url, "r", h.config.rollouts) as client:
            assert await asyncio.wait_for(client.current_policy(), 60) == (V0, 0)
        sent = [headers for _, headers, _ in bad.requests + good.requests]
        assert len(sent) >= 2
        assert not any(TOKEN in value for headers in sent for value in headers.values())
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("variable", [TOKEN_VARIABLE, CLIENT_TOKEN_VARIABLE])
@pytest.mark.parametrize("value", ["two words", "line\nbreak", "h\xfcnter2", "hunter\tsecret"])
@run_async
async def test_a_token_that_no_header_can_hold_is_a_usage_error_that_does_not_quote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=variable) as error:
        build_runner(make_config(tmp_path))
    assert not any(word in str(error.value) for word in value.split())


@run_async
async def test_the_status_page_shows_the_fleet_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    hostile = '<script>alert("1")</script>'
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("sound"), V0, quarantined={V1: hostile}, error=f"'\"&{hostile}")
        await h.add(FakeReplica("broken", answer_always(500, "x")), V1)
        assert (await h.complete(V0, n=4))[0] == 200
        assert (await h.complete(V1, deadline_s=0))[0] == 503
        async with h.session.get(h.url + "/") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            page = await response.text()
        for word in ("sound", "broken", V0, V1, "answered 500", "75.0 %", "100.0 %", 'http-equiv="refresh"'):
            assert word in page, word
        assert hostile not in page
        assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in page
        assert "<script" not in page
        assert "src=" not in page
        assert "href=" not in page


def test_every_text_of_a_page_is_escaped() -> None:
    hostile = "<b>&\"'"
    row = {
        "id": hostile, "state": hostile, "newest": hostile, "proved": [hostile], "in_flight": hostile,
        "samples": hostile, "share": 0.5, "strikes": hostile, "heartbeat_age_s": 1.0, "blocked_s": 2.0, "ready": True,
        "quarantined": {hostile: hostile}, "last_error": hostile, "error": hostile,
    }  # fmt: skip
    policy = {"policy": hostile, "replicas": 1, "samples": 1, "share": None, "hit_rate": None, "best_hit_rate": 1.0}
    described = {
        "run": hostile, "fleet": hostile, "replicas": [row], "policies": [policy], "samples": 1,
        "hit_rate": None, "best_hit_rate": None,
    }  # fmt: skip
    page = render(described, 0)
    assert "<b>" not in page
    assert page.count("&lt;b&gt;&amp;&quot;&#x27;") >= 12


@run_async
async def test_the_fleet_table_tells_shares_and_hit_rates(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0)
        await h.add(FakeReplica("b"), V1)
        for _ in range(3):
            await h.complete(V0, n=4, prompt=[1, 2, 3])
        await h.complete("latest", n=4, prompt="x")
        _, table = await h.get("/fleet")
        rows = {row["policy"]: row for row in table["policies"]}
        assert (rows[V0]["replicas"], rows[V1]["replicas"]) == (1, 1)
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
        assert sum(row["share"] for row in table["replicas"]) == pytest.approx(1.0)
        assert table["samples"] == 16
        assert rows[V0]["hit_rate"] == pytest.approx(11 / 12) or rows[V0]["samples"] == 16
        assert table["hit_rate"] == table["best_hit_rate"]
