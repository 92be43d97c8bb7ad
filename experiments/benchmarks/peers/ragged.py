"""A batch of samples of different lengths as one .npz file, for engines in other environments. Numpy only.

prompt_tokens, prompt_lengths        int32: the prompts of all samples one after the other, and the S lengths
completion_tokens, completion_lengths  likewise; completions have at least one token, prompts too
sampler_logprobs                     float32, one per completion token
advantages                           float32 [S]
normaliser                           float32 scalar: the loss is Σ term / normaliser
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    prompt: np.ndarray  # int [P]
    completion: np.ndarray  # int [L]
    sampler_logprobs: np.ndarray  # float [L]
    advantage: float


def write_batch(path: Path, samples: Sequence[Sample], normaliser: float | None = None) -> None:
    """`normaliser`: default, the number of completion tokens (the token mean over these samples)."""
    completions = [len(sample.completion) for sample in samples]
    np.savez(
        path,
        prompt_tokens=np.concatenate([sample.prompt for sample in samples]).astype(np.int32),
        prompt_lengths=np.array([len(sample.prompt) for sample in samples], np.int32),
        completion_tokens=np.concatenate([sample.completion for sample in samples]).astype(np.int32),
        completion_lengths=np.array(completions, np.int32),
        sampler_logprobs=np.concatenate([sample.sampler_logprobs for sample in samples]).astype(np.float32),
        advantages=np.array([sample.advantage for sample in samples], np.float32),
        normaliser=np.float32(sum(completions) if normaliser is None else normaliser),
    )


def read_batch(path: Path) -> tuple[list[Sample], float]:
    with np.load(path) as data:
        prompts = np.split(data["prompt_tokens"], np.cumsum(data["prompt_lengths"])[:-1])
        ends = np.cumsum(data["completion_lengths"])[:-1]
        completions = np.split(data["completion_tokens"], ends)
        logprobs = np.split(data["sampler_logprobs"], ends)
        advantages, normaliser = data["advantages"].tolist(), float(data["normaliser"])
    return [Sample(*parts) for parts in zip(prompts, completions, logprobs, advantages, strict=True)], normaliser
