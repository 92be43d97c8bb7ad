"""How the processes of the proxy's benchmark run their event loops."""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any


def pin(core: int | None) -> None:
    """This process and its children stay on one core, where the system can do that."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def run_pinned(work: Coroutine[Any, Any, None], core: int | None) -> None:
    """On uvloop where it is installed: load and replicas must cost less than what is measured."""
    pin(core)
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
