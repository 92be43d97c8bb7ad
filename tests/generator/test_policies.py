"""Reconciling against a server that misbehaves: answers lost, names lost, deaths, and requests that still run."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.adapters.manifest import read_manifest
from grpo_jax.generator import files
from grpo_jax.generator import policies as module
from grpo_jax.generator.client import Load, ServerError, parse_metrics
from grpo_jax.generator.index import INDEX, indexed
from grpo_jax.generator.policies import Policies, Wanted
from grpo_jax.generator.sources import LocalCopies, Mounted
from grpo_jax.storage import layout
from tests.generator.stand_in import StandIn


class Server:
    """An engine's interface without an engine: it answers canaries as the manifests say."""

    def __init__(self, learner: StandIn):
        self._learner = learner
        self.names: dict[str, Path] = {}
        self.loads: list[str] = []
        self.die_at: str | None = None
        self.last_word: Exception = ConnectionError()
        self.ill = False
        self.lose_answer_of: str | None = None
        self.off_at: str | None = None
        self.foreign: list[str] = []
        self.registers_by_itself: str | None = None
        self.scored: list[str] = []

    async def healthy(self) -> bool:
        return not self.ill

    async def models(self) -> list[str]:
        return ["base", *self.names, *self.foreign]

    async def load(self, name: str, path: str) -> None:
        if name == self.registers_by_itself:
            self.names[name] = Path(path)
        if name in self.names:
            raise ServerError("HTTP 400: already been loaded")
        folder = Path(path)
        assert (folder / "adapter_model.safetensors").is_file()
        self.names[name] = folder
        self.loads.append(name)
        if name == self.lose_answer_of:
            self.lose_answer_of = None
            raise TimeoutError

    async def unload(self, name: str) -> None:
        assert indexed(self.names[name].parent, name) is None
        del self.names[name]

    async def canary(self, name: str, tokens: list[int]) -> list[float]:
        if name == self.die_at:
            self.ill = True
            raise self.last_word
        assert name in self.names
        self.scored.append(name)
        logprobs = read_manifest(self._learner.bucket, name).canary.logprobs
        return [x - 1.0 for x in logprobs] if name == self.off_at else logprobs


@pytest.fixture
def server(learner: StandIn) -> Server:
    return Server(learner)


@pytest.fixture
def policies(learner: StandIn, tmp_path: Path) -> Policies:
    return _policies(learner, tmp_path)


def _policies(learner: StandIn, folder: Path, reproof_s: float = 1e9) -> Policies:
    source = LocalCopies(learner.bucket, folder / "adapters")
    return Policies(source, learner.run, dtype="float32", slots=4, reproof_s=reproof_s)


def _settle(policies: Policies, server: Any, learner: StandIn) -> None:
    """Steps until there is nothing to do, as long as the server answers."""

    async def run() -> None:
        wanted = Wanted(learner.probe, learner.window[0], tuple(learner.window))
        for _ in range(20):
            if not await policies.step(server, wanted):
                return
        raise AssertionError("there is always something to do")

    asyncio.run(run())


def test_the_newest_is_proved_first_and_no_more_than_the_slots(learner, server, policies):
    v0 = learner.start()
    names = [learner.publish(i, learner.version(i)) for i in range(1, 6)]
    learner.point(*reversed(names), v0)
    _settle(policies, server, learner)
    assert server.loads == [learner.probe, names[4], names[3], names[2], names[1]]
    assert set(policies.proved) == set(names[1:])


def test_old_policies_stay_until_their_slot_is_needed(learner, server, policies):
    window = [learner.start()]
    _settle(policies, server, learner)
    everything = list(window)
    for i in range(1, 6):
        window = [learner.publish(i, learner.version(i)), *window][:3]
        everything.append(window[0])
        learner.point(*window)
        _settle(policies, server, learner)
        assert policies.proved == everything[-4:]
        assert set(server.names) == set(everything[-4:])


def test_a_lost_answer_is_no_verdict(learner, server, policies):
    v0 = learner.start()
    server.lose_answer_of = v0
    with pytest.raises(TimeoutError):
        _settle(policies, server, learner)
    assert policies.quarantined == {}
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    assert server.loads == [learner.probe, v0]


