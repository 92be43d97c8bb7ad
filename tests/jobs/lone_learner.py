"""A learner without worker and generators: a real process that trains on a spool which the test has written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_jax.observability.metrics import read_metrics
from grpo_jax.rollouts.sample import Group, GroupId, Provenance, Sample, prompt_digest
from grpo_jax.storage import layout
from grpo_jax.storage.batches import read_batches
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader
from grpo_jax.storage.spool import SpoolWriter
from tests.jobs.harness import REPO, tiny_config, wait_for
from tests.tiny_model import HF_CONFIG

STEPS, PROMPTS, SAMPLES, LONGEST = 6, 2, 4, 6

# What differs between two runs that did the same: the clocks, and what is counted by the second.
_CLOCKS = (
    "perf/",
    "time/",
    "rollout/",
    "fleet/",
    "cost/",
    "policy/publish_s",
    "policy/time_to",
    "sample/time_in_queue_s",
)


def config_of(model: Path, bucket: Path | str, **changes: Any) -> dict[str, Any]:
    """All groups may be of v0, every version is published, and groups of equal rewards make room for others."""
    defaults = {
        "steps": STEPS,
        "staleness": {"exactly": STEPS},
        "algorithm": {"zero_variance": "replace"},
        "evaluation": {},
        "checkpoints": {"every": 1},
    }
    return tiny_config(model, bucket, **{**defaults, **changes})


class LoneLearner:
    """`grpo-jax learner`, and what it leaves in the directory behind its bucket."""

    def __init__(self, config: dict[str, Any], store: Path, local: Path | None = None, devices: int = 1):
        """
        Args:
          store: the directory that holds the run, whatever the bucket's URL makes of it.
          local: its run directory; None: the run's own in the bucket.
        """
        self.run_dir = store / config["run"]
        folder = local or store.parent
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "learner.yaml"
        path.write_text(yaml.safe_dump(config))
        self.log = folder / f"learner-{time.monotonic_ns()}.log"
        self._before = set(self.run_dir.rglob("*"))
        flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-m", "grpo_jax.cli", "learner", "--config", str(path)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *(("--dir", str(local / config["run"])) if local else ())],
                cwd=REPO,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "LoneLearner":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self, code: int = 0, timeout_s: float = 240) -> str:
        """Its log, once it has ended with this exit code."""
        assert self.process.wait(timeout_s) == code, self.tail()
        return self.tail()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def made(self, pattern: str, without: str | None = None) -> list[Path]:
        """What it has made that fits, as far as it has made nothing in the same folder that fits `without`."""
        found = set(self.run_dir.glob(pattern)) - self._before
        return [path for path in found if without is None or not set(path.parent.glob(without)) - self._before]

    def state(self) -> dict[str, Any]:
        return RecordReader(Bucket(str(self.run_dir)), layout.LEARNER_STATE).read() or {}

    def wait_for(self, condition: Callable[[], object], what: str) -> object:
        """As fast as can be: what is waited for may last for milliseconds."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            if value := condition():
                return value
            assert self.process.poll() is None, f"it ended before {what}: {self.tail()}"
            time.sleep(0.002)
        raise AssertionError(f"{what} did not come: {self.tail()}")


def first_policy(run_dir: Path) -> str:
    def current() -> str | None:
        record = RecordReader(Bucket(str(run_dir)), layout.POLICY).read()
        return None if record is None else record["current"]

    return wait_for(current, what="v0")


def make_groups(policy: str, count: int) -> Iterator[Group]:
    """Groups of v0 in the order in which they are to be trained, with rewards that differ in all but every fifth."""
    for index in range(count):
        rng = np.random.default_rng(index)
        samples = []
        for i in range(SAMPLES):
            tokens = rng.integers(0, 256, int(rng.integers(1, LONGEST + 1))).astype(np.int32)
            logprobs = (-5 + rng.normal(size=len(tokens)).clip(-2, 2)).astype(np.float32)
            reward = 0.0 if index % 5 == 4 else float(i % 2)
            samples.append(Sample(tokens, logprobs, reward, {}, "", "stop"))
        prompt = rng.integers(0, 256, 8).astype(np.int32)
        started = 1_700_000_000.0 + index
        provenance = Provenance(
            policy, "r0", str(index), index, {}, started, started + 1, prompt_digest=prompt_digest(prompt)
        )
        yield Group(GroupId(0, index), prompt, tuple(samples), provenance)


