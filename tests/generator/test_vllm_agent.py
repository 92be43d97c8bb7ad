"""An agent with a real vLLM: late join, policies that vLLM loses and takes back, restarts."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.generator.index import run_folder
from tests.generator.calls import call, complete, prompt_logprobs
from tests.generator.served import Served
from tests.generator.settings import VLLM_START_S

pytestmark = pytest.mark.slow


def _scores_right(served: Served, name: str, version: int) -> None:
    """Whether a policy's canary is the learner's, asked of the server itself."""
    tokens = served.learner.tokens.tolist()
    expected = served.learner.logprobs(served.learner.version(version))
    np.testing.assert_allclose(prompt_logprobs(served.url, name, tokens), expected, atol=1e-3)


def _listed(served: Served) -> set[str]:
    return {model["id"] for model in call(f"{served.url}/v1/models").json()["data"]}


def _server_log(served: Served) -> str:
    return (served.agent.work_dir / "vllm-r0.log").read_text(errors="replace")


def _published(served: Served) -> tuple[str, int]:
    """A new good policy, proved, and its version."""
    version = served.following
    served.good = served.next(served.tree())
    served.agent.proved(served.good)
    return served.good, version


def test_a_replica_that_joins_late_proves_the_window(vllm_agent):
    window = set(vllm_agent.joined["proved"])
    assert len(window) == 3
    assert vllm_agent.v0 not in window
    assert vllm_agent.joined["quarantined"] == {}
    assert vllm_agent.joined["engine"] == "vllm"


def test_a_proved_policy_that_vllm_has_lost_is_taken_back_at_a_request(vllm_agent):
    name, version = _published(vllm_agent)
    for _ in range(5):  # the agent itself may be faster, now and then
        assert call(f"{vllm_agent.url}/v1/unload_lora_adapter", {"lora_name": name}).status == 200
        _scores_right(vllm_agent, name, version)
        if f"Resolved and loaded LoRA adapter '{name}'" in _server_log(vllm_agent):
            break
    assert f"Resolved and loaded LoRA adapter '{name}'" in _server_log(vllm_agent)
    assert name in _listed(vllm_agent)
    assert name in vllm_agent.agent.heartbeat()["proved"]


def test_nothing_else_is_taken_from_the_disk(vllm_agent):
    name, version = _published(vllm_agent)
    adapters: Path = run_folder(vllm_agent.agent.work_dir / "adapters", vllm_agent.learner.run)
    tokens = vllm_agent.learner.tokens.tolist()
    base = prompt_logprobs(vllm_agent.url, "base", tokens)
    outside = adapters.parent / "tiny.v000800.deadbeef"
    inside = adapters / "tiny.v000801.deadbeef"
    for folder in (outside, inside):
        shutil.copytree(adapters / name, folder)
    names = (
        inside.name,
        outside.name,
        f"../{outside.name}",
        "../x",
        str(inside),
        "index.json",
        "tiny.v000900.01234567",
        vllm_agent.learner.probe,
    )
    try:
        for other in names:
            answer = call(f"{vllm_agent.url}/v1/completions", {"model": other, "prompt": tokens, "max_tokens": 1})
            assert (other, answer.status) == (other, 404)
    finally:
        shutil.rmtree(outside)
    assert not _listed(vllm_agent) & set(names)
    assert prompt_logprobs(vllm_agent.url, "base", tokens) == pytest.approx(base, abs=1e-5)
    _scores_right(vllm_agent, name, version)


def test_a_quarantined_policy_is_not_taken_back(vllm_agent):
    learner = vllm_agent.learner
    bad = vllm_agent.next(vllm_agent.tree(), files=learner.files(learner.version(555)))
    assert "differ from the learner's" in vllm_agent.agent.quarantined(bad)
    answer = call(f"{vllm_agent.url}/v1/completions", {"model": bad, "prompt": [5, 6], "max_tokens": 1})
    assert answer.status == 404


def test_proofs_are_repeated(vllm_agent):
    name, _ = _published(vllm_agent)
    before = vllm_agent.agent.heartbeat()
    record = vllm_agent.agent.wait_for(lambda r: r["proved_at"].get(name, 0.0) > before["proved_at"][name])
    assert record["proofs"] > before["proofs"]
    assert name in record["proved"]


def test_after_a_kill_of_the_server_everything_is_proved_again(vllm_agent):
    name, version = _published(vllm_agent)
    record = vllm_agent.agent.heartbeat()
    for pid in vllm_agent.agent.server_pids():
        os.kill(pid, signal.SIGKILL)
    again = vllm_agent.agent.wait_for(
        lambda r: r["restarts"] > record["restarts"] and set(vllm_agent.learner.window) <= set(r["proved"]),
        wait_s=VLLM_START_S,
    )
    assert again["quarantined"] == {}
    assert again["proofs"] > record["proofs"]
    assert again["proved_at"][name] > record["proved_at"][name]
    _scores_right(vllm_agent, name, version)
    assert complete(vllm_agent.url, model=name, prompt=[5, 6, 7], max_tokens=2)[0]["token_ids"]
