"""Whole runs: real processes, a real bucket, real HTTP, the reference engine on a tiny model."""

import json
import os
import signal

import numpy as np
import pytest

from grpo_jax.rollouts.sample import Group
from tests.jobs.harness import Command, learner_step, metrics, tiny_config, trained_groups, wait_for

pytestmark = pytest.mark.slow


def test_a_run_ends_with_its_report_and_leaves_nothing_running(finished):
    folder, (code, out, err), left = finished
    run_dir = folder / "bucket/tiny"
    assert code == 0, err
    assert left == {}
    assert f"{run_dir / 'report.html'}" in out
    assert (run_dir / "reward.png").stat().st_size > 10_000
    assert [record["step"] for record in metrics(run_dir)] == [0, 1, 2, 3]
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"


def test_every_sample_names_a_published_policy_and_its_log_probs_are_the_learners(finished):
    folder, _, _ = finished
    run_dir = folder / "bucket/tiny"
    groups = [Group.from_bytes(path.read_bytes()) for path in run_dir.glob("rollouts/*/*.safetensors")]
    published = {path.name for path in (run_dir / "adapters").iterdir()}
    assert len(groups) >= 8
    assert {group.provenance.policy for group in groups} <= published
    assert len({group.provenance.seed for group in groups}) == len(groups)
    records = metrics(run_dir)
    assert max(record["mismatch/lag0/max"] for record in records if "mismatch/lag0/max" in record) < 1e-3
    assert max(record["sample/staleness_max"] for record in records) <= 1
    assert records[-1]["policy/version"] == 4


def test_each_step_trained_other_groups_and_the_held_out_problems_were_never_among_them(finished):
    folder, _, _ = finished
    run_dir = folder / "bucket/tiny"
    trained = trained_groups(run_dir)
    assert len(trained) == len(set(trained)) == 8
    evaluations = [json.loads(path.read_text()) for path in (run_dir / "evaluations").glob("*.json")]
    assert {evaluation["problems"] for evaluation in evaluations} == {4}
    assert len(evaluations) == 2
    from experiments.tasks.addition import one_digit

    held_out = {problem.id for problem in one_digit(4)["eval"]}
    groups = [Group.from_bytes(path.read_bytes()) for path in run_dir.glob("rollouts/*/*.safetensors")]
    assert not held_out & {group.provenance.problem_id for group in groups}


def test_a_finished_run_prints_its_result_again_and_starts_nothing(finished, tiny_model):
    folder, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (folder / "bucket/tiny/batches").iterdir()}
    code, out, err = Command(tiny_config(tiny_model, folder / "bucket"), folder).wait(120)
    assert code == 0, err
    assert "finished already" in out
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "bucket/tiny/batches").iterdir()}


def test_a_changed_config_is_refused_with_the_keys_that_differ(finished, tiny_model):
    folder, _, _ = finished
    config = tiny_config(tiny_model, folder / "bucket", optimizer__learning_rate=0.5, steps=9)
    code, _, err = Command(config, folder).wait(120)
    assert code == 2
    assert "optimizer.learning_rate" in err
    assert "steps" not in err


def test_fresh_starts_anew_and_touches_nothing_else(tiny_model, tmp_path):
    run_dir = tmp_path / "bucket/tiny"
    config = tiny_config(tiny_model, tmp_path / "bucket", steps=1, evaluation__samples=0)
    assert Command(config, tmp_path).wait()[0] == 0
    (run_dir / "notes.txt").write_text("mine")
    created = json.loads((run_dir / "run.json").read_text())["created_at"]
    wrong = tiny_config(tiny_model, tmp_path / "bucket", batch__row_tokens=12)
    assert Command(wrong, tmp_path, "--fresh").wait(120)[0] == 2
    assert json.loads((run_dir / "run.json").read_text())["created_at"] == created
    code, _, err = Command({**config, "seed": 5}, tmp_path, "--fresh").wait()
    assert code == 0, err
    assert json.loads((run_dir / "run.json").read_text())["created_at"] > created
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_a_signal_stops_everything_after_the_last_step_is_saved_and_the_same_command_goes_on(tiny_model, tmp_path):
    run_dir = tmp_path / "bucket/tiny"
    config = tiny_config(tiny_model, tmp_path / "bucket", steps=8)
    command = Command(config, tmp_path)
    wait_for(lambda: learner_step(run_dir) >= 3, what="step 3")
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.wait(90)
    assert code == 75, err
    assert command.processes() == {}
    assert "the same command goes on" in err
    done = learner_step(run_dir)
    assert max(int(path.parent.name[:6]) for path in run_dir.glob("checkpoints/*/manifest*.json")) == done
    records = {path.name: path.read_bytes() for path in (run_dir / "batches").iterdir()}

    again = Command(config, tmp_path)
    code, _, err = again.wait()
    assert code == 0, err
    assert [record["step"] for record in metrics(run_dir)] == list(range(8))
    assert done < 8
    trained = trained_groups(run_dir)
    assert len(trained) == len(set(trained)) == 16
    assert records == {name: (run_dir / "batches" / name).read_bytes() for name in records}
    assert again.processes() == {}


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("generator server", signal.SIGKILL),
        ("generator server", signal.SIGSTOP),
        ("generator", signal.SIGKILL),
        ("proxy", signal.SIGKILL),
        ("worker", signal.SIGKILL),
        ("learner", signal.SIGKILL),
        ("learner", signal.SIGSTOP),
    ],
)
def test_a_role_that_is_killed_or_stopped_for_good_costs_no_step(tiny_model, tmp_path, role, number):
    run_dir = tmp_path / "bucket/tiny"
    config = tiny_config(tiny_model, tmp_path / "bucket", steps=6, local={"hung_s": 15.0}, generator__hung_s=15.0)
    command = Command(config, tmp_path)
    wait_for(lambda: learner_step(run_dir) >= 2, what="step 2")
    words = ("grpo_jax.generator.reference",) if role == "generator server" else ("grpo_jax.cli", f" {role} ")
    os.kill(command.find(*words), number)
    code, _, err = command.wait()
    assert code == 0, err
    assert [record["step"] for record in metrics(run_dir)] == list(range(6))
    trained = trained_groups(run_dir)
    assert len(trained) == len(set(trained)) == 12
    assert command.processes() == {}
    losses = [record["loss"] for record in metrics(run_dir) if "loss" in record]  # none where no group was mixed
    assert losses
    assert np.isfinite(losses).all()


def test_a_killed_supervisor_takes_its_roles_with_it(tiny_model, tmp_path):
    run_dir = tmp_path / "bucket/tiny"
    command = Command(tiny_config(tiny_model, tmp_path / "bucket", steps=50), tmp_path)
    wait_for(lambda: learner_step(run_dir) >= 1, what="step 1")
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    wait_for(lambda: command.processes() == {}, 30, "the end of all roles")