def test_a_name_that_the_server_lost_is_loaded_again(learner, server, policies, monkeypatch):
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    v0 = learner.start()
    _settle(policies, server, learner)
    server.names.clear()
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    assert server.loads == [learner.probe, v0, v0]


@pytest.mark.parametrize("last_word", [ConnectionError(), ServerError("HTTP 500: EngineCore encountered an issue")])
def test_what_kills_the_server_again_and_again_is_quarantined_for_a_while(
    learner, server, policies, last_word, monkeypatch
):
    v0 = learner.start()
    bad = learner.publish(1, learner.version(1))
    learner.point(bad, v0)
    server.die_at, server.last_word = bad, last_word
    for _ in range(3):
        with pytest.raises(ConnectionError):
            _settle(policies, server, learner)
        assert bad not in policies.quarantined
        server.names.clear()
        server.ill = False
        policies.forget_server()
    _settle(policies, server, learner)
    assert "died 3 times" in policies.quarantined[bad]
    assert policies.proved == [v0]
    # Not for ever: it may not have been to blame.
    server.die_at = None
    monkeypatch.setattr(module, "_DEATHS_S", 0.0)
    policies.forget_server()
    server.names.clear()
    _settle(policies, server, learner)
    assert policies.quarantined == {}
    assert set(policies.proved) == {bad, v0}


def test_servers_that_die_now_and_then_are_no_fault_of_what_they_have_loaded_since(learner, server, policies):
    v0 = learner.start()
    for _ in range(4):
        server.die_at, server.last_word = learner.probe, ConnectionError()
        with pytest.raises(ConnectionError):
            _settle(policies, server, learner)
        server.ill, server.die_at = False, None
        policies.forget_server()
        server.names.clear()
        _settle(policies, server, learner)
        assert policies.proved == [v0]
        policies.forget_server()
        server.names.clear()


def test_the_files_of_a_run_that_is_over_go(learner, server, policies, monkeypatch):
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    monkeypatch.setattr("grpo_jax.generator.files._KEEP_S", 0.0)
    learner.start()
    _settle(policies, server, learner)

    async def leave() -> None:
        for _ in range(3):
            await policies.retire(server)
            await policies.sweep(replace(Load(), asked_at=time.monotonic()))

    asyncio.run(leave())
    assert policies.held == []


def test_a_new_server_proves_everything_again(learner, server, policies):
    v0 = learner.start()
    _settle(policies, server, learner)
    server.names.clear()
    policies.forget_server()
    assert policies.proved == []
    _settle(policies, server, learner)
    assert server.loads == [learner.probe, v0] * 2


def test_another_probe_calibrates_again(learner, server, policies):
    v0 = learner.start()
    _settle(policies, server, learner)
    learner.probe = learner.publish(None, learner.version(77, size=0.4))
    learner.point(v0)
    _settle(policies, server, learner)
    assert server.loads[-1] == learner.probe
    assert policies.proved == [v0]


