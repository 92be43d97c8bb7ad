"""The device side of a learner: the arrays that live on the mesh, and what is done with them, one call after another.

Everything that every process of a multi-host learner has to do in the same order is a method here, and takes and gives
nothing but host arrays and numbers (or arrays that are whole on every device). See `multihost`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.learner.packing import MicroBatch
from grpo_jax.learner.setup import Trainer
from grpo_jax.learner.step import Accumulated, Applied, LearnerState, TokenOutputs

Tree = Any


class Engine:
    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._step, self._base = trainer.step, trainer.base
        self._state: LearnerState = _settled(self._step.init(self._step.place_lora(trainer.initial_lora())))
        self._acc: Accumulated | None = None
        self._marked: LearnerState | None = None

    def restore(self, state: LearnerState) -> None:
        """Takes a state from the host, the same on every process."""
        self._state = self._step.place_state(state)

    def start_from(self, lora: Tree | None) -> None:
        """Before the first step: takes an adapter from the host in place of the fresh one, if there is one."""
        if lora is not None:
            self.restore(self.host_state().replace(lora=lora))

    def host_state(self) -> LearnerState:
        """The whole state, as host arrays."""
        return jax.device_get(self._step.gather(self._state))

    def mark(self) -> None:
        """Keeps a copy of the state on the devices, for `rewind`."""
        self._marked = jax.tree.map(jnp.copy, self._state)

    def rewind(self) -> None:
        """Back to the state at the mark."""
        assert self._marked is not None
        self._state, self._marked = self._marked, None

    def unmark(self) -> None:
        """Frees the copy."""
        self._marked = None

    def score(self, batch: MicroBatch) -> np.ndarray:
        """float32 S×N: log-probabilities under the current policy, without a gradient."""
        logprob_SxN, _ = self._step.score(self._base, self._state.lora, self._step.arrays(batch))
        return np.asarray(logprob_SxN)

    def score_reference(self, batch: MicroBatch) -> np.ndarray:
        """float32 S×N: log-probabilities under the base, the adapter off."""
        return np.asarray(self._step.score_reference(self._base, self._step.arrays(batch)))

    def begin(self, update: int) -> None:
        """Starts the sums of an optimiser update, the `update`-th of its step."""
        self._acc = _settled(self._step.zeros(self._state, np.float32(update)))

    def accumulate(self, batch: MicroBatch) -> TokenOutputs:
        assert self._acc is not None
        arrays = self._step.arrays(batch)
        self._acc, outputs = _settled(self._step.accumulate(self._base, self._state.lora, self._acc, arrays))
        return outputs

    def apply(self, rate: float, canary_tokens: np.ndarray) -> tuple[float, Applied]:
        """(loss, what is left beside the new state)."""
        assert self._acc is not None
        loss = float(self._acc.loss)
        self._state, applied = _settled(
            self._step.apply(self._base, self._state, self._acc, np.float32(rate), canary_tokens)
        )
        self._acc = None
        return loss, applied

    def canary(self, lora: Tree, tokens: np.ndarray) -> np.ndarray:
        """float32 [C − 1]: log-probabilities of the tokens after the first under an adapter from the host."""
        return np.asarray(self._step.canary(self._base, self._step.place_lora(lora), tokens))

    def published(self) -> Tree:
        """The adapter as it would be published now, whole on every device."""
        # A copy in any case: the state is donated to the next update, whatever else still reads it.
        return _settled(jax.tree.map(jnp.copy, self.trainer.published_form(self._step.gather(self._state.lora))))

    def state_shape(self) -> LearnerState:
        """Shapes and dtypes of the state, for a restore."""
        return jax.eval_shape(lambda: self._state)


def _settled(arrays: Any) -> Any:
    """The same arrays. With several processes only once they are computed: on a CPU two functions that do not depend on
    each other may run at one time, and then their collectives meet in another order on each process."""
    return jax.block_until_ready(arrays) if jax.process_count() > 1 else arrays
