"""`grpo-jax samples`: which of a run's samples are shown, and that what a model wrote cannot touch the terminal."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_jax import cli
from grpo_jax.errors import UsageError
from grpo_jax.observability.printable import printable
from grpo_jax.observability.samples import samples_table, select_samples
from grpo_jax.rollouts.sample import Group, GroupId, Sample
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolWriter
from tests.observability.synthetic import group, policy, write_run

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Bucket:
    return write_run(Bucket(str(tmp_path)), tmp_path / "toy", STEPS)


def rendered(run: Bucket, **options: object) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(samples_table(select_samples(run, None, **options)))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_newest_groups_come_first_and_one_sample_of_each(run: Bucket) -> None:
    shown = select_samples(run, None, n=5)
    assert [s.problem for s in shown[:4]] == [f"problem-{i}" for i in range(12, 16)]
    assert shown[4].problem == "problem-8"
    everything = select_samples(run, None, n=1000)
    assert len(everything) == 4 * 4 * STEPS
    assert [s.tokens for s in everything] == sorted(s.tokens for s in everything)  # the k-th sample has 3 + k


def test_those_of_a_step_are_what_its_batch_names(run: Bucket) -> None:
    shown = select_samples(run, None, n=100, step=1)
    assert {s.problem for s in shown} == {f"problem-{i}" for i in range(4, 8)}
    with pytest.raises(UsageError, match="there is no record of a step 99"):
        select_samples(run, None, step=99)


@pytest.mark.parametrize("name", [policy(2), "v2", "2"])
def test_those_of_a_policy_go_by_name_or_version(run: Bucket, name: str) -> None:
    assert {s.policy for s in select_samples(run, None, n=100, policy=name)} == {policy(2)}
    with pytest.raises(UsageError, match="no samples of that kind"):
        select_samples(run, None, policy="v77")


def test_the_best_and_the_worst_go_by_reward_and_leave_out_what_has_none(run: Bucket) -> None:
    best, worst = (select_samples(run, None, n=1000, order=order) for order in ("best", "worst"))
    rewards = [s.reward for s in best]
    assert None not in rewards
    assert rewards == sorted(rewards, reverse=True)  # type: ignore[type-var]
    assert [s.reward for s in worst] == rewards[::-1]


def test_prompts_are_decoded_where_there_is_a_tokenizer(run: Bucket) -> None:
    (shown,) = select_samples(run, lambda tokens: f"tokens {tokens}", n=1)
    assert shown.prompt == "tokens [1, 2, 3, 4, 5]"


def test_parts_are_shown_where_there_are_several(run: Bucket) -> None:
    made = group(90, 3, 2e9, 2e9 + 1)
    sample = made.samples[0]
    parts = {"exact": 1.0, "short/length": None}
    changed = Sample(sample.tokens, sample.logprobs, 1.0, parts, "x", "stop")
    SpoolWriter(run, "w1").write(Group(GroupId(0, 90), made.prompt_tokens, (changed,), made.provenance))
    text = rendered(run, n=1)
    assert "exact 1.00" in text
    assert "short/length unscorable" in text
    assert "last_integer" not in rendered(run, n=1, step=1)


def test_what_a_model_wrote_is_data(run: Bucket) -> None:
    evil = "[bold]x[/red] \x1b[2J\x1b]0;title\x07 \x9b31m \u202eback\u202c \r\x08 \ud800".encode(
        errors="replace"
    ).decode()
    SpoolWriter(run, "w1").write(group(90, 3, 2e9, 2e9 + 1, text=evil))
    text = rendered(run, n=1)
    assert "[bold]x[/red]" in text
    assert "\x1b[2J" not in text
    assert not {"\x07", "\x08", "\r", "\x9b", "\u202e"} & set(text)


@given(st.text())
def test_printable_text_has_no_controls_and_what_is_printable_stays(text: str) -> None:
    found = printable(text)
    assert len(found) == len(text)
    assert all(char in "\n\t" or char.isprintable() or char.isspace() or not char.isascii() for char in found)
    assert printable(found) == found
    assert printable("é ß\n漢\t🙂") == "é ß\n漢\t🙂"
    assert printable("abc", longest=2) == "ab…"


def test_the_command_prints_the_table(run: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.local_path())
    assert cli.main(["samples", folder, "--step", "1", "--worst", "--n", "2"]) == 0
    assert "problem-4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "0"], "--n: 0 samples"),
        (["--step", "77"], "no record of a step 77"),
        (["--policy", "x"], "of that kind"),
    ],
)
def test_what_is_not_there_is_wrong_usage(
    run: Bucket, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["samples", str(run.local_path()), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_run_without_samples_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(tmp_path / "none")]) == 2
    assert "none: there are no samples\n" in capsys.readouterr().err
