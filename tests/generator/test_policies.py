"""Reconciling against a server that misbehaves: answers lost, names lost, deaths, and requests that still run."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.adapters.manifest import read_manifest
from grpo_jax.generator import policies as module
from grpo_jax.generator.client import Load, ServerError, parse_metrics
from grpo_jax.generator.policies import Policies, Wanted
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

    async def healthy(self) -> bool:
        return not self.ill

    async def adapters(self) -> set[str]:
        return set(self.names)

    async def load(self, name: str, folder: Path) -> None:
        if name in self.names:
            raise ServerError("HTTP 400: already been loaded")
        assert (folder / "adapter_model.safetensors").is_file()
        self.names[name] = folder
        self.loads.append(name)
        if name == self.lose_answer_of:
            self.lose_answer_of = None
            raise TimeoutError

    async def unload(self, name: str) -> None:
        del self.names[name]

    async def canary(self, name: str, tokens: list[int]) -> list[float]:
        if name == self.die_at:
            self.ill = True
            raise self.last_word
        assert name in self.names
        logprobs = read_manifest(self._learner.bucket, name).canary.logprobs
        return [x - 1.0 for x in logprobs] if name == self.off_at else logprobs


@pytest.fixture
def server(learner: StandIn) -> Server:
    return Server(learner)


@pytest.fixture
def policies(learner: StandIn, tmp_path: Path) -> Policies:
    return Policies(learner.bucket, tmp_path / "adapters", dtype="float32", slots=4)


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
def test_what_kills_the_server_again_and_again_is_quarantined(learner, server, policies, last_word):
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
    monkeypatch.setattr(module, "_KEEP_FILES_S", 0.0)
    v0 = learner.start()
    _settle(policies, server, learner)
    folder = tmp_path / "adapters"
    assert {path.name for path in folder.iterdir()} == {v0, learner.probe}
    now = time.monotonic()
    for load in (Load(busy=frozenset({learner.probe}), asked_at=now), Load(asked_at=now - 60)):
        asyncio.run(policies.sweep(load))
        assert {path.name for path in folder.iterdir()} == {v0, learner.probe}
    asyncio.run(policies.sweep(Load(busy=frozenset({v0}), asked_at=now)))
    assert {path.name for path in folder.iterdir()} == {v0}


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
