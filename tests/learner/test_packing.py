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
@given(batches(), st.integers(22, 60), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_every_completion_token_is_predicted_once_from_its_own_context(samples, row_tokens, rows, shards, share_prompt):
    packed = pack(samples, row_tokens=row_tokens, rows=rows, shards=shards, share_prompt=share_prompt)
    seen = [[] for _ in samples]
    for batch in packed:
        assert batch.tokens_BxT.shape == (shards * rows, row_tokens)
        segments = {}
        for shard in range(shards):
            here = slice(shard * rows, (shard + 1) * rows)
            tokens, positions = batch.tokens_BxT[here].reshape(-1), batch.positions_BxT[here].reshape(-1)
            prompts, branches = batch.prompt_ids_BxT[here].reshape(-1), batch.branch_ids_BxT[here].reshape(-1)
            row_of = np.repeat(np.arange(rows), row_tokens)
            used = int(batch.mask_SxN[shard].sum())
            assert not batch.mask_SxN[shard, used:].any()
            for n in range(used):
                i, slot = batch.sample_SxN[shard, n], batch.slot_SxN[shard, n]
                s, t = samples[i], len(seen[i])
                # All that this slot may read: earlier in its row, same prompt, the shared stem or its own branch.
                reads = (row_of == row_of[slot]) & (np.arange(tokens.size) <= slot) & (prompts == prompts[slot])
                reads &= (branches == 0) | (branches == branches[slot])
                order = np.argsort(positions[reads])
                np.testing.assert_array_equal(positions[reads][order], np.arange(reads.sum()))
                np.testing.assert_array_equal(tokens[reads][order], np.concatenate([s.prompt, s.completion[:t]]))
                assert prompts[slot] > 0
                assert batch.target_SxN[shard, n] == s.completion[t]
                assert batch.sampler_logprob_SxN[shard, n] == s.sampler_logprobs[t]
                assert batch.advantage_SxN[shard, n] == np.float32(s.advantage)
                assert batch.weight_SxN[shard, n] == np.float32(s.token_weight)
                assert segments.setdefault(batch.segment_SxN[shard, n], i) == i
                seen[i].append(t)
        assert sorted(segments) == list(range(len(set(segments.values()))))  # dense, one for each sample
    assert [len(tokens) for tokens in seen] == [len(s.completion) for s in samples]


def test_a_shared_prompt_stands_once_per_group():
    rng = np.random.default_rng(0)
    prompt = np.arange(26, dtype=np.int32)
    samples = [sample(0, i, prompt, 13, rng) for i in range(8)]
    shared, plain = (
        sum(int((b.prompt_ids_BxT > 0).sum()) for b in pack(samples, row_tokens=144, rows=1, share_prompt=share))
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
    used = (packed[0].prompt_ids_BxT > 0).sum(axis=1)
    assert sorted(used.tolist()) == [0, 9 + 12, 9 + 24, 9 + 24]


def test_a_sample_longer_than_a_row_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(PackingError, match="a sample of 41 tokens does not fit into a row of 40"):
        pack([sample(0, 0, np.arange(30, dtype=np.int32), 12, rng)], row_tokens=40, rows=1, share_prompt=True)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_all_rows_but_the_last_are_full_at_lengths_like_those_of_a_real_run(seed, share_prompt):
    # Completions of 1.2k on average and at most 3k, in rows of 16k.
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(16):
        prompt = np.zeros(int(rng.integers(60, 250)), np.int32)
        for index in range(8):
            samples.append(sample(group, index, prompt, int(np.clip(rng.gamma(2.2, 1200 / 2.2), 20, 3000)), rng))
    packed = pack(samples, row_tokens=16_384, rows=1, share_prompt=share_prompt)
    fill = sorted(float((batch.prompt_ids_BxT > 0).mean()) for batch in packed)
    assert np.mean(fill[1:]) >= 0.97


def test_splitting_groups_never_takes_more_rows_than_keeping_them_whole():
    rng = np.random.default_rng(0)
    samples = [sample(g, i, np.arange(26, dtype=np.int32), 13, rng) for g in range(4) for i in range(8)]
    assert len(pack(samples, row_tokens=144, rows=1, share_prompt=True)) == 4  # 129 tokens each: one row a group
