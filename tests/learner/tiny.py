"""A tiny model, random groups, and the gradient of a batch through the real step."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms.objectives import dual_clip
from grpo_jax.config.schema import Algorithm, Optimizer
from grpo_jax.learner.batch import train_samples
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.packing import pack
from grpo_jax.learner.step import build_step, step_arrays
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import init_params
from grpo_jax.models.lora import init_lora
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    max_positions=128,
)
LORA = LoraConfig(rank=4, alpha=8.0)
ALGORITHM = Algorithm()


@cache
def make_step(dtype="float32", optimizer=None):
    """Compiled once for all tests that ask for the same."""
    return build_step(
        MODEL,
        LORA,
        build_optimizer(optimizer or Optimizer(learning_rate=1e-2), 10),
        partial(dual_clip, clip_low=0.2, clip_high=0.28, cap=3.0),
        dtype=jnp.dtype(dtype),
        temperature=0.7,
    )


def base_and_lora(dtype="float32"):
    base = init_params(jax.random.key(0), MODEL, jnp.dtype(dtype))
    lora = init_lora(jax.random.key(1), MODEL, LORA)
    # B = 0 would hide every mistake in A's gradient.
    lora = jax.tree.map(lambda x: 0.3 * jax.random.normal(jax.random.key(2), x.shape, jnp.dtype(dtype)), lora)
    return base, lora


def make_group(
    rng, index=0, *, n=4, prompt=7, longest=9, policy="tiny.v000000.00000000", started_at=None, rewards=None
):
    samples = []
    for i in range(n):
        length = int(rng.integers(1, longest + 1))
        samples.append(
            Sample(
                tokens=rng.integers(0, MODEL.vocab_size, length).astype(np.int32),
                logprobs=(-4 + rng.normal(size=length)).astype(np.float32),
                reward=float(rng.normal()) if rewards is None else rewards[i],
                reward_parts={},
                text="",
                finish_reason="stop",
            )
        )
    started = float(index) if started_at is None else started_at
    return Group(
        GroupId(0, index),
        rng.integers(0, MODEL.vocab_size, prompt).astype(np.int32),
        tuple(samples),
        Provenance(policy, "r0", str(index), 0, {}, started, started + 1),
    )


def ragged_groups(seed=0, count=4):
    rng = np.random.default_rng(seed)
    return [make_group(rng, i, n=int(rng.integers(2, 6)), prompt=int(rng.integers(2, 12))) for i in range(count)]


def gradient(step, base, lora, samples, *, row_tokens=64, rows=2, share_prompt=True, dtype="float32", extra=()):
    """(loss, gradient tree as float64) of a packed batch, accumulated over its micro-batches."""
    batches = pack(samples, row_tokens=row_tokens, rows=rows, share_prompt=share_prompt, dtype=np.dtype(dtype))
    acc = step.zeros(lora)
    for batch in [*batches, *extra]:
        acc, _, _ = step.accumulate(base, lora, acc, step_arrays(batch))
    return float(acc.loss), jax.tree.map(lambda x: np.asarray(x, np.float64), acc.grads)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def samples_of(groups):
    return train_samples(groups, ALGORITHM)
