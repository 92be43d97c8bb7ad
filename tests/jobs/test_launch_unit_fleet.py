"""Which jobs are started and cancelled, and when a run is over, as the launcher decides it."""

from dataclasses import replace

import pytest

from grpo_jax.config.schema import Config
from grpo_jax.jobs.hub_jobs import Job
from grpo_jax.jobs.launch_cost import hourly, so_far
from grpo_jax.jobs.launch_fleet import LASTING_S, Decision, Fleet, RunView
from grpo_jax.jobs.launch_spec import LEARNER
from grpo_jax.jobs.launch_state import Desired
from tests.jobs.test_launch_unit import config_of

THIS, EARLIER = "this", "earlier"
TRAINING = RunView("running", 3)
TWO = Desired("running", 2)
WHOLE = ("generator-0", "generator-1", LEARNER)


def job(
    slot: str, stage: str = "RUNNING", *, id: str = "", launch: str = THIS, message: str = "", ran: float = 5.0
) -> Job:
    role = "learner" if slot == LEARNER else "generator"
    return Job(id or f"{slot}-{launch}", role, slot, launch, stage, message, "cpu-basic", 0.0, ran, "")


def decided(jobs: list[Job], desired: Desired = TWO, run: RunView = TRAINING, restarts: int = 2) -> Decision:
    """What the fleet decides once all waiting is over."""
    fleet = Fleet(THIS, restarts)
    fleet.decide(jobs, desired, run, 0.0)
    return fleet.decide(jobs, desired, run, 1e6)


def test_a_new_run_gets_its_generators_first_and_one_job_for_each_slot() -> None:
    assert decided([], run=RunView()).start == [*WHOLE]
    assert decided([job(slot) for slot in WHOLE]) == Decision()


def test_a_job_that_waits_for_a_machine_holds_its_slot() -> None:
    assert decided([job(slot, "SCHEDULING") for slot in WHOLE]) == Decision()


@pytest.mark.parametrize("stage", ["ERROR", "DELETED", "CANCELED", "COMPLETED"])
def test_a_generator_that_ended_while_the_learner_runs_is_replaced(stage: str) -> None:
    assert decided([job("generator-0", stage), job("generator-1"), job(LEARNER)]).start == ["generator-0"]


def test_a_replacement_waits_longer_each_time() -> None:
    fleet, jobs = Fleet(THIS, 9), [job("generator-1"), job(LEARNER)]
    waits = []
    for i in range(4):
        jobs.append(job("generator-0", "ERROR", id=f"g{i}"))
        start = 1000.0 * i
        waits.append(next(s for s in range(100) if fleet.decide(jobs, TWO, TRAINING, start + s).start))
    assert waits == sorted(waits)
    assert waits[0] <= 2 < waits[-1]


def test_a_learner_that_failed_is_replaced_and_given_up_after_its_restarts() -> None:
    others = [job("generator-0"), job("generator-1")]
    failed = [
        job(LEARNER, "ERROR", id=f"l{i}", message="Job failed with exit code: 1. Reason: Error") for i in range(3)
    ]
    assert decided([*others, *failed[:1]]).start == [LEARNER]
    assert decided([*others, *failed[:2]]).start == [LEARNER]
    outcome = decided([*others, *failed]).outcome
    assert outcome is not None
    assert outcome.how == "failed"
    assert "exit code: 1" in outcome.reason


def test_a_job_that_lasted_is_always_replaced() -> None:
    others = [job("generator-0"), job("generator-1")]
    lasting = [job(LEARNER, "ERROR", id=f"l{i}", ran=LASTING_S) for i in range(9)]
    assert decided([*others, *lasting]).start == [LEARNER]
    assert decided([*others, *lasting, job(LEARNER, "ERROR", id="l9")]).start == [LEARNER]


def test_what_a_job_before_it_could_run_is_no_wrong_config() -> None:
    """The Hub, say, does not hand out the model to the job that follows a preempted one."""
    others = [job("generator-0"), job("generator-1")]
    wrong = job(LEARNER, "ERROR", id="l1", message="Job failed with exit code: 2. Reason: Error")
    preempted = job(LEARNER, "ERROR", id="l0", message="Job was preempted", ran=LASTING_S)
    assert decided([*others, preempted, wrong]).start == [LEARNER]
    more = [replace(wrong, id=f"w{i}") for i in range(3)]
    assert decided([*others, preempted, *more]).outcome is not None


