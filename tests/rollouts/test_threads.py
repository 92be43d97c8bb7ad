import asyncio
import subprocess
import sys
import threading

import pytest

from grpo_jax.rollouts.threads import in_daemon_thread, until_it_works


def test_results_and_exceptions_come_back() -> None:
    def divide(a: int, *, b: int) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return a / b

    assert asyncio.run(in_daemon_thread(divide, 6, b=3)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(divide, 6, b=0))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_what_would_end_a_process_or_a_coroutine_is_an_ordinary_error(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(RuntimeError):
        asyncio.run(in_daemon_thread(leave))


def test_calls_that_never_return_neither_use_up_threads_nor_keep_the_process_alive() -> None:
    program = """
import asyncio, threading
from grpo_jax.rollouts.threads import in_daemon_thread
async def main():
    for _ in range(100):
        try:
            await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.005)
        except TimeoutError:
            pass
    print(await in_daemon_thread(lambda: "still works"))
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still works\n", "")


def test_a_bucket_call_is_tried_until_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_jax.rollouts.threads._FIRST_WAIT_S", 0.001)
    failures = [OSError("disk full"), RuntimeError("403")]

    def write(value: int) -> int:
        if failures:
            raise failures.pop(0)
        return value

    assert asyncio.run(until_it_works("writing it", write, 7)) == 7
    assert [r.getMessage() for r in caplog.records] == [
        "writing it failed and is tried again: OSError('disk full')",
        "writing it failed and is tried again: RuntimeError('403')",
    ]
