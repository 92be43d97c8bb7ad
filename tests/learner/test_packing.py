import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.learner.packing import PackingError, TrainSample, pack


def sample(group, index, prompt, length, rng):
    return TrainSample(
        group,
        index,
        prompt,
        rng.integers(100, 200, length).astype(np.int32),
        rng.normal(size=length).astype(np.float32),
        float(rng.normal()),
        float(rng.random()),
    )


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for group in range(draw(st.integers(1, 5))):
        prompt = rng.integers(0, 100, draw(st.integers(1, 10))).astype(np.int32)
        for index in range(draw(st.integers(1, 6))):
            samples.append(sample(group, index, prompt, draw(st.integers(1, 12)), rng))
    return samples


@settings(deadline=None)
@given(batches(), st.integers(22, 60), st.integers(1, 3), st.booleans())
def test_every_completion_token_is_predicted_once_from_its_own_context(samples, row_tokens, rows, share_prompt):
    packed = pack(samples, row_tokens=row_tokens, rows=rows, share_prompt=share_prompt)
    seen = [[] for _ in samples]
    for batch in packed:
        assert batch.tokens_RxT.shape == (rows, row_tokens)
        tokens, positions = batch.tokens_RxT.reshape(-1), batch.positions_RxT.reshape(-1)
        prompts, branches = batch.prompt_ids_RxT.reshape(-1), batch.branch_ids_RxT.reshape(-1)
        row_of = np.repeat(np.arange(rows), row_tokens)
        assert not batch.mask_N[batch.count :].any()
        for n in range(batch.count):
            i, slot = batch.sample_N[n], batch.slot_N[n]
            s, t = samples[i], len(seen[i])
            # All that this slot may read: earlier in its row, same prompt, the shared stem or its own branch.
            reads = (row_of == row_of[slot]) & (np.arange(tokens.size) <= slot) & (prompts == prompts[slot])
            reads &= (branches == 0) | (branches == branches[slot])
            order = np.argsort(positions[reads])
            np.testing.assert_array_equal(positions[reads][order], np.arange(reads.sum()))
            np.testing.assert_array_equal(tokens[reads][order], np.concatenate([s.prompt, s.completion[:t]]))
            assert prompts[slot] > 0
            assert batch.target_N[n] == s.completion[t]
            assert batch.sampler_logprob_N[n] == s.sampler_logprobs[t]
            assert batch.advantage_N[n] == np.float32(s.advantage)
            assert batch.weight_N[n] == np.float32(s.token_weight)
            seen[i].append(t)
    assert [len(tokens) for tokens in seen] == [len(s.completion) for s in samples]


def test_a_shared_prompt_stands_once_per_group():
    rng = np.random.default_rng(0)
    prompt = np.arange(26, dtype=np.int32)
    samples = [sample(0, i, prompt, 13, rng) for i in range(8)]
    shared, plain = (
        sum(int((b.prompt_ids_RxT > 0).sum()) for b in pack(samples, row_tokens=144, rows=1, share_prompt=share))
        for share in (True, False)
    )
    assert shared == 25 + 8 * 13
    assert plain == 8 * (25 + 13)


def test_a_group_that_is_too_long_for_a_row_is_split_by_samples():
    rng = np.random.default_rng(0)
    prompt = np.arange(10, dtype=np.int32)
    samples = [sample(0, i, prompt, 12, rng) for i in range(5)]
    packed = pack(samples, row_tokens=40, rows=4, share_prompt=True)
    assert len(packed) == 1
    used = (packed[0].prompt_ids_RxT > 0).sum(axis=1)
    assert sorted(used.tolist()) == [0, 9 + 12, 9 + 24, 9 + 24]


def test_a_sample_longer_than_a_row_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(PackingError, match="a sample of 41 tokens does not fit into a row of 40"):
        pack([sample(0, 0, np.arange(30, dtype=np.int32), 12, rng)], row_tokens=40, rows=1, share_prompt=True)
