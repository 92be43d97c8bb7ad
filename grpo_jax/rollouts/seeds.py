"""Sampling seeds: a hash of what is drawn, so a run repeats itself and no two draws share a random stream."""

import hashlib

from grpo_jax.storage.records import canonical_json

# A server draws sample i of a request with seed + i, a signed 64-bit integer: the margin keeps it from overflowing.
_RANGE = 2**63 - 2**20


def sampling_seed(run: str, config_seed: int, drawn: str) -> int:
    """The seed of sample 0 of a request, 63 bits; sample i has this + i.

    Args:
      drawn: names what is drawn: a group id (its attempt included), or an evaluation's problem.
    """
    digest = hashlib.blake2b(canonical_json([run, config_seed, drawn]), digest_size=16).digest()
    return int.from_bytes(digest, "big") % _RANGE
