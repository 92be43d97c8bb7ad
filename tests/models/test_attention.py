import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.attention import attend, attention_mask
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.logprobs import token_logprobs
from tests.models.conftest import tiny_config


def test_the_mask_is_the_sentence_that_defines_it():
    rng = np.random.default_rng(0)
    prompts, branches = rng.integers(0, 3, (4, 9)), rng.integers(0, 3, (4, 9))
    mask = np.asarray(attention_mask(jnp.asarray(prompts), jnp.asarray(branches)))
    for row, query, key in np.ndindex(4, 9, 9):
        same_prompt = prompts[row, query] == prompts[row, key]
        readable = branches[row, key] in (0, branches[row, query])
        assert mask[row, query, key] == (key <= query and same_prompt and readable)
    assert mask[:, range(9), range(9)].all()


def test_a_group_of_query_heads_reads_one_key_head():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, heads, 4)) for i, heads in enumerate((6, 2, 2)))
    mask = jnp.tril(jnp.ones((2, 5, 5), bool))
    grouped = attend(q, k, v, mask)
    repeated = attend(q, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2), mask)
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


def logprobs(config, params, tokens, positions, prompt_ids, branch_ids):
    """Log-prob of tokens[t + 1] under the state at t, (B, T - 1)."""
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, prompt_ids, branch_ids))
    hidden = Decoder(config, dtype=jnp.float64).apply({"params": params}, *arrays)
    targets = jnp.asarray(tokens)[:, 1:].reshape(-1)
    flat = hidden[:, :-1].reshape(-1, config.hidden_size)
    return token_logprobs(params, flat, targets, config=config, temperature=1.0, chunk=8)[0].reshape(len(tokens), -1)


def alone(config, params, sequence):
    """Log-probs of a sequence's tokens from the second on, in a row of its own."""
    length = len(sequence)
    return logprobs(config, params, [sequence], [range(length)], [[1] * length], [[0] * length])[0]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_packed_sequences_have_the_logprobs_of_separate_ones(name, x64):
    config, rng = tiny_config(name), np.random.default_rng(0)
    params = init_params(jax.random.key(0), config, jnp.float64)
    sequences = [rng.integers(0, config.vocab_size, length) for length in (7, 3, 9)]
    padding = 4
    tokens = np.concatenate([*sequences, np.zeros(padding, int)])
    positions = np.concatenate([*(np.arange(len(s)) for s in sequences), np.zeros(padding, int)])
    ids = np.concatenate([*(np.full(len(s), i + 1) for i, s in enumerate(sequences)), np.zeros(padding, int)])
    packed = logprobs(config, params, tokens[None], positions[None], ids[None], np.zeros_like(ids)[None])[0]
    assert np.isfinite(packed).all()
    start = 0
    for sequence in sequences:
        expected = alone(config, params, sequence)
        np.testing.assert_allclose(packed[start : start + len(expected)], expected, rtol=0, atol=1e-9)
        start += len(sequence)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_a_shared_prompt_gives_the_logprobs_of_separate_rows(name, x64):
    """Two groups in one row: prompt[:-1] once, then for each branch the last prompt token and the completion."""
    config, rng = tiny_config(name), np.random.default_rng(1)
    params = init_params(jax.random.key(0), config, jnp.float64)
    groups = [(5, (4, 1, 6)), (3, (2, 5))]
    tokens, positions, prompts, branches, expected, found_at = [], [], [], [], [], []
    for group, (prompt_length, completion_lengths) in enumerate(groups):
        prompt = rng.integers(0, config.vocab_size, prompt_length)
        tokens += [*prompt[:-1]]
        positions += range(prompt_length - 1)
        branches += [0] * (prompt_length - 1)
        for branch, length in enumerate(completion_lengths):
            completion = rng.integers(0, config.vocab_size, length)
            expected.append(alone(config, params, [*prompt, *completion])[prompt_length - 1 :])
            found_at.append(slice(len(tokens), len(tokens) + length))
            tokens += [prompt[-1], *completion]
            positions += range(prompt_length - 1, prompt_length + length)
            branches += [branch + 1] * (length + 1)
        prompts += [group + 1] * (len(tokens) - len(prompts))
    shared = logprobs(config, params, *([row] for row in (tokens, positions, prompts, branches)))[0]
    for where, values in zip(found_at, expected, strict=True):
        np.testing.assert_allclose(shared[where], values, rtol=0, atol=1e-9)


def test_absolute_positions_do_not_matter(x64):
    """Rotary attention sees differences of positions only, so shifting a whole sequence changes nothing."""
    config = tiny_config("qwen2")
    params = init_params(jax.random.key(0), config, jnp.float64)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, 8))
    ones, zeros, positions = np.ones((1, 8), int), np.zeros((1, 8), int), np.arange(8)[None]
    here = logprobs(config, params, tokens, positions, ones, zeros)
    there = logprobs(config, params, tokens, positions + 21, ones, zeros)
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-9)
