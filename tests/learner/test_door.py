from dataclasses import replace

import numpy as np
import pytest

from grpo_jax.config.schema import Config
from grpo_jax.learner.door import Door
from grpo_jax.rollouts.sample import Group, prompt_digest
from tests.learner.tiny import MODEL, make_group

CONFIG = Config.model_validate(
    {
        "run": "tiny",
        "model": {"source": "m"},
        "task": {"source": "a:b"},
        "rewards": [{"source": "a:b"}],
        "sampling": {"max_tokens": 9},
        "batch": {"group_size": 4, "row_tokens": 16},
    }
)
DOOR = Door(CONFIG, MODEL.vocab_size)
GOOD = make_group(np.random.default_rng(0), rewards=[0.0, 1.0, None, 1.0])


def with_first(**changes):
    return replace(GOOD, samples=(replace(GOOD.samples[0], **changes), *GOOD.samples[1:]))


def of(tokens, logprobs):
    return with_first(tokens=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32))


def told(**changes):
    return replace(GOOD, provenance=replace(GOOD.provenance, **changes))


@pytest.mark.parametrize(
    "group",
    [
        GOOD,
        of([], []),  # what a request that failed leaves
        of([MODEL.vocab_size - 1], [0.0]),
        of([1], [1e-6]),  # rounding
        of(range(9), [-1] * 9),
        told(prompt_digest=prompt_digest(GOOD.prompt_tokens)),
        replace(GOOD, prompt_tokens=np.ones(8, np.int32)),  # prompt[:-1] and 9 tokens fill the row
    ],
)
def test_what_is_sound_is_welcome(group):
    assert DOOR.problem(Group.from_bytes(group.to_bytes())) is None


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        (of([MODEL.vocab_size], [-1]), "a token id is not below the vocabulary's 96"),
        (replace(GOOD, prompt_tokens=np.array([96, 1], np.int32)), "a token id is not below the vocabulary's 96"),
        (of([1], [np.nan]), "a log-probability is not finite"),
        (of([1], [-np.inf]), "a log-probability is not finite"),
        (of([1], [0.5]), "a log-probability is 0.5, above 0"),
        (of(range(10), [-1] * 10), "a completion has 10 tokens, more than sampling.max_tokens = 9"),
        (replace(GOOD, prompt_tokens=np.ones(30, np.int32)), "do not fit into a row of 16 tokens"),
        (replace(GOOD, samples=GOOD.samples[:3]), "it has 3 samples, not 4"),
        (told(policy="tiny2.v000000.00000000"), "its policy tiny2.v000000.00000000 is of another run"),
        (told(prompt_digest=prompt_digest([1, 2, 3])), "its prompt is not the one"),
    ],
)
def test_what_is_not_is_refused_in_one_clause(group, problem):
    assert problem in DOOR.problem(Group.from_bytes(group.to_bytes()))


def test_no_group_of_the_run_is_too_large():
    samples = tuple(replace(GOOD.samples[0], text="x" * 1000, tokens=np.zeros(9, np.int32)) for _ in range(4))
    samples = tuple(replace(sample, logprobs=np.zeros(9, np.float32)) for sample in samples)
    assert len(replace(GOOD, samples=samples).to_bytes()) < DOOR.max_bytes
