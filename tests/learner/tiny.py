"""A tiny model, random groups, and the gradient of a batch through the real step."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.schema import Algorithm, Optimizer
from grpo_jax.learner.batch import train_minibatches
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.packing import pack
from grpo_jax.learner.setup import Layout, Trainer, objective_of
from grpo_jax.learner.sharding import make_mesh, param_shardings, place, row_shards
from grpo_jax.learner.step import build_step
from grpo_jax.learner.train import train_batch
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
MAX_TOKENS = 9


def algorithm_of(pairs):
    """A config's algorithm from nested tuples of (key, value), which can be hashed."""
    return Algorithm(**_dicts(pairs))


def _dicts(value):
    is_pairs = isinstance(value, tuple) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
    return {k: _dicts(v) for k, v in value} if is_pairs else value


@cache
def make_step(dtype="float32", algorithm=(), **others):
    """Compiled once for all tests that ask for the same. `algorithm`: see `algorithm_of`."""
    step = build_step(
        MODEL,
        LORA,
        build_optimizer(Optimizer()),
        objective_of(algorithm_of(algorithm)),
        dtype=jnp.dtype(dtype),
        temperature=0.7,
        **others,
    )
    # Only the gradient depends on the objective; the rest need not be compiled again for each of them.
    return replace(make_step(dtype, **others), accumulate=step.accumulate) if algorithm else step


def base_and_lora(dtype="float32"):
    base = init_params(jax.random.key(0), MODEL, jnp.dtype(dtype))
    # The head is tied to the embeddings: smaller ones make distributions that are not decided.
    base["embed"]["embedding"] *= 0.25
    lora = init_lora(jax.random.key(1), MODEL, LORA)
    # B = 0 would hide every mistake in A's gradient. An adapter is never narrower than float32.
    wide = jnp.promote_types(dtype, jnp.float32)
    lora = jax.tree.map(lambda x: 0.3 * jax.random.normal(jax.random.key(2), x.shape, wide), lora)
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
    acc = step.zeros(step.init(lora), np.float32(0))
    for batch in [*batches, *extra]:
        acc, _ = step.accumulate(base, lora, acc, step.arrays(batch))
    return float(acc.loss), jax.tree.map(lambda x: np.asarray(x, np.float64), acc.grads)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def samples_of(groups, algorithm=ALGORITHM, **options):
    (samples,) = train_minibatches(groups, algorithm, max_tokens=MAX_TOKENS, **options)
    return samples


class TinyTrainer(Trainer):
    """A trainer without a model directory, with an adapter whose B is not 0."""

    def initial_lora(self):
        return base_and_lora(self.dtype.name)[1]


def make_trainer(sizes=(1, 1, 1), dtype="float32", algorithm=(), *, row_tokens=64, rows=1, share_prompt=True, **step):
    """On a mesh of the first data × fsdp × tensor devices."""
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    shardings = param_shardings(mesh, MODEL)
    base, _ = base_and_lora(dtype)
    return TinyTrainer(
        model=MODEL,
        lora=LORA,
        base=jax.tree.map(lambda x, sharding: place(np.asarray(x), sharding), base, shardings),
        base_digest="0" * 64,
        step=make_step(dtype, algorithm, mesh=mesh, **step),
        objective=objective_of(algorithm_of(algorithm)),
        dtype=jnp.dtype(dtype),
        seed=0,
        layout=Layout(row_tokens, rows, row_shards(mesh), share_prompt),
    )


def train(engine, groups, algorithm=(), *, rate=1e-2, steps=1):
    """Some steps over the same groups; the last one's `Trained`."""
    config = algorithm_of(algorithm)
    lags = [0] * len(groups)
    for _ in range(steps):
        trained = train_batch(
            engine,
            train_minibatches(groups, config, max_tokens=MAX_TOKENS, step_lags=lags),
            lags,
            iterations=config.num_iterations,
            rate=rate,
            canary_tokens=np.arange(8, dtype=np.int32),
        )
    return trained
