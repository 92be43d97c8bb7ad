"""Against a real vLLM: what the agent relies on, and what of it vLLM alone would get wrong."""

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load, save

from grpo_jax.generator.client import EngineClient
from grpo_jax.generator.policies import Policies, Wanted
from grpo_jax.models.config import LoraConfig
from grpo_jax.storage import layout
from tests.conftest import VllmServer
from tests.generator.agents import AgentProcess, wait_until_gone
from tests.generator.calls import call
from tests.generator.conftest import make_config
from tests.generator.stand_in import StandIn

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=8, alpha=16.0)


class Subject:
    def __init__(self, server: VllmServer, folder: Path):
        self.url = server.url
        self.learner = StandIn(str(folder / "bucket"), "real", server.model_dir, LORA)
        self.policies = Policies(self.learner.bucket, folder / "adapters", dtype="float32", slots=server.config.slots)

    def settle(self) -> None:
        """What the agent does until there is nothing left to do."""

        async def run() -> None:
            async with aiohttp.ClientSession() as session:
                client = EngineClient(session, self.url)
                wanted = Wanted(self.learner.probe, self.learner.window[0], tuple(self.learner.window))
                while await self.policies.step(client, wanted):
                    pass
                await self.policies.sweep(await client.load_now())

        asyncio.run(run())

    def complete(self, **body: Any) -> list[dict[str, Any]]:
        asked = {"logprobs": 0, "return_token_ids": True, "temperature": 1.0, "max_tokens": 8, **body}
        answer = call(f"{self.url}/v1/completions", asked)
        assert answer.status == 200, answer.text
        return answer.json()["choices"]

    def scored(self, model: str, prompt: list[int]) -> np.ndarray:
        """Log-probabilities of the prompt and of the best next tokens."""
        choice = self.complete(model=model, prompt=prompt, temperature=0.0, max_tokens=4, prompt_logprobs=0)[0]
        prompt_logprobs = [next(iter(x.values()))["logprob"] for x in choice["prompt_logprobs"][1:]]
        return np.array(prompt_logprobs + choice["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def subject(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    subject = Subject(vllm_server, tmp_path_factory.mktemp("real"))
    v0 = subject.learner.start()
    subject.learner.point(subject.learner.publish(1, subject.learner.version(1, size=0.03)), v0)
    subject.settle()
    return subject


def _prompts(count: int, length: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return rng.integers(100, 8000, (count, length)).tolist()


def test_probe_and_versions_are_proved_against_jax(subject):
    assert subject.policies.quarantined == {}
    assert set(subject.policies.proved) == set(subject.learner.window)
    names = {model["id"] for model in call(f"{subject.url}/v1/models").json()["data"]}
    assert set(subject.learner.window) <= names
    assert subject.learner.probe not in names


def _renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.replace("base_model.model.model.", "base_model.model."): value for key, value in tensors.items()}


def test_vllm_serves_the_base_under_keys_that_match_nothing_and_the_probe_shows_it(vllm_server, tmp_path):
    """The exporter's mistake: probe and policies alike. Keys equal to the probe's prove nothing then; numbers do."""
    wrong = Subject(vllm_server, tmp_path)
    learner = wrong.learner
    tree = learner.version(1001, size=0.3)
    files = learner.files(tree)
    learner.probe = learner.publish(
        None, tree, files={**files, layout.ADAPTER_WEIGHTS: save(_renamed(load(files[layout.ADAPTER_WEIGHTS])))}
    )
    learner.point(learner.publish(0, learner.version(1000, size=0.0)))
    wrong.settle()
    assert "serves the base" in wrong.policies.quarantined[learner.probe]
    assert wrong.policies.proved == []


def test_a_wrong_version_is_caught_by_its_numbers(subject):
    v0 = subject.learner.window[-1]
    previous, now = subject.learner.version(1, size=0.03), subject.learner.version(2, size=0.03)
    bad = subject.learner.publish(2, now, files=subject.learner.files(previous))
    good = subject.learner.publish(3, now)
    subject.learner.point(good, bad, v0)
    subject.settle()
    assert "differ from the learner's" in subject.policies.quarantined[bad]
    assert {good, v0} <= set(subject.policies.proved)


def test_adapters_and_the_base_in_one_batch_are_as_if_alone(subject):
    first, second = subject.learner.window[0], subject.learner.window[-1]
    jobs = [(model, prompt) for prompt in _prompts(5) for model in (first, second, "base")]
    alone = [subject.scored(*job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: subject.scored(*job), jobs))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4)
    for i in range(0, len(jobs), 3):  # v0 is the base, the other one is not
        np.testing.assert_allclose(alone[i + 1][:19], alone[i + 2][:19], atol=2e-4)
        assert np.abs(alone[i] - alone[i + 2]).max() > 0.05


def test_a_canary_among_running_requests_is_right_and_the_server_lives(subject):
    policy, tokens = subject.learner.window[0], subject.learner.tokens.tolist()
    expected = subject.learner.logprobs(subject.learner.version(2, size=0.03))

    async def run() -> list[float]:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, subject.url)
            busy = asyncio.create_task(
                asyncio.to_thread(
                    subject.complete, model=policy, prompt=_prompts(1)[0], n=72, max_tokens=16, seed=1, ignore_eos=True
                )
            )
            while (await client.load_now()).running < 60:
                await asyncio.sleep(0.02)
            measured = await client.canary(policy, tokens)
            assert not busy.done()  # 72 requests on 64 seats: it has overtaken those that waited
            assert len(await busy) == 72
            return measured

    np.testing.assert_allclose(asyncio.run(run()), expected, atol=5e-4)


