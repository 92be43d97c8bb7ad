"""Agents as processes of their own, and what can be seen of them from outside: heartbeats, exit codes, children."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.generator.stoppage import family
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

_WAIT_S = 120.0
_MAIN = """
import json, logging, sys
from pathlib import Path
from grpo_jax.config.schema import Config
from grpo_jax.generator.agent import run_generator
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
config, replica, work = sys.argv[1:]
configs = [Config.model_validate(each) for each in json.loads(Path(config).read_text())]
sys.exit(run_generator(configs, replica, Path(work)))
"""


class AgentProcess:
    def __init__(self, config: Config, replica: str, folder: Path, *others: Config):
        folder.mkdir(parents=True, exist_ok=True)
        self.replica, self.work_dir, self.log = replica, folder / "work", folder / "agent.log"
        (folder / "config.json").write_text(json.dumps([each.model_dump(mode="json") for each in (config, *others)]))
        command = [sys.executable, "-c", _MAIN, str(folder / "config.json"), replica, str(self.work_dir)]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        self._bucket, self._key = Bucket(config.bucket), layout.replica(config.fleet_name, replica)
        self._reader = RecordReader(self._bucket, self._key)

    def heartbeat(self) -> dict[str, Any]:
        return self._reader.read() or {}

    def heartbeat_exists(self) -> bool:
        return self._bucket.read_or_none(self._key) is not None

    def wait_for(self, what: Callable[[dict[str, Any]], Any], wait_s: float = _WAIT_S) -> dict[str, Any]:
        """The first heartbeat that `what` is true of."""
        deadline = time.monotonic() + wait_s
        while not what(record := self.heartbeat()):
            assert self._process.poll() is None, f"the agent ended: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{record}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)
        return record

    def proved(self, *names: str, wait_s: float = _WAIT_S) -> dict[str, Any]:
        return self.wait_for(lambda r: set(names) <= set(r.get("proved", ())), wait_s)

    def quarantined(self, name: str) -> str:
        return self.wait_for(lambda r: name in r.get("quarantined", ()))["quarantined"][name]

    def server_pids(self) -> list[int]:
        return family(self.pid)[1:]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self, wait_s: float = 30.0) -> int:
        return self._process.wait(wait_s)

    def end(self) -> None:
        """For the end of a test, whatever its outcome."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], wait_s: float = 15.0) -> None:
    deadline = time.monotonic() + wait_s
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.05)
