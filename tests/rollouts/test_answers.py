import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.rollouts.answers import Answer, BadAnswer, read_answer

SOUND: dict[str, Any] = {
    "model": "toy.v000001.00000001",
    "choices": [
        {
            "index": i,
            "text": "four",
            "token_ids": [7, 8, i],
            "logprobs": {"token_logprobs": [-0.5, 0, -2.25]},
            "finish_reason": "stop",
        }
        for i in (1, 0)
    ],
}


def read(body: Any) -> Answer:
    return read_answer(body, policy="toy.v000001.00000001", replica="r1", n=2, max_tokens=3)


def test_a_sound_answer_is_read_in_the_order_of_its_indices() -> None:
    answer = read(SOUND)
    assert (answer.policy, answer.replica, answer.failures) == ("toy.v000001.00000001", "r1", ())
    assert answer.generated_tokens == 6
    first = answer.choices[0]
    assert first is not None
    assert (first.tokens.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    assert (first.tokens.tolist(), first.logprobs.tolist()) == ([7, 8, 0], [-0.5, 0.0, -2.25])
    assert (first.text, first.finish_reason) == ("four", "stop")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_ids", None),
        ("token_ids", []),
        ("token_ids", [1, 2]),
        ("token_ids", [1, 2, -1]),
        ("token_ids", [1, 2, 2**31]),
        ("token_ids", [1, 2, 3.0]),
        ("token_ids", [1, 2, True]),
        ("token_ids", [1, 2, "3"]),
        ("logprobs", None),
        ("logprobs", {"token_logprobs": [-1.0, None, -1.0]}),
        ("logprobs", {"token_logprobs": [-1.0, float("nan"), -1.0]}),
        ("logprobs", {"token_logprobs": [-1.0, float("-inf"), -1.0]}),
        ("logprobs", {"token_logprobs": [-1.0, -1.0]}),
        ("logprobs", {}),
        ("finish_reason", "abort"),
        ("finish_reason", None),
        ("text", None),
    ],
)
def test_a_choice_that_is_not_sound_is_one_failed_sample(key: str, value: Any) -> None:
    body = copy.deepcopy(SOUND)
    body["choices"][1][key] = value
    answer = read(body)
    assert answer.choices[0] is None
    assert answer.choices[1] is not None
    (failure,) = answer.failures
    assert failure.startswith("sample 0: ")


def test_more_tokens_than_asked_for_are_a_failed_sample() -> None:
    body = copy.deepcopy(SOUND)
    body["choices"][0].update(token_ids=[1] * 4, logprobs={"token_logprobs": [-1.0] * 4})
    assert read(body).failures == ("sample 1: 4 tokens where 1 to 3 were asked for",)


def test_a_choice_that_is_missing_is_a_failed_sample() -> None:
    assert read({**SOUND, "choices": SOUND["choices"][:1]}).failures == ("sample 0: it is not in the answer",)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {**SOUND, "model": "toy.v000002.00000002"},
        {**SOUND, "model": None},
        {**SOUND, "choices": None},
        {**SOUND, "choices": [{**SOUND["choices"][0], "index": 2}]},
        {**SOUND, "choices": [SOUND["choices"][0]] * 2},
        {**SOUND, "choices": [None]},
    ],
)
def test_what_is_no_answer_of_this_policy_is_refused_whole(body: Any) -> None:
    with pytest.raises(BadAnswer):
        read(body)


def test_text_that_no_file_could_hold_is_made_harmless() -> None:
    body = copy.deepcopy(SOUND)
    body["choices"][1]["text"] = "a\ud800b"
    found = read(body).choices[0]
    assert found is not None
    assert found.text == "a?b"


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["token_ids", "logprobs", "text", "finish_reason", "index"]), json_values)
def test_no_value_anywhere_gets_past_the_checks_or_raises_anything_else(key: str, value: Any) -> None:
    body = copy.deepcopy(SOUND)
    body["choices"][0][key] = value
    try:
        answer = read(body)
    except BadAnswer:
        return
    for found in answer.choices:
        if found is not None:
            assert len(found.tokens) == len(found.logprobs) > 0
            assert np.isfinite(found.logprobs).all()
            assert (found.tokens >= 0).all()
