"""Blocking calls beside the event loop, each in a daemon thread of its own.

The loop's own executor has a fixed number of threads and is joined at exit: a few calls that never return would use it
up and keep the process from ending. Here a hung call costs one idle thread and nothing else.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


async def in_daemon_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of `function(*args, **kwargs)`, or its exception. Cancelling the wait leaves the call to itself.

    What is no Exception (SystemExit) becomes a RuntimeError: a plugin cannot end the process by leaving a thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def call() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=call, name=getattr(function, "__name__", "call"), daemon=True).start()
    result, error = await outcome
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"{error!r} was raised in a thread") from error
    return result  # type: ignore[return-value]


async def until_it_works(what: str, function: Callable[..., T], *args: Any) -> T:
    """The result of a call to the bucket, tried again for as long as it takes. `what` names it in the log."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return await in_daemon_thread(function, *args)
        except Exception as error:  # every kind of bucket raises errors of its own
            log.warning("%s failed and is tried again: %r", what, error)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
