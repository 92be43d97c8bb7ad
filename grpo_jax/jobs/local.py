"""All roles of a run as processes of this machine: start, watch, restart, stop (`grpo-jax run`)."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.generator.process import free_port
from grpo_jax.jobs.processes import Process, role_command, stop_all

log = logging.getLogger(__name__)

_RESTARTS = 3
_BACK_OFF_S = (0.5, 2.0, 5.0)
_STOP_S = 5.5
_LEAVE_S = 5.0


@dataclass
class Role:
    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    process: Process | None = None
    restarts: int = 0
    start_at: float = 0.0
    finished: bool = False


class Supervisor:
    """The processes of a run. `poll` returns True once the learner is done, and raises RunFailed."""

    def __init__(self, config: Config, run_dir: Path, *, learner_arguments: tuple[str, ...] = ()):
        self.logs = run_dir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        resolved = run_dir / "config.json"
        resolved.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
        common = ("--config", str(resolved))
        port = config.proxy.port or free_port(config.proxy.host)
        self.proxy_url = f"http://{config.proxy.host}:{port}"
        local = config.local
        self.roles = [
            Role("proxy", role_command("proxy", *common, "--port", str(port))),
            *(
                Role(
                    f"generator-{i}",
                    role_command(
                        "generator", *common, "--id", f"local-{i}", "--dir", str(run_dir / "generators" / str(i))
                    ),
                    cpus=local.generator_cpus[i] if i < len(local.generator_cpus) else (),
                )
                for i in range(config.generator.replicas)
            ),
            Role(
                "learner",
                role_command("learner", *common, "--dir", str(run_dir), *learner_arguments),
                cpus=local.learner_cpus,
            ),
            Role("worker", role_command("worker", *common, "--proxy", self.proxy_url)),
        ]

    def start(self) -> None:
        for role in self.roles:
            self._start(role)

    def poll(self) -> bool | None:
        for role in self.roles:
            if role.finished:
                continue
            if role.process is None:
                if time.monotonic() >= role.start_at:
                    self._start(role)
                continue
            code = role.process.poll()
            if code is None:
                continue
            role.process.kill()  # what it may have left behind in its session
            if code == EXIT_DONE:
                role.finished = True
                if role.name == "learner":
                    return True
                continue
            reason = f"the {role.name} ended with exit code {code}: {last_line(role.process.log)}"
            if code == EXIT_USAGE:
                raise UsageError(last_line(role.process.log))
            if role.restarts >= _RESTARTS:
                raise RunFailed(f"{reason} (after {role.restarts} restarts; see {role.process.log})")
            log.warning("%s; it is started again", reason)
            role.start_at = time.monotonic() + _BACK_OFF_S[role.restarts]
            role.restarts, role.process = role.restarts + 1, None
        return None

    def leave(self) -> None:
        """After the learner is done: the others see that in the bucket and go by themselves; what stays is stopped."""
        deadline = time.monotonic() + _LEAVE_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stop()

    def stop(self) -> None:
        stop_all([role.process for role in self.roles if role.process is not None], _STOP_S)

    def _running(self) -> bool:
        return any(role.process is not None and role.process.poll() is None for role in self.roles)

    def _start(self, role: Role) -> None:
        role.process = Process(role.argv, self.logs / f"{role.name}.log", role.env, role.cpus)


def last_line(path: Path) -> str:
    """The last line of a log that says something (a traceback's last line names the error)."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else f"{path} is empty"


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of what they did before."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        for number in before:
            signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        if in_main:
            for number, handler in before.items():
                signal.signal(number, handler)


def default_environment() -> None:
    """For this process and its children: libraries show no progress bars, tokenizers start no threads."""
    for key, value in {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "USE_TORCH": "0",
    }.items():
        os.environ.setdefault(key, value)
