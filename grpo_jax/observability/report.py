"""`report.html` and `reward.png` of a run, finished or not, from what it has left behind."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.observability import format as f
from grpo_jax.observability.page import render
from grpo_jax.observability.plot import draw
from grpo_jax.observability.rundata import load_run
from grpo_jax.observability.samples import Decode, choose_samples
from grpo_jax.observability.summary import summarise
from grpo_jax.observability.theme import DARK, LIGHT
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    html_path: Path
    png_path: Path | None  # None: matplotlib is not installed
    summary: dict[str, Any]

    @property
    def headline(self) -> str:
        """One line for the terminal."""
        s = self.summary
        return (
            f"{s['steps']} of {f.number(s['total_steps'])} steps, "
            f"training reward {f.arrow(s['reward_first3'], s['reward_last5'])}, "
            f"held-out reward {f.arrow(s['held_out_base'], s['held_out_trained'])}, "
            f"{f.duration(s['step_s_median'])} a step, overlap {f.percent(s['overlap_fraction'])}"
        )


def build_report(run_dir: Path, bucket: Bucket, decode: Decode | None = None) -> Report:
    """Writes both files into `run_dir` and returns the numbers in them.

    Args:
      bucket: the run's prefix in the bucket.
      decode: token ids → text (a tokenizer's), to show prompts; without it a prompt is named by its problem's id.

    Raises:
      UsageError: there is no run at all.
    """
    run = load_run(run_dir, bucket)
    if not (run.run or run.metrics or run.groups or run.learner):
        raise UsageError(f"{bucket.address}: no run has left anything here")
    run_dir.mkdir(parents=True, exist_ok=True)
    summary = summarise(run)
    png_path: Path | None = run_dir / "reward.png"
    try:
        pictures = [draw(run, theme) for theme in (LIGHT, DARK)]
    except ImportError:
        pictures, png_path = [], None
        summary["missing"] = [*summary["missing"], "The picture: matplotlib is not installed."]
    if png_path is not None:
        png_path.write_bytes(pictures[0])
    html_path = run_dir / "report.html"
    html_path.write_text(render(run, summary, pictures, choose_samples(run, bucket, decode)), encoding="utf-8")
    return Report(html_path, png_path, summary)
