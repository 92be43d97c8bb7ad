"""The index of a run's folder on an agent's disk: the policies that its server may take from there by itself.

The agent writes it, the plugin inside the server's processes reads it (see `plugin`).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from grpo_jax.adapters.names import parse_policy

INDEX = "index.json"


def run_folder(adapters: Path, run: str) -> Path:
    """Where an agent keeps the policies of one of its runs, with an index of their own."""
    return adapters / run


def write_index(folder: Path, names: Iterable[str]) -> None:
    """Replaces the index by one of these policies, which lie in `folder`. A reader sees the old one or the new one."""
    temporary = folder / f".{INDEX}.tmp"
    temporary.write_text(json.dumps({name: str(folder / name) for name in sorted(names)}))
    os.replace(temporary, folder / INDEX)


def found(adapters: Path, name: str) -> str | None:
    """The directory of a policy of any run, as `indexed` tells it."""
    try:
        return indexed(run_folder(adapters, parse_policy(name).run), name)
    except ValueError:
        return None


def indexed(folder: Path, name: str) -> str | None:
    """The directory of a policy, spelled as the agent spells it; None if the index does not hold it.

    Also None where the name is no policy's or the directory is not there or lies elsewhere.
    """
    try:
        parse_policy(name)
        path = json.loads((folder / INDEX).read_bytes())[name]
        inside = Path(path).resolve(strict=True) == folder.resolve() / name
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: links or nesting without end
        return None
    return path if inside and os.path.isdir(path) else None