def test_files_stay_while_a_request_names_them_and_go_afterwards(learner, server, policies, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_KEEP_S", 0.0)
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    v0 = learner.start()
    _settle(policies, server, learner)
    assert _stored(tmp_path) == {v0, learner.probe}
    now = time.monotonic()
    for load in (Load(busy=frozenset({learner.probe}), asked_at=now), Load(asked_at=now - 60)):
        asyncio.run(policies.sweep(load))
        assert _stored(tmp_path) == {v0, learner.probe}
    asyncio.run(policies.sweep(Load(busy=frozenset({v0}), asked_at=now)))
    assert _stored(tmp_path) == {v0}


def test_files_stay_until_the_server_was_seen_without_the_name(learner, server, policies, tmp_path, monkeypatch):
    """A request may have brought the name back just before it was withdrawn."""
    monkeypatch.setattr(files, "_KEEP_S", 0.2)
    v0 = learner.start()
    _settle(policies, server, learner)
    server.names[learner.probe] = tmp_path / "adapters" / learner.probe
    time.sleep(0.4)
    asyncio.run(policies.sweep(Load(asked_at=time.monotonic())))
    assert _stored(tmp_path) == {v0, learner.probe}
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    _settle(policies, server, learner)
    asyncio.run(policies.sweep(Load(asked_at=time.monotonic())))
    assert _stored(tmp_path) == {v0, learner.probe}
    assert policies.proved == [v0]


def test_what_an_earlier_server_held_goes_once_nobody_wants_it(learner, server, policies, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_KEEP_S", 0.0)
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    v0 = learner.start()
    _settle(policies, server, learner)
    server.names.clear()
    policies.forget_server()
    assert indexed(tmp_path / "adapters", v0) is not None  # the next server may take it
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1)
    _settle(policies, server, learner)
    assert indexed(tmp_path / "adapters", v0) is None
    asyncio.run(policies.sweep(Load(asked_at=time.monotonic())))
    assert _stored(tmp_path) == {v1}


def test_the_index_holds_what_is_proved_and_nothing_else(learner, server, policies, tmp_path):
    folder = tmp_path / "adapters"
    v0 = learner.start()
    server.off_at = bad = learner.publish(1, learner.version(1))
    learner.point(bad, v0)
    _settle(policies, server, learner)
    assert set(json.loads((folder / INDEX).read_text())) == {v0}
    assert indexed(folder, v0) == str(server.names[v0])  # the path of the load: vLLM's prefix cache goes by it
    names = [learner.publish(i, learner.version(i)) for i in (2, 3, 4, 5)]
    learner.point(*reversed(names))
    _settle(policies, server, learner)
    assert set(json.loads((folder / INDEX).read_text())) == set(names) == set(server.names)


def test_what_the_server_registered_by_itself_meanwhile_is_proved_not_refused(learner, server, policies):
    v0 = learner.start()
    server.registers_by_itself = v0
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    assert policies.quarantined == {}


def test_files_that_a_server_may_be_reading_are_not_written_again(learner, server, policies, tmp_path):
    v0 = learner.start()
    _settle(policies, server, learner)
    weights = tmp_path / "adapters" / v0 / "adapter_model.safetensors"
    before = weights.stat().st_mtime_ns
    server.names.clear()
    policies.forget_server()
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    server.names.clear()
    policies.forget_server()
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    assert weights.read_bytes() == learner.bucket.read(layout.adapter(v0, weights.name))


def test_adapters_of_others_are_left_alone(learner, server, policies):
    """On a server without an agent there may be some; a slot of theirs is not ours to empty."""
    server.foreign = ["someone-elses", "other.v000001.abcdef01"]
    v0 = learner.start()
    names = [learner.publish(i, learner.version(i)) for i in range(1, 6)]
    learner.point(*reversed(names), v0)
    _settle(policies, server, learner)
    assert set(policies.loaded) == set(names[1:])
    assert policies.proved == policies.loaded


def _run_for(policies: Policies, server: Any, learner: StandIn, steps: int) -> None:
    async def run() -> None:
        wanted = Wanted(learner.probe, learner.window[0], tuple(learner.window))
        for _ in range(steps):
            await policies.step(server, wanted)
            await asyncio.sleep(0.001)

    asyncio.run(run())


def test_proved_policies_are_proved_again_and_again(learner, server, tmp_path):
    policies = _policies(learner, tmp_path, reproof_s=0.003)
    v0 = learner.start()
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1, v0)
    _run_for(policies, server, learner, 100)
    counts = Counter(server.scored)
    assert min(counts[v0], counts[v1]) > 5
    assert counts[learner.probe] == 1
    record = policies.record()
    assert record["proofs"] == counts.total()
    assert set(record["proved_at"]) == {v0, v1}
    assert abs(min(record["proved_at"].values()) - time.time()) < 60
    assert record["refused_total"] == 0


def test_a_policy_that_is_proved_no_more_is_quarantined_with_the_reason(learner, server, tmp_path):
    policies = _policies(learner, tmp_path, reproof_s=0.003)
    v0 = learner.start()
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1, v0)
    _run_for(policies, server, learner, 20)
    assert set(policies.proved) == {v0, v1}
    server.off_at = v1
    _run_for(policies, server, learner, 100)
    assert policies.proved == [v0]
    assert "proved, and is no more: the canary's log-probabilities differ" in policies.quarantined[v1]
    assert set(server.names) == {v0}
    assert indexed(tmp_path / "adapters", v1) is None
    assert policies.record()["refused_total"] == 1


