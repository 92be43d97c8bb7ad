"""Runs of a tiny model through the real command, with all roles as processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

REPO = Path(__file__).parents[2]


def tiny_config(model: Path, bucket: Path, /, **changes) -> dict:
    config = {
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
        "generator": {"engine": "reference", "replicas": 1},
        "evaluation": {"samples": 2},
        "checkpoints": {"every": 2},
    }
    for path, value in changes.items():
        node = config
        *sections, key = path.split("__")
        for section in sections:
            node = node[section]
        node[key] = value
    return config


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
    record = RecordReader(Bucket(str(run_dir)), "learner/state.json").read()
    return -1 if record is None or record["phase"] == "starting" else record["step"]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained_groups(run_dir: Path) -> list[str]:
    return [g for path in sorted((run_dir / "batches").glob("*.json")) for g in json.loads(path.read_text())["groups"]]
