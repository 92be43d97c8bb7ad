"""A server must not outlive the agent that started it, not even one that was SIGKILLed."""

import ctypes
import os
import signal
import sys
import threading

PARENT_PID = "GRPO_JAX_PARENT_PID"
"""Environment variable by which a starter names itself, so that a start during its death is noticed."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None) -> None:
    """Asks Linux to SIGKILL this process when the thread that started it ends; does nothing on other systems.

    The thread, not the process: whoever starts this must do so from a thread that lives as long as it does, in practice
    the main one. The request is forgotten at `fork`, so every process of a tree makes its own: see
    `let_forked_die_too`.

    Args:
        parent_pid: the starter. If it is gone already, the signal will never come, and this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    _ask_for(signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def let_forked_die_too() -> None:
    """Has every process that is forked from the main thread, from now on, die with the one that forked it.

    A child of another thread would die with that thread, so it is left alone; so is what `subprocess` starts.
    """
    forker: int | None = None

    def note() -> None:
        nonlocal forker
        forker = os.getpid() if threading.current_thread() is threading.main_thread() else None

    def follow() -> None:
        if forker is not None:
            die_with_parent(forker)

    os.register_at_fork(before=note, after_in_child=follow)


def wake_with_parent() -> None:
    """Asks Linux to SIGCONT this process when the thread that started it ends: a stopped one could not leave by itself.

    Does nothing on other systems, nor to a process that runs.
    """
    if sys.platform.startswith("linux"):
        _ask_for(signal.SIGCONT)


def _ask_for(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def parent_pid_from_environment() -> int | None:
    value = os.environ.get(PARENT_PID, "")
    return int(value) if value.isdigit() else None
