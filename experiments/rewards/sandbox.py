"""Runs a Python program that a model has written, with limits. Linux.

What holds everywhere: a session and an empty directory of its own, an environment without anything of ours, limits of
CPU seconds, memory, file size and wall seconds, and all that it has started killed at the end. Where the system allows
namespaces (to root in most places, else as user namespaces): no network, no sight of other processes or of the home
directories, a user of its own in the place of root, a limit of processes. `protections()` says which of these hold
here; where `files` does not, a program can read what this user can, and that is the worker's environment in /proc, too.
It is a fence against accidents and lazy cheating, not against an attacker with an exploit: for that, run the
worker in a container or a virtual machine of its own.
"""

import functools
import json
import logging
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 5.0
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Limits:
    """`file_mb`: of one file, and of what is printed. `processes`: threads are counted, too."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_mb: int = 512
    file_mb: int = 4
    processes: int = 16


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `exit 0`, `exit 1` and so on, a signal's name (SIGKILL: the CPU limit), or `timeout`."""

    ended: str
    stdout: str
    stderr: str
    protections: Mapping[str, bool]


def run_python(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Runs `source` as a program of this interpreter, with its packages. RuntimeError if the fence itself fails."""
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        work = folder / "work"
        work.mkdir()
        work.chmod(0o777)
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        return _run(folder, work, limits or Limits())


@functools.cache
def protections() -> Mapping[str, bool]:
    """Which of `network`, `files` and `processes` are closed to a program here. Says in the log, once, what is open."""
    found = run_python("").protections
    if not all(found.values()):
        left = ", ".join(name for name, closed in found.items() if not closed)
        log.warning("the sandbox cannot restrict a program's %s here (experiments/rewards/sandbox.py)", left)
    return found


def _run(folder: Path, work: Path, limits: Limits) -> Outcome:
    settings: dict[str, Any] = {
        **asdict(limits),
        **{name: str(folder / name) for name in ("stdin", "stdout", "stderr")},
        "argv": [sys.executable, "-I", "-B", str(folder / "program.py")],
        "env": {**_ENVIRONMENT, "HOME": str(work), "TMPDIR": str(work)},
        "keep": sorted({str(folder), *(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix))}),
        "hide": sorted({*_homes(), "/root", "/home", "/run"}),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=work,
        env=_ENVIRONMENT,
        start_new_session=True,
    )
    try:
        said, error = process.communicate(timeout=limits.wall_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError("the sandbox does not answer") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    report: dict[str, Any] = {}
    for line in said.splitlines():
        report |= json.loads(line)
    if "ended" not in report:
        raise RuntimeError(f"the sandbox failed: {error.decode(errors='replace')[-300:]}")
    stdout, stderr = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if report["ended"] == "exit 126" and not stderr:
        raise RuntimeError("the sandbox cannot start the interpreter")
    return Outcome(report["ended"], stdout, stderr, report["applied"])


def _homes() -> set[str]:
    """The home directory, by the environment and by the system."""
    found = {os.environ.get("HOME", "")}
    try:
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # in containers, users need not have an entry
        pass
    return {os.path.realpath(home) for home in found if len(home) > 1}
