"""The learner's work, step by step: `python -m experiments.benchmarks.jax_step BATCH MODEL`; see `peers.torch_peft`.

The same protocol, batch file and work: LoRA forward, backward and AdamW update on the whole batch, here with the
learner's own packing and compiled step. At the end it says besides: seconds from the start of the process to the end of
its first step, operations that a step executes, and what a 2048³ product reaches.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.peers.ragged import read_batch
from grpo_jax.config.schema import Algorithm, Optimizer
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.packing import MicroBatch, TrainSample, pack
from grpo_jax.learner.setup import objective_of
from grpo_jax.learner.step import build_step
from grpo_jax.models.attention import LONGEST_WHOLE
from grpo_jax.models.config import LoraConfig, ModelConfig, parameter_count, projection_shapes
from grpo_jax.models.lora import init_lora
from grpo_jax.models.weights import load_params

_STARTED = time.perf_counter()
_CHUNK = 128
_GEMM = 2048


def train_samples(path: Path) -> list[TrainSample]:
    """Samples with the same prompt, one after the other, are a group."""
    samples, normaliser = read_batch(path)
    found: list[TrainSample] = []
    group = -1
    for i, sample in enumerate(samples):
        if not i or not np.array_equal(sample.prompt, samples[i - 1].prompt):
            group += 1
        found.append(
            TrainSample(
                group, i, sample.prompt, sample.completion, sample.sampler_logprobs, sample.advantage, 1 / normaliser
            )
        )
    return found


def executed_flops(config: ModelConfig, lora: LoraConfig, batches: list[MicroBatch], remat: str) -> float:
    """Operations of the products that a step executes, padding and recomputation included.

    4 for each weight and row token (forward, and backward through the activations), 6 for each number of the adapter,
    12 for each pair of tokens that attention multiplies per head and channel, 4 for each number of the head and
    position of a chunk that holds a completion token. Remat computes each layer once more.
    """
    linear = sum(rows * columns for rows, columns in projection_shapes(config).values())
    adapter = sum(lora.rank * sum(shape) for shape in projection_shapes(config).values())
    rows, length = batches[0].tokens_BxT.shape
    pairs, passes = float(length**2), 12
    if length > LONGEST_WHOLE:  # in blocks: keys after the block are left out, and the scores are computed twice
        pairs, passes = pairs * 9 / 16, 16
    attention = passes * pairs / length * config.num_heads * config.head_dim
    again = 2 * linear + 2 * adapter if remat == "full" else 0
    per_token = config.num_layers * (4 * linear + 6 * adapter + attention + again)
    chunks = sum(-(-int(count) // _CHUNK) for batch in batches for count in batch.mask_SxN.sum(axis=1))
    head = 4.0 * config.hidden_size * config.vocab_size * chunks * _CHUNK
    return len(batches) * rows * length * per_token + head


def gemm_flop_s(dtype: Any) -> float:
    """Operations a second of a square product, the best of five."""
    a = jnp.ones((_GEMM, _GEMM), dtype)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * _GEMM**3 / min(seconds)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA steps with the learner; defaults as in the quickstart.")
    parser.add_argument("batch", type=Path)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--share-prompt", action="store_true")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cache", metavar="DIR", help="compilation cache")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.cache:
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    dtype = jnp.dtype(options.dtype)
    config, lora = ModelConfig.from_dir(options.model), LoraConfig(8, 16.0)
    base = load_params(options.model, config, dtype)
    step = build_step(
        config,
        lora,
        build_optimizer(Optimizer(beta2=0.95)),
        objective_of(Algorithm()),
        dtype=dtype,
        temperature=1.0,
        remat=options.remat,
        chunk=_CHUNK,
    )
    samples = train_samples(options.batch)
    batches = pack(samples, row_tokens=options.row_tokens, rows=options.rows, share_prompt=options.share_prompt)
    state = step.init(step.place_lora(init_lora(jax.random.key(0), config, lora)))
    canary = np.arange(24, dtype=np.int32)
    print(json.dumps({"ready": True}), flush=True)
    losses: list[float] = []
    seconds: list[float] = []
    first_step_at = 0.0
    while len(seconds) < options.steps and sys.stdin.readline().strip() == "go":
        started = time.perf_counter()
        acc = step.zeros(state, np.float32(0))
        for batch in batches:
            acc, _ = step.accumulate(base, state.lora, acc, step.arrays(batch))
        loss = acc.loss
        losses.append(float(loss))
        state, applied = step.apply(base, state, acc, np.float32(1e-3), canary)
        jax.block_until_ready((state, applied))
        seconds.append(time.perf_counter() - started)
        first_step_at = first_step_at or time.perf_counter() - _STARTED
        print(json.dumps({"step": len(losses) - 1, "loss": losses[-1], "step_s": seconds[-1]}), flush=True)
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    found = {
        "loss": losses[0] if losses else None,
        "step_s": seconds,
        "tokens": sum(len(s.prompt) + len(s.completion) for s in samples),
        "trained_tokens": sum(len(s.completion) for s in samples),
        "padded_tokens": sum(batch.tokens_BxT.size for batch in batches),
        "peak_rss_gb": peak_rss,
        "first_step_at_s": first_step_at,
        "flops": executed_flops(config, lora, batches, options.remat),
        "gemm_flop_s": gemm_flop_s(dtype),
        "parameters": parameter_count(config),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
