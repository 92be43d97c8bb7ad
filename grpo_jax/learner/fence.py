"""The fence: a learner whose run has been taken over by another one writes and deletes nothing any more.

Each life claims the next incarnation, and looks whether it is the newest before it writes. A process can be stopped
between the look and the write, for as long as one likes. So what counts never depends on the look alone: records carry
the incarnation and readers refuse lower ones, and immutable objects have it in their key (or the digest of what is in
them), so that a late write overwrites nothing and is known for what it is.
"""

import random
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_jax.errors import EXIT_TAKEN_OVER, RunFailed
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json

T = TypeVar("T")

_KEY = re.compile(rf"{layout.INCARNATIONS}/([0-9]{{6,}})(?:\.[0-9a-f]+)?\.json")
_TIE_S = 0.3
# So long a look is good for a bucket where each costs a request.
_REMOTE_LOOK_S = 1.0


class TakenOver(RunFailed):
    """Another learner goes on with this run."""

    exit_code = EXIT_TAKEN_OVER


def incarnations(run: Bucket) -> list[int]:
    """Sorted; twice the same if two learners have claimed it at the same moment."""
    return sorted(int(match[1]) for match in map(_KEY.fullmatch, run.list(layout.INCARNATIONS)) if match)


def delete_claims(run: Bucket) -> None:
    """All but the newest, and with it the last words of all: for a run that starts anew.

    A learner that was stopped (SIGSTOP, a frozen machine) would else take itself for the newest when it goes on.
    """
    newest = max(incarnations(run), default=0)
    for key in run.list(layout.INCARNATIONS):
        match = _KEY.fullmatch(key)
        if match is None or int(match[1]) < newest:
            run.delete(key)


def claim_incarnation(run: Bucket) -> int:
    """Claims the next incarnation of the learner; an older one that is still alive stops when it sees this."""
    while True:
        number = max(incarnations(run), default=0) + 1
        key = f"{layout.INCARNATIONS}/{number:06d}.{uuid.uuid4().hex[:8]}.json"
        run.put(key, canonical_json({"claimed_at": time.time()}))
        if incarnations(run).count(number) <= 1:
            return number
        time.sleep(random.uniform(0.0, _TIE_S))  # somebody else claims at the same time: whoever sees it tries again


def check_incarnation(run: Bucket, mine: int) -> None:
    """TakenOver if another learner has claimed a higher incarnation, or the same one."""
    found = incarnations(run)
    newest = max(found, default=mine)
    if newest > mine or found.count(mine) > 1:
        raise TakenOver(f"another learner (incarnation {newest}) has taken over this run; incarnation {mine} stops")


class FencedBucket(Bucket):
    """A run's prefix for the learner of one incarnation: each write and each deletion looks at the fence first."""

    def __init__(self, run: Bucket, incarnation: int):
        super().__init__(run.url, run.limits)
        self._claims, self._incarnation = run, incarnation
        self._good_for_s = 0.0 if run.is_local else _REMOTE_LOOK_S
        self._looked_at = float("-inf")

    def check(self) -> None:
        """TakenOver if this incarnation is not the newest."""
        if time.monotonic() - self._looked_at >= self._good_for_s:
            check_incarnation(self._claims, self._incarnation)
            self._looked_at = time.monotonic()

    def _call(self, verb: str, key: str, function: Callable[..., T], *args: Any, size: int = 0) -> T:
        if verb in ("writing", "deleting"):
            self.check()
        return super()._call(verb, key, function, *args, size=size)
