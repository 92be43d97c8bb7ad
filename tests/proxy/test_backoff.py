from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.proxy.backoff import FIRST_DELAY_S, MAX_DELAY_S, TRIAL_S, Backoff


def _end_of_pause(backoff: Backoff, now: float) -> float:
    assert backoff.blocked(now)
    assert not backoff.blocked(backoff.until)
    return backoff.until


def test_consecutive_failures_double_the_pause_up_to_the_bound() -> None:
    backoff, now, pauses = Backoff(), 100.0, []
    for _ in range(10):
        backoff.begin(now)
        backoff.strike(now + 0.001, began=now)
        pauses.append(_end_of_pause(backoff, now + 0.001) - now - 0.001)
        now = backoff.until
    expected = [min(MAX_DELAY_S, FIRST_DELAY_S * 2**i) for i in range(10)]
    # The trial of a short pause also holds the others back, but never longer than TRIAL_S.
    assert all(e <= p + 1e-6 and p <= max(e, TRIAL_S) + 1e-6 for e, p in zip(expected, pauses, strict=True))
    assert abs(pauses[-1] - MAX_DELAY_S) < 1e-6


def test_failures_of_one_event_count_once() -> None:
    backoff = Backoff()
    assert backoff.strike(10.0, began=1.0)
    assert not any(backoff.strike(10.0 + i / 100, began=1.0 + i / 100) for i in range(1, 60))
    assert backoff.count == 1
    assert backoff.strike(backoff.until + 1, began=backoff.until + 0.5)
    assert backoff.count == 2


def test_after_the_pause_one_goes_ahead_and_the_others_wait_for_it() -> None:
    backoff = Backoff()
    backoff.strike(0.0, began=0.0)
    now = backoff.until
    backoff.begin(now)
    assert backoff.blocked(now + 0.9 * TRIAL_S)
    # It is still at work after that: a long completion does not hold back the rest, but until it ends they go singly.
    assert not backoff.blocked(now + TRIAL_S)
    backoff.begin(now + TRIAL_S)
    assert backoff.blocked(now + 1.9 * TRIAL_S)
    backoff.reset()
    backoff.begin(now + TRIAL_S)
    assert not backoff.blocked(now + TRIAL_S)


def test_success_forgives_everything() -> None:
    backoff = Backoff()
    for i in range(8):
        backoff.strike(float(100 * i), began=float(100 * i))
    backoff.reset()
    assert not backoff.blocked(700.0)
    backoff.begin(700.0)
    assert not backoff.blocked(700.0)
    backoff.strike(701.0, began=700.0)
    assert backoff.until == 701.0 + FIRST_DELAY_S


@given(st.lists(st.tuples(st.sampled_from("sbr"), st.floats(0, 100)), max_size=60))
def test_a_pause_is_bounded_whatever_happens(events: list[tuple[str, float]]) -> None:
    backoff, now = Backoff(), 0.0
    for kind, passed in events:
        began, now = now, now + passed
        if kind == "s":
            backoff.strike(now, began)
            assert backoff.blocked(now)
        elif kind == "b" and not backoff.blocked(now):
            backoff.begin(now)
        elif kind == "r":
            backoff.reset()
            assert not backoff.blocked(now)
        assert not backoff.blocked(now + MAX_DELAY_S + 1e-6)
