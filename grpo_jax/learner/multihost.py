"""A learner of several processes: the first one decides, the others do on their devices what it does on its own.

Process 0 alone knows the bucket, the spool and the metrics. Before each call on its engine it broadcasts the call, so
that all processes enter the same compiled functions in the same order. Start-up is `jax.distributed`'s own, from its
standard variables (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, or a cluster that jax recognises).
"""

import io
import os
from dataclasses import astuple
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from grpo_jax.learner.engine import Engine
from grpo_jax.learner.packing import MicroBatch
from grpo_jax.learner.setup import Trainer
from grpo_jax.learner.step import Applied, LearnerState, TokenOutputs

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_SMALLEST = 1024


def connect() -> int:
    """Joins the other processes, if the environment says that there are any; returns this process's index."""
    if os.environ.get(_ADDRESS):
        count, index = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(
            num_processes=None if count is None else int(count), process_id=None if index is None else int(index)
        )
    return jax.process_index()


class Leader(Engine):
    """Process 0's engine. Whoever made it calls `dismiss` at the end, or the others wait for ever."""

    def restore(self, state: LearnerState) -> None:
        _broadcast("restore", jax.tree.leaves(state))
        super().restore(state)

    def host_state(self) -> LearnerState:
        _broadcast("host_state")
        return super().host_state()

    def mark(self) -> None:
        _broadcast("mark")
        super().mark()

    def rewind(self) -> None:
        _broadcast("rewind")
        super().rewind()

    def unmark(self) -> None:
        _broadcast("unmark")
        super().unmark()

    def score(self, batch: MicroBatch) -> np.ndarray:
        _broadcast("score", astuple(batch))
        return super().score(batch)

    def score_reference(self, batch: MicroBatch) -> np.ndarray:
        _broadcast("score_reference", astuple(batch))
        return super().score_reference(batch)

    def begin(self, update: int) -> None:
        _broadcast("begin", [update])
        super().begin(update)

    def accumulate(self, batch: MicroBatch) -> TokenOutputs:
        _broadcast("accumulate", astuple(batch))
        return super().accumulate(batch)

    def apply(self, rate: float, canary_tokens: np.ndarray) -> tuple[float, Applied]:
        _broadcast("apply", [rate, canary_tokens])
        return super().apply(rate, canary_tokens)

    def canary(self, lora: Any, tokens: np.ndarray) -> np.ndarray:
        _broadcast("canary", [tokens, *jax.tree.leaves(lora)])
        return super().canary(lora, tokens)

    def published(self) -> Any:
        _broadcast("published")
        return super().published()

    def dismiss(self, exit_code: int) -> None:
        """Lets the other processes end, with this exit code."""
        _broadcast("end", [exit_code])


def make_engine(trainer: Trainer) -> Engine:
    """The engine of process 0, whether it is the only one or not."""
    return Leader(trainer) if jax.process_count() > 1 else Engine(trainer)


def follow(engine: Engine) -> int:
    """What the other processes do until they are dismissed: each call of process 0, with the same arrays."""
    lora = jax.tree.structure(engine.trainer.step.lora_shardings)
    while True:
        call, arguments = _receive()
        if call == "end":
            return int(arguments[0])
        if call in ("score", "score_reference", "accumulate"):
            getattr(engine, call)(MicroBatch(*arguments))
        elif call == "restore":
            engine.restore(jax.tree.unflatten(jax.tree.structure(engine.state_shape()), arguments))
        elif call == "begin":
            engine.begin(int(arguments[0]))
        elif call == "apply":
            engine.apply(float(arguments[0]), arguments[1])
        elif call == "canary":
            engine.canary(jax.tree.unflatten(lora, arguments[1:]), arguments[0])
        else:
            getattr(engine, call)()


def _broadcast(call: str, arguments: Any = ()) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, np.array(call), *[np.asarray(argument) for argument in arguments], allow_pickle=False)
    _send(np.frombuffer(buffer.getvalue(), np.uint8))


def _receive() -> tuple[str, list[np.ndarray]]:
    with np.load(io.BytesIO(_send(None).tobytes()), allow_pickle=False) as message:
        call, *arguments = (message[f"arr_{i}"] for i in range(len(message.files)))
    return str(call), arguments


def _send(data: np.ndarray | None) -> np.ndarray:
    """Process 0's bytes on every process. Sizes are rounded up, as each of them is compiled once."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(0 if data is None else data.size)))
    padded = np.zeros(max(_SMALLEST, 1 << (size - 1).bit_length()), np.uint8)
    if data is not None:
        padded[:size] = data
    return np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size]
