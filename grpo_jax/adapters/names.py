"""Policy names. A name means one set of weights, for ever: the hex is the digest of the canonical adapter files."""

import hashlib
import re
from typing import NamedTuple

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_POLICY = re.compile(r"(?P<run>[a-z0-9][a-z0-9_-]{0,62})\.(?:v(?P<version>[0-9]{6})|probe)\.(?P<hex>[0-9a-f]{8})")


class PolicyName(NamedTuple):
    """`<run>.v<6 digits>.<8 hex>`, or `<run>.probe.<8 hex>` (version None) for the probe of a run."""

    run: str
    version: int | None
    hex: str

    def __str__(self) -> str:
        middle = "probe" if self.version is None else f"v{self.version:06d}"
        return f"{self.run}.{middle}.{self.hex}"


def parse_policy(name: str) -> PolicyName:
    """ValueError for anything that is not exactly a policy name (so a name is always safe as a file name)."""
    match = _POLICY.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a policy name")
    version = match["version"]
    return PolicyName(match["run"], None if version is None else int(version), match["hex"])


def adapter_digest(config: bytes, weights: bytes) -> str:
    """sha256 hex of the canonical `adapter_config.json` followed by `adapter_model.safetensors`."""
    digest = hashlib.sha256(config)
    digest.update(weights)
    return digest.hexdigest()
