"""The compiled functions of a step: `accumulate` a micro-batch's gradient, and `apply` the sum of them.

Everything static (model, objective, optimiser, mesh) is closed over once; arrays are arguments. The base parameters are
an argument of their own: frozen, never donated, never in the optimiser.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding

from grpo_jax.algorithms.objective import Objective
from grpo_jax.algorithms.tokens import TokenArrays
from grpo_jax.learner.packing import MicroBatch
from grpo_jax.learner.sharding import lora_shardings, place, replicated, row_sharding, state_shardings
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import token_logprobs

Tree = Any

# Positions whose logits exist at one time: 128 × 49k floats are 25 MB.
_CHUNK = 128
# Dynamic loss scaling (arXiv 1710.03740): halved by an update that is not finite, doubled after so many that were.
_FIRST_SCALE, _LARGEST_SCALE, _GROW_AFTER = 2.0**15, 2.0**24, 200


class LearnerState(struct.PyTreeNode):
    """What training changes: the adapter, the optimiser's state, counters (int32) and the loss scale (float32)."""

    lora: Tree
    opt_state: Tree
    updates: jax.Array  # updates that were made
    loss_scale: jax.Array  # 1 but in float16
    since_scaled: jax.Array  # finite updates since the scale changed


class StepArrays(struct.PyTreeNode):
    """A `MicroBatch` on its way to the device."""

    tokens_BxT: jax.Array
    positions_BxT: jax.Array
    prompt_ids_BxT: jax.Array
    branch_ids_BxT: jax.Array
    slot_SxN: jax.Array
    target_SxN: jax.Array
    sampler_logprob_SxN: jax.Array
    advantage_SxN: jax.Array
    weight_SxN: jax.Array
    staleness_SxN: jax.Array
    mask_SxN: jax.Array
    segment_SxN: jax.Array
    old_logprob_SxN: jax.Array
    reference_logprob_SxN: jax.Array


class Accumulated(struct.PyTreeNode):
    """Sums over the micro-batches of an update so far, and what is constant while they are made."""

    grads: Tree
    loss: jax.Array
    loss_scale: jax.Array
    update: jax.Array  # updates since the start of the step, float


class TokenOutputs(struct.PyTreeNode):
    """What a micro-batch leaves for the metrics, S×N, on every device."""

    logprob: jax.Array
    entropy: jax.Array
    clipped: jax.Array  # int8, see `algorithms.objective.Terms`
    factor: jax.Array


class Applied(struct.PyTreeNode):
    """What an update leaves beside the new state. `publish` is a copy: the state is donated to the next one."""

    publish: Tree
    canary_logprobs: jax.Array
    grad_norm: jax.Array
    finite: jax.Array  # bool: False when the gradient was not finite and the update was left out


@dataclass(frozen=True)
class Step:
    """The compiled functions, and where their arguments lie.

    init: lora → LearnerState
    zeros: (LearnerState, update) → Accumulated
    accumulate: (base, lora, Accumulated, StepArrays) → (Accumulated, TokenOutputs); donates Accumulated
    apply: (base, LearnerState, Accumulated, learning rate, canary tokens [C]) → (LearnerState, Applied); donates the
        second and the third
    score: (base, lora, StepArrays) → (logprob_SxN, entropy_SxN), without a gradient
    score_reference: (base, StepArrays) → logprob_SxN of the base, the adapter off
    canary: (base, lora, tokens [C]) → log-probabilities [C − 1] of the tokens after the first, at temperature 1
    gather: a tree on the mesh → the same, whole on every device
    """

    init: Callable[..., LearnerState]
    zeros: Callable[..., Accumulated]
    accumulate: Callable[..., tuple[Accumulated, TokenOutputs]]
    apply: Callable[..., tuple[LearnerState, Applied]]
    score: Callable[..., tuple[jax.Array, jax.Array]]
    score_reference: Callable[..., jax.Array]
    canary: Callable[..., jax.Array]
    gather: Callable[..., Any]
    mesh: Mesh
    lora_shardings: Tree

    def arrays(self, batch: MicroBatch) -> StepArrays:
        """The micro-batch on the mesh, its rows over the shards that have rows of their own."""
        sharding = row_sharding(self.mesh)
        return StepArrays(**{f.name: place(getattr(batch, f.name), sharding) for f in fields(StepArrays)})

    def place_lora(self, lora: Tree) -> Tree:
        """An adapter onto the mesh."""
        return jax.tree.map(lambda x, sharding: place(np.asarray(x), sharding), lora, self.lora_shardings)

    def place_state(self, state: LearnerState) -> LearnerState:
        """A state from the host, the same on every process, onto the mesh."""
        shardings = state_shardings(self.mesh, state, self.lora_shardings)
        return jax.tree.map(lambda x, sharding: place(np.asarray(x), sharding), state, shardings)


