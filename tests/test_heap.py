"""What a process still holds after it has freed large things that lay among small ones."""

import subprocess
import sys

import pytest

_CODE = """
import sys
from grpo_jax.heap import keep_heap_small

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "small":
    keep_heap_small()
del_me = bytearray(30 * 2**20)
del del_me  # from now on glibc takes what is smaller than that from the heap
before = resident_mb()
pairs = [(bytes([1]) * (4 * 2**20), bytes([1]) * 50_000) for _ in range(50)]
small = [small for _, small in pairs]
del pairs
print(resident_mb() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library of Linux")
def test_large_blocks_leave_no_holes() -> None:
    held = {
        mode: float(subprocess.run([sys.executable, "-c", _CODE, mode], capture_output=True, check=True).stdout)
        for mode in ("small", "default")
    }
    assert held["small"] < 20
    assert held["default"] > 150, "this would be no test"
