"""Rewards against answers that are known, and what each says of answers that it cannot read."""

import sys
from typing import Any

import pytest

from experiments.rewards import exact, json_schema, lengths, math_latex, numbers, patterns, tags
from grpo_jax.rollouts.rewards import Completion


def completion(text: str, answer: Any = None, tokens: int = 3, finish: str = "stop", **metadata: Any) -> Completion:
    return Completion(text, list(range(tokens)), "p", answer, metadata, finish)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so 7", 7, 1),
        ("7, no: -8", -8, 1),
        ("7 or 8", "7", 0),
        ("none", 7, 0),
        ("1" * 5000, 7, 0),
    ],
)
def test_the_last_integer(text: str, answer: Any, reward: float) -> None:
    assert numbers.last_integer(completion(text, answer)) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("It costs $1,234.50.", "1234.5", 1),
        ("It costs $1,234.50.", 1234.5, 1),
        ("0.1 + 0.2 = 0.3", 0.3, 1),
        ("one half: 1/2", "0.5", 1),
        ("one half: 1 / 2", 0.5, 1),
        ("-.5", "-1/2", 1),
        ("5-3", 3, 1),
        ("12e2", 1200, 1),
        ("50%", "50", 1),
        ("12 34", "1234", 0),
        ("3.14", "3.14159", 0),
        ("x2 and v3", 3, 0),
        ("<think>8</think> none", 8, 0),
        ("<think>9</think> 8", 8, 1),
        ("<think>8", 8, 0),
        ("9" * 5000, 8, 0),
        ("1e999999999", 8, 0),
        ("8/0", 8, 0),
    ],
)
def test_the_last_number(text: str, answer: Any, reward: float) -> None:
    assert numbers.last_number(completion(text, answer)) == reward


def test_a_number_may_be_off_by_a_tolerance() -> None:
    assert numbers.last_number(completion("3.14", "3.14159"), tolerance=0.01) == 1
    assert numbers.last_number(completion("3.14", "3.14159"), tolerance=0.001) == 0
    assert numbers.last_number(completion("1010", 1000), relative=0.01) == 1
    assert numbers.last_number(completion("1011", 1000), relative=0.01) == 0


def test_answers_that_are_no_numbers_are_found_beforehand_and_never_score_0() -> None:
    assert numbers.last_number.check_answer("1,000") is None  # type: ignore[attr-defined]
    assert "no number" in numbers.last_number.check_answer("many")  # type: ignore[attr-defined]
    assert "no integer" in numbers.last_integer.check_answer(None)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no number"):
        numbers.last_number(completion("7", "many"))


@pytest.mark.parametrize(
    ("text", "args", "answer", "reward"),
    [
        (" Paris. ", {}, "paris", 1),
        ("<think>Rome</think>Paris", {}, "Paris", 1),
        ("the  Big\nApple!", {}, "The big apple", 1),
        ("paris", {"strict": True}, "Paris", 0),
        (" Paris\n", {"strict": True}, "Paris", 1),
        ("Rome or Paris", {}, "Paris", 0),
        ("Answer: Rome. Answer: Paris", {"after": "Answer:"}, "Paris", 1),
        ("Paris", {"after": "Answer:"}, "Paris", 0),
        (r"\boxed{1} so \boxed{\frac{1}{2}}", {"boxed": True}, r"\frac{1}{2}", 1),
        (r"\boxed {7} and \boxed{8", {"boxed": True}, "7", 1),
        ("7", {"boxed": True}, "7", 0),
        ("yes", {}, ["yep", "Yes"], 1),
        ("5", {}, "-5", 0),
        ("-5.", {}, "-5", 1),
        (".5", {}, "5", 0),
        ("0.50", {}, ".5", 1),
        ("+", {}, "-", 0),
        ("", {}, "-", 0),
        ("...", {}, "?", 0),
        ("#### $2,125.00", {"after": "####"}, "2125", 1),
        ("2125", {}, "2,125", 1),
        ("21,25", {}, "2125", 0),
        ("C", {}, "C++", 0),
        ("(b)", {}, "B", 1),
        ("1" * 600, {}, "2" * 600, 0),
        ("1" * 600, {}, "1" * 600, 1),
        ("**Paris**.", {}, "paris", 1),
        ("-$5", {}, "-5", 1),
        ("Answer: $42$.", {"after": "Answer:"}, "42", 1),
        ("**$42$**", {}, 42, 1),
        ("$$42$$", {}, 42, 1),
        (r"\(42\)", {}, 42, 1),
        (r"**\[ 42 \]**", {}, 42, 1),
        (r"\$42", {}, 42, 1),
        (r"42\%", {}, 42, 1),
        ("42 %", {}, 42, 1),
        ("$x$", {}, "x", 1),
        ("$5 and $6", {}, "5 and $6", 0),
        ("1/2", {}, "1/2", 1),
        ("Answer: **7**!", {"after": "Answer"}, 7, 1),
    ],
)
def test_an_exact_match(text: str, args: dict[str, Any], answer: Any, reward: float) -> None:
    assert exact.exact_match(completion(text, answer), **args) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"Hence \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"Hence $0.5$.", r"\frac12", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", 1),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"$\frac{1}{\sqrt{2}}$", 1),
        (r"\boxed{3}", "4", 0),
        ("I do not know.", "4", 0),
        (r"<think>\boxed{4}</think> $5$", "4", 0),
    ],
)
def test_mathematics_is_compared_as_such(text: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert math_latex.math_equal(completion(text, answer)) == reward


def test_an_answer_that_is_no_mathematics_is_not_scorable() -> None:
    pytest.importorskip("math_verify")
    check = math_latex.math_equal.check_answer  # type: ignore[attr-defined]
    assert check(r"\frac{1}{2}") is None
    assert check("") == "there is none"
    assert "does not read" in check("$$")
    with pytest.raises(ValueError, match="no mathematics"):
        math_latex.math_equal(completion("1", "$$"))


@pytest.mark.parametrize(
    ("text", "exact_format", "part"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1, 1.0),
        ("<think>a</think> so <answer>b</answer>", 0, 1.0),
        ("<answer>b</answer><think>a</think>", 0, 1.0),
        ("<think>a<answer>b</answer></think>", 0, 1.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0.5),
        ("<think>a</think><answer>b", 0, 0.75),
        ("</think>a<think><answer>b</answer>", 0, 1.0),
        ("", 0, 0.0),
    ],
)
def test_tags(text: str, exact_format: float, part: float) -> None:
    assert tags.tag_format(completion(text)) == exact_format
    assert tags.tag_count(completion(text)) == part