def rounded(lora: Tree, dtype: Any) -> Tree:
    """The adapter as the forward pass uses it: through the compute dtype and back."""
    return jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), lora)


def one_device_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))


def build_step(
    config: ModelConfig,
    lora: LoraConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    dtype: Any,
    temperature: float,
    mesh: Mesh | None = None,
    chunk: int = _CHUNK,
    **decoder: Any,
) -> Step:
    """Builds the functions of a step for a model, an adapter, an optimiser and an objective.

    Args:
      dtype: float32, bfloat16 or float16 (with dynamic loss scaling) to compute in; float64 in tests.
      temperature: of the sampler; logits are divided by it.
      mesh: see `sharding`; one device by default.
      chunk: positions of a shard whose logits exist at one time.
      decoder: further fields of `Decoder`: remat, attention, quantization.
    """
    mesh = mesh or one_device_mesh()
    model = Decoder(config, lora, dtype, mesh=mesh, **decoder)
    # The canary is one short row, which is neither sharded nor a flash kernel's business.
    small = Decoder(config, lora, dtype, **{**decoder, "attention": "xla", "remat": "none"})
    adapter_shardings, everywhere = lora_shardings(mesh, config, lora), replicated(mesh)
    scaled = jnp.dtype(dtype) == jnp.float16

    def constrain(tree: Tree, shardings: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(tree, shardings)

    def logprobs(variables: Tree, batch: StepArrays, entropy_gradient: bool = False) -> tuple[jax.Array, jax.Array]:
        ids = (batch.tokens_BxT, batch.positions_BxT, batch.prompt_ids_BxT, batch.branch_ids_BxT)
        hidden_BxTxD: Any = model.apply(variables, *ids)
        shards, size = batch.slot_SxN.shape[0], hidden_BxTxD.shape[-1]
        hidden_SxNxD = jnp.take_along_axis(hidden_BxTxD.reshape(shards, -1, size), batch.slot_SxN[..., None], axis=1)
        return token_logprobs(
            variables["params"],
            constrain(hidden_SxNxD, row_sharding(mesh)),
            batch.target_SxN,
            batch.mask_SxN,
            config=config,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
        )

    def loss_fn(adapter: Tree, base: Tree, acc: Accumulated, batch: StepArrays) -> tuple[jax.Array, Any]:
        variables = {"params": base, "lora": adapter}
        logprob_SxN, entropy_SxN = logprobs(variables, batch, objective.entropy_coef > 0)
        recomputed = objective.needs_old
        tokens = TokenArrays(
            logprob_N=logprob_SxN.ravel(),
            sampler_logprob_N=batch.sampler_logprob_SxN.ravel(),
            anchor_logprob_N=(batch.old_logprob_SxN if recomputed else batch.sampler_logprob_SxN).ravel(),
            proximal_logprob_N=jax.lax.stop_gradient(batch.old_logprob_SxN if recomputed else logprob_SxN).ravel(),
            advantage_N=batch.advantage_SxN.ravel(),
            mask_N=batch.mask_SxN.ravel(),
            sample_N=batch.segment_SxN.ravel(),
            staleness_N=batch.staleness_SxN.ravel(),
            update=acc.update,
        )
        terms = objective(tokens, batch.reference_logprob_SxN.ravel(), entropy_SxN.ravel())
        loss = jnp.sum(jnp.where(tokens.mask_N, batch.weight_SxN.ravel() * terms.term_N, 0.0))
        shape = logprob_SxN.shape
        outputs = TokenOutputs(logprob_SxN, entropy_SxN, terms.clipped_N.reshape(shape), terms.factor_N.reshape(shape))
        return loss * acc.loss_scale, (loss, outputs)

    def accumulate(base: Tree, adapter: Tree, acc: Accumulated, batch: StepArrays) -> tuple[Accumulated, TokenOutputs]:
        grads, (loss, outputs) = jax.grad(loss_fn, has_aux=True)(adapter, base, acc, batch)
        grads = jax.tree.map(lambda total, g: total + g / acc.loss_scale, acc.grads, grads)
        acc = acc.replace(grads=constrain(grads, adapter_shardings), loss=acc.loss + loss)
        return acc, constrain(outputs, everywhere)

    def canary(base: Tree, adapter: Tree, tokens_C: jax.Array) -> jax.Array:
        ids_1xC = jnp.ones((1, tokens_C.shape[0]), jnp.int32)
        positions_1xC = jnp.arange(tokens_C.shape[0])[None]
        hidden_1xCxD: Any = small.apply(
            {"params": base, "lora": adapter}, tokens_C[None], positions_1xC, ids_1xC, jnp.zeros_like(ids_1xC)
        )
        logprobs_1xC, _ = token_logprobs(
            base, hidden_1xCxD[:, :-1], tokens_C[None, 1:], config=config, temperature=1.0, chunk=_CHUNK
        )
        return constrain(logprobs_1xC[0], everywhere)

    def init(adapter: Tree) -> LearnerState:
        state = LearnerState(
            lora=adapter,
            opt_state=optimizer.init(adapter),
            updates=jnp.zeros((), jnp.int32),
            loss_scale=jnp.full((), _FIRST_SCALE if scaled else 1.0, jnp.float32),
            since_scaled=jnp.zeros((), jnp.int32),
        )
        return constrain(state, state_shardings(mesh, state, adapter_shardings))

    def zeros(state: LearnerState, update: jax.Array) -> Accumulated:
        grads = constrain(jax.tree.map(jnp.zeros_like, state.lora), adapter_shardings)
        return Accumulated(grads, jnp.zeros(()), state.loss_scale, jnp.asarray(update, jnp.float32))

    def apply(
        base: Tree, state: LearnerState, acc: Accumulated, rate: jax.Array, canary_tokens: jax.Array
    ) -> tuple[LearnerState, Applied]:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(acc.grads)))
        finite = jnp.isfinite(norm)
        # A gradient that is not finite must not reach Adam's moments, which would never forget it.
        grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), acc.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.lora)
        lora = jax.tree.map(lambda x, u: x - rate.astype(x.dtype) * u, state.lora, updates)
        new, old = (lora, opt_state, state.updates + 1), (state.lora, state.opt_state, state.updates)
        scale = _next_scale(state, finite) if scaled else (state.loss_scale, state.since_scaled)
        state = LearnerState(*jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old), *scale)
        state = constrain(state, state_shardings(mesh, state, adapter_shardings))
        publish = constrain(rounded(state.lora, dtype), everywhere)
        return state, Applied(publish, canary(base, publish, canary_tokens), norm, finite)

    def score(base: Tree, adapter: Tree, batch: StepArrays) -> tuple[jax.Array, jax.Array]:
        return constrain(logprobs({"params": base, "lora": adapter}, batch), everywhere)

    def score_reference(base: Tree, batch: StepArrays) -> jax.Array:
        return constrain(logprobs({"params": base}, batch)[0], everywhere)

    return Step(
        init=jax.jit(init),
        zeros=jax.jit(zeros),
        accumulate=jax.jit(accumulate, donate_argnums=2),
        apply=jax.jit(apply, donate_argnums=(1, 2)),
        score=jax.jit(score),
        score_reference=jax.jit(score_reference),
        canary=jax.jit(canary),
        gather=jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, everywhere.spec)),
        mesh=mesh,
        lora_shardings=adapter_shardings,
    )


def _next_scale(state: LearnerState, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    good = jnp.where(finite, state.since_scaled + 1, 0)
    grow = good >= _GROW_AFTER
    scale = jnp.where(finite, jnp.where(grow, state.loss_scale * 2, state.loss_scale), state.loss_scale / 2)
    return jnp.clip(scale, 1.0, _LARGEST_SCALE), jnp.where(grow, 0, good)