def test_seeds_decide_samples(subject):
    asked = {"model": subject.learner.window[0], "prompt": _prompts(1)[0], "n": 4, "max_tokens": 12}

    def tokens(**settings: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in subject.complete(**asked, **settings)]

    first = tokens(seed=2**62 + 1)
    assert tokens(seed=2**62 + 1) == first
    assert tokens(seed=5) != first
    assert len({tuple(x) for x in first}) == 4


def test_sampled_logprobs_are_those_of_the_learner_after_temperature(subject):
    prompt, temperature = _prompts(1)[0], 0.7
    tree = subject.learner.version(2, size=0.03)
    choice = subject.complete(
        model=subject.learner.window[0], prompt=prompt, max_tokens=5, seed=3, temperature=temperature
    )[0]
    for i, token in enumerate(choice["token_ids"]):
        scaled = subject.learner.next_logits(tree, [*prompt, *choice["token_ids"][:i]]) / temperature
        expected = scaled[token] - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))
        assert choice["logprobs"]["token_logprobs"][i] == pytest.approx(expected, abs=5e-4)


def test_metrics_name_the_adapters_of_running_requests_and_forget_them(subject):
    policy = subject.learner.window[0]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, subject.url)
            busy = asyncio.create_task(
                asyncio.to_thread(
                    subject.complete, model=policy, prompt=_prompts(1)[0], max_tokens=100, ignore_eos=True
                )
            )
            await _until(client, lambda load: policy in load.busy and load.running == 1)
            await busy
            await _until(client, lambda load: not load.busy and load.running == 0)

    asyncio.run(run())


async def _until(client: EngineClient, condition: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition(await client.load_now()):
            await asyncio.sleep(0.02)


def test_sigkill_of_an_agent_takes_vllm_and_its_engine_along(smollm2_dir, tmp_path):
    agent = AgentProcess(make_config(tmp_path / "bucket", smollm2_dir, generator={"engine": "vllm"}), "r0", tmp_path)
    deadline = time.monotonic() + 120
    while not (engine := [pid for pid in agent.server_pids() if "spawn_main" in _command_line(pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    everything = agent.server_pids()
    assert len(everything) > len(engine)
    agent.signal(signal.SIGKILL)
    wait_until_gone(everything)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
