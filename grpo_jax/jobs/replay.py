"""`grpo-jax replay`: a run trained again from its spool, offline, with another objective or with the same."""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.load import override, parse_config
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import shortened
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, UsageError
from grpo_jax.jobs.local import default_environment, stop_on_signals
from grpo_jax.jobs.run import RunResult, place
from grpo_jax.jobs.show import run_decoder
from grpo_jax.observability.report import build_report
from grpo_jax.observability.rundata import bucket_root, run_name
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordReader

log = logging.getLogger(__name__)

# All else decides what was sampled, or does nothing without somebody who samples.
CHANGEABLE = (
    "algorithm",
    "optimizer",
    "lora",
    "learner",
    "steps",
    "batch.row_tokens",
    "batch.rows_per_micro_batch",
    "batch.skip_zero_advantage",
    "batch.share_prompt",
    "checkpoints",
    "retention",
    "logging",
)


def replay_run(run: Bucket, overrides: Sequence[str], to: str | None = None) -> RunResult:
    """Trains the run whose prefix is `run` again and reports on it; a replay that was interrupted goes on.

    Args:
      overrides: `key=value` of the sections that need no new rollouts.
      to: directory of the new run; None: beside the old one, as `<run>-replay`.

    Raises:
      UsageError: there is no run, a key cannot change without new rollouts, groups are gone, or another run is there.
    """
    default_environment()
    record = RecordReader(run, layout.RUN).read()
    if record is None:
        raise UsageError(f"{run.address}: there is no run (no sound {layout.RUN})")
    config, run_dir = _place(run, replay_config(record, overrides), to)
    target = Bucket(config.bucket).child(config.run)
    _refuse_other(target, config, record)
    from grpo_jax.learner.replay import replay
    from grpo_jax.learner.replay_source import Source

    source = Source(run, record)
    if source.steps < config.steps:
        log.warning("the batches of %d of %d steps are on record; the replay ends there", source.steps, config.steps)
    run_dir.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop:
        code = replay(config, source, run_dir, stop)
    if code == EXIT_RESUMABLE:
        return RunResult(code, run_dir, None, f"interrupted; the same command goes on ({run_dir})")
    report = build_report(run_dir, target, run_decoder(target))
    return RunResult(EXIT_DONE, run_dir, report, f"replayed {record['run']}: {report.headline}")


def replay_config(record: Record, overrides: Sequence[str]) -> Config:
    """The config of a run's record with the overrides; its name and place are still the old ones.

    A preset starts the section `algorithm` anew, another loss or weight its numbers: what the record says of them is
    said of the old ones.

    Raises:
      UsageError: names the key that cannot change, or what is wrong with its value.
    """
    keys = [text.partition("=")[0].strip() for text in overrides]
    for key in keys:
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in CHANGEABLE):
            raise UsageError(f"{key}: a replay cannot change it, because the rollouts on record were made with it")
    raw: dict[str, Any] = copy.deepcopy(record["config"])
    if "algorithm.preset" in keys:
        raw["algorithm"] = {}
    for name in ("loss", "weight"):
        if f"algorithm.{name}" in keys:
            raw["algorithm"][f"{name}_args"] = {}
    override(raw, overrides)
    # Nobody is there to be evaluated, and nobody draws another group in the place of one.
    config = parse_config({**raw, "evaluation": {**raw["evaluation"], "samples": 0}}, record["run"])
    was = record["config"]["algorithm"].get("zero_variance")
    if config.algorithm.zero_variance == "replace" != was:
        raise UsageError("algorithm.zero_variance: replace needs new rollouts; a replay can drop or keep such groups")
    return config


def _place(run: Bucket, config: Config, to: str | None) -> tuple[Config, Path]:
    if to is not None:
        return place(config.model_copy(update={"bucket": "."}), to)
    name = shortened(f"{run_name(run)}-replay")
    return place(config.model_copy(update={"bucket": bucket_root(run).url, "run": name}), None)


def _refuse_other(target: Bucket, config: Config, source: Record) -> None:
    """UsageError unless the place is free, or holds this very replay, not finished."""
    record = RecordReader(target, layout.RUN).read()
    if record is None:
        if target.list():
            raise UsageError(f"{target.address} is not empty; --dir names another place")
        return
    of = record.get("replay_of") or {}
    same = (of.get("run"), of.get("created_at")) == (source["run"], source.get("created_at"))
    if record["status"] == "finished" or not same or record["config"] != config.model_dump(mode="json"):
        raise UsageError(f"{target.address} exists already and is not overwritten; --dir names another place")
