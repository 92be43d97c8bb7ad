"""Spool files that are sound, those that are made of them by damage, and what a reader owes to both."""

import hashlib
import json
import math
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from grpo_jax.config.schema import Algorithm
from grpo_jax.learner.batch import train_minibatches
from grpo_jax.learner.diagnostics import group_metrics
from grpo_jax.learner.ledger import Ledger
from grpo_jax.rollouts.sample import Group, GroupError
from tests.fuzz.mutations import as_json, bent, damaged
from tests.observability.synthetic import group, policy

SOUND = [group(i, 1, 100.0 + i, 101.0 + i, text="so 4 ß", reward=0.5).to_bytes() for i in range(2)]
_ALGORITHM = Algorithm()
_OTHER = Group.from_bytes(SOUND[1])
_DTYPES = ("float16", "float64", "int8", "uint32", "int64", "bool")
_NUMBERS = (0, -1, 1, 2**31 - 1, -(2**31), 7)


def mutated(rng: Random, data: bytes) -> bytes:
    """Damage to the bytes as they are, or to what they mean, under a checksum that is right again."""
    if rng.random() < 0.25:
        return damaged(rng, data)
    try:
        header, tensors = taken_apart(data)
    except Exception:
        return damaged(rng, data)
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.6:
            header = bent(rng, header)
        else:
            tensors = _changed(rng, tensors)
    return put_together(header, tensors)


def taken_apart(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """(JSON of the header, tensors) of a file that is a safetensors file at least."""
    outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(outer["__metadata__"]["group"].partition(" ")[2]), load(data)


def put_together(header: Any, tensors: dict[str, np.ndarray]) -> bytes:
    text = as_json(header).decode()
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + str(tensors[name].dtype).encode() + tensors[name].tobytes())
    return save(tensors, {"group": f"{digest.hexdigest()} {text}"})


def read(data: bytes, train: bool = True) -> Group | None:
    """The group, or None where it is refused as documented. AssertionError, or whatever comes, is a defect.

    `train=False` leaves out what needs jax, which takes most of the time.
    """
    try:
        found = Group.from_bytes(data)
    except GroupError:
        return None
    _check_types(found)
    again = Group.from_bytes(found.to_bytes())
    assert again.id == found.id
    assert again.provenance == found.provenance
    _use(found, train)
    return found


def _check_types(found: Group) -> None:
    provenance = found.provenance
    for value in (provenance.policy, provenance.replica, provenance.problem_id, *provenance.failures):
        assert type(value) is str
    assert type(provenance.seed) is int
    assert isinstance(provenance.sampler, dict)
    for value in (provenance.started_at, provenance.finished_at):
        assert type(value) in (int, float)
        assert math.isfinite(value)
    for sample in found.samples:
        assert sample.finish_reason in ("stop", "length", "failed")
        assert len(sample.tokens) == len(sample.logprobs)
        sample.text.encode()
        for name, value in sample.reward_parts.items():
            assert type(name) is str
            assert value is None or (type(value) in (int, float) and math.isfinite(value))


def _use(found: Group, train: bool) -> None:
    """What the learner does with a group that it has been given."""
    ledger = Ledger(max_staleness=1)
    ledger.offer([found, _OTHER])
    ledger.sweep(1, {1: policy(1)})
    taken = ledger.take(1, 1)
    if taken and train:
        train_minibatches(taken, _ALGORITHM, max_tokens=16, step_lags=[0])
    if taken:
        metrics = group_metrics(taken, version=1, now=200.0)
        assert all(type(value) is float for value in metrics.values())


def _changed(rng: Random, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = dict(tensors)
    name = rng.choice(sorted(tensors)) if tensors else "tokens"
    array = tensors.get(name, np.zeros(0))
    kind = rng.randrange(6)
    if kind == 0:
        tensors.pop(name, None)
    elif kind == 1:
        with np.errstate(all="ignore"):
            tensors[name] = array.astype(rng.choice(_DTYPES))
    elif kind == 2:
        tensors[name] = array[: rng.randint(0, len(array))] if array.ndim else array
    elif kind == 3:
        tensors[name] = array.reshape(1, -1)
    elif kind == 4 and array.size and array.ndim == 1:
        tensors[name] = array = array.copy()
        odd = (np.nan, np.inf, -np.inf, 1e300) if array.dtype.kind == "f" else _NUMBERS
        with np.errstate(all="ignore"):
            array[rng.randrange(array.size)] = np.array(rng.choice(odd)).astype(array.dtype)
    else:
        tensors[name] = np.concatenate([array, array]) if array.ndim == 1 else array
    return tensors
