"""The processes of `proxy`: the real proxy before simulated replicas, the replicas, and the load."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from experiments.benchmarks.proxy_load import Load, Result
from grpo_jax.jobs.processes import role_command
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter

ROOT = Path(__file__).parents[2]
RUN, POLICY = "bench", "bench.v000000.00000000"
_START_S = 60.0
_CONFIG = f"run: {RUN}\nmodel: {{source: nowhere}}\ntask: {{source: a:b}}\nrewards: [{{source: a:b}}]\n"


class Side:
    """A process that answers every line with a line of JSON."""

    def __init__(self, module: str, *options: str):
        command = [sys.executable, "-m", f"{__package__}.{module}", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side of the benchmark ended early: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
        return json.loads(line)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def load(self, load: Load) -> Result:
        return Result(**self.ask(json.dumps(asdict(load))))


class Proxy:
    """A started proxy that has seen all its replicas."""

    def __init__(self, process: subprocess.Popen[bytes], url: str):
        self.process, self.url = process, url

    def get(self, path: str) -> Any:
        with urlopen(self.url + path, timeout=10) as response:
            return json.loads(response.read())

    def cpu_s(self) -> float:
        """Processor time of its whole life."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def started_proxy(urls: list[str], core: int, profile: Path | None = None) -> Iterator[Proxy]:
    """`grpo-jax proxy` on `core`, with a heartbeat a second for each of `urls`, as agents write them."""
    with tempfile.TemporaryDirectory(prefix="grpo_jax-benchmark-") as name, socket.socket() as listener:
        folder = Path(name)
        (folder / "config.yaml").write_text(_CONFIG)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        options = ("--config", str(folder / "config.yaml"), "--bucket", str(folder / "bucket"), "--port", str(port))
        command = role_command("proxy", *options)
        if profile is not None:
            command[1:1] = ["-m", "cProfile", "-o", str(profile)]
        stop = threading.Event()
        beats = threading.Thread(target=_beat, args=(Bucket(str(folder / "bucket")), urls, stop), daemon=True)
        beats.start()
        log = (folder / "log").open("w")
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            os.sched_setaffinity(process.pid, {core})
            proxy = Proxy(process, f"http://127.0.0.1:{port}")
            _wait(proxy, len(urls), folder / "log")
            yield proxy
        finally:
            process.terminate()
            process.wait()
            stop.set()
            beats.join()
            log.close()


def _wait(proxy: Proxy, replicas: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while proxy.process.poll() is None and time.monotonic() < end:
        try:
            if proxy.get("/health")["replicas_ready"] == replicas:
                return
        except (URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"the proxy does not serve:\n{log.read_text()[-2000:]}")


def _beat(bucket: Bucket, urls: list[str], stop: threading.Event) -> None:
    writers = {
        id: (url, RecordWriter(bucket, layout.replica(RUN, id), incarnation=1))
        for id, url in ((f"replica-{i:02d}", url) for i, url in enumerate(urls))
    }
    while not stop.is_set():
        for id, (url, writer) in writers.items():
            writer.write({"id": id, "url": url, "state": "ready", "runs": [RUN], "proved": [POLICY]})
        stop.wait(1.0)
