"""A server must not outlive the agent that started it, not even one that was SIGKILLed."""

import ctypes
import os
import signal
import sys

PARENT_PID = "GRPO_JAX_PARENT_PID"
"""Environment variable by which a starter names itself, so that a start during its death is noticed."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None) -> None:
    """Asks Linux to SIGKILL this process when the thread that started it ends; does nothing on other systems.

    The thread, not the process: whoever starts this must do so from a thread that lives as long as it does, in practice
    the main one. The request is forgotten at `fork`, so every process of a tree makes its own.

    Args:
        parent_pid: the starter. If it is gone already, the signal will never come, and this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def parent_pid_from_environment() -> int | None:
    value = os.environ.get(PARENT_PID, "")
    return int(value) if value.isdigit() else None
