"""A process that a signal has stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from grpo_jax.generator.stoppage import STOPPED_S, Stoppage, is_stopped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who is stopped")


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process.pid
        process.kill()


def _send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    while is_stopped(pid) != (number == signal.SIGSTOP):
        time.sleep(0.01)


def test_it_counts_only_when_it_has_lasted(pid: int) -> None:
    now = 100.0
    stoppage = Stoppage(lambda: now)
    assert stoppage.reason([pid]) is None
    _send(pid, signal.SIGSTOP)
    assert stoppage.reason([pid]) is None
    now += STOPPED_S - 1
    assert stoppage.reason([pid]) is None
    _send(pid, signal.SIGCONT)
    assert stoppage.reason([pid]) is None
    now += 5
    _send(pid, signal.SIGSTOP)
    assert stoppage.reason([pid]) is None, "it has been continued meanwhile"
    now += STOPPED_S
    assert stoppage.reason([os.getpid(), pid]) == "a signal stopped it 10 s ago"


def test_who_waits_less_for_a_hanging_process_waits_less_for_a_stopped_one(pid: int) -> None:
    now = 0.0
    stoppage = Stoppage(lambda: now)
    _send(pid, signal.SIGSTOP)
    assert stoppage.reason([pid], longest_s=2.0) is None
    now = 2.0
    assert stoppage.reason([pid], longest_s=2.0) is not None


def test_nobody_is_no_stopped_process() -> None:
    assert not is_stopped(2**30)
    assert Stoppage().reason([2**30]) is None
