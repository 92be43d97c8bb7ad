"""`grpo-jax launch` as a user calls it, with a Hub on loopback whose jobs are processes of this machine."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi

from tests.fakes.hub import FakeHub
from tests.fakes.hub_job import ENDED, Job
from tests.fakes.hub_mounts import Mount
from tests.jobs.harness import REPO, learner_step, tiny_config, wait_for

TOKEN = "hf_theusersowntokenofthehub"
API_KEY = "sk-thekeyofsomebodysjudge"
_FAST = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    # What is not compressed the Hub can hand out as it came.
    "HF_XET_XORB_COMPRESSION_POLICY": "none",
    "HF_XET_TELEMETRY_ENABLED": "false",
}


class Launch:
    """A `grpo-jax` command that talks to the Hub. `text`: what it has printed so far, both streams in one."""

    def __init__(self, log: Path, env: dict[str, str], *arguments: str, terminal: bool = False):
        self._log = log
        argv = [sys.executable, "-u", "-m", "grpo_jax.cli", *arguments]
        if terminal:
            self._keyboard, screen = pty.openpty()
            self.process = subprocess.Popen(
                argv, cwd=REPO, env=env, stdin=screen, stdout=screen, stderr=screen, start_new_session=True
            )
            os.close(screen)
            threading.Thread(target=self._copy_screen, daemon=True).start()
            return
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def says(self, text: str, timeout_s: float = 120) -> None:
        wait_for(lambda: text in self.text or self._ended_without(text), timeout_s, repr(text))

    def wait(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def end(self) -> None:
        """For the end of a test, whatever its outcome."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _copy_screen(self) -> None:
        with self._log.open("wb", buffering=0) as log:
            try:
                while data := os.read(self._keyboard, 1 << 16):
                    log.write(data)
            except OSError:  # how a terminal tells that nobody is left on its other side
                return

    def _ended_without(self, text: str) -> bool:
        assert self.process.poll() is None or text in self.text, f"ended without {text!r}:\n{self.text}"
        return False


class HubPlace:
    """A Hub and the shell of its user. `commands`: all that were called, for what they have printed."""

    def __init__(self, server: FakeHub, folder: Path, model: Path):
        self.server, self.folder, self.model = server, folder, model
        self.api = HfApi(endpoint=server.url, token=TOKEN)
        self.commands: list[Launch] = []
        cache = folder / "xla"
        server.jobs.image_env = {
            **_FAST,
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GRPO_JAX_TOKEN"))
        }
        self.env = {
            **inherited,
            **_FAST,
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(folder / "hf"),
            "JUDGE_API_KEY": API_KEY,
        }

    def config(self, run: str, **changes) -> Path:
        """The file of a config whose run lies in a bucket of its own, `someone/<run>`."""
        jobs: dict[str, Any] = {
            "backend": "huggingface",
            "prices": {"cpu-basic": 0.6},
            "generator": {"flavor": "cpu-basic"},
            "learner": {"flavor": "cpu-basic", "secrets": ["JUDGE_API_KEY"]},
            **changes.pop("jobs", {}),
        }
        defaults = {"run": run, "generator__replicas": 2, "fleet": {"allowed_hosts": ["127.0.0.1"]}, "jobs": jobs}
        path = self.folder / f"{run}.yaml"
        config = tiny_config(self.model, f"hf://buckets/someone/{run}/runs", **{**defaults, **changes})
        path.write_text(yaml.safe_dump(config))
        return path

    def gated(self, run: str, steps: int) -> tuple[list[dict[str, Any]], Path]:
        """Rewards for `config` that let a run come to `steps` at least and one step further at most; what opens them.

        Of each step 8 completions are scored, and as many of the evaluation at the start.
        """
        gate = self.folder / f"{run}.gate"
        args = {"gate": str(gate), "free": 8 + 8 * steps}
        return [{"source": "tests.jobs.gate:even_first_token", "args": args, "timeout_s": 900}], gate

    def call(self, *arguments: str, env: dict[str, str] | None = None, **more) -> Launch:
        log = self.folder / f"command-{len(self.commands)}.log"
        command = Launch(log, {**self.env, **(env or {})}, *arguments, **more)
        self.commands.append(command)
        return command

    def jobs(self, run: str, slot: str | None = None) -> list[Job]:
        """All jobs that a run, or a slot of it (`learner`, `generator-0`), has had, oldest first."""
        wanted = {"grpo-jax": run, **({"grpo-jax-slot": slot} if slot else {})}
        return [job for job in list(self.server.jobs.all.values()) if wanted.items() <= job.spec["labels"].items()]

    def billing(self, run: str) -> list[Job]:
        """Jobs that cost money."""
        return [job for job in self.jobs(run) if job.stage not in ENDED]

    def running(self, run: str, slot: str) -> Job:
        """The job of a slot that runs, once there is one."""

        def found() -> Job | None:
            return next((job for job in self.jobs(run, slot) if job.stage == "RUNNING"), None)

        return wait_for(found, 120, f"a running job of {slot}")

    @contextlib.contextmanager
    def view(self, run: str) -> Iterator[Path]:
        """A directory that shows a run as it lies in its bucket."""
        wait_for(lambda: self.server.buckets.exists(f"someone/{run}"), 120, "the bucket")
        folder = self.folder / f"view-{len(list(self.folder.glob('view-*')))}"
        mount = Mount(self.server.url, TOKEN, f"someone/{run}", folder, read_only=True, every_s=1.0)
        mount.start()
        try:
            yield folder / "runs" / run
        finally:
            mount.stop(flush=False)

    def until_step(self, view: Path, step: int, command: Launch | None = None) -> None:
        def reached() -> bool:
            assert command is None or command.process.poll() is None, command.text
            time.sleep(0.4)  # the view changes once a second, and the run needs the processor
            return learner_step(view) >= step

        wait_for(reached, 400, f"step {step}")

    def told(self, view: Path) -> dict[str, str]:
        """Everything that somebody else may read after all: jobs, their logs, objects of a run, output of commands."""
        texts = dict(self.server.jobs.texts())
        for path in view.rglob("*"):
            if path.is_file():
                texts[str(path.relative_to(view))] = path.read_bytes().decode("latin-1")
        return texts | {f"command {i}": command.text for i, command in enumerate(self.commands)}

    def logs(self, run: str) -> str:
        """For the message of a failed assertion."""
        return "\n".join(
            f"{job.spec['labels']['grpo-jax-slot']} {job.stage} {job.message}: {job.log_text()[-2000:]}"
            for job in self.jobs(run)
        )
