"""Blocking calls with a deadline, each in a daemon thread that is used again, or abandoned if it hangs.

A read from a mount whose server is gone cannot be interrupted; only the thread in it can be given up. Daemon threads do
not hold up the exit of the process, which those of an executor would. What comes of an abandoned call is dropped.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_HUNG = 32
"""So many calls may hang at a time in this process; while they do, further ones are refused. Each holds its data."""

_idle: "deque[_Worker]" = deque()
_hung: "set[_Job]" = set()


class _Job:
    __slots__ = ("args", "done", "error", "finished", "function", "result")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()


class _Worker:
    """A thread that waits for a job. It puts itself back before it reports, so that the next call finds it."""

    __slots__ = ("_job", "_wake")

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._work, name="bucket", daemon=True).start()

    def give(self, job: _Job) -> None:
        self._job = job
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            assert job is not None
            try:
                job.result = job.function(*job.args)
            except BaseException as error:
                job.error = error
            job.finished = True
            _hung.discard(job)
            _idle.append(self)
            job.done.release()
            del job  # an idle thread holds nobody's data


def call_within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """The result of `function(*args)`, or its exception.

    Raises:
        TimeoutError: there was none within `seconds`; the call is left to itself. Or too many such calls still hang.
    """
    if len(_hung) >= MAX_HUNG:
        raise TimeoutError(f"{len(_hung)} earlier calls still hang")
    try:
        worker = _idle.pop()
    except IndexError:
        try:
            worker = _Worker()
        except RuntimeError:  # no threads any more while the interpreter ends
            return function(*args)
    job = _Job(function, args)
    worker.give(job)
    if not job.done.acquire(timeout=seconds):
        _hung.add(job)
        if not job.finished:
            raise TimeoutError(f"no answer in {seconds:.3g} s")
        _hung.discard(job)  # it came between the two lines above
    error, job.error = job.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # else it would be in a cycle with this frame
    return job.result


def _forget_threads() -> None:
    _idle.clear()
    _hung.clear()


os.register_at_fork(after_in_child=_forget_threads)
