"""What people ask of a run with one damaged object: an answer, or a UsageError in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from grpo_jax.config.sweep import expand
from grpo_jax.errors import RunFailed, UsageError
from grpo_jax.observability.diff import compare_runs
from grpo_jax.observability.explain import explain, lines
from grpo_jax.observability.members import INDEX, members_of_runs, members_of_sweep, write_index
from grpo_jax.observability.metrics import FILE, MetricsLog, MetricsTail, read_metrics, segment_key
from grpo_jax.observability.page import render
from grpo_jax.observability.rundata import load_run
from grpo_jax.observability.samples import choose_samples, select_samples
from grpo_jax.observability.snapshot import Observer
from grpo_jax.observability.summary import summarise
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from tests.fuzz.mutations import as_json, bent, damaged
from tests.fuzz.profile import fuzz, in_a_sentence
from tests.fuzz.spool_files import mutated
from tests.fuzz.test_records import forged
from tests.observability.synthetic import RUN, policy, write_run

STEPS = 2
SAMPLE = "e000.i000001.a00/1"
Ask = Callable[[Bucket, Path], Any]


def _report(run: Bucket, folder: Path) -> None:
    data = load_run(folder, run)
    summary = summarise(data)
    json.dumps(summary)
    render(data, summary, [], choose_samples(data, run, None))


def _explain(run: Bucket, _: Path) -> None:
    lines(explain(run, SAMPLE, None))


ASKED: dict[str, Ask] = {
    "report": _report,
    "samples": lambda run, _: select_samples(run, None, n=3),
    "samples of a step": lambda run, _: select_samples(run, None, step=1, order="best"),
    "explain": _explain,
    "diff": lambda run, _: compare_runs(run, run),
    "members": lambda run, _: members_of_runs([run, run]),
    "snapshot": lambda run, folder: Observer(run, folder, STEPS, RUN).snapshot().waits(),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bucket, Path]:
    root = tmp_path_factory.mktemp("runs")
    folder = root / RUN
    return write_run(Bucket(str(root)), folder, STEPS), folder


def _damage(rng: Random, path: Path, data: bytes) -> bytes:
    if path.suffix == ".safetensors":
        return mutated(rng, data)
    if path.suffix == ".jsonl":
        return b"".join(_line(rng, line) for line in data.splitlines(keepends=True))
    value = json.loads(data)
    if "checksum" in value:
        body = {k: v for k, v in value.items() if k not in ("checksum", "incarnation", "seq")}
        return forged(rng, body)
    return damaged(rng, data) if rng.random() < 0.3 else as_json(bent(rng, value))


def _line(rng: Random, line: bytes) -> bytes:
    return damaged(rng, line) if rng.random() < 0.3 else as_json(bent(rng, json.loads(line))) + b"\n"


def test_all_answer_for_a_sound_run(place: tuple[Bucket, Path]) -> None:
    for ask in ASKED.values():
        ask(*place)


@fuzz(150)
def test_a_damaged_object_is_a_sentence_and_no_crash(place: tuple[Bucket, Path], rng: Random) -> None:
    run, folder = place
    fleet = sorted((folder.parent / "fleets").rglob("*.json"))
    path = rng.choice([p for p in (*sorted(folder.rglob("*")), *fleet) if p.is_file()])
    sound = path.read_bytes()
    path.write_bytes(_damage(rng, path, sound))
    try:
        for name in rng.sample(sorted(ASKED), 3):
            try:
                ASKED[name](run, folder)
            except (UsageError, RunFailed) as error:
                in_a_sentence(error)
    finally:
        path.write_bytes(sound)


@fuzz()
def test_lines_of_metrics_are_numbers_or_left_out(place: tuple[Bucket, Path], rng: Random) -> None:
    folder = place[1]
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    other = folder.parent / "metrics"
    bucket = Bucket(str(other)).child("bucket")
    other.mkdir(exist_ok=True)
    damage = b"".join(_line(rng, line) for line in lines)
    (other / FILE).write_bytes(damage)
    bucket.replace(segment_key(0), damage)
    tail = MetricsTail(other)
    tail.poll()
    for found in (read_metrics(other), read_metrics(bucket), [tail.records[t] for t in sorted(tail.records)]):
        steps = [record["step"] for record in found]
        assert steps == sorted(set(steps))
        assert all(type(step) is int and step >= 0 for step in steps)
        json.dumps(found, allow_nan=False)
    log = MetricsLog.resume(other, bucket, 2)
    log.append({"step": 2, "reward": 1.0})
    log.close()
    assert read_metrics(other)[-1] == {"step": 2, "reward": 1.0}


@fuzz()
def test_the_index_of_a_sweep_names_its_runs_or_is_refused(place: tuple[Bucket, Path], rng: Random) -> None:
    root = Bucket(str(place[1].parent))
    config = {
        "run": "s", "model": {"source": "x"}, "task": {"source": "a:b"}, "rewards": [{"source": "a:b"}],
    }  # fmt: skip
    write_index(root, expand(config, {"seeds": [0, 1]}, "test"))
    index = json.loads(root.read(INDEX))
    root.replace(INDEX, damaged(rng, as_json(index)) if rng.random() < 0.3 else as_json(bent(rng, index)))
    try:
        found = members_of_sweep(root)
    except UsageError as error:
        in_a_sentence(error)
        return
    if found is not None:
        name, members = found
        assert isinstance(name, str)
        assert all(isinstance(member.settings, dict) for member in members)


def test_the_places_are_those_of_a_run(place: tuple[Bucket, Path]) -> None:
    run, folder = place
    assert run.read_or_none(layout.RUN) == (folder / layout.RUN).read_bytes()
    assert policy(0).startswith(RUN)
