"""Runs a command to its end, and says how long it took and how much memory its whole process tree had."""

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.5
_GRACE_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Watched:
    started: float  # time.time()
    wall_s: float
    peak_rss: int  # bytes
    lines: list[str]  # of its stdout


class MemoryPeak:
    """The largest sum of resident memory over a process and all its descendants, looked at twice a second.

    Pages that several of the processes share count once for each of them.
    """

    def __init__(self, pid: int):
        self._pid, self._stop, self.peak = pid, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, tree_rss(self._pid))
            self._stop.wait(_EVERY_S)


def tree_rss(root: int) -> int:
    """Bytes of resident memory of a process and its descendants, from Linux's /proc; those that have gone count 0."""
    return sum(_tree(root).values())


def tree_descriptors(root: int) -> int:
    """Open file descriptors of a process and its descendants; those that have gone count 0."""
    count = 0
    for pid in _tree(root):
        try:
            count += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
    return count


def _tree(root: int) -> dict[int, int]:
    """Of a process and its descendants, the resident bytes by pid."""
    children, rss = defaultdict(list), {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # The name in parentheses may hold anything; the parent is the second field after it, the pages the 22nd.
            fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(entry))
        rss[int(entry)] = int(fields[21]) * _PAGE
    tree, found = {}, [root]
    while found:
        pid = found.pop()
        tree[pid] = rss.get(pid, 0)
        found += children[pid]
    return tree


def watched(command: list[str], *, label: str, log: Path, folder: Path) -> Watched:
    """Runs `command` in `folder`, its stderr in `log`; its lines on stdout are shown as they come.

    Raises:
      SystemExit: it failed; the message has the end of its log.
    """
    started = time.time()
    with open(log, "wb") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
        memory = MemoryPeak(process.pid)
        lines = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                print(f"[{label}] {line.rstrip()}", file=sys.stderr, flush=True)
            process.wait()
        finally:
            # Only after an interruption of ours is it still alive: it stops what it has started itself.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            memory.close()
    wall_s = time.time() - started
    if process.returncode != 0:
        tail = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{label} ended with exit code {process.returncode}:\n{''.join(lines[-5:])}{tail}")
    return Watched(started, wall_s, memory.peak, lines)
