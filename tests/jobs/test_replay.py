"""`grpo-jax replay`: with nothing changed the same adapters and metrics; with another objective a run of its own."""

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax.adapters.names import parse_policy
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.jobs.replay import replay_config, replay_run
from grpo_jax.learner.replay_source import Source
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import read_record
from tests.jobs.harness import REPO, metrics, tiny_config
from tests.observability.synthetic import write_run

# What a replay cannot have, and what goes by the clock.
_CLOCK = ("perf/", "time/", "rollout/", "cost/", "fleet/", "logging/", "policy/")
_QUEUE = ("sample/rollout_queue_size", "sample/time_in_queue_s")


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "grpo_jax.cli", "replay", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True, timeout=400)


def adapters(run_dir: Path) -> dict[int, tuple[str, dict[str, np.ndarray]]]:
    """Version → (digest in the name, tensors)."""
    named = {parse_policy(path.name): path for path in (run_dir / "adapters").iterdir()}
    return {
        name.version: (name.hex, load_file(path / layout.ADAPTER_WEIGHTS))
        for name, path in named.items()
        if name.version is not None
    }


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith((*_CLOCK, *_QUEUE))} for record in metrics(run_dir)]


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in sorted(run_dir.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def replayed(finished) -> tuple[Path, Path]:
    """The directories of a run and of its replay."""
    folder, (code, _, err), _ = finished
    assert code == 0, err
    run_dir = folder / "bucket/tiny"
    before = contents(run_dir)
    done = command(str(run_dir))
    assert done.returncode == 0, done.stderr
    assert contents(run_dir) == before
    return run_dir, folder / "bucket/tiny-replay"


@pytest.mark.slow
def test_the_same_batches_make_the_same_adapters_and_metrics(replayed):
    original, replay = map(adapters, replayed)
    assert original.keys() == replay.keys() == {0, 1, 2, 3, 4}
    assert {v: digest for v, (digest, _) in original.items()} == {v: digest for v, (digest, _) in replay.items()}
    changed = [key for key, tensor in replay[4][1].items() if not np.array_equal(tensor, replay[0][1][key])]
    assert changed
    assert comparable(replayed[0]) == comparable(replayed[1])
    assert len(comparable(replayed[1])) == 4


@pytest.mark.slow
def test_a_replay_is_a_run_that_says_of_which_it_is_one(replayed):
    run_dir, replay = replayed
    of = read_record(Bucket(str(run_dir)), layout.RUN)
    record = read_record(Bucket(str(replay)), layout.RUN)
    assert record["status"] == "finished"
    assert record["run"] == "tiny-replay"
    assert record["replay_of"] == {
        "run": "tiny",
        "address": str(run_dir),
        "created_at": of["created_at"],
        "steps": 4,
    }
    assert (replay / "report.html").is_file()
    assert json.loads((replay / "policy.json").read_text())["current"].startswith("tiny-replay.v000004.")
    assert list((replay / "checkpoints").rglob("manifest*.json"))


@pytest.mark.slow
def test_nothing_is_overwritten(replayed):
    run_dir, replay = replayed
    before = contents(replay)
    for arguments in ((), ("optimizer.learning_rate=1e-3",), ("--dir", str(run_dir))):
        done = command(str(run_dir), *arguments)
        assert done.returncode == 2
        assert "--dir names another place" in done.stderr
    assert contents(replay) == before


@pytest.mark.slow
def test_a_stopped_replay_goes_on_and_ends_as_one_that_was_not(replayed, tmp_path, monkeypatch):
    run_dir, other = replayed[0], tmp_path / "other"
    changes = ["algorithm.aggregation=sequence_mean", "optimizer.learning_rate=3e-3", "lora.alpha=8"]

    class Late(threading.Event):
        """Set once the second step is finished."""

        def is_set(self) -> bool:
            return len(metrics(other)) >= 2

    monkeypatch.setattr("grpo_jax.jobs.replay.stop_on_signals", lambda: nullcontext(Late()))
    stopped = replay_run(Bucket(str(run_dir)), changes, str(other))
    assert stopped.exit_code == 75
    assert len(metrics(other)) == 2
    monkeypatch.undo()
    with pytest.raises(UsageError, match="exists already"):
        replay_run(Bucket(str(run_dir)), [*changes, "lora.rank=16"], str(other))
    assert replay_run(Bucket(str(run_dir)), changes, str(other)).exit_code == 0
    assert replay_run(Bucket(str(run_dir)), changes, str(tmp_path / "whole")).exit_code == 0
    assert comparable(other) == comparable(tmp_path / "whole")
    ours, whole, original = adapters(other), adapters(tmp_path / "whole"), adapters(run_dir)
    assert {v: hex for v, (hex, _) in ours.items()} == {v: hex for v, (hex, _) in whole.items()}
    assert all(ours[v][0] != original[v][0] for v in ours)


@pytest.fixture
def record(tmp_path) -> dict[str, Any]:
    config = Config.model_validate(tiny_config(tmp_path / "model", tmp_path, algorithm={"preset": "dapo"}))
    return {"run": "tiny", "config": config.model_dump(mode="json")}


@pytest.mark.parametrize(
    "change",
    [
        "model.dtype=bfloat16", "task.args.held_out=3", "sampling.max_tokens=6", "batch.prompts_per_step=2", "seed=1",
        "batch.group_size=4", "batch={}", "max_staleness=3", "sync_every=2", "rewards.0.weight=2", "run=x", "bucket=y",
    ],
)  # fmt: skip
def test_what_needs_new_rollouts_is_refused_by_its_key(record, change):
    with pytest.raises(UsageError, match=f"^{change.partition('=')[0]}: a replay cannot change it"):
        replay_config(record, [change])


def test_replacing_groups_needs_new_rollouts_and_so_is_refused(record):
    record["config"]["algorithm"]["zero_variance"] = "keep"
    assert replay_config(record, ["algorithm.zero_variance=drop"]).algorithm.zero_variance == "drop"
    with pytest.raises(UsageError, match=r"algorithm\.zero_variance: replace needs new rollouts"):
        replay_config(record, ["algorithm.preset=dapo"])


def test_another_preset_or_loss_brings_its_own_numbers(record):
    before = json.dumps(record)
    unchanged = replay_config(record, [])
    assert unchanged.model_dump() == {
        **Config.model_validate(record["config"]).model_dump(),
        "evaluation": unchanged.evaluation.model_dump(),
    }
    gspo = replay_config(record, ["algorithm.preset=gspo", "lora.rank=16", "optimizer.stop_at_reward.value=0.5"])
    assert gspo.algorithm == type(gspo.algorithm)(preset="gspo")
    assert gspo.optimizer.stop_at_reward.value == 0.5
    assert replay_config(record, ["algorithm.loss=cispo"]).algorithm.loss_args == {}
    assert json.dumps(record) == before


def test_steps_whose_groups_are_gone_are_named(tmp_path):
    run = write_run(Bucket(str(tmp_path)), tmp_path / "toy", 6)
    record = read_record(run, layout.RUN)
    assert Source(run, record).steps == 6
    for index in (0, 4, 5, 13):  # four groups a step
        run.delete(layout.rollout("w0", f"e000.i{index:06d}.a00"))
    with pytest.raises(UsageError, match="groups of steps 0-1, 3 are no longer in the spool"):
        Source(run, record)
    run.delete_folder(layout.BATCHES)
    with pytest.raises(UsageError, match="no step has been recorded"):
        Source(run, record)
