"""The processes of a run by the part that they are, from Linux's /proc, and what they hold."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
MARK = "GRPO_JAX_CHAOS_MARK"
"""Variable in the environment of all that one run has started, by which its processes are found."""

PARTS = ("learner", "worker", "proxy", "generator-0", "generator-1", "engine-0", "engine-1")
_ENGINES = ("grpo_jax.generator.reference", "grpo_jax.generator.launch_vllm")


@dataclass(frozen=True)
class Found:
    pid: int
    parent: int
    words: tuple[str, ...]


def marked(mark: str) -> list[Found]:
    """All that lives (no zombies) with this mark."""
    wanted = f"{MARK}={mark}".encode()
    return [found for pid in _pids() if (found := _found(pid, wanted)) is not None]


def by_part(processes: list[Found]) -> dict[str, int]:
    """Part → pid; `run` is the command itself. An engine is the one of the agent that is its parent."""
    parts: dict[str, int] = {}
    agents: dict[int, str] = {}
    for process in processes:
        words = process.words
        if "grpo_jax.cli" in words and len(words) > words.index("grpo_jax.cli") + 1:
            role = words[words.index("grpo_jax.cli") + 1]
            if role == "generator":
                number = words[words.index("--id") + 1].rpartition("-")[2]
                role, agents[process.pid] = f"generator-{number}", number
            parts[role] = process.pid
        elif "experiments.chaos.command" in words:
            parts["run"] = process.pid
    for process in processes:
        if process.parent in agents and any(engine in process.words for engine in _ENGINES):
            parts[f"engine-{agents[process.parent]}"] = process.pid
    return parts


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of resident memory, file descriptors, threads."""

    rss: int
    descriptors: int
    threads: int


def held(pid: int) -> Held | None:
    """None if it has gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        return Held(int(fields[21]) * _PAGE, len(os.listdir(f"/proc/{pid}/fd")), int(fields[17]))
    except (OSError, IndexError):
        return None


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _found(pid: int, wanted: bytes) -> Found | None:
    folder = Path("/proc", str(pid))
    try:
        if wanted not in (folder / "environ").read_bytes().split(b"\0"):
            return None
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Found(pid, int(fields[1]), tuple(words)) if fields[0] not in "ZX" else None
