"""What the tests of this folder write, and how they insist on it."""

import hashlib
import random
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from grpo_jax.adapters.manifest import AdapterError, Canary, Manifest, file_entry
from grpo_jax.adapters.names import PolicyName
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import BucketError

T = TypeVar("T")


def group(index: int, attempt: int = 0) -> Group:
    provenance = Provenance("toy.v000000.00000000", "r0", f"p{index}", 1, {}, 1.0, 2.0)
    sample = Sample(np.array([index], np.int32), np.array([-1.0], np.float32), 1.0, {}, "x", "stop")
    return Group(GroupId(0, index, attempt), np.array([1], np.int32), (sample,), provenance)


def adapter(version: int, size: int = 20_000) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest and files that fit it; the weights are random bytes, which nothing here looks into."""
    weights = random.Random(version).randbytes(size)
    files = {layout.ADAPTER_CONFIG: b'{"r": 8}', layout.ADAPTER_WEIGHTS: weights}
    digest = hashlib.sha256(files[layout.ADAPTER_CONFIG] + weights).hexdigest()
    manifest = Manifest(
        name=str(PolicyName("toy", version, digest[:8])),
        version=version,
        step=version,
        rank=8,
        alpha=16.0,
        scale=2.0,
        targets=["q_proj"],
        base_digest="d" * 64,
        norm=1.0,
        digest=digest,
        files={name: file_entry(data) for name, data in files.items()},
        canary=Canary(tokens=[1, 2], logprobs=[-1.0]),
    )
    return manifest, files


def insist(call: Callable[[], T], until: Callable[[T], bool] = lambda result: True) -> T:
    """What `call` returns once it does without a BucketError or AdapterError, and `until` is content with it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            result = call()
            if until(result):
                return result
            problem: Exception = AssertionError(f"it stays at {result!r}")
        except (BucketError, AdapterError) as error:
            problem = error
        if time.monotonic() > deadline:
            raise problem
        time.sleep(0.02)
