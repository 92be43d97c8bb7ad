"""What a peer is to do, in one JSON file, and what it says of it: one JSON line a step on stdout.

The file is made from our resolved config, down to the learning rate of every update and the order of the problems, so
that the two sides cannot drift apart. A peer first prints {"versions": {…}}, then {"step", "t", "reward"} at the end of
each step; t is `time.time()`, reward the mean over the step's batch.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Reward
from grpo_jax.rollouts.rewards import Completion, load_rewards
from grpo_jax.rollouts.scoring import Scorer


@dataclass(frozen=True)
class Work:
    """Plain JSON values. `problems` holds `steps` × `prompts_per_step` of them, in the order of drawing."""

    model: str  # a Hugging Face directory
    dtype: str  # of the base and of the compute: float32 or bfloat16
    seed: int
    prompts_per_step: int
    group_size: int
    max_tokens: int
    temperature: float
    rank: int
    alpha: float
    rslora: bool
    targets: list[str]  # last parts of the adapted modules' names
    clip_low: float
    clip_high: float
    dual_clip: float
    learning_rates: list[float]  # one per step
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    rewards: list[dict[str, Any]]  # as the config has them
    reward_timeout_s: float
    problems: list[dict[str, Any]]  # {"messages", "prompt", "answer", "metadata"}

    @property
    def steps(self) -> int:
        return len(self.learning_rates)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_work() -> Work:
    """The work in the file that the command line names."""
    return Work(**json.loads(Path(sys.argv[1]).read_text()))


class Rewards:
    """Our reward functions, by the same code that scores our own samples."""

    def __init__(self, work: Work):
        self._problems, self._timeout_s = work.problems, work.reward_timeout_s
        self._rewards = load_rewards([Reward.model_validate(reward) for reward in work.rewards])

    def score(self, problem: int, texts: Sequence[str], tokens: Sequence[Sequence[int]], eos: int) -> list[float]:
        """Rewards of completions of one problem (by its place in `problems`); NaN where there is none."""
        asked = self._problems[problem]
        completions = [
            Completion(
                text=text,
                tokens=list(ids),
                prompt=asked["prompt"],
                answer=asked["answer"],
                metadata=asked["metadata"],
                finish_reason="stop" if len(ids) and ids[-1] == eos else "length",
            )
            for text, ids in zip(texts, tokens, strict=True)
        ]
        scores = asyncio.run(Scorer(self._rewards, self._timeout_s).score(completions))
        return [float("nan") if score.reward is None else score.reward for score in scores]


def say_versions(*packages: str) -> None:
    _say({"versions": {"python": sys.version.split()[0], **{package: version(package) for package in packages}}})


def say_step(step: int, reward: float) -> None:
    _say({"step": step, "t": time.time(), "reward": reward})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)
