"""`grpo-jax reward`: stored samples are scored as a run would score them, and what goes wrong is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo_jax import cli
from grpo_jax.jobs.score import histogram
from grpo_jax.jobs.stored import read_stored
from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample
from grpo_jax.rollouts.tasks import Problem
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolWriter
from tests.jobs.harness import tiny_config


def problems() -> list[Problem]:
    return [Problem("p0", "one?", 1, {"hint": 10}), Problem("p1", "two?", 2, {"hint": 20})]


def tokens(completion: Completion) -> float:
    return float(len(completion.tokens))


def hinted(completion: Completion) -> dict[str, float]:
    """Fails for problems without a hint."""
    return {"hint": completion.metadata["hint"], "finished": float(completion.finish_reason == "stop")}


def rank(group: Any) -> list[float]:
    return [float(i) for i, _ in enumerate(group)]


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    def source(name: str) -> dict[str, str]:
        return {"source": f"{__name__}:{name}"}

    path = tmp_path / "config.yaml"
    rewards = [source("tokens"), source("rank")]
    raw = tiny_config(tiny_model, tmp_path / "bucket", task=source("problems"), rewards=rewards)
    path.write_text(yaml.safe_dump(raw))
    return path


def stored(config: Path, on: str) -> list[tuple[str, list[Completion]]]:
    from grpo_jax.config.load import load_config

    return [(group.name, group.completions) for group in read_stored(load_config(config), on).groups]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    return str(path)


def spool(run: Path, problem_id: str = "p1") -> str:
    samples = tuple(
        Sample(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), 0.0, {}, f"t{length}", finish)
        for length, finish in ((1, "stop"), (2, "length"), (0, "failed"))
    )
    provenance = Provenance("toy.v000000.0123abcd", "r", problem_id, 1, {}, 1.0, 2.0, answer=7)
    SpoolWriter(Bucket(str(run)), "w0").write(Group(GroupId(0, 1), np.array([1], np.int32), samples, provenance))
    return str(run)


def test_lines_are_grouped_by_prompt_and_their_other_keys_are_metadata(config: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "two?"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "one?", "completion": "1", "answer": 1, "tokens": [5, 6], "level": 3, "metadata": {"hint": 4}},
        {"prompt": chat, "completion": [{"role": "assistant", "content": "2"}], "finish_reason": "length"},
        {"prompt": "one?", "text": "ab", "answer": 1},
    ]
    found = stored(config, lines(tmp_path / "s.jsonl", rows))
    assert [name for name, _ in found] == ["line 1", "line 3"]
    (first, second), (third,) = (completions for _, completions in found)
    assert first == Completion("1", [5, 6], "one?", 1, {"level": 3, "hint": 4}, "stop")
    assert (third.text, third.prompt, third.finish_reason, third.answer) == ("2", chat, "length", None)
    assert len(second.tokens) == 2  # by the model's tokenizer, which has bytes


def test_a_run_s_samples_get_their_problem_s_prompt_answer_and_metadata(config: Path, tmp_path: Path) -> None:
    ((name, completions),) = stored(config, spool(tmp_path / "run"))
    assert name == "e000.i000001.a00 (p1)"
    assert completions == [
        Completion("t1", [0], "two?", 2, {"hint": 20}, "stop"),
        Completion("t2", [0, 1], "two?", 2, {"hint": 20}, "length"),
    ]


def test_a_problem_that_the_task_does_not_have_keeps_its_recorded_answer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = spool(tmp_path / "run", problem_id="gone")
    ((_, completions),) = stored(config, on)
    assert {(c.prompt, c.answer) for c in completions} == {("", 7)}
    assert cli.main(["reward", str(config), "--on", on]) == 0
    assert "note: 1 problems of the run, for example 'gone', are not in the config's task" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_reward_and_part(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = spool(tmp_path / "run")
    override = "rewards.1={source: tests.jobs.test_score:hinted, weight: 0.1}"
    assert cli.main(["reward", str(config), "--on", on, override]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["tokens"][:4] == ["tokens", "1", "1.5", "0.5"]
    assert rows["hinted"][:4] == ["hinted", "0.1", "20.5", "0.5"]
    assert rows["hinted/hint"][:3] == ["hinted/hint", "20", "0"]
    assert "weighted sum" in out
    assert "2 completions of 1 prompts; 100% of those" in out
    assert "slowest: " in out


def test_a_reward_that_fails_is_counted_and_its_traceback_is_shown_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = lines(tmp_path / "s.jsonl", [{"prompt": "x", "text": f"\x1b[31m{i}"} for i in range(3)])
    override = "rewards.1={source: tests.jobs.test_score:hinted}"
    assert cli.main(["reward", str(config), "--on", on, override]) == 0
    captured = capsys.readouterr()
    assert "failed 3×: reward hinted: KeyError('hint')" in captured.out
    assert captured.err.count("Traceback") == 1
    assert "test_score.py" in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there are no samples in it"),
        ("{}", "line 1: there is no text in 'completion' or 'text'"),
        ('{"text": "x"}\nx', "line 2: is no JSON"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_holds_no_samples_is_wrong_usage(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "s.jsonl"
    if content is not None:
        path.write_text(content)
    assert cli.main(["reward", str(config), "--on", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_directory_that_is_no_run_is_wrong_usage(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reward", str(config), "--on", str(tmp_path / "none")]) == 2
    assert "there are no samples in it" in capsys.readouterr().err


def test_bars_say_how_often_values_fall_where() -> None:
    assert histogram([1.0, 1.0]) == "█"
    assert histogram([0.0, 1.0, 1.0], bins=4) == "▄  █"
    assert len(histogram(list(map(float, range(100))))) == 8
    assert set(histogram(list(map(float, range(80))))) == {"█"}
