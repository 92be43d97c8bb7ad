import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_jax.observability import progress
from grpo_jax.observability.metrics import MetricsLog
from grpo_jax.observability.progress import RunProgress, panel
from grpo_jax.observability.snapshot import Observer, Snapshot
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from tests.observability import synthetic

LEARNER = {"step": 0, "version": 0, "total_steps": 25, "drops": []}
PROBE, V0 = synthetic.policy(None), synthetic.policy(0)


@pytest.fixture(autouse=True)
def every_look_is_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_RECORDS_EVERY_S", 0.0)


def plain() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def shown(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(panel("toy", snapshot))
    return "\n".join(written(console))


def test_a_log_file_gets_one_line_per_step(root: Bucket, tmp_path: Path) -> None:
    run, console = root.child(synthetic.RUN), plain()
    with RunProgress(run, tmp_path, 25, console=console) as shows:
        log = MetricsLog(tmp_path, run)
        for step in range(12):
            log.append({**synthetic.record(step), "reward": 0.831, "perf/step_s": 9.1, "sample/staleness_mean": 1.0})
            shows.update()
            shows.update()
    steps = [line for line in written(console) if line.startswith("step")]
    assert len(steps) == 12
    assert steps[-1] == "step 12/25  reward 0.83  staleness 1.0  251 tok/s  9.1 s/step  eta 1:58"
    assert steps[0].startswith("step  1/25  ")


def test_what_was_not_recorded_is_left_out(root: Bucket, tmp_path: Path) -> None:
    run, console = root.child(synthetic.RUN), plain()
    with RunProgress(run, tmp_path, 3, console=console):
        MetricsLog(tmp_path, run).append({"step": 0, "reward": 1.0})
    assert "step 1/3  reward 1.00" in written(console)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("terminal", [False, True])
def test_a_full_disk_behind_the_output_ends_no_run(
    root: Bucket, tmp_path: Path, terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = root.child(synthetic.RUN)
    # Unbuffered, so that closing it writes nothing more.
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        console = Console(file=full, width=60, force_terminal=terminal)
        with RunProgress(run, tmp_path, 25, console=console) as shows:
            log = MetricsLog(tmp_path, run)
            for step in range(3):
                log.append(synthetic.record(step))
                shows.update()
    said = {record.getMessage() for record in caplog.records if "progress" in record.name}
    assert said == {"the progress cannot be shown: [Errno 28] No space left on device"}


def test_steps_of_an_earlier_life_are_not_told_again(root: Bucket, tmp_path: Path) -> None:
    run, console = root.child(synthetic.RUN), plain()
    synthetic.write_metrics(run, tmp_path, 6)
    with RunProgress(run, tmp_path, 10, console=console) as shows:
        log = MetricsLog.resume(tmp_path, run, 4)
        shows.update()
        log.append({**synthetic.record(4), "reward": 0.5})
        shows.update()
    assert [line[:16] for line in written(console) if line.startswith("step")] == ["step  5/10  rewa"]


def write_learner(root: Bucket, **body: Any) -> None:
    RecordWriter(root.child("toy"), layout.LEARNER_STATE, 7).write({**LEARNER, **body})


def write_replica(root: Bucket, **body: Any) -> None:
    record = {"engine": "vllm", "proved": [], "quarantined": {}, **body}
    RecordWriter(root, layout.replica("toy", "r0"), 7).write(record)


def write_policy(root: Bucket) -> None:
    RecordWriter(root.child("toy"), layout.POLICY, 7).write({"current": V0, "window": [V0], "probe": PROBE})


def write_worker(root: Bucket, **body: Any) -> None:
    RecordWriter(root.child("toy"), layout.worker_state("w0"), 7).write(body)


def compiling(root: Bucket) -> None:
    write_learner(root, phase="starting")
    write_replica(root, state="starting")


def nothing_published(root: Bucket) -> None:
    write_replica(root, state="ready")


def probe_not_proved(root: Bucket) -> None:
    write_policy(root)
    write_replica(root, state="ready")


def v0_not_proved(root: Bucket) -> None:
    write_policy(root)
    write_replica(root, state="ready", proved=[PROBE])


def first_batch(root: Bucket) -> None:
    v0_not_proved(root)
    write_learner(root, phase="training")
    RecordWriter(root, layout.replica("toy", "r0"), 8).write({"state": "ready", "proved": [PROBE, V0]})
    write_worker(root, phase="running", inflight_groups=8)


def base_evaluation(root: Bucket) -> None:
    write_worker(root, phase="evaluating")


def last_evaluation(root: Bucket) -> None:
    write_learner(root, phase="draining", step=25)
    write_worker(root, phase="evaluating")


def last_publish(root: Bucket) -> None:
    write_learner(root, phase="draining", step=25)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda root: None, ["learner is starting", "generator is starting"]),
        (compiling, ["learner is compiling", "vLLM is loading the model"]),
        (nothing_published, ["learner is starting", "generator waits for the first policy"]),
        (probe_not_proved, ["learner is starting", "waiting for the probe to be proved"]),
        (v0_not_proved, ["learner is starting", "waiting for the first policy to be proved"]),
        (first_batch, ["learner waits for its first batch", "1 of 1 replicas serve", "worker samples 8 groups"]),
        (base_evaluation, ["learner is starting", "generator is starting", "worker evaluates the base"]),
        (last_evaluation, ["evaluating the last policy"]),
        (last_publish, ["publishing the last policy"]),
    ],
)
def test_who_waits_for_what(root: Bucket, tmp_path: Path, write: Callable[[Bucket], None], expected: list[str]) -> None:
    observer = Observer(root.child("toy"), tmp_path, 25, "toy")
    write(root)
    assert observer.snapshot().waits() == expected


