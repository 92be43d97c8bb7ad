"""Faults of replicas and errors of requests, over HTTP."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from grpo_jax.proxy.metrics import MAX_REPLICAS, Metrics
from grpo_jax.proxy.routing import Router
from grpo_jax.proxy.usage import MAX_POLICIES
from grpo_jax.storage.bucket import Bucket
from tests.proxy.harness import OTHER_RUN, PROBE, V0, V1, V2, Harness, eventually, run_async
from tests.proxy.replica import Answer, FakeReplica, answer_always, answer_well, completion, openai_error


@run_async
async def test_an_answer_comes_from_a_replica_that_proved_the_policy(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        a, b = await h.add(FakeReplica("a"), V0), await h.add(FakeReplica("b"), V0, V1)
        for _ in range(4):
            status, payload, headers = await h.complete(V1, temperature=0.5, n=2)
            assert (status, payload["model"], headers["x-grpo-replica"]) == (200, V1, "b")
        assert a.requests == []
        path, _, body = b.requests[0]
        assert path == "/v1/completions"
        assert body == {"model": V1, "prompt": [1, 2], "max_tokens": 2, "temperature": 0.5, "n": 2}
        _, payload, _ = await h.complete(V1, path="/v1/chat/completions", messages=[])
        assert payload["model"] == V1
        assert b.requests[-1][0] == "/v1/chat/completions"


@run_async
async def test_latest_is_resolved_to_an_exact_name(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a"), V0, V1, PROBE, OTHER_RUN)
        status, payload, _ = await h.complete("latest", seed=3)
        assert (status, payload["model"]) == (200, V1)
        assert replica.requests[0][2] == {"model": V1, "prompt": [1, 2], "max_tokens": 2, "seed": 3}
        assert await h.get("/v1/policy") == (200, {"policy": V1, "version": 1, "replica": "a"})
        _, models = await h.get("/v1/models")
        assert [model["id"] for model in models["data"]] == [V1, V0]


@run_async
async def test_the_least_loaded_replica_is_chosen(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hold(request: web.Request, body: dict) -> web.StreamResponse:
        await release.wait()
        return await answer_well(request, body)

    async with Harness(tmp_path) as h:
        a, b = await h.add(FakeReplica("a", hold), V0), await h.add(FakeReplica("b", hold), V0)
        big = asyncio.create_task(h.complete(V0, n=8))
        await eventually(lambda: a.requests or b.requests, "the big request arrives")
        small = [asyncio.create_task(h.complete(V0, n=2, prompt=[i])) for i in range(4)]
        await eventually(lambda: len(a.requests) + len(b.requests) == 5, "all arrive")
        assert sorted([len(a.requests), len(b.requests)]) == [1, 4]
        release.set()
        assert all(answer[0] == 200 for answer in await asyncio.gather(big, *small))
        assert all(replica.in_flight == 0 for replica in h.proxy.router.replicas.values())


def _wrong_model() -> Answer:
    return answer_always(200, json.dumps(completion("smollm2")))


async def _hang_up(request: web.Request, body: dict) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    "bad",
    [
        answer_always(404, openai_error("no such model")),
        answer_always(404, "<html>"),
        answer_always(500, openai_error("boom")),
        answer_always(503, "starting"),
        answer_always(401, openai_error("who are you")),
        answer_always(429, openai_error("slow down")),
        answer_always(400, "no OpenAI object"),
        answer_always(200, "not JSON"),
        answer_always(200, '{"object": "text_completion"}'),
        _wrong_model(),
        answer_always(307, "", Location="/elsewhere"),
        _hang_up,
    ],
)
@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_a_faulty_replica_gets_one_request_and_the_others_answer(tmp_path: Path, bad: Answer) -> None:
    async with Harness(tmp_path) as h:
        faulty = await h.add(FakeReplica("bad", bad), V0)
        sound = await h.add(FakeReplica("good"), V0)
        answers = [await h.complete(V0) for _ in range(10)]
        assert all(status == 200 and payload["model"] == V0 for status, payload, _ in answers)
        assert len(faulty.requests) == 1
        assert len(sound.requests) == 10
        _, fleet = await h.get("/fleet")
        row = next(row for row in fleet["replicas"] if row["id"] == "bad")
        assert row["strikes"] + sum(row["struck_policies"].values()) == 1
        assert row["last_error"]


@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_a_restarted_server_that_knows_no_policy_draws_no_traffic(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        empty = await h.add(FakeReplica("empty", answer_always(404, openai_error("no such model"))), V0, V1)
        await h.add(FakeReplica("good"), V0, V1)
        models = [V0, V1, "latest"] * 20
        answers = await asyncio.gather(*(h.complete(model, n=4) for model in models))
        assert [status for status, _, _ in answers] == [200] * 60
        before = len(empty.requests)
        answers = await asyncio.gather(*(h.complete(model, n=4) for model in models))
        assert [status for status, _, _ in answers] == [200] * 60
        assert len(empty.requests) == before
        # Its newest policy is struck, so it does not decide what `latest` is either.
        assert (await h.get("/v1/policy"))[1]["replica"] == "good"


@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_a_dead_replica_is_passed_by(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        dead = await h.add(FakeReplica("dead"), V0)
        await h.add(FakeReplica("good"), V0)
        await dead.stop()  # its heartbeat goes on: the agent has not noticed yet
        h.replicas.remove(dead)
        answers = await asyncio.gather(*(h.complete(V0) for _ in range(10)))
        assert [status for status, _, _ in answers] == [200] * 10
        assert {headers["x-grpo-replica"] for _, _, headers in answers} == {"good"}


@pytest.mark.parametrize("status", [400, 413, 422])
@run_async
async def test_an_error_of_the_request_passes_through_once(tmp_path: Path, status: int) -> None:
    async with Harness(tmp_path) as h:
        text = openai_error("prompt too long")
        replicas = [await h.add(FakeReplica(id, answer_always(status, text)), V0) for id in "ab"]
        got, payload, headers = await h.complete(V0)
        assert (got, payload) == (status, json.loads(text))
        assert headers["x-grpo-replica"] in "ab"
        assert sum(len(replica.requests) for replica in replicas) == 1
        assert all(row["strikes"] == 0 for row in (await h.get("/fleet"))[1]["replicas"])


@run_async
async def test_the_deadline_ends_in_an_error_object_with_the_cause(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        for id in "ab":
            await h.add(FakeReplica(id, answer_always(500, openai_error("boom"))), V0)
        status, payload, _ = await h.complete(V0, deadline_s=0.2)
        assert status == 503
        assert set(payload["error"]) == {"message", "type", "param", "code"}
        assert "answered 500" in payload["error"]["message"]


@run_async
async def test_a_single_replica_is_tried_again_until_it_recovers(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a"), V0)

        async def fail_twice(request: web.Request, body: dict) -> web.StreamResponse:
            if len(replica.requests) <= 2:
                return web.json_response(json.loads(openai_error("boom")), status=500)
            return await answer_well(request, body)

        replica.answer = fail_twice
        assert (await h.complete(V0))[0] == 200
        assert len(replica.requests) == 3
        assert (await h.get("/fleet"))[1]["replicas"][0]["strikes"] == 0


@run_async
async def test_the_deadline_counts_from_the_first_failure_not_from_the_start(tmp_path: Path) -> None:
    """A replica that dies after long work costs a retry, not the request, however short the deadline."""
    async with Harness(tmp_path) as h:
        a, b = await h.add(FakeReplica("a"), V0), await h.add(FakeReplica("b"), V0)

        async def first_dies_late(request: web.Request, body: dict) -> web.StreamResponse:
            if len(a.requests) + len(b.requests) == 1:
                await asyncio.sleep(1.2)
                return await _hang_up(request, body)
            return await answer_well(request, body)

        a.answer = b.answer = first_dies_late
        assert (await h.complete(V0, deadline_s=1.0))[0] == 200


@run_async
async def test_the_wait_for_a_first_replica_is_no_failure(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        request = asyncio.create_task(h.complete("latest", deadline_s=1.5))
        await asyncio.sleep(0.1)

        async def dies_late(request: web.Request, body: dict) -> web.StreamResponse:
            await asyncio.sleep(1.6)
            return await _hang_up(request, body)

        await h.add(FakeReplica("a", dies_late), V0)
        await eventually(lambda: h.proxy.router.replicas["a"].in_flight, "the request has found its replica")
        await h.add(FakeReplica("b"), V0)
        status, _, headers = await request
        assert (status, headers["x-grpo-replica"]) == (200, "b")


@run_async
async def test_one_request_kills_three_servers_at_most(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replicas = [await h.add(FakeReplica(id, _hang_up), V0) for id in "abcde"]
        status, payload, _ = await h.complete(V0)
        assert (status, payload["error"]["code"]) == (502, "replicas_lost")
        assert sum(len(replica.requests) for replica in replicas) == 3


@run_async
async def test_a_replica_that_hangs_is_given_up(tmp_path: Path) -> None:
    async def hang(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with Harness(tmp_path, rollouts={"request_timeout_s": 0.3}) as h:
        replica = await h.add(FakeReplica("a", hang), V0)
        status, payload, _ = await h.complete(V0, deadline_s=0)
        assert status == 503
        assert "did not answer in time" in payload["error"]["message"]
        await eventually(lambda: replica.cancelled == 1, "the request to the replica is cancelled")


@run_async
async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        target = FakeReplica("target")
        await target.start()
        h.replicas.append(target)
        away = answer_always(307, "", Location=f"{target.url}/v1/completions")
        await h.add(FakeReplica("a", away), V0)
        status, payload, _ = await h.complete(V0, deadline_s=0)
        assert status == 503
        assert "307" in payload["error"]["message"]
        assert target.requests == []


@run_async
async def test_names_that_the_fleet_does_not_hold_are_not_found(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a"), V0, PROBE, OTHER_RUN)
        await eventually(lambda: h.proxy.router.complete, "the fleet has been looked at")
        for model in (V1, PROBE, OTHER_RUN, "smollm2", "", "../x", "Latest", V0 + "\n"):
            status, payload, _ = await h.complete(model)
            assert (status, payload["error"]["code"]) == (404, "model_not_found"), model
        assert replica.requests == []


@run_async
async def test_no_policy_is_called_unknown_before_the_fleet_has_been_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(self: Bucket, prefix: str = "") -> list[str]:
        raise RuntimeError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "list", down)
        async with Harness(tmp_path) as h:
            assert (await h.complete(V0, deadline_s=0))[0] == 503
            assert (await h.complete("smollm2", deadline_s=0))[0] == 404
    async with Harness(tmp_path) as h:
        await eventually(lambda: h.proxy.router.complete, "the fleet has been looked at")
        assert (await h.complete(V0, deadline_s=0))[0] == 404


@run_async
async def test_a_known_policy_without_a_replica_is_waited_for(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0, loaded=[V1], quarantined={V2: "the canary differs"})
        status, payload, _ = await h.complete(V1, deadline_s=0.2)
        assert (status, payload["error"]["code"]) == (503, "no_replica")
        status, payload, _ = await h.complete(V2, deadline_s=0)
        assert status == 503
        assert "the canary differs" in payload["error"]["message"]
        request = asyncio.create_task(h.complete(V1))
        await asyncio.sleep(0.1)
        h.agents["a"].body["proved"] = [V0, V1]
        assert (await request)[0] == 200


@run_async
async def test_nothing_proved_is_a_503_on_policy_and_on_latest(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        status, payload = await h.get("/v1/policy")
        assert status == 503
        assert payload["error"]["code"] == "no_replica"
        await h.add(FakeReplica("a"), PROBE)
        assert (await h.get("/v1/policy"))[0] == 503
        assert (await h.complete("latest", deadline_s=0.1))[0] == 503


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"model": 3}', 400), (b'{"model": "x", "stream": 1}', 400),
     (b'{"model": "x", "stream": "yes"}', 400), (b'{"model": NaN}', 400), (b"[" * 100_000, 400),
     (b" " * (33 * 2**20), 413)],
)  # fmt: skip
@run_async
async def test_a_bad_body_is_refused_with_an_error_object(tmp_path: Path, data: bytes, status: int) -> None:
    async with Harness(tmp_path) as h, h.session.post(f"{h.url}/v1/completions", data=data) as response:
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("deadline", ["soon", "-1", "nan", ""])
@run_async
async def test_a_bad_deadline_is_refused(tmp_path: Path, deadline: str) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0)
        headers = {"x-grpo-deadline-s": deadline}
        async with h.session.post(f"{h.url}/v1/completions", json={"model": V0}, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_deadline"


@run_async
async def test_a_client_that_goes_away_cancels_its_request(tmp_path: Path) -> None:
    async def hang(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a", hang), V0)
        request = asyncio.create_task(h.complete(V0, n=4))
        await eventually(lambda: replica.requests, "the request arrives")
        assert h.proxy.router.replicas["a"].in_flight == 4
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await eventually(lambda: replica.cancelled == 1, "the replica sees the end of its request")
        await eventually(lambda: h.proxy.router.replicas["a"].in_flight == 0, "the load is given back")
        assert h.proxy.router.replicas["a"].health.count == 0
        assert h.proxy.metrics.requests == {"cancelled": 1}


@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("bad", answer_always(500, "")), V0)
        await h.add(FakeReplica("good"), V0)
        for _ in range(3):
            await h.complete(V0)
        await h.complete("smollm2")
        async with h.session.get(f"{h.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        prefix = "grpo_jax_proxy_"
        assert values[prefix + 'requests_total{outcome="ok"}'] == "3"
        assert values[prefix + 'requests_total{outcome="not_found"}'] == "1"
        assert values[prefix + "request_seconds_count"] == "4"
        assert float(values[prefix + "request_seconds_sum"]) > 0
        assert (values[prefix + "retries_total"], values[prefix + "strikes_total"]) == ("1", "1")
        assert (values[prefix + "in_flight"], values[prefix + "replicas_ready"]) == ("0", "2")
        assert await h.get("/health") == (200, {"status": "ok", "replicas_ready": 2})


@run_async
async def test_metrics_of_replicas_policies_and_prefixes(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a"), V0, V1)
        await h.add(FakeReplica("b"), V1, quarantined={V0: "the canary differs"})
        for _ in range(3):
            await h.complete(V0, n=4)
        async with h.session.get(f"{h.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        expected = {
            'replica_ready{replica="a"}': 1, 'replica_requests_total{replica="a"}': 3, 'replica_proved{replica="a"}': 2,
            'replica_samples_total{replica="a"}': 12, 'replica_samples_total{replica="b"}': 0,
            'replica_quarantined{replica="b"}': 1, 'replica_strikes_total{replica="a"}': 0,
            f'policy_replicas{{policy="{V1}"}}': 2, f'policy_replicas{{policy="{V0}"}}': 1,
            f'policy_samples_total{{policy="{V0}"}}': 12, f'policy_affinity_hits_total{{policy="{V0}"}}': 11,
            f'policy_affinity_possible_total{{policy="{V0}"}}': 11, "samples_total": 12, "affinity_hits_total": 11,
            'request_seconds_bucket{le="+Inf"}': 3,
        }  # fmt: skip
        assert {key: int(values["grpo_jax_proxy_" + key]) for key in expected} == expected
        # As the text format demands: one TYPE for each family, and no series twice.
        families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(set(families)) == len(families)
        assert len(values) == sum(not line.startswith("#") for line in lines)


def test_the_number_of_series_is_bounded_and_labels_are_escaped() -> None:
    router = Router("r", memory_s=60.0)
    for i in range(2 * MAX_REPLICAS):
        router.observe(f'x"\\\n{i}', URL("http://a:1"), True, [f"r.v{i:06d}.aaaaaaaa"], 0.0)
    for i in range(200):
        router.usage.add(f"r.v{i:06d}.aaaaaaaa", 1, False, False)
    lines = Metrics().text(router).splitlines()
    assert sum("replica_in_flight{" in line for line in lines) == MAX_REPLICAS
    assert sum("policy_samples_total{" in line for line in lines) == MAX_POLICIES
    assert sum("policy_replicas{" in line for line in lines) == MAX_POLICIES
    assert r'{replica="x\"\\\n0"}' in "\n".join(lines)
    assert "grpo_jax_proxy_samples_total 200" in lines


@run_async
async def test_unknown_paths_and_methods_answer_with_error_objects(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        assert (await h.get("/v1/embeddings"))[0] == 404
        status, payload = await h.get("/v1/completions")
        assert (status, payload["error"]["type"]) == (405, "invalid_request_error")


@run_async
async def test_no_body_reaches_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a", answer_always(500, openai_error("refused: sesame"))), V0)
        await h.complete(V0, deadline_s=0, prompt="sesame")
        await h.complete(V0, deadline_s=0, prompt="sesame", stream=True)
    assert "answered 500" in caplog.text
    assert "sesame" not in caplog.text


async def _raw_stream(h: Harness, model: str, **headers: str) -> tuple[int, bytes, str]:
    body = {"model": model, "prompt": [1], "stream": True}
    async with h.session.post(f"{h.url}/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.read(), response.headers.get("x-grpo-replica", "")


def _event(model: str, text: str) -> bytes:
    return f"data: {json.dumps({'model': model, 'choices': [{'index': 0, 'text': text}]})}\n\n".encode()


def _streaming(*pieces: bytes | None) -> Answer:
    """Sends the pieces as they are; None breaks the connection."""

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await asyncio.sleep(0.01)
            if piece is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(piece)
        await response.write_eof()
        return response

    return answer


@run_async
async def test_a_stream_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    first = _event(V0, "a")
    pieces = [b": ping\n\n", first[:10], first[10:], _event(V0, "b") + _event(V0, "c"), b"data: [DONE]\n\n"]
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a", _streaming(*pieces)), V0)
        assert await _raw_stream(h, V0) == (200, b"".join(pieces), "a")
        assert h.proxy.router.replicas["a"].in_flight == 0


@pytest.mark.parametrize(
    "bad",
    [
        _streaming(None),
        _streaming(b": ping\n\n", None),
        _streaming(),
        _streaming(_event("smollm2", "a"), b"data: [DONE]\n\n"),
        _streaming(b"data: [DONE]\n\n"),
        _streaming(b'data: {"error": {"message": "boom"}}\n\n'),
        answer_always(500, ""),
    ],
)
@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_a_stream_that_fails_before_its_first_event_is_retried(tmp_path: Path, bad: Answer) -> None:
    async with Harness(tmp_path) as h:
        faulty = await h.add(FakeReplica("bad", bad), V0)
        await h.add(FakeReplica("good", _streaming(_event(V0, "x"), b"data: [DONE]\n\n")), V0)
        for _ in range(3):
            status, data, replica = await _raw_stream(h, V0)
            assert (status, data, replica) == (200, _event(V0, "x") + b"data: [DONE]\n\n", "good")
        assert len(faulty.requests) == 1


@run_async
async def test_a_stream_that_breaks_later_ends_in_an_error_event(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a", _streaming(_event(V0, "x"), None)), V0)
        status, data, _ = await _raw_stream(h, V0)
        events = [line for line in data.split(b"\n") if line.startswith(b"data:")]
        assert status == 200
        assert json.loads(events[-1][5:])["error"]["code"] == "replica_failed"
        assert data.startswith(_event(V0, "x"))
        assert b"[DONE]" not in data
        assert len(replica.requests) == 1
        assert h.proxy.router.replicas["a"].health.count == 1


@run_async
async def test_the_request_error_of_a_stream_passes_through(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("a", answer_always(400, openai_error("too long"))), V0)
        status, data, _ = await _raw_stream(h, V0)
        assert (status, json.loads(data)) == (400, json.loads(openai_error("too long")))


@run_async
async def test_a_client_that_leaves_a_stream_cancels_it(tmp_path: Path) -> None:
    async def endless(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(_event(V0, "x"))
            await asyncio.sleep(0.01)

    async with Harness(tmp_path) as h:
        replica = await h.add(FakeReplica("a", endless), V0)
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{h.url}/v1/completions", json={"model": V0, "stream": True})
            await response.content.readany()
            response.close()
        await eventually(lambda: h.proxy.router.replicas["a"].in_flight == 0, "the load is given back")
        await eventually(lambda: replica.cancelled == 1, "the replica sees the end of its stream")
        assert h.proxy.router.replicas["a"].health.count == 0
