"""A group: one prompt, its completions under one policy, their rewards, and where all of it came from.

On disk a group is one safetensors file. Tokens, log-probabilities and rewards are tensors; everything else is JSON in
the header, with a sha256 over both. Nothing is unpickled, and `from_bytes` checks all that a reader relies on.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from grpo_jax.adapters.names import parse_policy
from grpo_jax.storage.records import canonical_json

_GROUP_ID = re.compile(r"e([0-9]{3,})\.i([0-9]{6,})\.a([0-9]{2,})")


@dataclass(frozen=True, order=True)
class GroupId:
    """(epoch, data index) says which prompt, `attempt` how often it has been drawn again.

    The data index counts through all epochs, so that it names a group alone.
    """

    epoch: int
    index: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"e{self.epoch:03d}.i{self.index:06d}.a{self.attempt:02d}"

    @classmethod
    def parse(cls, text: str) -> "GroupId":
        match = _GROUP_ID.fullmatch(text)
        if match is None or str(found := cls(*(int(part) for part in match.groups()))) != text:
            raise ValueError(f"{text!r} is not a group id")
        return found


@dataclass(frozen=True)
class Sample:
    """One completion.

    `logprobs` are the sampler's, of the sampled tokens, after temperature (vLLM's processed_logprobs). `reward` is None
    when the sample could not be scored: it then has weight 0 and is left out of every mean, never reward 0.
    """

    tokens: np.ndarray  # int32 [L], EOS included when the sampler emitted it
    logprobs: np.ndarray  # float32 [L]
    reward: float | None
    reward_parts: dict[str, float | None]
    text: str
    finish_reason: str  # stop | length | failed


@dataclass(frozen=True)
class Provenance:
    """Who made a group, when and how. Times are seconds since the epoch on the worker's clock."""

    policy: str  # the exact name that the server answered with
    replica: str
    problem_id: str
    seed: int  # of sample 0; sample i has seed + i
    sampler: dict[str, Any]
    started_at: float
    finished_at: float
    answer: Any = None
    failures: tuple[str, ...] = ()
    prompt_digest: str = ""
    """What `prompt_digest` says of the prompt that was sent; empty in files that were written without it."""
    verifiers: dict[str, str] = field(default_factory=dict)
    """Label of a reward → sha256 of the file that its function stands in."""


@dataclass(frozen=True)
class Group:
    id: GroupId
    prompt_tokens: np.ndarray  # int32 [P]
    samples: tuple[Sample, ...]
    provenance: Provenance

    @property
    def version(self) -> int:
        version = parse_policy(self.provenance.policy).version
        assert version is not None  # checked in from_bytes
        return version

    @property
    def rewards(self) -> np.ndarray:
        """float64 [n]; NaN where a sample is unscorable."""
        return np.array([np.nan if s.reward is None else s.reward for s in self.samples], np.float64)

    def to_bytes(self) -> bytes:
        lengths = np.array([len(s.tokens) for s in self.samples], np.int32)
        tensors = {
            "prompt_tokens": np.ascontiguousarray(self.prompt_tokens, np.int32),
            "lengths": lengths,
            "tokens": np.concatenate([np.asarray(s.tokens, np.int32) for s in self.samples]),
            "logprobs": np.concatenate([np.asarray(s.logprobs, np.float32) for s in self.samples]),
            "rewards": self.rewards,
        }
        header = canonical_json(
            {
                "id": str(self.id),
                "provenance": asdict(self.provenance),
                "samples": [
                    {"reward_parts": s.reward_parts, "text": s.text, "finish_reason": s.finish_reason}
                    for s in self.samples
                ],
            }
        ).decode()
        # One entry only: safetensors writes several in an order that changes from call to call.
        return save(tensors, {"group": f"{_checksum(tensors, header)} {header}"})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Group":
        """Reads and checks a group; GroupError says what is wrong with it."""
        try:
            tensors = load(data)
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            checksum, _, header_text = metadata["group"].partition(" ")
            if _checksum(tensors, header_text) != checksum:
                raise GroupError("the checksum does not match the content")
            header = json.loads(header_text)
            canonical_json(header)  # no NaN and no broken text anywhere in it
            lengths = _typed(tensors, "lengths", np.int32)
            prompt = _typed(tensors, "prompt_tokens", np.int32)
            tokens, logprobs = _typed(tensors, "tokens", np.int32), _typed(tensors, "logprobs", np.float32)
            rewards = _typed(tensors, "rewards", np.float64)
            if not len(prompt) or not len(lengths):
                raise GroupError("the prompt is empty or there are no samples")
            if len(lengths) != len(rewards) or len(lengths) != len(header["samples"]):
                raise GroupError("the counts of samples differ")
            if (lengths < 0).any() or lengths.sum() != len(tokens) or len(tokens) != len(logprobs):
                raise GroupError("the lengths of tokens and log-probabilities differ")
            if (prompt < 0).any() or (tokens < 0).any() or np.isinf(rewards).any():
                raise GroupError("a token id is negative or a reward is infinite")
            ends = np.cumsum(lengths)
            samples = tuple(
                Sample(
                    tokens[end - length : end],
                    logprobs[end - length : end],
                    None if np.isnan(reward) else float(reward),
                    _reward_parts(extra["reward_parts"]),
                    _text(extra["text"]),
                    _finish_reason(extra["finish_reason"]),
                )
                for length, end, reward, extra in zip(lengths, ends, rewards, header["samples"], strict=True)
            )
            provenance = _provenance(header["provenance"])
            if parse_policy(provenance.policy).version is None:
                raise GroupError(f"{provenance.policy} is a probe")
            return cls(GroupId.parse(header["id"]), prompt, samples, provenance)
        except (
            SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise GroupError(f"not a group: {error!r}") from None


class GroupError(Exception):
    """A spool file that is not a sound group."""


def prompt_digest(tokens: Sequence[int] | np.ndarray) -> str:
    """sha256 (hex) of a prompt's token ids, as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def _provenance(raw: dict[str, Any]) -> Provenance:
    found = Provenance(**{**raw, "failures": tuple(map(_text, raw["failures"]))})
    for text in (found.policy, found.replica, found.problem_id, found.prompt_digest, *found.verifiers.values()):
        _text(text)
    for seconds in (found.started_at, found.finished_at):
        _number(seconds)
    if type(found.seed) is not int or not isinstance(found.sampler, dict):
        raise GroupError("the seed is no integer or the sampler's settings are no object")
    return found


def _reward_parts(raw: dict[str, Any]) -> dict[str, float | None]:
    return {label: None if value is None else _number(value) for label, value in raw.items()}


def _finish_reason(raw: Any) -> str:
    if raw not in ("stop", "length", "failed"):
        raise GroupError(f"a sample ended with finish_reason {raw!r:.100}")
    return raw


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise GroupError(f"{raw!r:.100} is no text")
    return raw


def _number(raw: Any) -> float:
    if type(raw) not in (int, float) or not math.isfinite(raw):
        raise GroupError(f"{raw!r:.100} is no number")
    return raw


def _typed(tensors: dict[str, np.ndarray], name: str, dtype: type) -> np.ndarray:
    array = tensors[name]
    if array.dtype != dtype or array.ndim != 1:
        raise GroupError(f"{name} is {array.dtype} of rank {array.ndim}")
    return array


def _checksum(tensors: dict[str, np.ndarray], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + str(tensors[name].dtype).encode() + tensors[name].tobytes())
    return digest.hexdigest()