def test_a_log_file_is_told_of_a_wait_once(root: Bucket, tmp_path: Path) -> None:
    console = plain()
    with RunProgress(root.child("toy"), tmp_path, 25, console=console) as shows:
        shows.update()
        shows.update()
        compiling(root)
        shows.update()
    assert written(console) == [
        "learner is starting",
        "generator is starting",
        "learner is compiling",
        "vLLM is loading the model",
    ]


def test_records_of_an_earlier_life_do_not_count(root: Bucket, tmp_path: Path) -> None:
    writer = RecordWriter(root.child("toy"), layout.LEARNER_STATE, 7)
    writer.write({**LEARNER, "phase": "done", "step": 25})
    observer = Observer(root.child("toy"), tmp_path, 25, "toy")
    assert (observer.snapshot().phase(), observer.snapshot().step) == ("starting", 0)
    writer.write({**LEARNER, "phase": "training", "step": 3})
    assert (observer.snapshot().phase(), observer.snapshot().step) == ("training", 3)


def test_half_written_files_change_nothing(root: Bucket, tmp_path: Path) -> None:
    run = root.child("toy")
    observer = Observer(run, tmp_path, 25, "toy")
    write_learner(root, phase="training", step=2)
    MetricsLog(tmp_path, run).append(synthetic.record(1))
    before = observer.snapshot()
    run.replace(layout.LEARNER_STATE, b'{"phase": "dra')
    root.replace(layout.replica("toy", "r0"), b"")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rew')
    after = observer.snapshot()
    assert (after.learner, after.recent, after.replicas) == (before.learner, before.recent, {})


def test_a_store_that_fails_keeps_the_last_look(root: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer(root.child("toy"), tmp_path, 25, "toy")
    write_learner(root, phase="training", step=2)
    assert observer.snapshot().step == 2

    def fail(self: Bucket, key: str, max_bytes: int | None = None, *, size: int = 0) -> bytes:
        raise ConnectionError("the store is away")

    monkeypatch.setattr(Bucket, "read", fail)
    assert observer.snapshot().step == 2


def test_the_panel_has_the_last_numbers() -> None:
    recent = [{**synthetic.record(t), "reward": 0.1 * t} for t in range(7, 12)]
    snapshot = Snapshot(
        total_steps=25,
        learner={"phase": "training", "step": 12, "drops": [["e000.i000001.a00", "stale"]]},
        workers={"w0": {"inflight_samples": 64}},
        replicas={
            "r0": {"state": "ready", "quarantined": {V0: "canary differs", "toy-2.v000000.00000000": "theirs"}},
            "r1": {"state": "starting"},
        },
        recent=recent,
    )
    text = shown(snapshot)
    for expected in (
        "toy", "training", "step 12/25", "eta 0:52", "reward 1.10  (mean of 5: 0.90)", "staleness 0.8", "251 tok/s",
        "4.0 s/step", "1/2 replicas ready · 64 samples in flight · 1 dropped",
        f"r0 refuses {V0}: canary differs",
    ):  # fmt: skip
        assert expected in text, expected
    assert "theirs" not in text


def test_a_terminal_is_redrawn_in_place(root: Bucket, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    run = root.child("toy")
    with RunProgress(run, tmp_path, 10, console=console) as shows:
        shows.update()
        log = MetricsLog(tmp_path, run)
        for step in range(3):
            log.append(synthetic.record(step))
            shows.update()
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "step 3/10" in output
    assert "\x1b[1A" in output  # the cursor goes up again
    assert "\x1b[2J" not in output  # the screen is never cleared
