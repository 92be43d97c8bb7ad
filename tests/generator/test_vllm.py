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

from grpo_jax.generator import files, policies
from grpo_jax.generator.client import EngineClient
from grpo_jax.generator.policies import Policies, Wanted
from grpo_jax.generator.sources import LocalCopies
from grpo_jax.models.config import LoraConfig
from grpo_jax.storage import layout
from tests.conftest import VllmServer
from tests.generator.agents import AgentProcess, wait_until_gone
from tests.generator.calls import call, complete, prompt_logprobs
from tests.generator.settings import make_config
from tests.generator.stand_in import StandIn

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=8, alpha=16.0)


class Subject:
    def __init__(self, server: VllmServer, folder: Path):
        self.url, self.adapters, self.slots = server.url, folder / "adapters", server.config.slots
        self.learner = StandIn(str(folder / "bucket"), "real", server.model_dir, LORA)
        self.policies = Policies(
            LocalCopies(self.learner.bucket, self.adapters),
            self.learner.run,
            dtype="float32",
            slots=self.slots,
            reproof_s=server.config.fleet.reproof_s,
        )

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
        return complete(self.url, **body)

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


def test_more_adapters_than_slots_are_read_again_from_the_disk(subject, tmp_path):
    learner, extra = subject.learner, [f"extra{i}" for i in range(subject.slots + 1)]
    for i, name in enumerate(extra):
        for file, data in learner.files(learner.version(50 + i, size=0.03)).items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_bytes(data)
        body = {"lora_name": name, "lora_path": str(tmp_path / name)}
        assert call(f"{subject.url}/v1/load_lora_adapter", body).status == 200
        subject.complete(model=name, prompt=_prompts(1)[0], max_tokens=1)
    try:
        for policy, tree in (
            (learner.window[0], learner.version(2, size=0.03)),
            (learner.window[-1], learner.version(1, size=0.0)),
        ):
            measured = prompt_logprobs(subject.url, policy, learner.tokens.tolist())
            np.testing.assert_allclose(measured, learner.logprobs(tree), atol=5e-4)
    finally:
        for name in extra:
            call(f"{subject.url}/v1/unload_lora_adapter", {"lora_name": name})


def _cache_hits(url: str) -> float:
    lines = call(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_what_one_policy_has_cached_is_not_seen_by_the_next(subject):
    learner, prompt = subject.learner, _prompts(1, 40)[0]
    trees = {version: learner.version(version, size=0.03) for version in (21, 22)}
    first, second = (learner.publish(version, tree) for version, tree in trees.items())
    by_name = dict(zip((first, second), trees.values(), strict=True))
    learner.point(second, first)
    subject.settle()

    def fault(policy: str, other: str) -> tuple[float, float]:
        """How far the next token's log-probability is from the learner's, and how far another policy's would be."""
        choice = subject.complete(model=policy, prompt=prompt, max_tokens=1, temperature=0.0)[0]
        (token,) = choice["token_ids"]
        logits = [learner.next_logits(by_name[name], prompt) for name in (policy, other)]
        right, wrong = (x[token] - x.max() - np.log(np.sum(np.exp(x - x.max()))) for x in logits)
        (measured,) = choice["logprobs"]["token_logprobs"]
        return abs(measured - right), abs(wrong - right)

    hits = _cache_hits(subject.url)
    for policy, other in ((first, second), (first, second), (second, first), (first, second), (second, first)):
        off, apart = fault(policy, other)
        assert off < 5e-4 < apart / 10
    assert _cache_hits(subject.url) >= hits + 3 * 32  # else there was nothing to be stale


def test_a_request_that_outlives_its_window_is_finished_before_its_files_go(subject, monkeypatch):
    monkeypatch.setattr(files, "_KEEP_S", 0.2)
    monkeypatch.setattr(policies, "_COMPARE_S", 0.0)
    learner, prompt, tree = subject.learner, _prompts(1)[0], subject.learner.version(30, size=0.03)
    old = learner.publish(30, tree)
    new = [learner.publish(i, learner.version(i, size=0.03)) for i in range(31, 31 + subject.slots)]
    learner.point(old)
    subject.settle()
    assert old in subject.policies.proved
    with ThreadPoolExecutor(1) as pool:
        asked = {"model": old, "prompt": prompt, "n": 8, "max_tokens": 120, "ignore_eos": True, "seed": 4}
        request = pool.submit(subject.complete, **asked)
        asyncio.run(_until_busy(subject.url, old))
        learner.point(*reversed(new))
        subject.settle()
        assert set(subject.policies.proved) == set(new)
        assert old not in {model["id"] for model in call(f"{subject.url}/v1/models").json()["data"]}
        for _ in range(4):
            time.sleep(0.3)
            subject.settle()
            assert (subject.adapters / old).is_dir()
        assert not request.done()
        choices = request.result()
    assert len(choices) == 8
    for choice in choices[:2]:
        sequence = [*prompt, *choice["token_ids"]]
        expected = learner.logprobs(tree, sequence)[len(prompt) - 1 :]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=2e-3)
        assert len(choice["token_ids"]) == 120
    deadline = time.monotonic() + 30
    while (subject.adapters / old).exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
        subject.settle()
    assert all((subject.adapters / name).is_dir() for name in new)


async def _until_busy(url: str, policy: str) -> None:
    async with aiohttp.ClientSession() as session:
        await _until(EngineClient(session, url), lambda load: policy in load.busy)


def test_sigkill_of_an_agent_takes_vllm_and_its_engine_along(smollm2_dir, tmp_path):
    agent = AgentProcess(make_config(tmp_path / "bucket", smollm2_dir, generator={"engine": "vllm"}), "r0", tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (engine := [pid for pid in agent.server_pids() if "EngineCore" in _command_line(pid)]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        everything = agent.server_pids()
        assert len(everything) > len(engine)
        agent.signal(signal.SIGKILL)
        wait_until_gone(everything)
    finally:
        agent.end()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
