"""The reference server keeps vLLM's contract, and its numbers are those of the model."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_jax.generator.process import free_port
from grpo_jax.generator.reference_engine import ROWS, sample
from tests.generator.calls import Answer, call
from tests.generator.settings import LORA, make_config
from tests.generator.stand_in import StandIn


class Server:
    def __init__(self, learner: StandIn, folder: Path):
        self.learner, self.folder, self.port = learner, folder, free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        env = make_config(folder, learner.model_dir).generator.env
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_jax.generator.reference", "--model", str(learner.model_dir)),
                *("--port", str(self.port), "--max-model-len", "64", "--max-lora-rank", "8", "--max-loras", "3"),
            ],
            env={**os.environ, **env, "JAX_PLATFORMS": "cpu"},
        )
        deadline = time.monotonic() + 120
        while not self.healthy():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def healthy(self) -> bool:
        try:
            return self.get("/health").status == 200
        except OSError:
            return False

    def get(self, path: str) -> Answer:
        return call(f"{self.url}{path}", timeout_s=10)

    def post(self, path: str, **body: Any) -> Answer:
        return call(f"{self.url}{path}", body)

    def post_and_leave(self, after_s: float) -> None:
        """A request that takes long, of a client that does not wait for it."""
        body = {"model": "base", "prompt": PROMPT, "n": 400, "max_tokens": 58, "ignore_eos": True}
        with pytest.raises(TimeoutError):
            call(f"{self.url}/v1/completions", body, timeout_s=after_s)

    def complete(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post("/v1/completions", **{"logprobs": 0, "return_token_ids": True, **body})
        assert answer.status == 200, answer.text
        return answer.json()["choices"]

    def adapter(self, seed: int) -> tuple[str, Any]:
        """(name, tree) of an adapter, loaded."""
        tree, name = self.learner.version(seed), f"a{seed}"
        folder = self.write(name, self.learner.files(tree))
        if name not in self.names():
            assert self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder)).status == 200
        return name, tree

    def write(self, name: str, files: dict[str, bytes]) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        return folder

    def names(self) -> list[str]:
        return [model["id"] for model in self.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reference")
    subject = Server(StandIn(str(folder / "bucket"), "tiny", tiny_dir, LORA), folder)
    yield subject
    subject.process.kill()
    subject.process.wait()


PROMPT = [5, 17, 200, 31, 9]


def test_prompt_logprobs_are_the_learners(server):
    name, tree = server.adapter(1)
    tokens = server.learner.tokens.tolist()
    answer = server.complete(model=name, prompt=tokens, max_tokens=1, temperature=1.0, prompt_logprobs=0)[0]
    given = answer["prompt_logprobs"]
    assert given[0] is None
    measured = [given[i][str(tokens[i])]["logprob"] for i in range(1, len(tokens))]
    np.testing.assert_allclose(measured, server.learner.logprobs(tree), atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_the_models_after_temperature(server, temperature):
    name, tree = server.adapter(1)
    for choice in server.complete(model=name, prompt=PROMPT, n=3, seed=4, max_tokens=6, temperature=temperature):
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert len(tokens) == len(logprobs)
        for i, token in enumerate(tokens):
            scaled = server.learner.next_logits(tree, [*PROMPT, *tokens[:i]]) / temperature
            assert logprobs[i] == pytest.approx(scaled[token] - np.log(np.sum(np.exp(scaled))), abs=1e-5)


def test_a_seed_repeats_its_samples_and_others_differ(server):
    name, _ = server.adapter(1)

    def tokens(**settings: Any) -> list[list[int]]:
        choices = server.complete(model=name, prompt=PROMPT, max_tokens=8, temperature=1.0, **settings)
        return [choice["token_ids"] for choice in choices]

    first = tokens(seed=11, n=4)
    assert tokens(seed=11, n=4) == first
    assert tokens(seed=12, n=3) == first[1:]  # sample i of a request has the seed plus i
    assert len({tuple(x) for x in first}) > 1
    assert tokens() != tokens()


def test_samples_follow_the_distribution(server):
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    rng = np.random.default_rng(0)
    drawn = [sample(logits, 1.0, rng)[0] for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, np.exp(logits), atol=0.03)


def test_temperature_0_takes_the_best_token(server):
    name, tree = server.adapter(1)
    choice = server.complete(model=name, prompt=PROMPT, max_tokens=1, temperature=0.0)[0]
    assert choice["token_ids"] == [int(np.argmax(server.learner.next_logits(tree, PROMPT)))]


def test_adapters_beside_each_other_do_not_mix(server):
    """More sequences than rows, of three functions, at the same time: each as if alone."""
    models = [server.adapter(1)[0], server.adapter(2)[0], "base"]
    asked = {"prompt": PROMPT, "n": ROWS - 2, "seed": 3, "max_tokens": 6, "temperature": 1.0}
    alone = {model: [c["token_ids"] for c in server.complete(model=model, **asked)] for model in models}
    together: dict[str, list[list[int]]] = {}

    def ask(model: str) -> None:
        together[model] = [c["token_ids"] for c in server.complete(model=model, **asked)]

    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len({str(tokens) for tokens in alone.values()}) == 3


def test_eos_ends_a_completion_and_is_part_of_it(server):
    eos = 257
    logits = server.learner.next_logits(server.learner.version(1), PROMPT)
    assert np.isfinite(logits[eos])
    ended = []
    for seed in range(40):
        choices = server.complete(model=server.adapter(1)[0], prompt=PROMPT, n=8, seed=8 * seed, max_tokens=40)
        ended += [c for c in choices if c["finish_reason"] == "stop"]
        if ended:
            break
    for choice in ended:
        assert choice["token_ids"][-1] == eos
        assert eos not in choice["token_ids"][:-1]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert ended


def test_a_completion_ends_where_the_context_does(server):
    choice = server.complete(model="base", prompt=[7] * 60, max_tokens=16, ignore_eos=True)[0]
    assert len(choice["token_ids"]) == 4
    assert choice["finish_reason"] == "length"


def test_a_stop_text_ends_a_completion(server):
    free = server.complete(model="base", prompt="abc", max_tokens=12, seed=5, ignore_eos=True)[0]
    end = next(character for character in free["text"] if character.isascii() and character.isprintable())
    choice = server.complete(model="base", prompt="abc", max_tokens=12, seed=5, ignore_eos=True, stop=[end])[0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == free["text"].partition(end)[0]
    assert choice["token_ids"] == free["token_ids"][: len(choice["token_ids"])]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"model": "nobody", "prompt": PROMPT}, 404, "does not exist"),
        ({"model": "base", "prompt": PROMPT, "top_p": 0.9}, 400, "top_p"),
        ({"model": "base", "prompt": PROMPT, "stream": True}, 400, "stream"),
        ({"model": "base", "prompt": PROMPT, "temprature": 1.0}, 400, "temprature"),
        ({"model": "base", "prompt": [7] * 64}, 400, "64 tokens"),
        ({"model": "base", "prompt": [99999]}, 400, "vocabulary"),
        ({"model": "base", "prompt": []}, 400, "prompt"),
        ({"model": "base", "prompt": PROMPT, "n": 0}, 400, "n: "),
    ],
)
def test_what_is_wrong_with_a_request_is_said(server, body, status, reason):
    answer = server.post("/v1/completions", **body)
    assert answer.status == status
    assert reason in answer.error
    assert answer.json()["error"]["code"] == status


def test_loading_and_unloading_answer_as_vllm_does(server):
    name, tree = server.adapter(1)
    folder = server.folder / name
    again = server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
    assert again.status == 400
    assert "already been loaded" in again.error
    assert server.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(folder / "no")).status == 404
    assert server.post("/v1/unload_lora_adapter", lora_name="x").status == 404
    assert server.post("/v1/unload_lora_adapter", lora_name=name).status == 200
    assert name not in server.names()
    wide = jax.tree.map(lambda x: np.concatenate([x] * 4, axis=int(np.argmax(np.equal(x.shape, LORA.rank)))), tree)
    files = server.learner.files(wide, rank=4 * LORA.rank)
    broken = server.post("/v1/load_lora_adapter", lora_name="w", lora_path=str(server.write("wide", files)))
    assert broken.status == 500
    assert "rank 16 is greater" in broken.error
    torn = server.write("torn", {file: data[:-9] for file, data in server.learner.files(tree).items()})
    assert server.post("/v1/load_lora_adapter", lora_name="t", lora_path=str(torn)).status == 500


def test_a_request_keeps_its_adapter_when_it_is_unloaded_and_shows_in_the_metrics(server):
    name, _ = server.adapter(3)
    asked = {"model": name, "prompt": PROMPT, "n": 40, "seed": 1, "max_tokens": 50, "ignore_eos": True}
    expected = [c["token_ids"] for c in server.complete(**asked)]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete(**asked)))
    thread.start()
    deadline = time.monotonic() + 30
    while f'running_lora_adapters="{name}"' not in server.get("/metrics").text:
        assert time.monotonic() < deadline
    assert server.post("/v1/unload_lora_adapter", lora_name=name).status == 200
    thread.join()
    assert [c["token_ids"] for c in answers[0]] == expected
    assert server.post("/v1/completions", model=name, prompt=PROMPT).status == 404


def test_a_client_that_leaves_frees_its_rows(server):
    server.post_and_leave(after_s=0.3)
    deadline = time.monotonic() + 10
    while 'num_requests_running{engine="0",model_name="base"} 0' not in server.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_ends_it_at_once_even_while_it_decodes(server):
    server.post_and_leave(after_s=0.2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 0
