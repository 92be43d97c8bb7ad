"""The compiled step on an accelerator with random weights; started by `gpu.sh`. Prints one JSON object a line.

`mfu` counts 4 N operations a token for the frozen base and 6 for each number of the adapter (`learner.flops`), of the
tokens that are not padding, against the device's peak in bfloat16 by its data sheet.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.schema import Algorithm, Optimizer
from grpo_jax.learner.flops import peak_flops
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.packing import TrainSample, pack
from grpo_jax.learner.setup import objective_of
from grpo_jax.learner.step import build_step
from grpo_jax.models.attention_backends import choose, self_test
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.models.decoder import init_params
from grpo_jax.models.flops import flops_per_token
from grpo_jax.models.lora import init_lora
from grpo_jax.models.source import shipped_config

MODEL = "Qwen/Qwen2.5-1.5B"


def model_config(tiny: bool) -> ModelConfig:
    config = shipped_config(MODEL)
    if config is None:
        raise SystemExit(f"configs/models has nothing of {MODEL}: run this in a checkout")
    if not tiny:
        return config
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return replace(config, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, **heads)


def samples_of(config: ModelConfig, longest: int, seed: int = 0) -> list[TrainSample]:
    """16 groups of 8, lengths like those of a public run of this model: 0.4 of `longest` on average."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(16):
        prompt = rng.integers(0, config.vocab_size, int(rng.integers(longest // 50, longest // 12))).astype(np.int32)
        for index in range(8):
            length = int(np.clip(rng.gamma(2.2, 0.4 * longest / 2.2), 4, longest))
            completion = rng.integers(0, config.vocab_size, length).astype(np.int32)
            logprobs = rng.normal(-11, 1, length).astype(np.float32)
            samples.append(TrainSample(group, index, prompt, completion, logprobs, float(rng.normal()), 1e-5))
    return samples


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def measure(config: ModelConfig, *, row_tokens: int, longest: int, remat: str, attention: str, steps: int) -> None:
    dtype, lora = jnp.dtype(jnp.bfloat16), LoraConfig(1, 32.0)
    share = attention == "xla"
    step = build_step(
        config,
        lora,
        build_optimizer(Optimizer()),
        objective_of(Algorithm()),
        dtype=dtype,
        temperature=1.0,
        remat=remat,
        attention=attention,
    )
    base = jax.tree.map(lambda x: 0.02 * x, init_params(jax.random.key(0), config, dtype))
    state = step.init(step.place_lora(init_lora(jax.random.key(1), config, lora)))
    batches = pack(samples_of(config, longest), row_tokens=row_tokens, rows=1, share_prompt=share)
    tokens = sum(int((batch.prompt_ids_BxT > 0).sum()) for batch in batches)
    arrays = step.arrays(batches[0])
    started = time.perf_counter()
    compiled = step.accumulate.lower(base, state.lora, step.zeros(state, np.float32(0)), arrays).compile()  # type: ignore[attr-defined]
    compile_s, memory = time.perf_counter() - started, compiled.memory_analysis()
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        acc = step.zeros(state, np.float32(0))
        for batch in batches:
            acc, _ = step.accumulate(base, state.lora, acc, step.arrays(batch))
        state, applied = step.apply(base, state, acc, np.float32(1e-6), np.arange(24, dtype=np.int32))
        jax.block_until_ready((state, applied))
        seconds.append(time.perf_counter() - started)
    step_s = float(np.median(seconds[1:]))
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind, dtype)
    stats = device.memory_stats() or {}
    say(
        what="step",
        attention=attention,
        remat=remat,
        row_tokens=row_tokens,
        rows=len(batches),
        tokens=tokens,
        fill=tokens / (len(batches) * row_tokens),
        compile_s=compile_s,
        step_s=step_s,
        tok_s=tokens / step_s,
        mfu=tokens * flops_per_token(config, lora) / step_s / peak if peak else None,
        temp_gb=memory.temp_size_in_bytes / 1e9 if memory else None,
        peak_gb=stats.get("peak_bytes_in_use", 0) / 1e9,
        finite=bool(applied.finite),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The compiled step on an accelerator.")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows: does the script run at all?")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    config = model_config(options.tiny)
    row_tokens, longest = (512, 300) if options.tiny else (16_384, 3000)
    device = jax.devices()[0]
    say(what="device", kind=device.device_kind, platform=jax.default_backend(), jax=jax.__version__)
    shapes: dict[str, Any] = {"dtype": jnp.bfloat16, "head_dim": config.head_dim, "row_tokens": row_tokens}
    fused = choose("auto", platform=jax.default_backend(), shared_prompts=False, **shapes)
    if fused != "xla":
        heads: dict[str, Any] = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
        say(what="self-test", attention=fused, error=self_test(fused, **heads, **shapes))
    for remat, attention in dict.fromkeys([("full", fused), ("dots", fused), ("full", "xla")]):
        try:
            measure(
                config, row_tokens=row_tokens, longest=longest, remat=remat, attention=attention, steps=options.steps
            )
        except Exception as error:  # out of memory under one policy says nothing about the others
            say(what="failed", attention=attention, remat=remat, error=f"{error!r:.300}")


if __name__ == "__main__":
    main()
