"""The heap of a role: what it has freed goes back to the system."""

import ctypes
import sys

# Names and numbers are those of mallopt(3).
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 256 * 1024
_ARENAS = 2


def keep_heap_small() -> None:
    """Has glibc map each large block by itself and keep few heaps, in this process from now on.

    By default it puts blocks of up to 32 MiB into the heap of whichever thread asks, among small things that stay. With
    an adapter's arrays and dozens of threads the holes between them go on growing: with SmolLM2 a learner's memory by a
    megabyte a step, that of an agent by a whole adapter now and then. Does nothing where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)
