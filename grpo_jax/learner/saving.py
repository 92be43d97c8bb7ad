"""When a checkpoint is due, and what becomes of one that the bucket does not take."""

import logging
import time
from collections.abc import Callable

from grpo_jax.errors import RunFailed
from grpo_jax.learner.checkpoint import Checkpointer, Meta
from grpo_jax.learner.step import LearnerState

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Saver:
    """The loop waits for the last checkpoint only: one that is due while another is written comes a step later."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        every: int,
        snapshot: Callable[[], tuple[LearnerState, Meta | Callable[[], Meta]]],
        first: Callable[[], None],
        saved_step: int,
    ):
        """
        Args:
          every: steps between two checkpoints.
          snapshot: the state of the last finished step, on the host, and the meta data to keep with it, or what says
            them in the background.
          first: called in the background before each commit.
          saved_step: the step that a restart would find now, -1 if there is none.
        """
        self._checkpointer, self._every, self._snapshot, self._first = checkpointer, every, snapshot, first
        self._saved_step, self._due = saved_step, False

    def after_step(self, step: int) -> None:
        self._due |= step % self._every == 0
        if not self._due or self._checkpointer.busy:
            return
        try:
            self._save(step)
        except OSError as error:
            log.warning("a checkpoint was not written, and another one follows: %s", error)

    def save_for_good(self, step: int, timeout_s: float) -> None:
        """Returns when `step` is committed, however often the bucket fails; RunFailed after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._save(step)
                self._checkpointer.wait()
                return
            except OSError as error:
                self._saved_step = -1
                if time.monotonic() > deadline:
                    raise RunFailed(f"the checkpoint after step {step} cannot be written: {error}") from None
                log.warning("the checkpoint after step %d was not written, and is tried again: %s", step, error)
                time.sleep(_RETRY_S)

    def _save(self, step: int) -> None:
        """Starts to save `step`. OSError if the save before it has failed; `step` is then not saved."""
        if self._saved_step == step:
            return
        self._checkpointer.wait()
        state, meta = self._snapshot()
        self._checkpointer.save(step, state, meta, self._first)
        self._saved_step, self._due = step, False
