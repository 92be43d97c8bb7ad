"""The learner's work with torch and PEFT, step by step: `python -m experiments.benchmarks.peers.torch_peft BATCH MODEL`

BATCH is a .npz of `ragged.py`, MODEL a Hugging Face directory. One step is forward, backward and AdamW update of a LoRA
on the whole batch: dual-clip loss, token mean, in micro-batches of samples sorted by length, logits at completion
positions only. Each step waits for a line `go` on stdin, so that a driver can interleave two processes.

Prints {"ready": true}, after each step {"step", "loss", "step_s"}, and at the end (`--steps` done, or stdin closed)
{"loss", "step_s", "tokens", "trained_tokens", "padded_tokens", "peak_rss_gb"}: the loss of the first step, which is
that of the base (B = 0); all step times; tokens a step without padding, those with a loss, and all that are forwarded.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from experiments.benchmarks.peers.ragged import Sample, read_batch


@dataclass(frozen=True)
class MicroBatch:
    """B samples padded on the right to T tokens; N completion tokens, each predicted at (row, column)."""

    tokens_BxT: Any
    rows_N: Any
    columns_N: Any
    targets_N: Any
    sampler_logprob_N: Any
    advantage_N: Any


def micro_batches(samples: Sequence[Sample], size: int) -> list[MicroBatch]:
    ordered = sorted(samples, key=lambda sample: len(sample.prompt) + len(sample.completion))
    return [_padded(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _padded(samples: Sequence[Sample]) -> MicroBatch:
    longest = max(len(sample.prompt) + len(sample.completion) for sample in samples)
    # What stands in the padding does not matter: nothing before it attends to it.
    tokens = np.zeros((len(samples), longest), np.int64)
    for row, sample in enumerate(samples):
        whole = np.concatenate([sample.prompt, sample.completion])
        tokens[row, : len(whole)] = whole
    lengths = [len(sample.completion) for sample in samples]
    advantages = np.array([sample.advantage for sample in samples], np.float32)
    columns = [len(sample.prompt) - 1 + np.arange(len(sample.completion)) for sample in samples]
    return MicroBatch(
        tokens_BxT=torch.from_numpy(tokens),
        rows_N=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        columns_N=torch.from_numpy(np.concatenate(columns)),
        targets_N=torch.from_numpy(np.concatenate([sample.completion for sample in samples]).astype(np.int64)),
        sampler_logprob_N=torch.from_numpy(np.concatenate([sample.sampler_logprobs for sample in samples])),
        advantage_N=torch.from_numpy(np.repeat(advantages, lengths)),
    )


def loss_sum(model: Any, batch: MicroBatch, options: argparse.Namespace) -> Any:
    """Σ of the dual-clip terms of a micro-batch."""
    # No attention mask: causal attention never reaches the padding on the right, and torch is faster without one.
    hidden_BxTxD = model.get_base_model().model(input_ids=batch.tokens_BxT, use_cache=False).last_hidden_state
    logits_NxV = model.get_base_model().lm_head(hidden_BxTxD[batch.rows_N, batch.columns_N])
    logprob_N = -cross_entropy(logits_NxV.float() / options.temperature, batch.targets_N, reduction="none")
    ratio_N = (logprob_N - batch.sampler_logprob_N).clamp(-20, 20).exp()
    a_N = batch.advantage_N
    surrogate_N = torch.minimum(ratio_N * a_N, ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high) * a_N)
    return -torch.where(a_N < 0, torch.maximum(surrogate_N, options.dual_clip * a_N), surrogate_N).sum()


def build(options: argparse.Namespace) -> Any:
    torch.manual_seed(options.seed)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    # The adapter itself stays float32, as PEFT has it.
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=options.rank, lora_alpha=options.alpha, target_modules="all-linear", lora_dropout=0.0
    )
    return get_peft_model(base, lora).train()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA steps with torch and PEFT; defaults as in the quickstart.")
    parser.add_argument("batch", type=Path)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    numbers = {"alpha": 16.0, "learning-rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "max-grad-norm": 1.0}
    for name, value in {**numbers, "clip-low": 0.2, "clip-high": 0.28, "dual-clip": 3.0}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.threads:
        torch.set_num_threads(options.threads)
    samples, normaliser = read_batch(options.batch)
    batches, model = micro_batches(samples, options.micro_batch), build(options)
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (options.beta1, options.beta2)
    optimizer = torch.optim.AdamW(adapter, lr=options.learning_rate, betas=betas, weight_decay=0.0)

    def step() -> float:
        loss = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                part = loss_sum(model, batch, options) / normaliser
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(adapter, options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    print(json.dumps({"ready": True}), flush=True)
    losses: list[float] = []
    seconds: list[float] = []
    while len(seconds) < options.steps and sys.stdin.readline().strip() == "go":
        started = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
        print(json.dumps({"step": len(losses) - 1, "loss": losses[-1], "step_s": seconds[-1]}), flush=True)
    trained = sum(len(sample.completion) for sample in samples)
    found = {
        "loss": losses[0] if losses else None,
        "step_s": seconds,
        "tokens": trained + sum(len(sample.prompt) for sample in samples),
        "trained_tokens": trained,
        "padded_tokens": sum(batch.tokens_BxT.numel() for batch in batches),
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