def test_text_around_tags_may_be_allowed_and_their_content_be_the_answer() -> None:
    text = "first <think>a</think> so <answer> b\n</answer>."
    assert tags.tag_format(completion(text), alone=False) == 1
    assert tags.tagged_exact(completion(text, "b")) == 1
    assert tags.tagged_exact(completion(text, "a")) == 0
    assert tags.tagged_exact(completion("b", "b")) == 0


def test_lengths() -> None:
    limits = [lengths.soft_limit(completion("", tokens=n), limit=10, slope=4) for n in (0, 6, 8, 10, 99)]
    assert limits == [0, 0, -0.5, -1, -1]
    assert [lengths.near(completion("", tokens=n), target=10, width=4) for n in (2, 8, 10, 12, 99)] == [
        0,
        0.5,
        1,
        0.5,
        0,
    ]
    assert lengths.finished(completion("")) == 1
    assert lengths.finished(completion("", finish="length")) == 0


def test_relative_length_sums_to_what_symmetry_asks_for() -> None:
    group = [completion("", tokens=n) for n in (10, 20, 30)]
    assert lengths.shorter_than_others(group) == [0.5, 0.0, -0.5]
    assert lengths.shorter_than_others(group[:1] * 3) == [0.0, 0.0, 0.0]


def test_patterns() -> None:
    answer = completion("<think>b</think>\nName: Ada\n", "Ada")
    assert patterns.matches(answer, r"Name: \w+") == 1
    assert patterns.matches(answer, r"Name: \w+", full=True) == 1
    assert patterns.matches(answer, r"Ada.", full=True) == 0
    assert patterns.matches(answer, "b") == 0
    assert patterns.matches(answer, "b", thinking=True) == 1
    assert patterns.captured(answer, r"Name: (\w+)") == 1
    assert patterns.captured(answer, r"Nom: (\w+)") == 0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "parses", "valid"),
    [
        ('{"a": 1}', 1, 1),
        ('<think>{}</think>Here:\n```json\n{"a": 1}\n```', 1, 1),
        ('```\n{"a": "x"}\n```', 1, 0),
        ('```json\n{}\n```\n```json\n{"a": 2}\n```', 1, 1),
        ('{"a": 1, "b": 2}', 1, 0),
        ("[" * 100_000, 0, 0),
        ("NaN", 0, 0),
        ("none", 0, 0),
    ],
)
def test_json_of_a_shape(text: str, parses: float, valid: float) -> None:
    pytest.importorskip("jsonschema")
    expected = {"reward": valid, "parses": parses, "valid": valid}
    assert json_schema.valid_json(completion(text), SCHEMA) == expected
    assert json_schema.valid_json(completion(text, schema=SCHEMA)) == expected


def test_json_may_have_to_be_the_answer() -> None:
    pytest.importorskip("jsonschema")
    assert json_schema.valid_json(completion('{"a": 1}', {"a": 1}), SCHEMA, equal=True)["reward"] == 1
    assert json_schema.valid_json(completion('{"a": 1}', {"a": 2}), SCHEMA, equal=True)["reward"] == 0


@pytest.mark.parametrize(
    ("reward", "module"), [(math_latex.math_equal, "math_verify"), (json_schema.valid_json, "jsonschema")]
)
def test_an_optional_package_is_named_by_who_needs_it(
    reward: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module in reward.requires
    monkeypatch.setitem(sys.modules, module, None)
    if module == "math_verify":
        math_latex._parsed.cache_clear()
        assert reward.check_answer("1") is None  # nothing can be said without it
    with pytest.raises(ImportError):
        reward(completion("1", "1"), **({"schema": {}} if module == "jsonschema" else {}))
