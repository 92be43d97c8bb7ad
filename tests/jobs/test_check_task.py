"""`grpo-jax check` on tasks with faults: warnings are printed, errors are wrong usage."""

from pathlib import Path

import pytest
import yaml

from grpo_jax import cli
from grpo_jax.rollouts.tasks import Problem
from tests.jobs.harness import tiny_config


def twice() -> list[Problem]:
    return [Problem("a", "1 + 1 = ?"), Problem("b", "1 + 1 = ?")]


def empty() -> list[Problem]:
    return [Problem("a", "1 + 1 = ?"), Problem("b", "")]


def faulty() -> list[Problem]:
    return [*twice(), *empty(), Problem("long", "1 + " * 500)]


@pytest.mark.parametrize(
    ("task", "code", "message"),
    [
        ("twice", 0, "1 problems have the prompt of another, for example 'b' of 'train', as 'a'"),
        ("empty", 2, "task: 1 problems have an empty prompt, for example 'b' of 'train'"),
    ],
)
def test_findings_are_printed_and_errors_are_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, code: int, message: str
) -> None:
    path = tmp_path / "config.yaml"
    config = tiny_config(
        tiny_model, tmp_path / "bucket", task={"source": f"{__name__}:{task}"}, evaluation={"samples": 0}
    )
    path.write_text(yaml.safe_dump(config))
    assert cli.main(["check", str(path), "--no-compile", "--offline"]) == code
    captured = capsys.readouterr()
    assert message in (captured.err if code else captured.out)
    assert captured.err.count("\n") == (code == 2)


def test_all_faults_of_a_task_are_said_at_once(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    config = tiny_config(
        tiny_model, tmp_path / "bucket", task={"source": f"{__name__}:faulty"}, evaluation={"samples": 0}
    )
    path.write_text(yaml.safe_dump(config))
    assert cli.main(["check", str(path), "--no-compile", "--offline"]) == 2
    errors = capsys.readouterr().err
    for said in (
        "task: 1 problems have an empty prompt",
        "longer than batch.row_tokens",
        "warning: 1 problems have the id",
    ):
        assert said in errors
    dropping = ["task.drop_overlong=true", f"task.source={__name__}:twice"]
    assert cli.main(["check", str(path), "--no-compile", "--offline", *dropping]) == 0
