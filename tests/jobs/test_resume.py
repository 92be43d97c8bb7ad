"""A learner that is killed at the worst moments goes on as if nothing had happened. Real processes, a real SIGKILL."""

import random
import signal
import time

import numpy as np
import pytest

from tests.jobs.lone_learner import (
    STEPS,
    LoneLearner,
    config_of,
    fill_spool,
    fill_with_what_is_bad,
    first_policy,
    outcome,
    trained,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# So slow that a look every few milliseconds sees what is half written.
SLOW = "faulty:slow=0.05:"
# On eight devices checkpoints lie between two publishes, too.
SETTINGS = {1: {}, 8: {"sync_every": 2}}


class Uninterrupted:
    def __init__(self, model, folder, devices):
        self.folder, self.run_dir = folder, folder / "bucket" / "tiny"
        config = config_of(model, folder / "bucket", **SETTINGS[devices])
        with LoneLearner(config, folder / "bucket", devices=devices) as learner:
            self.policy = first_policy(self.run_dir)
            learner.send(signal.SIGSTOP)  # how far it has come with the spool is in the metrics
            self.bad = self.fill(self.run_dir)
            learner.send(signal.SIGCONT)
            learner.ends()
            self.state = learner.state()
        self.outcome = outcome(self.run_dir)

    def fill(self, run_dir):
        bad = fill_with_what_is_bad(run_dir, self.policy)
        fill_spool(run_dir, self.policy)
        return bad


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """By number of devices: a run that nobody disturbed."""
    found = {}

    def get(devices):
        if devices not in found:
            found[devices] = Uninterrupted(tiny_model, tmp_path_factory.mktemp(f"undisturbed{devices}"), devices)
        return found[devices]

    return get


def test_bad_groups_are_refused_at_the_door_and_the_others_are_trained(runs):
    run = runs(1)
    batches = run.outcome["batches"]
    assert [step for step, _, _ in batches] == list(range(STEPS))
    groups = [group for _, group in trained(run.run_dir)]
    # All of the good ones, in the order of their start, but those whose rewards are equal.
    assert groups == [f"e000.i{i:06d}.a00" for i in range(20) if i % 5 != 4][: 2 * STEPS]
    assert len(run.bad) == run.state["quarantined_total"]
    reasons = dict(run.state["quarantined"])
    for key, why in run.bad.items():
        assert why in reasons[key], reasons[key]
    assert {record["sample/quarantined_total"] for record in run.outcome["metrics"]} == {len(run.bad)}


def test_what_is_not_trained_is_listed_with_the_reason_and_holds_nothing_up(runs):
    run = runs(1)
    drops = {group: reason for _, _, dropped in run.outcome["batches"] for group, reason in dropped.items()}
    assert drops.pop("e000.i000108.a00") == "foreign"
    skipped = {key for key, reason in drops.items() if reason == "zero_variance"}
    assert skipped == {f"e000.i{i:06d}.a00" for i in (4, 9)}
    # The second worker's copy of a group is refused, the group itself is not.
    refused = [key.rpartition("/")[2].removesuffix(".safetensors") for key in run.bad if "/w1/" not in key]
    assert {key for key, reason in drops.items() if reason == "invalid"} == {*refused, "e000.i000109.a00"}


PLANS = {
    # (what is waited for, how it is seen, seconds at most until the kill)
    1: [
        ("while it compiles", lambda learner: learner.made("run.json"), 1.0),
        ("between batch record and update", lambda learner: learner.made("batches/*.json"), 0.0),
        ("in mid-publish", lambda learner: learner.made("adapters/tiny.v00000[1-9].*/*", "manifest.json"), 0.0),
        ("in mid-checkpoint", lambda learner: learner.made("checkpoints/*/*", "manifest.*"), 0.0),
        ("at any time", lambda learner: learner.state().get("phase") == "training", 1.0),
    ],
    8: [
        (
            "right after a checkpoint between two publishes",
            lambda learner: learner.made("checkpoints/*/manifest.*"),
            0.0,
        ),
    ],
}


@pytest.mark.parametrize("devices", PLANS, ids=["one device", "eight devices"])
def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(tiny_model, tmp_path, runs, devices):
    whole, rng = runs(devices), random.Random(devices)
    store = tmp_path / "bucket"
    whole.fill(store / "tiny")
    config = config_of(tiny_model, f"{SLOW}{store}", **SETTINGS[devices])
    for moment, condition, longest_s in PLANS[devices]:
        with LoneLearner(config, store, tmp_path / "local", devices) as learner:
            learner.wait_for(lambda c=condition, it=learner: c(it), moment)
            time.sleep(rng.uniform(0.0, longest_s))
            assert learner.process.poll() is None, learner.tail()
            learner.kill()
    with LoneLearner(config, store, tmp_path / "local", devices) as learner:
        learner.ends()
    assert outcome(store / "tiny") == whole.outcome
    groups = [group for _, group in trained(store / "tiny")]
    assert len(groups) == len(set(groups))


def test_another_number_of_devices_moves_a_gradient_by_rounding_alone(runs):
    one, eight = (runs(devices).outcome["metrics"][0] for devices in (1, 8))
    assert one["grad_norm"] > 0
    np.testing.assert_allclose(eight["grad_norm"], one["grad_norm"], rtol=1e-5)
    assert runs(1).outcome["batches"] == runs(8).outcome["batches"]