@pytest.mark.parametrize("last_word", [ConnectionError(), TimeoutError(), ServerError("HTTP 500: it is ill")])
def test_a_server_that_is_away_when_a_policy_is_proved_again_is_no_verdict(learner, server, tmp_path, last_word):
    policies = _policies(learner, tmp_path, reproof_s=0.003)
    v0 = learner.start()
    _run_for(policies, server, learner, 5)
    server.die_at, server.last_word = v0, last_word
    for _ in range(5):  # more often than a server may die of one policy
        with pytest.raises((ConnectionError, TimeoutError)):
            _run_for(policies, server, learner, 200)
    server.die_at, server.ill = None, False
    _run_for(policies, server, learner, 5)
    assert policies.proved == [v0]
    assert policies.quarantined == {}


def test_newer_policies_come_before_repeated_proofs(learner, server, tmp_path):
    policies = _policies(learner, tmp_path, reproof_s=1e-6)
    v0 = learner.start()
    _run_for(policies, server, learner, 20)
    assert policies.proved == [v0]
    v1 = learner.publish(1, learner.version(1))
    learner.point(v1, v0)
    _run_for(policies, server, learner, 1)
    assert v1 in policies.proved


def test_without_a_mount_only_what_is_listed_is_proved_and_nothing_is_loaded(learner, server):
    source = Mounted(learner.bucket, learner.run, None)
    policies = Policies(source, learner.run, dtype="float32", slots=4, reproof_s=1e9)
    v0 = learner.start()
    good, bad, absent = (learner.publish(i, learner.version(i)) for i in (1, 2, 3))
    learner.point(absent, bad, good, v0)
    server.off_at = bad
    server.names = {good: Path("x"), bad: Path("x"), v0: Path("x")}
    _settle(policies, server, learner)
    assert set(policies.proved) == {good, v0}
    assert "differ from the learner's" in policies.quarantined[bad]
    assert set(server.names) == {good, bad, v0}
    assert server.loads == []
    assert learner.probe not in server.scored


def test_without_a_mount_a_listed_probe_that_is_not_reproduced_refuses_everything(learner, server):
    source = Mounted(learner.bucket, learner.run, None)
    policies = Policies(source, learner.run, dtype="float32", slots=4, reproof_s=1e9)
    v0 = learner.start()
    server.names = {v0: Path("x")}
    _settle(policies, server, learner)
    assert policies.proved == [v0]
    server.names[learner.probe] = Path("x")
    server.off_at = learner.probe
    policies.forget_server()
    _settle(policies, server, learner)
    assert policies.proved == []
    assert "does not reproduce the probe" in policies.quarantined[v0]


def _stored(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "adapters").iterdir() if path.is_dir()}


def test_refusals_of_names_that_nobody_wants_any_more_are_forgotten(learner, server, policies):
    v0 = learner.start()
    server.off_at = bad = learner.publish(1, learner.version(1))
    learner.point(bad, v0)
    _settle(policies, server, learner)
    assert set(policies.quarantined) == {bad}
    v2 = learner.publish(2, learner.version(2))
    learner.point(v2, v0)
    _settle(policies, server, learner)
    assert policies.quarantined == {}
    assert bad not in server.names


def test_a_name_that_is_no_policy_is_quarantined_and_touches_nothing(learner, server, policies, tmp_path):
    v0 = learner.start()
    learner.point("../../etc", v0)
    _settle(policies, server, learner)
    assert "not a policy name" in policies.quarantined["../../etc"]
    assert policies.proved == [v0]


def test_a_path_in_the_place_of_a_name_deletes_nothing(learner, server, policies, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_KEEP_S", 0.0)
    monkeypatch.setattr(module, "_COMPARE_S", 0.0)
    (tmp_path / "victim").mkdir()
    v0 = learner.start()
    learner.point("../victim", v0)
    _settle(policies, server, learner)
    learner.point(v0)
    _settle(policies, server, learner)
    asyncio.run(policies.sweep(Load(asked_at=time.monotonic())))
    assert (tmp_path / "victim").is_dir()
    assert policies.held == [v0]


METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_running{engine="1",model_name="base"} 1.0
vllm:num_requests_waiting{engine="0",model_name="base"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 9.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7960144610522604e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.7960144620522604e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters=""} 1.7960144600522604e+09
"""


def test_metrics_are_the_newest_series_and_the_sum_of_engines():
    assert parse_metrics(METRICS) == Load(4, 2, frozenset({"a", "b", "c"}))
    assert parse_metrics("") == Load()
