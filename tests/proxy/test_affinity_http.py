"""Where requests go, over HTTP: to where their prompt is, to where their policy was found, and away from silence."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from grpo_jax.config.schema import Sampling
from grpo_jax.proxy.http1 import Connection
from grpo_jax.rollouts.client import Client
from tests.proxy.harness import RUN, V0, V1, Harness, eventually, run_async
from tests.proxy.replica import FakeReplica, answer_always, answer_well
from tests.rollouts.scripted import completions


@pytest.mark.parametrize("model", [V0, "latest"])
@run_async
async def test_separate_samples_of_a_prompt_go_to_one_replica(tmp_path: Path, model: str) -> None:
    async with Harness(tmp_path) as h:
        replicas = [await h.add(FakeReplica(id), V0) for id in "abcd"]
        prompts = [[*range(16), i] for i in range(12)]
        await asyncio.gather(*(h.complete(model, prompt=p) for p in prompts for _ in range(4)))
        seen = [{tuple(body["prompt"]) for _, _, body in replica.requests} for replica in replicas]
        assert sum(map(len, seen)) == len(prompts)  # no prompt at two of them
        assert all(seen)
        _, table = await h.get("/fleet")
        assert table["hit_rate"] == table["best_hit_rate"] == pytest.approx(3 / 4)


@run_async
async def test_texts_and_chats_are_found_again_too(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        for id in "ab":
            await h.add(FakeReplica(id), V0)
        for _ in range(3):
            for text in ("one", "two"):
                await h.complete(V0, prompt=text)
                await h.complete(V0, path="/v1/chat/completions", messages=[{"role": "user", "content": text}])
        usage = h.proxy.router.usage.total
        assert (usage.samples, usage.possible, usage.hits) == (12, 8, 8)


@run_async
async def test_groups_of_the_client_go_where_their_policy_was_found(tmp_path: Path) -> None:
    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.json_response(completions(body))

    async with Harness(tmp_path) as h:
        replicas = [
            await h.add(FakeReplica(id, answer), *proved)
            for id, proved in (("a", [V0, V1]), ("b", [V0, V1]), ("late", [V0]))
        ]
        async with Client(h.url, RUN, h.config.rollouts) as client:
            groups = []
            for i in range(30):  # as the worker does it: the next question while the last group is on its way
                policy, _ = await client.current_policy()
                groups.append(asyncio.create_task(client.sample(policy, [1, i], 8, i, Sampling(max_tokens=4))))
            await asyncio.gather(*groups)
        assert [set(replica.served) for replica in replicas] == [{V1}, {V1}, {V0}]
        assert all(8 <= len(replica.requests) <= 12 for replica in replicas), [len(r.requests) for r in replicas]


@run_async
async def test_what_a_black_hole_has_swallowed_is_tried_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_jax.proxy.pace.STALL_S", 0.3)
    monkeypatch.setattr("grpo_jax.proxy.handlers._TEND_S", 0.05)

    async def hang(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with Harness(tmp_path) as h:
        hole, good = await h.add(FakeReplica("hole", hang), V0), await h.add(FakeReplica("good"), V0)
        first = [asyncio.create_task(h.complete(V0, prompt=[i])) for i in range(8)]
        await eventually(lambda: hole.requests, "it swallows one")

        async def all_are_there() -> bool:
            await h.complete(V0, prompt="others go on")
            return all(request.done() for request in first)

        await eventually(all_are_there, "every request has an answer")
        answers = await asyncio.gather(*first)
        assert {(status, headers["x-grpo-replica"]) for status, _, headers in answers} == {(200, "good")}
        assert hole.cancelled
        row = next(row for row in (await h.get("/fleet"))[1]["replicas"] if row["id"] == "hole")
        assert row["strikes"] >= 1
        assert "has answered nothing" in row["last_error"]
        assert len(good.requests) > len(hole.requests)


@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_an_answer_that_is_too_large_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_max_body", 10_000)
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("bad", answer_always(200, "[" + "1," * 10_000 + "1]")), V0)
        await h.add(FakeReplica("good", answer_well), V0)
        for _ in range(4):
            status, _, headers = await h.complete(V0)
            assert (status, headers["x-grpo-replica"]) == (200, "good")
        row = next(row for row in (await h.get("/fleet"))[1]["replicas"] if row["id"] == "bad")
        assert "more than" in row["last_error"]


@pytest.mark.usefixtures("long_strikes")
@run_async
async def test_an_address_that_cannot_be_resolved_is_a_fault_of_the_replica(tmp_path: Path) -> None:
    async with Harness(tmp_path) as h:
        await h.add(FakeReplica("bad"), V0, url=f"http://{'a' * 70}.invalid:80")
        await h.add(FakeReplica("good"), V0)
        for _ in range(4):
            assert (await h.complete(V0))[0] == 200
        assert h.proxy.router.replicas["bad"].health.count == 1
