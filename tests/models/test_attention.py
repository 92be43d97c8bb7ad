import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.attention import attend, attention_mask
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits
from tests.models.conftest import compiled, random_params, tiny_config

# All rows below have one shape, so that a model is compiled once.
ROWS, LENGTH = 6, 32


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
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 5, heads, 4)), jnp.float32) for heads in (6, 2, 2))
    mask = np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5))
    repeated = attend(q, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2), mask)
    np.testing.assert_allclose(attend(q, k, v, mask), repeated, atol=1e-6)


class Row:
    """One row as it is filled: tokens, positions, prompt ids, branch ids."""

    def __init__(self):
        self.columns = []

    def add(self, tokens, start, prompt=1, branch=0):
        """Appends tokens at positions from `start`; returns where they lie."""
        at = len(self.columns)
        self.columns += [(token, start + index, prompt, branch) for index, token in enumerate(tokens)]
        return slice(at, len(self.columns))

    def array(self):
        """(4, LENGTH), padded with zeros."""
        return np.pad(np.asarray(self.columns, int).reshape(-1, 4).T, ((0, 0), (0, LENGTH - len(self.columns))))


def alone(tokens, start=0):
    row = Row()
    row.add(tokens, start)
    return row


def logprobs(name, rows):
    """Log-prob of the token at t + 1 under the state at t, float64: array (row, t)."""
    config, params = tiny_config(name), random_params(name, np.float64)
    rows = [*rows, *[Row()] * (ROWS - len(rows))]
    tokens, positions, prompts, branches = np.stack([row.array() for row in rows], axis=1)
    hidden = compiled(Decoder(config, dtype=jnp.float64))({"params": params}, tokens, positions, prompts, branches)
    scores = np.asarray(logits(params, hidden, config))
    scores = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
    assert np.isfinite(scores).all()
    return np.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_packed_sequences_have_the_logprobs_of_separate_ones(name, x64):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, length) for length in (9, 5, 14)]
    packed = Row()
    places = [packed.add(sequence, 0, prompt=index + 1) for index, sequence in enumerate(sequences)]
    found, *separate = logprobs(name, [packed, *map(alone, sequences)])
    for place, expected in zip(places, separate, strict=False):
        size = place.stop - place.start - 1
        np.testing.assert_allclose(found[place.start : place.start + size], expected[:size], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_a_shared_prompt_gives_the_logprobs_of_separate_rows(name, x64):
    """Two groups in one row: prompt[:-1] once, then for each branch the last prompt token and the completion."""
    rng = np.random.default_rng(1)
    shared, separate, places, starts = Row(), [], [], []
    for group, (prompt_length, completion_lengths) in enumerate([(5, (4, 1, 6)), (3, (2, 3))], start=1):
        prompt = rng.integers(0, 97, prompt_length)
        shared.add(prompt[:-1], 0, group)
        for branch, length in enumerate(completion_lengths, start=1):
            completion = rng.integers(0, 97, length)
            places.append(shared.add([prompt[-1], *completion], prompt_length - 1, group, branch))
            separate.append(alone([*prompt, *completion]))
            starts.append(prompt_length - 1)
    found, *expected = logprobs(name, [shared, *separate])
    for place, start, values in zip(places, starts, expected, strict=True):
        size = place.stop - place.start - 1
        np.testing.assert_allclose(found[place.start : place.stop - 1], values[start : start + size], rtol=0, atol=1e-9)


def test_absolute_positions_do_not_matter(x64):
    """Rotary attention sees differences of positions only, so shifting a whole sequence changes nothing."""
    tokens = np.random.default_rng(2).integers(0, 97, LENGTH)
    here, there, *_ = logprobs("qwen3", [alone(tokens), alone(tokens, start=21)])
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-9)
