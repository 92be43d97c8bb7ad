"""The processes of a publish benchmark: generators with their agents, a proxy, the load; and how a fleet is paused."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.peers.watch import tree_descriptors, tree_rss
from grpo_jax.config.schema import Config
from grpo_jax.generator.index import run_folder
from grpo_jax.generator.process import free_port
from grpo_jax.generator.vllm import on_cpu
from grpo_jax.jobs.keeper import last_line
from grpo_jax.jobs.processes import Process, role_command, stop_all
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

ROOT = Path(__file__).parents[2]
_START_S = 600.0
_STEP_S = 60.0
_STOP_S = 6.0
_LOOK_S = 0.005
# Loopback only: a proxy of the environment has no business here.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Held:
    """What all generators (agents, servers and their children) hold at one time."""

    rss_mb: float
    descriptors: int
    adapters: int
    """Folders of adapters on their disks."""


class Fleet:
    """Generators `r0`, `r1`, … and a proxy, each role a process as a launcher starts it."""

    def __init__(self, config: Config, replicas: int, folder: Path):
        file = folder / "config.json"
        file.write_text(json.dumps(config.model_dump(mode="json")))
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._processes = [
            Process(role_command("proxy", "--config", str(file), "--port", str(port)), folder / "proxy.log")
        ]
        cores = cores_apart(replicas)
        for i in range(replicas):
            command = role_command("generator", "--config", str(file), "--id", f"r{i}", "--dir", str(folder / f"r{i}"))
            self._processes.append(Process(command, folder / f"r{i}.log", cpus=cores[i]))
        self._folders = [run_folder(folder / f"r{i}" / "adapters", config.run) for i in range(replicas)]
        bucket, name = Bucket(config.bucket), config.fleet_name
        self._records = [RecordReader(bucket, layout.replica(name, f"r{i}")) for i in range(replicas)]

    def replica_urls(self) -> list[str]:
        return [str((reader.read() or {})["url"]) for reader in self._records]

    def wait_until_proved(self, version: int, wait_s: float = _STEP_S) -> float:
        """The time (monotonic) at which the last replica said that it has proved this version."""
        mark = f".v{version:06d}."

        def proved() -> bool:
            lists = [(reader.read() or {}).get("proved", ()) for reader in self._records]
            return all(any(mark in name for name in names) for names in lists)

        self.wait(proved, wait_s, f"version {version} on every replica")
        return time.monotonic()

    def held(self) -> Held:
        pids = [process.pid for process in self._processes[1:]]
        return Held(
            sum(map(tree_rss, pids)) / 1e6,
            sum(map(tree_descriptors, pids)),
            sum(len([path for path in folder.iterdir() if path.is_dir()]) for folder in self._folders),
        )

    def wait_until_started(self) -> None:
        self.wait_until_proved(0, _START_S)
        self.wait(self._is_reachable, _STEP_S, "the proxy")

    def wait(self, condition: Callable[[], bool], wait_s: float, what: str) -> None:
        deadline = time.monotonic() + wait_s
        while not condition():
            for process in self._processes:
                if process.poll() is not None:
                    raise SystemExit(f"{process.log.stem} ended early: {last_line(process.log)}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not come about within {wait_s:.0f} s")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        stop_all(self._processes, _STOP_S)

    def _is_reachable(self) -> bool:
        try:
            return b'"replicas_ready": 0' not in request("GET", f"{self.url}/health")
        except OSError:
            return False


def cores_apart(replicas: int) -> list[tuple[int, ...]]:
    """Cores for each replica, no core for two, as far as there are enough; all of them where the GPU computes."""
    cores = sorted(os.sched_getaffinity(0))
    if not on_cpu():
        return [()] * replicas
    share = max(1, len(cores) // replicas)
    return [tuple(cores[(i * share + j) % len(cores)] for j in range(share)) for i in range(replicas)]


class LoadProcess:
    """See `exchange_load`. `count`: tokens so far; `first_seen`: version → time (monotonic) of its first answer."""

    def __init__(self, url: str, out: Path, concurrency: int, new_tokens: int):
        arguments = [url, str(out), f"--concurrency={concurrency}", f"--new-tokens={new_tokens}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.exchange_load", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.first_seen: dict[int, float] = {}
        self.running, self.count = False, 0
        self.last: dict[str, Any] = {}
        threading.Thread(target=self._listen, name="load-listener", daemon=True).start()

    def hear(self) -> None:
        """Takes in what the process has said so far."""
        while not self._said.empty():
            message = self._said.get()
            if message is None:
                raise SystemExit("the load ended early")
            self._take(message)

    def finish(self) -> dict[str, Any]:
        """Ends the load, whose times are then in its file; its counts."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        while (message := self._said.get(timeout=_STEP_S)) is not None:
            self._take(message)
        self._process.wait(_STEP_S)
        return self.last

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _take(self, message: dict[str, Any]) -> None:
        if "model" in message:
            self.first_seen[int(message["model"].split(".v")[1][:6])] = message["t"]
        elif "failure" in message:
            print(f"a request of the load failed: {message['failure']}", file=sys.stderr)
        self.running |= bool(message.get("running"))
        self.count = message.get("count", self.count)
        self.last = message

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)


@dataclass(frozen=True)
class Pause:
    """Times (monotonic): from the first request to pause to the answer of the last one to resume."""

    started: float
    ended: float


def pause_load_resume(urls: Sequence[str], name: str, folder: Path, files: Callable[[], dict[str, bytes]]) -> Pause:
    """A publish that stops the fleet: pause every server, write the adapter, load it on one after the other, resume.

    Running requests are frozen, not aborted, and go on after it, which is the shortest of vLLM's ways to pause.
    """
    started = time.monotonic()
    for url in urls:
        request("POST", f"{url}/pause?mode=keep")
    try:
        folder.mkdir(parents=True)
        for file, data in files().items():
            (folder / file).write_bytes(data)
        for url in urls:
            request("POST", f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    finally:
        for url in urls:
            request("POST", f"{url}/resume")
    return Pause(started, time.monotonic())


def unload(urls: Sequence[str], name: str) -> None:
    for url in urls:
        try:
            request("POST", f"{url}/v1/unload_lora_adapter", {"lora_name": name})
        except urllib.error.HTTPError:  # the agent may have been faster: nobody wants this name
            continue


def request(method: str, url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, data, headers, method=method)
    with _OPENER.open(asked, timeout=_STEP_S) as response:
        return response.read()
