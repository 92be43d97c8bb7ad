"""A learner of two processes, in a whole run: one decides, the other follows."""

import os
import subprocess
import sys

import pytest

from grpo_jax.generator.process import free_port
from tests.jobs.harness import REPO, Command, metrics, tiny_config, trained_groups, wait_for

pytestmark = pytest.mark.slow


def test_a_run_whose_learner_is_two_processes(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port('127.0.0.1')}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    run_dir = tmp_path / "bucket" / "tiny"
    # π_old, the reference and two updates a step: every call that one process asks the other for.
    algorithm = {"preset": "precision_rl", "kl_coef": 0.01, "minibatches": 2}
    command = Command(tiny_config(tiny_model, tmp_path / "bucket", steps=3, algorithm=algorithm), tmp_path)
    resolved = wait_for(lambda: (run_dir / "config.json").is_file() and run_dir / "config.json", what="the run")
    follower = subprocess.Popen(
        [sys.executable, "-m", "grpo_jax.cli", "learner", "--config", str(resolved), "--dir", str(tmp_path / "other")],
        cwd=REPO,
        env={**os.environ, "JAX_PROCESS_ID": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        code, out, err = command.wait()
        assert code == 0, err[-3000:]
        assert "finished: 3 of 3 steps" in out
        _, follower_err = follower.communicate(timeout=60)
        assert follower.returncode == 0, follower_err[-3000:]
    finally:
        follower.kill()
    records = metrics(run_dir)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["batch/skipped_update"] == 0 for record in records)
    assert len(set(trained_groups(run_dir))) == 6
    assert "data 2" in (run_dir / "logs" / "learner.log").read_text()