def test_a_config_that_cannot_run_is_not_tried_again() -> None:
    wrong = job(LEARNER, "ERROR", message="Job failed with exit code: 2. Reason: Error")
    outcome = decided([job("generator-0"), wrong]).outcome
    assert outcome is not None
    assert outcome.how == "failed"


@pytest.mark.parametrize(("stage", "how"), [("COMPLETED", "finished"), ("CANCELED", "cancelled")])
def test_the_end_of_the_learner_is_the_end_of_the_run(stage: str, how: str) -> None:
    outcome = decided([job("generator-0"), job(LEARNER, stage)]).outcome
    assert outcome is not None
    assert outcome.how == how


def test_who_cancels_anywhere_ends_the_run_here() -> None:
    decision = decided([job(slot) for slot in WHOLE], Desired("cancelled", 2))
    assert decision.start == []
    assert decision.outcome is not None
    assert decision.outcome.how == "cancelled"


def test_generators_wait_until_the_learner_has_taken_back_a_final_status() -> None:
    for status in ("failed", "finished"):
        assert decided([], run=RunView(status, 3)).start == [LEARNER]
    assert decided([job(LEARNER)], run=TRAINING).start == ["generator-0", "generator-1"]


def test_generators_are_not_replaced_while_nobody_learns() -> None:
    gone = [job("generator-0", "COMPLETED"), job("generator-1", "COMPLETED")]
    assert decided([*gone, job(LEARNER, "SCHEDULING")]).start == []
    assert decided([*gone, job(LEARNER, "ERROR")]).start == [LEARNER]


def test_a_generator_that_never_lasts_is_given_up_alone_as_long_as_another_is_left() -> None:
    failed = [job("generator-0", "ERROR", id=f"g{i}") for i in range(3)]
    decision = decided([*failed, job("generator-1"), job(LEARNER)])
    assert decision.start == []
    assert list(decision.given_up) == ["generator-0"]
    assert decision.outcome is None
    both = [
        replace(ended, slot=slot, id=f"{slot}{ended.id}") for ended in failed for slot in ("generator-0", "generator-1")
    ]
    outcome = decided([*both, job(LEARNER)]).outcome
    assert outcome is not None
    assert outcome.how == "failed"
    assert "generator" in outcome.reason


def test_scaling_down_cancels_the_highest_and_up_starts_them_however_often() -> None:
    jobs = [job(slot) for slot in WHOLE]
    assert [j.slot for j in decided(jobs, Desired("running", 1)).cancel] == ["generator-1"]
    cancelled = [job("generator-1", "CANCELED", id=f"c{i}") for i in range(5)]
    assert decided([job("generator-0"), *cancelled, job(LEARNER)]).start == ["generator-1"]


def test_a_second_job_for_a_slot_is_cancelled_and_the_one_that_runs_stays() -> None:
    waiting, running = job("generator-0", "SCHEDULING", id="first"), job("generator-0", id="second")
    decision = decided([waiting, running, job("generator-1"), job(LEARNER)])
    assert decision.cancel == [waiting]
    assert decision.start == []


def test_jobs_of_an_earlier_launch_are_cancelled_and_their_failures_are_forgotten() -> None:
    old = [job("generator-0", launch=EARLIER), *(job(LEARNER, "ERROR", launch=EARLIER, id=f"o{i}") for i in range(5))]
    decision = decided(old, run=RunView())
    assert decision.cancel == old[:1]
    assert decision.start == [*WHOLE]


def test_cost_is_that_of_the_time_run_and_unknown_without_a_price() -> None:
    jobs = [job("generator-0", ran=3600.0), job(LEARNER, ran=1800.0), job("generator-1", "CANCELED", ran=0.0)]
    jobs[2] = replace(jobs[2], flavor="never-ran")
    assert so_far(jobs, {"cpu-basic": 2.0}) == pytest.approx(3.0)
    assert so_far(jobs, {}) is None
    config: Config = config_of(prices={"l4x1": 1.0, "a100-large": 2.0})
    assert hourly(config) == pytest.approx(4.0)
    assert hourly(config_of()) is None
