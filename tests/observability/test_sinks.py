"""The real TensorBoard, trackio and wandb where they are installed; and sinks that fail, hang or are not there."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.observability import sink_writers
from grpo_jax.observability.metrics import MetricsLog, read_metrics
from grpo_jax.observability.scrubbing import scrubbed_config
from grpo_jax.observability.sinks import RunInfo, Sink, Sinks, open_sinks
from grpo_jax.storage.bucket import Bucket

SECRET = "correct-horse-battery"
CONFIG: dict[str, Any] = {
    "run": "toy",
    "bucket": f"s3://user:{SECRET}@host/runs",
    "batch": {"row_tokens": 256},
    "generator": {
        "env": {"HF_TOKEN": SECRET, "PROXY": f"socks5 {SECRET}", "OMP_NUM_THREADS": "2"},
        "extra_args": ["--api-key", SECRET, f"--ssl-key={SECRET}", "--max-num-batched-tokens", "8192"],
    },
    "task": {"source": "a:b", "args": {"url": f"https://host/x?token={SECRET}", "api_key": SECRET}},
    "rewards": [
        {"source": "a:judge", "args": {"headers": {"Authorization": f"Bearer {SECRET}"}, "password": [SECRET]}}
    ],
}


def record(created_at: float = 1.0, *sinks: str) -> dict[str, Any]:
    config = {**CONFIG, "logging": {"sinks": list(sinks), "project": "p", "space": None}}
    return {"run": "toy", "config": config, "created_at": created_at, "versions": {"jax": "0.10.2"}}


def lives(folder: Path, root: Bucket, *sinks: str) -> None:
    """A run of eight steps that is killed after step 5 and resumed at step 4."""
    for start, end, mark in ((0, 6, 0.0), (4, 8, 1.0)):
        log = MetricsLog.resume(folder, root, start)
        log.attach(open_sinks(record(1.0, *sinks), folder, start))
        for step in range(start, end):
            log.append({"step": step, "reward": step / 10, "life": mark, "note": "text", "time/finished": 1e9 + step})
        log.show({"step": start, "eval/reward": 0.25 + mark})  # of a step that lies behind
        log.close()


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.closed = False

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


INFO = RunInfo("toy-1", "toy", "p", {}, Path("."), 0)


class TestFeeding:
    def test_a_sink_gets_every_line_in_order_and_is_closed(self, tmp_path: Path, root: Bucket) -> None:
        sink, log = Kept(), MetricsLog(tmp_path, root)
        log.attach(Sinks({"kept": lambda info: sink}, INFO))
        for step in range(50):
            log.append({"step": step, "nan": float("nan")})
        log.close()
        assert sink.records == read_metrics(tmp_path)
        assert len(sink.records) == 50
        assert sink.closed

    def test_what_is_only_shown_is_no_line_of_the_metrics(self, tmp_path: Path, root: Bucket) -> None:
        sink, log = Kept(), MetricsLog(tmp_path, root)
        log.show({"step": 0, "eval/reward": 0.1})  # nobody is there to see it
        log.attach(Sinks({"kept": lambda info: sink}, INFO))
        log.append({"step": 7})
        log.show({"step": 4, "eval/reward": 0.5})
        log.close()
        assert sink.records[1] == {"step": 4, "eval/reward": 0.5}
        assert [r["step"] for r in read_metrics(tmp_path)] == [7]

    def test_a_sink_that_fails_is_counted_and_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Bad(Kept):
            def log(self, record: Mapping[str, Any]) -> None:
                super().log(record)
                raise OSError(f"https://user:{SECRET}@host is away")

        bad, good = Bad(), Kept()
        sinks = Sinks({"bad": lambda info: bad, "good": lambda info: good}, INFO)
        for step in range(5):
            sinks.log({"step": step})
        sinks.close()
        assert [r["step"] for r in good.records] == [r["step"] for r in bad.records] == list(range(5))
        assert sinks.failures == 5
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(lines) == 1
        assert "the sink bad does not take a step" in lines[0]
        assert SECRET not in lines[0]

    def test_the_failures_are_a_metric(self, tmp_path: Path, root: Bucket) -> None:
        def missing(info: RunInfo) -> Sink:
            raise ModuleNotFoundError("No module named 'dashboards'")

        log = MetricsLog(tmp_path, root)
        sinks = Sinks({"dashboards": missing}, INFO)
        log.attach(sinks)
        for feed in sinks._feeds:
            feed.join(10)
        for step in range(3):
            log.append({"step": step})
        log.close()
        assert [r["logging/failures_total"] for r in read_metrics(tmp_path)] == [1.0, 2.0, 3.0]

    def test_a_package_that_is_not_there_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        def missing(info: RunInfo) -> Sink:
            raise ModuleNotFoundError("No module named 'wandb'")

        sinks = Sinks({"wandb": missing}, INFO)
        sinks.close()
        assert "the package wandb is not installed" in caplog.text
        assert sinks.failures == 1

    def test_one_that_hangs_holds_up_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        release = threading.Event()

        class Hangs(Kept):
            def log(self, record: Mapping[str, Any]) -> None:
                release.wait(60)

        good = Kept()
        sinks = Sinks({"hangs": lambda info: Hangs(), "good": lambda info: good}, INFO)
        for step in range(100):
            sinks.log({"step": step})
        sinks.close(timeout_s=0.5)
        assert len(good.records) == 100
        assert "the sink hangs is still busy" in caplog.text
        release.set()

    def test_a_sink_that_cannot_be_opened_at_first_gets_the_lines_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("grpo_jax.observability.sinks._OPEN_AGAIN_S", 0.01)
        sink, tries = Kept(), []

        def open_at_the_third(info: RunInfo) -> Sink:
            tries.append(info)
            if len(tries) < 3:
                raise OSError("no route")
            return sink

        sinks = Sinks({"late": open_at_the_third}, INFO)
        for step in range(4):
            sinks.log({"step": step})
        while len(tries) < 3:
            threading.Event().wait(0.01)
        sinks.close()
        assert [r["step"] for r in sink.records] == [0, 1, 2, 3]
        assert sinks.failures == 2


class TestWhatIsSent:
    def test_no_secret_is_in_the_config(self) -> None:
        clean = scrubbed_config(CONFIG)
        assert SECRET not in json.dumps(clean)
        assert clean["batch"] == {"row_tokens": 256}
        assert clean["generator"]["env"]["OMP_NUM_THREADS"] == "2"
        assert clean["task"]["source"] == "a:b"
        assert clean["generator"]["extra_args"][:3] == ["--api-key", "***", "--ssl-key=***"]
        assert json.dumps(CONFIG).count(SECRET) == 9  # the original is left alone

    def test_a_value_of_a_secret_variable_is_masked_wherever_it_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOME_TOKEN", SECRET)
        assert (
            scrubbed_config({"task": {"args": {"path": f"/data/{SECRET}/x"}}})["task"]["args"]["path"] == "/data/***/x"
        )

    def test_a_run_keeps_its_id_and_a_fresh_one_gets_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        infos: list[RunInfo] = []

        def opener(info: RunInfo) -> Sink:
            infos.append(info)
            return Kept()

        monkeypatch.setitem(sink_writers.OPENERS, "wandb", opener)
        for created_at, first in ((1.0, 0), (1.0, 5), (2.0, 0)):
            sinks = open_sinks(record(created_at, "wandb"), tmp_path, first)
            assert sinks is not None
            sinks.close()
        assert infos[0].id == infos[1].id != infos[2].id
        assert infos[1].first_step == 5
        assert all(SECRET not in repr(info) for info in infos)

    def test_nothing_is_opened_where_nothing_is_asked_for(self, tmp_path: Path) -> None:
        assert open_sinks(record(), tmp_path, 0) is None
        assert open_sinks({**record(), "config": CONFIG}, tmp_path, 0) is None  # a run from before there were sinks


def test_tensorboard_shows_each_step_once(tmp_path: Path, root: Bucket) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lives(tmp_path, root, "tensorboard")
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 6)) for e in shown.Scalars("reward")] == [(t, t / 10) for t in range(8)]
    assert [e.value for e in shown.Scalars("life")] == [0.0] * 4 + [1.0] * 4
    assert sorted(shown.Tags()["scalars"]) == ["eval/reward", "life", "logging/failures_total", "reward"]
    assert [(e.step, e.value) for e in shown.Scalars("eval/reward")] == [(0, 0.25), (4, 1.25)]
    (text,) = shown.Tensors("config/text_summary")
    assert b"row_tokens: 256" in text.tensor_proto.string_val[0]
    assert all(SECRET.encode() not in f.read_bytes() for f in (tmp_path / "tensorboard").iterdir())


_LIVES = """
import sys
from pathlib import Path
from grpo_jax.storage.bucket import Bucket
from tests.observability.test_sinks import lives
lives(Path(sys.argv[1]), Bucket(sys.argv[1] + "/bucket"), sys.argv[2])
"""


def run_apart(folder: Path, sink: str, **env: str) -> None:
    """In a process of its own: these packages read the environment when they are imported, and keep threads."""
    done = subprocess.run(
        [sys.executable, "-c", _LIVES, str(folder), sink], env={**os.environ, **env}, capture_output=True, text=True,
        timeout=240, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the sink" not in done.stderr


@pytest.mark.slow
def test_trackio_goes_on_with_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run_apart(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    assert all(r["logging/failures_total"] == 0 for r in read_metrics(tmp_path))
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    shown = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [step for step, metrics in shown if "reward" in metrics] == [*range(6), *range(4, 8)]
    assert [metrics["reward"] for _, metrics in shown if "reward" in metrics][-1] == 0.7
    assert [(step, metrics) for step, metrics in shown if "reward" not in metrics] == [
        (0, {"eval/reward": 0.25}),
        (4, {"eval/reward": 1.25}),
    ]
    assert SECRET.encode() not in file.read_bytes()


@pytest.mark.slow
def test_wandb_goes_on_with_one_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_apart(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    assert all(r["logging/failures_total"] == 0 for r in read_metrics(tmp_path))
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.split("-", 3)[3] for folder in folders}) == 1
    written = b"".join(f.read_bytes() for f in (tmp_path / "wandb").rglob("*") if f.is_file())
    assert b"reward" in written
    assert SECRET.encode() not in written
