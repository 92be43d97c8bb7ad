"""The two compiled functions of a step: `accumulate` a micro-batch's gradient, and `apply` the sum of them.

Everything static (model, objective, optimiser) is closed over once; arrays are arguments. The base parameters are an
argument of their own: frozen, never donated, never in the optimiser.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from grpo_jax.algorithms.objectives import TokenArrays
from grpo_jax.learner.packing import MicroBatch
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import token_logprobs

Tree = Any
Objective = Callable[[TokenArrays], jax.Array]

# Positions whose logits exist at one time: 128 × 49k floats are 25 MB.
_CHUNK = 128


class LearnerState(struct.PyTreeNode):
    """What training changes: the adapter, the optimiser's state and the count of optimiser updates (int32)."""

    lora: Tree
    opt_state: Tree
    updates: jax.Array


class StepArrays(struct.PyTreeNode):
    """A `MicroBatch` on its way to the device."""

    tokens_RxT: jax.Array
    positions_RxT: jax.Array
    prompt_ids_RxT: jax.Array
    branch_ids_RxT: jax.Array
    slot_N: jax.Array
    target_N: jax.Array
    sampler_logprob_N: jax.Array
    advantage_N: jax.Array
    weight_N: jax.Array
    mask_N: jax.Array


class Accumulated(struct.PyTreeNode):
    """Sums over the micro-batches so far."""

    grads: Tree
    loss: jax.Array


class Applied(struct.PyTreeNode):
    """What a step leaves beside the new state. `publish` is a copy: the state is donated to the next step."""

    publish: Tree
    canary_logprobs: jax.Array
    grad_norm: jax.Array
    finite: jax.Array  # bool: False when the gradient was not finite and the update was left out


@dataclass(frozen=True)
class Step:
    """The compiled functions.

    init: lora → LearnerState
    zeros: lora → Accumulated
    accumulate: (base, lora, Accumulated, StepArrays) → (Accumulated, logprob_N, entropy_N); donates Accumulated
    apply: (base, LearnerState, Accumulated, canary tokens [C]) → (LearnerState, Applied); donates the first two
    score: (base, lora, StepArrays) → (logprob_N, entropy_N), without a gradient
    canary: (base, lora, tokens [C]) → log-probabilities [C − 1] of the tokens after the first, at temperature 1
    """

    init: Callable[..., LearnerState]
    zeros: Callable[..., Accumulated]
    accumulate: Callable[..., tuple[Accumulated, jax.Array, jax.Array]]
    apply: Callable[..., tuple[LearnerState, Applied]]
    score: Callable[..., tuple[jax.Array, jax.Array]]
    canary: Callable[..., jax.Array]


def step_arrays(batch: MicroBatch) -> StepArrays:
    return StepArrays(**{field.name: jnp.asarray(getattr(batch, field.name)) for field in fields(StepArrays)})


def rounded(lora: Tree, dtype: Any) -> Tree:
    """The adapter as the forward pass uses it: through the compute dtype and back."""
    return jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), lora)


def build_step(
    config: ModelConfig,
    lora: LoraConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    dtype: Any,
    temperature: float,
) -> Step:
    """Builds the functions of a step for a model, an adapter, an optimiser and an objective."""
    model = Decoder(config, lora, dtype)

    def score(base: Tree, adapter: Tree, batch: StepArrays) -> tuple[jax.Array, jax.Array]:
        ids = (batch.tokens_RxT, batch.positions_RxT, batch.prompt_ids_RxT, batch.branch_ids_RxT)
        hidden_RxTxD: Any = model.apply({"params": base, "lora": adapter}, *ids)
        hidden_NxD = hidden_RxTxD.reshape(-1, hidden_RxTxD.shape[-1])[batch.slot_N]
        return token_logprobs(
            base, hidden_NxD, batch.target_N, batch.mask_N, config=config, temperature=temperature, chunk=_CHUNK
        )

    def loss_fn(adapter: Tree, base: Tree, batch: StepArrays) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logprob_N, entropy_N = score(base, adapter, batch)
        term_N = objective(TokenArrays(logprob_N, batch.sampler_logprob_N, batch.advantage_N, batch.mask_N))
        return jnp.sum(jnp.where(batch.mask_N, batch.weight_N * term_N, 0.0)), (logprob_N, entropy_N)

    def accumulate(
        base: Tree, adapter: Tree, acc: Accumulated, batch: StepArrays
    ) -> tuple[Accumulated, jax.Array, jax.Array]:
        (loss, (logprob_N, entropy_N)), grads = jax.value_and_grad(loss_fn, has_aux=True)(adapter, base, batch)
        return Accumulated(jax.tree.map(jnp.add, acc.grads, grads), acc.loss + loss), logprob_N, entropy_N

    def canary(base: Tree, adapter: Tree, tokens_C: jax.Array) -> jax.Array:
        ids_1xC = jnp.ones((1, tokens_C.shape[0]), jnp.int32)
        positions_1xC = jnp.arange(tokens_C.shape[0])[None]
        hidden_1xCxD: Any = model.apply(
            {"params": base, "lora": adapter}, tokens_C[None], positions_1xC, ids_1xC, jnp.zeros_like(ids_1xC)
        )
        mask_C = jnp.ones((tokens_C.shape[0] - 1,), bool)
        return token_logprobs(
            base, hidden_1xCxD[0, :-1], tokens_C[1:], mask_C, config=config, temperature=1.0, chunk=_CHUNK
        )[0]

    def apply(
        base: Tree, state: LearnerState, acc: Accumulated, canary_tokens: jax.Array
    ) -> tuple[LearnerState, Applied]:
        norm = optax.global_norm(acc.grads)
        finite = jnp.isfinite(norm)
        # A gradient that is not finite must not reach Adam's moments, which would never forget it.
        grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), acc.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.lora)
        new = (optax.apply_updates(state.lora, updates), opt_state, state.updates + 1)
        old = (state.lora, state.opt_state, state.updates)
        state = LearnerState(*jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old))
        publish = rounded(state.lora, dtype)
        return state, Applied(publish, canary(base, publish, canary_tokens), norm, finite)

    return Step(
        init=jax.jit(lambda adapter: LearnerState(adapter, optimizer.init(adapter), jnp.zeros((), jnp.int32))),
        zeros=jax.jit(lambda adapter: Accumulated(jax.tree.map(jnp.zeros_like, adapter), jnp.zeros(()))),
        accumulate=jax.jit(accumulate, donate_argnums=2),
        apply=jax.jit(apply, donate_argnums=(1, 2)),
        score=jax.jit(score),
        canary=jax.jit(canary),
    )
