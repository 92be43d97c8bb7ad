"""All roles of a run as processes of this machine: start, watch, restart, stop (`grpo-jax run`)."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_ALONE, EXIT_DONE, EXIT_RESUMABLE, EXIT_TAKEN_OVER, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.generator.process import free_port, told_exit
from grpo_jax.jobs.keeper import Keeper, Role, last_line
from grpo_jax.jobs.processes import role_command, stop_all
from grpo_jax.jobs.restarts import Restarts
from grpo_jax.jobs.watchdog import LOCAL_REPLICA, WORKER, Watchdog

log = logging.getLogger(__name__)

_STOP_S = 5.5
_LEAVE_S = 5.0
# Who leaves because the run is over leaves a little before the learner does. If that one goes on, it was not over.
_OVER_S = 20.0


class Supervisor:
    """The processes of a run. `poll` returns True once the learner is done, and raises RunFailed.

    Start it in a thread that lives as long as the run does, in practice the main one (see `lifeline`).
    """

    def __init__(self, config: Config, run_dir: Path, *, learner_arguments: tuple[str, ...] = ()):
        self._config = config
        self.logs = run_dir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        resolved = run_dir / "config.json"
        resolved.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
        port = config.proxy.port or free_port(config.proxy.host)
        self.proxy_url = f"http://{config.proxy.host}:{port}"
        self.watchdog = Watchdog(config, self.proxy_url)
        local = config.local

        def role(name: str, command: str, *arguments: str, cpus: tuple[int, ...] = ()) -> Role:
            argv = role_command(command, "--config", str(resolved), *arguments)
            return Role(name, argv, self.logs / f"{name}.log", Restarts(local.restarts), cpus=cpus)

        roles = [
            role("proxy", "proxy", "--port", str(port)),
            *(
                role(
                    f"generator-{i}",
                    "generator",
                    *("--id", LOCAL_REPLICA.format(i), "--dir", str(run_dir / "generators" / str(i))),
                    cpus=local.generator_cpus[i] if i < len(local.generator_cpus) else (),
                )
                for i in range(config.generator.replicas)
            ),
            role("learner", "learner", "--dir", str(run_dir), *learner_arguments, cpus=local.learner_cpus),
            role("worker", "worker", "--proxy", self.proxy_url, "--id", WORKER),
        ]
        self._keeper = Keeper(
            roles, self._hangs, lambda: self.watchdog.steps, lambda role: self.watchdog.begins(role.name)
        )

    @property
    def roles(self) -> Sequence[Role]:
        return self._keeper.roles

    def start(self) -> None:
        self.watchdog.start()
        self._keeper.start()

    def poll(self) -> bool:
        for role, code in self._keeper.ended():
            if code == EXIT_DONE:
                if role.name == "learner":
                    return True
                self._keeper.rest(role, _OVER_S)
                continue
            # What has run before does not end by the config: a port was taken meanwhile, the Hub could not be reached.
            if code == EXIT_USAGE and not role.restarts.total:
                raise UsageError(last_line(role.log))
            if code in (EXIT_TAKEN_OVER, EXIT_ALONE):  # started again it would take the run back, or wait as before
                raise RunFailed(last_line(role.log))
            said = f": {last_line(role.log)}" if code >= 0 else ""
            self._keeper.again(role, f"{role.title} {told_exit(code)}{said}")
        return False

    def leave(self) -> None:
        """After the learner is done: the others see that in the bucket and go by themselves; what stays is stopped."""
        deadline = time.monotonic() + _LEAVE_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stop()

    def stop(self, at_once: threading.Event | None = None) -> bool:
        """Stops all; the learner has `local.stop_s` seconds to save its last step. Nothing is left running.

        Args:
          at_once: once it is set, nobody has any time.

        Returns:
          Whether the learner had ended by itself.
        """
        self.watchdog.stop()
        processes = self._keeper.processes
        learner = processes.get("learner")
        longer = {} if learner is None else {learner: self._config.local.stop_s}
        stop_all(list(processes.values()), _STOP_S, longer, at_once)
        return learner is None or learner.poll() in (EXIT_DONE, EXIT_RESUMABLE)

    def _running(self) -> bool:
        return any(process.poll() is None for process in self._keeper.processes.values())

    def _hangs(self, role: Role) -> str | None:
        return None if role.process is None else self.watchdog.dead(role.name, role.process.pid)


class Stop(threading.Event):
    """Set by the first signal; `at_once` by the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = threading.Event()

    def signalled(self, *_: object) -> None:
        (self.at_once if self.is_set() else self).set()


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """An event that SIGINT and SIGTERM set, instead of what they did before."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        for number in before:
            signal.signal(number, stop.signalled)
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
