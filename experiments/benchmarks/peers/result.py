"""What a side's runs come to, and how it is printed."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.benchmarks.peers.watch import Watched

ENOUGH = 0.9
_GB = 1e9


class Step(NamedTuple):
    t: float  # time.time() at its end
    reward: float


@dataclass(frozen=True)
class Result:
    """One whole run of one side."""

    run: Watched
    steps: list[Step]
    versions: dict[str, str]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step but the first, whose beginning is not seen."""
        return [after.t - before.t for before, after in zip(self.steps, self.steps[1:], strict=False)]

    @property
    def reached(self) -> Step | None:
        """The first step with enough reward."""
        return next((step for step in self.steps if step.reward >= ENOUGH), None)


def summary(results: Sequence[Result]) -> dict[str, float | None]:
    """Of all rounds of a side: medians of times, the mean of rewards, the largest memory. None: never, or too short."""
    seconds = [s for result in results for s in result.step_s]
    reached = [(result.run.started, result.steps[0].t, result.reached) for result in results]
    # A round that never got there leaves no honest time.
    whole = None not in (step for *_, step in reached)
    return {
        "step_s": median(seconds) if seconds else None,
        "wall_step_s": median(result.run.wall_s / len(result.steps) for result in results),
        "first_09_s": median(step.t - start for start, _, step in reached if step) if whole else None,
        "first_09_train_s": median(step.t - first for _, first, step in reached if step) if whole else None,
        "reward_last5": fmean(step.reward for result in results for step in result.steps[-5:]),
        "peak_rss_gb": max(result.run.peak_rss for result in results) / _GB,
    }


_ROWS = {
    "step_s": "seconds a step, median",
    "wall_step_s": "whole command / steps, s",
    "first_09_s": f"reward ≥ {ENOUGH}: s from start of command",
    "first_09_train_s": f"reward ≥ {ENOUGH}: s from end of first step",
    "reward_last5": "reward, mean of the last 5 steps",
    "peak_rss_gb": "peak memory, GB, sum over processes",
}


def table(ours: dict[str, Any], theirs: dict[str, Any], peer: str) -> str:
    lines = [f"{'':42}{'grpo_jax':>10}{peer:>10}"]
    for key, label in _ROWS.items():
        lines.append(f"{label:42}" + "".join(f"{_number(side[key]):>10}" for side in (ours, theirs)))
    return "\n".join(lines)


def rewards(result: Result) -> str:
    return " ".join(f"{step.reward:.2f}" for step in result.steps)


def machine() -> str:
    """Processor, cores that this process may use, memory, system."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GB
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GB, {platform.system()} {platform.machine()}"


def natural_dtype() -> str:
    """What a user of torch would choose: bfloat16 on an accelerator and on processors that multiply in it.

    On others torch's bfloat16 products are several times slower than float32.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    fast = {"avx512_bf16", "amx_bf16"} & set(flags) or Path("/dev/nvidia0").exists()
    return "bfloat16" if fast else "float32"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
