"""The verdict against a simulator that knows the truth: which resource, 20 % more of it, makes the run fastest."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.verdict import BALANCED, KINDS, NOTABLE, UNKNOWN, Verdict, judge
from tests.observability import synthetic
from tests.observability.queue_simulator import Regime, cycle_s, random_regime, simulate
from tests.observability.regimes import SEEDS, all_cores, known_truths, truth

_SEEN = 60


def judged(regime: Regime, steps: int = _SEEN, seed: int = 1) -> Verdict:
    return judge(RunData("toy", run={"config": regime.config}, metrics=simulate(regime, steps, seed)))


def judged_seed(seed: int) -> Verdict:
    return judged(random_regime(seed))


def named(gains: dict[str, float]) -> str:
    best = max(gains, key=lambda name: gains[name])
    return KINDS[best] if gains[best] >= NOTABLE else BALANCED


def score(verdicts: Mapping[int, Verdict]) -> tuple[float, float]:
    """(share named right, share of those whose gain is within 30 % of the true one)."""
    right, close = 0, 0
    for seed, verdict in verdicts.items():
        real = known_truths()[seed]
        if verdict.kind == named(real):
            right += 1
            best = max(real, key=lambda name: real[name])
            close += verdict.kind == BALANCED or abs(verdict.gains[best] - real[best]) <= 0.3 * real[best]
    return right / len(verdicts), close / right


def test_the_truths_that_are_kept_are_those_of_the_simulator() -> None:
    assert list(known_truths()) == list(SEEDS)
    for seed in SEEDS[7::90]:
        assert truth(random_regime(seed)) == pytest.approx(known_truths()[seed], abs=1e-3)


def test_some_random_regimes_are_named_right() -> None:
    right, close = score({seed: judged_seed(seed) for seed in SEEDS[:12]})
    assert right >= 10 / 12
    assert close >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_random_regimes_are_named_right() -> None:
    with all_cores() as pool:
        verdicts = dict(zip(SEEDS, pool.map(judged_seed, SEEDS, chunksize=4), strict=True))
    right, close = score(verdicts)
    assert {named(gains) for gains in known_truths().values()} == {BALANCED, *KINDS.values()}
    assert right >= 0.9
    assert close >= 0.9


# A public run of 16 x 8 samples a step, at most 128 in flight: the trainer was sped up until generation was short, a
# third replica did nothing, and lifting the limit did. What is not told of it (times, slots) is filled in here.
SLOW = Regime(
    prompts=16, samples=8, staleness=4, replicas=2, slots=256, generation_s=40.0, spread=0.3, reward_workers=32,
    reward_s=0.05, step_s=90.0, publish_s=4.0, cap=128,
)  # fmt: skip
PACKED = replace(SLOW, step_s=72.0)
NO_REMAT = replace(PACKED, step_s=36.0)
THIRD_REPLICA = replace(NO_REMAT, replicas=3, slots=384)
CAP_LIFTED = replace(THIRD_REPLICA, cap=384)


class TestThePublishedRegimes:
    def test_a_full_queue_and_no_wait_is_the_trainers(self) -> None:
        metrics = simulate(SLOW, 30)
        assert all(r["perf/rollout_wait_s"] < 0.03 and r["sample/rollout_queue_size"] >= 16 for r in metrics[5:])
        verdict = judged(SLOW, 30)
        assert verdict.kind == "trainer-bound"
        assert verdict.gain == pytest.approx(0.2, abs=0.02)

    def test_packing_leaves_it_there(self) -> None:
        verdict = judged(PACKED, 30)
        assert verdict.kind == "trainer-bound"
        faster = cycle_s(simulate(PACKED, 60), 10) / cycle_s(simulate(PACKED.with_more("trainer", 1.2), 60), 10) - 1
        assert verdict.gain == pytest.approx(faster, rel=0.3)

    def test_without_remat_the_limit_shows(self) -> None:
        verdict = judged(NO_REMAT, 30)
        assert verdict.kind == "in-flight-capped"
        assert verdict.gains["generation"] < 0.01  # it foretells that a third replica will do nothing
        assert cycle_s(simulate(THIRD_REPLICA, 60), 10) == pytest.approx(cycle_s(simulate(NO_REMAT, 60), 10), rel=0.02)

    def test_a_third_replica_does_nothing_because_128_are_in_flight(self) -> None:
        verdict = judged(THIRD_REPLICA, 30)
        assert verdict.kind == "in-flight-capped"
        assert "at most 128 samples" in verdict.sentence
        assert "A limit of 154 instead of 128 in flight" in verdict.sentence
        more = THIRD_REPLICA.with_more("inflight", 1.2)
        faster = cycle_s(simulate(THIRD_REPLICA, 60), 10) / cycle_s(simulate(more, 60), 10) - 1
        assert verdict.gain == pytest.approx(faster, rel=0.3)

    def test_once_it_is_lifted_the_trainer_is_the_limit_again(self) -> None:
        verdict = judged(CAP_LIFTED, 30)
        assert verdict.kind == "trainer-bound"
        assert cycle_s(simulate(CAP_LIFTED, 60), 10) < 0.95 * cycle_s(simulate(THIRD_REPLICA, 60), 10)


def test_without_a_cap_the_window_is_what_to_widen() -> None:
    regime = replace(CAP_LIFTED, staleness=0, cap=float("inf"), step_s=20.0, generation_s=60.0)
    verdict = judged(regime, 30)
    assert verdict.kind == "in-flight-capped"
    assert "max_staleness 1 instead of 0" in verdict.sentence
    faster = cycle_s(simulate(regime, 60), 10) / cycle_s(simulate(replace(regime, staleness=1), 60), 10) - 1
    assert verdict.gain == pytest.approx(faster, rel=0.3)


def test_a_large_batch_is_judged_like_a_small_one() -> None:
    large = replace(SLOW, prompts=64, slots=1024, cap=512)
    assert judged(large, 20).kind == "trainer-bound"
    assert judged(large, 20).gain == pytest.approx(0.2, abs=0.02)


class TestWhatIsRecorded:
    def test_nothing_is_said_of_too_few_steps(self) -> None:
        verdict = judged(SLOW, 3)
        assert verdict.kind == UNKNOWN
        assert verdict.sentence.startswith("Too little is recorded")

    def test_the_first_step_and_an_interruption_do_not_count(self) -> None:
        metrics = simulate(SLOW, 30)
        for step in (0, 17):
            metrics[step] = {**metrics[step], "perf/step_s": 4000.0, "perf/rollout_wait_s": 3900.0}
        run = {"config": SLOW.config}
        assert judge(RunData("toy", run=run, metrics=metrics)).kind == "trainer-bound"

    def test_without_the_fleets_metrics_the_groups_have_to_do(self) -> None:
        """Slots that are all at work show as a time for a token that grows with what is in flight."""
        metrics = [
            {"step": t, "perf/step_s": 10.0, "perf/rollout_wait_s": 7.0, "completions/mean_length": 9.0,
             "completions/max_length": 12.0} for t in range(12)
        ]  # fmt: skip
        config = {**synthetic.CONFIG, "max_staleness": 2}
        busy, free = [], []
        for step in range(12):
            for k in range(1 + step % 4):
                start = synthetic.T0 + 10 * step + 0.1 * k
                n = 1 + step % 4
                busy.append(synthetic.group(4 * step + k, step, start, start + 2.0 * n))
                free.append(synthetic.group(4 * step + k, step, start, start + 9.0))
        saturated, idle = (
            judge(RunData("toy", run={"config": config}, metrics=metrics, groups=g)) for g in (busy, free)
        )
        assert saturated.gains["generation"] > idle.gains["generation"]
        assert idle.kind != "generation-bound"

    def test_without_either_nothing_is_said(self) -> None:
        metrics = [{"step": t, "perf/step_s": 10.0, "perf/rollout_wait_s": 7.0} for t in range(12)]
        assert judge(RunData("toy", run={"config": synthetic.CONFIG}, metrics=metrics)).kind == UNKNOWN
