"""`grpo-jax sweep`: what it chooses, what it skips, and a whole sweep with an interruption and a run that fails."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_jax import cli
from grpo_jax.config.sweep import Sweep, load_sweep
from grpo_jax.errors import UsageError
from grpo_jax.jobs.sweep import choose, state_of
from grpo_jax.observability.members import write_index
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.jobs.harness import REPO, learner_step, metrics, tiny_config, wait_for

SECTION = {"grid": {"lora.rank": [1, 8]}, "variants": {"a": {}, "b": {"steps": 7}}, "seeds": [0, 1]}


def write(folder: Path, model: Path, section: dict[str, Any], **changes: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**tiny_config(model, folder / "bucket", **changes), "sweep": section}))
    return path


def sweep_of(path: Path) -> Sweep:
    sweep = load_sweep(path)
    assert sweep is not None
    return sweep


def record(sweep: Sweep, i: int, status: str, step: int = 0, **changes: Any) -> None:
    """What a run would have left."""
    config = sweep.variants[i].config
    run = Bucket(config.bucket).child(config.run)
    body = {"run": config.run, "status": status, "config": {**config.model_dump(mode="json"), **changes}, "error": None}
    RecordWriter(run, layout.RUN, 1).write(body)
    RecordWriter(run, layout.LEARNER_STATE, 1).write({"run": config.run, "step": step, "phase": "training"})


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return sweep_of(write(tmp_path, tmp_path / "model", SECTION))


@pytest.mark.parametrize(
    ("only", "runs"),
    [
        ([], list(range(8))),
        (["a-rank8"], [2, 3]),
        (["a-rank8-s1"], [3]),
        (["tiny-b-rank1-s0"], [4]),
        (["*-rank1*", "a-rank8-s1"], [0, 1, 3, 4, 5]),
    ],
    ids=str,
)
def test_runs_are_chosen_by_name_with_or_without_the_sweep_s_and_the_seed(
    sweep: Sweep, only: list[str], runs: list[int]
) -> None:
    assert choose(sweep, only) == [sweep.variants[i] for i in runs]


def test_a_name_that_is_none_of_them_is_refused_with_those_there_are(sweep: Sweep) -> None:
    with pytest.raises(UsageError, match=r"--only: 'c-\*' is none of tiny-a-rank1-s0, tiny-a-rank1-s1, "):
        choose(sweep, ["a-*", "c-*"])


def test_what_there_is_to_do_is_read_from_the_bucket(sweep: Sweep) -> None:
    record(sweep, 0, "finished")
    record(sweep, 1, "running", step=3)
    record(sweep, 2, "failed")
    record(sweep, 3, "finished", lora={"rank": 4})
    record(sweep, 4, "finished", steps=5)  # the config has 7 by now
    found = [state_of(variant.config) for variant in sweep.variants]
    assert found[0] == "finished"
    assert found[1] == "goes on after step 3"
    assert found[2] == found[4] == "begun, no step finished"
    assert found[3].startswith("exists with another config; differing: lora.")
    assert found[5:] == ["new"] * 3


def test_a_dry_run_starts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, tmp_path / "model", SECTION)
    assert cli.main(["sweep", str(path), "--dry-run", "--only", "b-*"]) == 0
    out = capsys.readouterr().out
    assert out.count("new") == 4
    assert not (tmp_path / "bucket").exists()


def test_nothing_is_started_for_runs_that_are_finished_or_cannot_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, tmp_path / "model", {"grid": {"lora.rank": [1, 8]}})
    sweep = sweep_of(path)
    record(sweep, 0, "finished")
    record(sweep, 1, "running", seed=5)
    assert cli.main(["sweep", str(path)]) == 1
    captured = capsys.readouterr()
    assert "1 of 2: tiny-rank1, 4 steps, finished" in captured.out
    assert "1 of 2 runs failed: tiny-rank8" in captured.err
    assert not list((tmp_path / "bucket").rglob("*.log"))
    assert (tmp_path / "bucket" / "tiny" / "comparison.html").exists()


def test_a_comparison_of_some_runs_leaves_the_others_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: Sweep
) -> None:
    for i in range(4):
        record(sweep, i, "finished")
    write_index(Bucket(sweep.folder), sweep)
    folder = Path(sweep.folder)
    assert cli.main(["report", sweep.folder, "--only", "a-rank1"]) == 0
    assert [line.split(",")[0] for line in (folder / "comparison.csv").read_text().splitlines()[1:]] == [
        "tiny-a-rank1-s0",
        "tiny-a-rank1-s1",
    ]
    assert cli.main(["report", sweep.folder, "--only", "c"]) == 2
    assert "--only: 'c' is none of" in capsys.readouterr().err
    assert cli.main(["report", f"{sweep.folder}/{sweep.variants[0].config.run}", "--only", "a"]) == 2
    assert "chooses runs of a sweep" in capsys.readouterr().err


def command(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_jax.cli", "sweep", str(path), *arguments],
        cwd=REPO,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_sweep_is_interrupted_goes_on_and_reports_the_run_that_fails(tiny_model: Path, tmp_path: Path) -> None:
    variants = {"broken": {"model": {"source": "/no/such/model"}}, "sound": {}, "stale": {"max_staleness": 2}}
    path = write(tmp_path, tiny_model, {"variants": variants}, evaluation__samples=0)
    folder = tmp_path / "bucket" / "tiny"
    process = command(path)
    wait_for(lambda: learner_step(folder / "tiny-sound") >= 1, what="the first step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err[-2000:]
    assert "interrupted after 1 of 3 runs" in err
    assert not (folder / "tiny-stale").exists()

    out, err = command(path).communicate(timeout=400)
    assert "2 of 3: tiny-sound, 4 steps, goes on after step" in out
    assert "1 of 3 runs failed: tiny-broken" in err
    assert [len(metrics(folder / f"tiny-{name}")) for name in ("sound", "stale")] == [4, 4]

    served = (folder / "generators" / "generator-0.log").read_text()
    assert served.count("the server is ready") == 2, "once, and once more after the interruption"
    assert served.count("serving tiny-sound") == 2
    assert served.count("serving tiny-stale") == 1

    again = command(path, "--only", "s*")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert out.count("finished before") == 2

    assert [run["run"] for run in json.loads((folder / "sweep.json").read_text())["runs"]] == [
        f"tiny-{name}" for name in variants
    ]
    assert "2 of 3 runs are finished" in (folder / "comparison.html").read_text()
    assert (folder / "comparison.png").exists()
    assert (folder / "comparison.csv").read_text().count("\n") == 4


@pytest.mark.slow
def test_a_shared_generator_that_is_killed_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, tiny_model, {"seeds": [0, 1]}, evaluation__samples=0, steps=6)
    folder = tmp_path / "bucket" / "tiny"
    process = command(path)
    try:
        wait_for(lambda: learner_step(folder / "tiny-s1") >= 1, what="the first step of the second run")
        (agent,) = [pid for pid, words in _commands(tmp_path).items() if "generator" in words]
        os.kill(agent, signal.SIGKILL)
        _, err = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, err[-2000:]
    assert "generator-0 was killed by SIGKILL" in err
    assert [len(metrics(folder / f"tiny-s{seed}")) for seed in (0, 1)] == [6, 6]
    assert (folder / "generators" / "generator-0.log").read_text().count("the server is ready") == 2


@pytest.mark.slow
def test_a_fleet_that_cannot_be_kept_alive_fails_its_runs_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    generator = {"engine": "reference", "extra_args": ["--no-such-option"]}
    path = write(tmp_path, tiny_model, {"seeds": [0, 1]}, generator=generator, local={"restarts": 0})
    process = command(path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err[-2000:]
    assert "2 of 2 runs failed" in err
    assert "restarts in a row did not help" in " ".join(out.split())
    assert not _commands(tmp_path)


def _commands(folder: Path) -> dict[int, list[str]]:
    """The words of every process that is told of something in this folder, by pid."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(folder) in word for word in words):
                found[int(place.name)] = words
    return found
