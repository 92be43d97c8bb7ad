"""Runs of a tiny model through the real command, with all roles as processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader
from tests.faults.replica import Faults

REPO = Path(__file__).parents[2]


def tiny_config(model: Path, bucket: Path | str, /, **changes) -> dict:
    config: dict[str, Any] = {
        "run": "tiny",
        "bucket": str(bucket),
        "steps": 4,
        "max_staleness": 1,
        "model": {"source": str(model), "dtype": "float32"},
        "lora": {"rank": 8, "alpha": 16},
        "task": {"source": "experiments.tasks.addition:one_digit", "args": {"held_out": 4}},
        "rewards": [{"source": "tests.plugins:even_first_token"}],
        "sampling": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "batch": {"prompts_per_step": 2, "group_size": 4, "row_tokens": 64, "rows_per_micro_batch": 2},
        "rollouts": {"max_redraws": 50, "retry_deadline_s": 120},
        "generator": {"engine": "reference", "replicas": 1, "env": _compile_cache(model.parent / "xla")},
        "evaluation": {"samples": 2},
        "checkpoints": {"every": 2},
        "retention": {"adapters": "all"},
    }
    for path, value in changes.items():
        node = config
        *sections, key = path.split("__")
        for section in sections:
            node = node[section]
        node[key] = value
    return config


def _compile_cache(folder: Path) -> dict[str, str]:
    """What one server has compiled, the servers of later runs find."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


class Command:
    """`grpo-jax run` as a user starts it. `environment` holds a mark by which its processes are found."""

    def __init__(self, config: dict, folder: Path, *arguments: str):
        self.mark = f"GRPO_JAX_TEST_MARK={folder}"
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_jax.cli", "run", str(path), *arguments],
            cwd=REPO,
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 400) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """For the end of a test, whatever its outcome."""
        if self.process.poll() is None:
            self.interrupt()
            try:
                self.process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def processes(self) -> dict[int, str]:
        """pid → command line of everything alive that this command has started, itself included."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line:
                        found[int(folder.name)] = line
            except OSError:
                continue
        return found

    def find(self, *words: str) -> int:
        """The pid of the process whose command line has all the words."""
        return next(pid for pid, line in self.processes().items() if all(word in line for word in words))


class FaultyGenerator:
    """One more generator of a run, whose server misbehaves; it leaves when the run is over."""

    def __init__(self, config_file: Path, folder: Path, faults: Faults, replica: str = "ill"):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{replica}.log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.agent", str(config_file), replica, str(folder / replica)],
                cwd=REPO,
                env={**os.environ, **faults.environment()},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def end(self, grace_s: float) -> int:
        """The exit code; it is killed if the grace has passed."""
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class FleetWatch:
    """A context manager in which it is noted what each replica of a fleet has ever said to have proved or refused."""

    def __init__(self, bucket: Path, fleet: str):
        self._bucket, self._prefix = Bucket(str(bucket)), layout.replicas(fleet)
        self._readers: dict[str, RecordReader] = {}
        self.proved: dict[str, set[str]] = {}
        self.quarantined: dict[str, dict[str, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "FleetWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            for key in self._bucket.list(self._prefix):
                record = self._readers.setdefault(key, RecordReader(self._bucket, key)).read()
                if record is not None:
                    self.proved.setdefault(record["id"], set()).update(record["proved"])
                    self.quarantined.setdefault(record["id"], {}).update(record["quarantined"])


def wait_for(condition, timeout_s: float = 200, what: str = "the condition"):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come about within {timeout_s:.0f} s")


def learner_step(run_dir: Path) -> int:
    """Steps that the learner has finished, from its record."""
    record = RecordReader(Bucket(str(run_dir)), layout.LEARNER_STATE).read()
    return -1 if record is None or record["phase"] == "starting" else record["step"]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained_groups(run_dir: Path) -> list[str]:
    return [g for path in sorted((run_dir / "batches").glob("*.json")) for g in json.loads(path.read_text())["groups"]]
