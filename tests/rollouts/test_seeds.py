from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.rollouts.seeds import sampling_seed


@given(st.text(max_size=10), st.integers(0, 2**40), st.text(max_size=20))
def test_a_seed_and_its_samples_fit_a_signed_64_bit_integer(run: str, seed: int, drawn: str) -> None:
    found = sampling_seed(run, seed, drawn)
    assert 0 <= found < found + 4096 < 2**63
    assert sampling_seed(run, seed, drawn) == found


def test_seeds_are_what_they_were() -> None:
    """A resumed run must draw what it would have drawn: the hash may not change between versions."""
    assert sampling_seed("run", 0, "e000.i000000.a00") == 3307839013374171712


def test_run_seed_group_and_attempt_all_count() -> None:
    keys = [("a", 0, "x"), ("b", 0, "x"), ("a", 1, "x"), ("a", 0, "y"), ("a", 0, "x "), ("a", 10, "x"), ("a1", 0, "x")]
    assert len({sampling_seed(*key) for key in keys}) == len(keys)
