"""Damage to what is read from outside: to bytes, and to JSON values at any path; all of it by a `Random`."""

import json
from random import Random
from typing import Any

_DEEP = "\0deep"  # becomes nesting that no parser follows to its end
_TWICE = "\0twice"  # at the end of a key: the key stands there a second time
_NESTING = 100_000

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**31) - 1, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), "", "x", "0", "²", "٣", "\0", "\ud800", "\u202e", "../../etc", "/",
    "nan", "a" * 5_000, [], {}, [[]], [None], ["x", 1], {"": None}, {"\ud800": 1}, _DEEP,
)  # fmt: skip
_BYTES = (b"\0", b"\xff", b"\xff" * 7 + b"\x7f", b"\xed\xa0\x80", b"{", b'"', b"[" * 2000, b"NaN", b"\n")


def damaged(rng: Random, data: bytes) -> bytes:
    """A few bits flipped, and bytes cut off, left out, doubled or put in."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(0, len(data)), rng.randint(1, 40)
        kind = rng.randrange(6)
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + data[at + length :]
        elif kind == 3:
            data = data[:at] + data[at : at + length] + data[at:]
        elif kind == 4:
            data = data[:at] + rng.choice(_BYTES) + data[at:]
        else:
            data = data[:at] + rng.randbytes(length) + data[at + length :]
    return data


def bent(rng: Random, value: Any) -> Any:
    """A copy with one to three places replaced by something odd, left out or doubled."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _bend(rng, value)
    return value


def _bend(rng: Random, node: Any) -> Any:
    if not isinstance(node, dict | list) or not node or rng.random() < 0.08:
        return rng.choice(ODD)
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key, copy, kind = rng.choice(keys), node.copy(), rng.random()
    if kind < 0.15:
        del copy[key]
    elif kind < 0.2 and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif kind < 0.2 and isinstance(key, str):
        copy[key + _TWICE] = rng.choice(ODD)
    elif kind < 0.25 and isinstance(copy, dict):
        copy[str(rng.choice(ODD))[:50]] = rng.choice(ODD)
    else:
        copy[key] = _bend(rng, node[key])
    return copy


def as_json(value: Any) -> bytes:
    """Its JSON with all that Python's reader takes and ours should not: NaN, a key twice, bottomless nesting."""
    text = json.dumps(value)
    text = text.replace(json.dumps(_TWICE)[1:-1], "")
    return text.replace(json.dumps(_DEEP), "[" * _NESTING + "]" * _NESTING).encode()
