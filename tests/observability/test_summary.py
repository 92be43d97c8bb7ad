from pathlib import Path

import pytest

from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.observability.summary import summarise
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter, canonical_json
from tests.observability import synthetic


def test_the_numbers_are_those_of_the_records(root: Bucket, tmp_path: Path) -> None:
    run = load_run(tmp_path, synthetic.write_run(root, tmp_path, steps=10))
    found = summarise(run)
    assert found["missing"] == []
    assert found["status"] == "finished"
    assert (found["steps"], found["total_steps"]) == (10, 10)
    assert found["reward_first3"] == pytest.approx(0.2 + 0.7 / 9)
    assert found["reward_last5"] == pytest.approx(0.2 + 0.7 * 7 / 9)
    assert (found["held_out_base"], found["held_out_trained"]) == (0.171875, 0.9375)
    assert found["step_s_median"] == 4.0
    assert (found["staleness_mean"], found["staleness_max"]) == (pytest.approx(0.9 * 0.75), 1.0)
    assert found["publish_stall_s_p50"] == pytest.approx(0.011)
    assert found["publish_stall_s_p99"] == pytest.approx(0.002 * 9.91)
    assert found["mismatch_max"] == pytest.approx(0.01)
    assert found["groups"] == 10 * synthetic.PROMPTS
    assert found["dropped"] == {"stale": 2, "invalid": 1}
    assert found["skipped"] == {"no two scorable samples": 1}
    assert (found["generated_tokens"], found["wasted_tokens"]) == (12_345, 1_234)
    assert found["quarantined"] == {"r0": {}, "r1": {synthetic.policy(3): "canary differs by 0.8"}}
    assert found["learner_wait_share"] == 0.25
    assert found["backpressure_share"] == pytest.approx(0.5 / 41)
    assert found["overlap_fraction"] == pytest.approx(9 / 41)


def test_the_first_step_waits_for_the_start_and_not_for_a_bottleneck() -> None:
    metrics = [synthetic.record(t) for t in range(3)]
    slow_start = [{**metrics[0], "perf/rollout_wait_s": 90.0, "perf/step_s": 93.0}, *metrics[1:]]
    assert summarise(RunData("toy", metrics=slow_start))["learner_wait_share"] == 0.25
    assert summarise(RunData("toy", metrics=slow_start[:1]))["learner_wait_share"] == pytest.approx(90 / 93)


def test_another_run_of_the_fleet_does_not_show(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, steps=2)
    replica = {"state": "ready", "quarantined": {"toy-2.v000001.00000000": "other", synthetic.policy(1): "ours"}}
    RecordWriter(root, layout.replica(synthetic.RUN, "r1"), 2).write(replica)
    assert summarise(load_run(tmp_path, run))["quarantined"]["r1"] == {synthetic.policy(1): "ours"}


def test_the_metrics_may_come_from_the_bucket_alone(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path / "there", steps=4)
    assert load_run(tmp_path / "here", run).metrics == load_run(tmp_path / "there", run).metrics != []


def test_damaged_pieces_are_named(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, steps=2)
    run.replace(layout.POLICY, b'{"current": "x", "incarnation": 1, "seq": 1, "checksum": "0"}')
    run.replace(layout.worker_state("w0"), b"{")
    run.put(layout.rollout("w0", "e000.i000099.a00"), b"torn")
    run.put(layout.evaluation(synthetic.policy(1), "eval"), b'{"policy": 3}')
    found = load_run(tmp_path, run)
    assert found.missing == ["No rollout worker has left a record.", "The policy record (policy.json) is damaged."]
    assert len(found.groups) == 2 * synthetic.PROMPTS
    assert len(found.evaluations) == 2


def test_an_evaluation_that_nothing_could_be_scored_in_has_no_reward(root: Bucket, tmp_path: Path) -> None:
    run = synthetic.write_run(root, tmp_path, steps=2)
    unscored = {"policy": synthetic.policy(2), "split": "eval", "reward": None, "rewards": {"last_integer": None}}
    run.replace(layout.evaluation(synthetic.policy(2), "eval"), canonical_json(unscored))
    found = load_run(tmp_path, run)
    assert len(found.evaluations) == 2
    assert (summarise(found)["held_out_base"], summarise(found)["held_out_trained"]) == (0.171875, None)


def test_the_fleet_is_found_from_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.write_run(Bucket(str(tmp_path)), tmp_path / synthetic.RUN, steps=2)
    monkeypatch.chdir(tmp_path)
    assert sorted(load_run(Path(synthetic.RUN), Bucket(synthetic.RUN)).replicas) == ["r0", "r1"]
    monkeypatch.chdir(tmp_path / synthetic.RUN)
    assert sorted(load_run(Path("."), Bucket(".")).replicas) == ["r0", "r1"]
