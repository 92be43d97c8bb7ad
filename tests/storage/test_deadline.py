import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.deadline import MAX_HUNG, call_within


def bucket_threads() -> int:
    return sum(thread.name == "bucket" for thread in threading.enumerate())


def test_results_and_exceptions_come_back() -> None:
    assert call_within(10, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_within(10, divmod, 7, 0)
    with pytest.raises(SystemExit):
        call_within(10, sys.exit, 3)


def test_threads_are_used_again(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path))
    bucket.put("x", b"1")
    before = bucket_threads()
    for _ in range(200):
        assert bucket.read("x") == b"1"
    assert bucket_threads() == before


def test_a_call_that_comes_back_late_gives_its_thread_back_and_nothing_else() -> None:
    gate = threading.Event()

    def late() -> str:
        gate.wait(60)
        return "late"

    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        call_within(0.05, late)
    gate.set()
    threads = {call_within(60, threading.get_ident) for _ in range(50)}
    assert call_within(60, str, "own") == "own"
    assert len(threads) <= 2


def test_many_callers_get_their_own_answers() -> None:
    wrong: list[int] = []

    def call(base: int) -> None:
        for i in range(base, base + 300):
            if call_within(60, int, str(i)) != i:
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(1000 * k,)) for k in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_a_mount_that_hangs_costs_the_deadline_and_neither_the_process_nor_its_threads(tmp_path: Path) -> None:
    """Opening a FIFO that nobody writes to hangs in the kernel, as a file of a dead mount does."""
    os.mkfifo(tmp_path / "hung")
    (tmp_path / "x").write_bytes(b"1")
    program = f"""
import os, threading
from grpo_jax.storage.bucket import Bucket, BucketError, Limits
bucket = Bucket({str(tmp_path)!r}, Limits(attempt_s=0.02, total_s=0.03))
errors = []
for _ in range({MAX_HUNG} + 10):
    try:
        bucket.read("hung")
    except BucketError as error:
        errors.append(str(error))
print(len(errors), threading.active_count() <= {MAX_HUNG} + 2)
print(errors[0])
print(errors[-1])
fifo = os.open({str(tmp_path / "hung")!r}, os.O_WRONLY)  # the mount is back
os.close(fifo)
patient = Bucket({str(tmp_path)!r}, Limits(attempt_s=30, total_s=30))
print(patient.read("x"))
try:
    bucket.read("hung")
except BucketError:
    print("hangs again")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    count, first, last, read, end = done.stdout.splitlines()
    assert count == f"{MAX_HUNG + 10} True"
    assert first.startswith(f"reading 'hung' in {tmp_path} failed")
    assert "no answer in" in first
    assert "still hang" in last
    assert (read, end) == ("b'1'", "hangs again")


def test_a_forked_process_starts_threads_of_its_own(tmp_path: Path) -> None:
    program = f"""
import os
from grpo_jax.storage.bucket import Bucket
bucket = Bucket({str(tmp_path)!r})
bucket.put("x", b"1")
pid = os.fork()
if pid == 0:
    os._exit(0 if bucket.read("x") == b"1" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_the_deadline_holds_for_each_verb(tmp_path: Path) -> None:
    program = f"""
from grpo_jax.storage.bucket import Bucket, BucketError, Limits
bucket = Bucket("faulty:delay=1e9:{tmp_path}", Limits(attempt_s=0.05, total_s=0.05))
for verb, args in [("read", ["a"]), ("read_or_none", ["a"]), ("put", ["a", b"x"]), ("replace", ["a", b"x"]),
                   ("list", []), ("delete", ["a"]), ("delete_folder", ["a"])]:
    for where in (bucket, bucket.child("b")):
        try:
            getattr(where, verb)(*args)
        except BucketError as error:
            print("no answer in" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n" * 14), done.stderr
