"""A tokenizer that fits on a page, and configs that name it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.config.load import parse_config
from grpo_jax.config.schema import Config
from grpo_jax.rollouts import client, evaluation, groups, threads, watch, worker
from tests.rollouts import toys

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "?", "!", *(f"word{i}" for i in range(24))]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tokenizer, a chat template and a config; a worker needs no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(WORDS)}))
    return folder


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> Callable[..., Config]:
    """A small run called `toy`; keyword arguments replace whole sections or are merged into them."""

    def make(**changes: Any) -> Config:
        raw: dict[str, Any] = {
            "run": "toy",
            "bucket": str(tmp_path / "bucket"),
            "steps": 3,
            "model": {"source": str(model_dir)},
            "task": {"source": "tests.rollouts.toys:letters"},
            "rewards": [{"source": "tests.rollouts.toys:length"}],
            "sampling": {"max_tokens": 5},
            "batch": {"prompts_per_step": 2, "group_size": 3, "row_tokens": 64},
            "rollouts": {"retry_deadline_s": 20.0, "reward_timeout_s": 20.0},
        }
        for key, value in changes.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        return parse_config(raw, "test")

    return make


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short periods of polling and waiting; rewards that hang are let go at the end."""
    monkeypatch.setattr(worker, "_LOCAL_POLL_S", 0.01)
    monkeypatch.setattr(worker, "_POLICY_POLL_S", 0.01)
    monkeypatch.setattr(worker, "_RECORD_EVERY_S", 0.05)
    monkeypatch.setattr(watch, "_RUN_EVERY_S", 0.02)
    monkeypatch.setattr(client, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(groups, "_ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(evaluation, "_ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(threads, "_FIRST_WAIT_S", 0.01)
    toys.release.clear()
    yield
    toys.release.set()
