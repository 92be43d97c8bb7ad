"""Which policy an evaluation keeps loaded, beside the window of those that training may still name."""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)


class Pin:
    """One policy at a time, or none; asked whenever a version is published.

    The base has the first turn; with `evaluation.every` another one begins every so many steps, and belongs to the
    version that is published then. A policy stays pinned until its evaluation is in the bucket, for
    `evaluation.timeout_s` at most; a turn that begins meanwhile has to wait, and falls to the version published last.
    """

    def __init__(self, config: Config, run: Bucket):
        self._evaluation, self._sync_every, self._run = config.evaluation, config.sync_every, run
        self._pinned: str | None = None
        self._until = float("-inf")
        self._turn: int | None = None  # the last one that was taken; None: not looked up yet
        self._finished: deque[dict[str, Any]] = deque()

    def choose(self, version: int, lineage: Mapping[int, str]) -> str | None:
        """The policy that is to stay loaded now that `version` is published.

        Reads the bucket once after a start, and whenever something is pinned. Where that fails nothing changes.
        """
        try:
            if self._turn is None:
                self._turn = self._last_turn(lineage)
            if self._pinned is not None and self._is_over(self._pinned):
                self._pinned = None
        except (OSError, ValueError) as error:  # of the bucket, or of what was read torn
            log.warning("whether a policy has been evaluated cannot be seen: %s", error)
            return self._pinned
        turn = 0 if self._turn < 0 else self._turn_of(version)
        if self._pinned is None and turn > self._turn:
            self._turn = turn
            self._pinned = lineage.get(version if turn else 0)
            self._until = time.monotonic() + self._evaluation.timeout_s
        return self._pinned

    def take_finished(self) -> list[dict[str, Any]]:
        """The evaluations of pinned policies that have been finished since the last call; for another thread."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _is_over(self, policy: str) -> bool:
        data = self._run.read_or_none(layout.evaluation(policy, self._evaluation.split))
        if data is not None:
            self._finished.append(json.loads(data))
            return True
        if time.monotonic() < self._until:
            return False
        log.warning("no evaluation of %s within %.0f s; it is not kept any longer", policy, self._evaluation.timeout_s)
        return True

    def _last_turn(self, lineage: Mapping[int, str]) -> int:
        """That of the newest version which has been evaluated; -1 if none has."""
        there = set(self._run.list(layout.EVALUATIONS))
        split = self._evaluation.split
        done = (self._turn_of(v) for v, name in lineage.items() if layout.evaluation(name, split) in there)
        return max(done, default=-1)

    def _turn_of(self, version: int) -> int:
        every = self._evaluation.every
        return version * self._sync_every // every if every else 0