def fill_spool(run_dir: Path, policy: str, first: int = 0, count: int = 20) -> None:
    writer = SpoolWriter(Bucket(str(run_dir)), "w0")
    for group in make_groups(policy, first + count):
        if group.id.index >= first:
            writer.write(group)


def fill_with_what_is_bad(run_dir: Path, policy: str) -> dict[str, str]:
    """Groups that must not be trained, all started before the good ones; spool key → what is to be said of it."""
    run = Bucket(str(run_dir))
    bad: dict[str, str] = {}

    def put(worker: str, group: Group, why: str, name: str | None = None) -> None:
        key = layout.rollout(worker, name or str(group.id))
        run.put(key, group.to_bytes())
        if why:
            bad[key] = why

    def changed(group: Group, **provenance: Any) -> Group:
        return replace(group, provenance=replace(group.provenance, started_at=1.0, **provenance))

    groups = [changed(group) for group in make_groups(policy, 110)][100:]

    def with_first(group: Group, **sample: Any) -> Group:
        return replace(group, samples=(replace(group.samples[0], **sample), *group.samples[1:]))

    ids, logprobs = np.array([HF_CONFIG["vocab_size"]], np.int32), np.array([-1.0], np.float32)
    long = np.zeros(LONGEST + 1, np.int32)
    put("w0", with_first(groups[0], tokens=ids, logprobs=logprobs), "vocabulary")
    put("w0", with_first(groups[1], tokens=ids * 0, logprobs=logprobs * np.nan), "not finite")
    put("w0", with_first(groups[2], tokens=ids * 0, logprobs=-logprobs), "above 0")
    put("w0", with_first(groups[3], tokens=long, logprobs=np.full(len(long), -1, np.float32)), "sampling.max_tokens")
    put("w0", replace(groups[4], samples=groups[4].samples[:2]), "2 samples, not 4")
    put("w0", changed(groups[5], prompt_digest="0" * 64), "prompt")
    put("w0", changed(groups[6], policy="other.v000000.00000000"), "another run")
    put("w0", groups[7], "it holds the group", name="e000.i000117.a00")
    put("w1", next(make_groups(policy, 1)), "is there already")  # w0 has it, too
    # Not refused, but dropped: of a lineage that is not this run's, and without anything to learn from.
    put("w0", changed(groups[8], policy="tiny.v000000.deadbeef"), "")
    put("w0", replace(groups[9], samples=tuple(replace(s, reward=None) for s in groups[9].samples)), "")
    return bad


def trained(run_dir: Path) -> list[tuple[int, str]]:
    """(step, group id) of all that the run counts as trained."""
    batches = read_batches(Bucket(str(run_dir)))
    return [(step, group) for step, record in sorted(batches.items()) for group in record["groups"]]


def outcome(run_dir: Path, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """All that two runs from the same groups have to agree on, to the last bit."""
    run = Bucket(str(run_dir))
    metrics = [
        {key: value for key, value in record.items() if not key.startswith((*_CLOCKS, *without))}
        for record in read_metrics(run)
    ]
    local = [record["step"] for record in read_metrics(run_dir)]
    assert not local or local == [record["step"] for record in metrics]
    record = json.loads((run_dir / layout.RUN).read_text())
    pointer = RecordReader(run, layout.POLICY).read() or {}
    return {
        "adapters": sorted(path.name for path in (run_dir / "adapters").iterdir()),
        "metrics": metrics,
        "batches": [(t, r["groups"], r["drops"]) for t, r in sorted(read_batches(run).items())],
        "current": pointer["current"],
        "status": (record["status"], record["error"]),
    }
