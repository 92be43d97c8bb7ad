"""An open-loop load generator for `proxy`: Poisson arrivals, whatever the answers do.

For every line of JSON on stdin (a `Load`) it makes that load and prints one line of JSON (a `Result`). Latency counts
from the time at which a request was due, so a generator that falls behind shows; it is the same for both sides.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field

import numpy as np

from experiments.benchmarks.proxy_loop import run_pinned

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_COMMON_TOKENS, _OWN_TOKENS = 16, 10  # of a prompt: as in the quickstart, a system prompt before each problem
_SPREAD_S = 0.05  # within which the samples of one group arrive
_PATIENCE_S = 20.0


@dataclass
class Load:
    urls: list[str]  # taken in turn
    model: str
    rate: float  # requests a second
    warm_s: float  # of load before the measurement
    measured_s: float
    group: int = 1  # requests with the same prompt


@dataclass
class Result:
    """Of the requests that were due in the measured time; milliseconds."""

    requests: int = 0
    failures: int = 0
    answered_per_s: float = 0.0  # answers that came within the measured time, of whatever request
    p50: float = 0.0
    p99: float = 0.0
    most_in_flight: int = 0
    lateness_p99: float = 0.0  # of sending


class Connection(asyncio.Protocol):
    """One request at a time; `done` is told whether it was answered with 200."""

    def __init__(self, generator: "Generator", port: int):
        self._generator, self._port = generator, port
        self._data = b""
        self.due = 0.0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, request: bytes, due: float) -> None:
        self.due, self._busy = due, True
        self._transport.write(request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._data, 0, head) if head > 3 else None
        if length is None or len(self._data) < head + int(length[1]):
            return
        good, self._data, self._busy = self._data.startswith(b"HTTP/1.1 200"), b"", False
        self._generator.idle[self._port].append(self)
        self._generator.finished(self.due, good)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._generator.idle[self._port]:
            self._generator.idle[self._port].remove(self)
        if self._busy:
            self._generator.finished(self.due, False)


@dataclass
class Generator:
    load: Load
    rng: random.Random
    idle: dict[int, list[Connection]] = field(default_factory=lambda: defaultdict(list))
    in_flight: int = 0
    most_in_flight: int = 0
    latencies: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    failures: int = 0
    answered: int = 0

    async def run(self) -> Result:
        loop, load = asyncio.get_running_loop(), self.load
        start = loop.time() + 0.05
        self._from, self._to = start + load.warm_s, start + load.warm_s + load.measured_s
        tasks = set()
        for due, port, request in self._schedule(start):
            while (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if waiting := self.idle[port]:
                self._send(waiting.pop(), request, due)
            else:
                task = asyncio.ensure_future(self._send_on_a_new_one(port, request, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        give_up = loop.time() + _PATIENCE_S
        while self.in_flight and loop.time() < give_up:
            await asyncio.sleep(0.05)
        found = np.array(self.latencies) if self.latencies else np.array([float("nan")])
        return Result(
            requests=len(self.latencies) + self.failures + self.in_flight,
            failures=self.failures + self.in_flight,
            answered_per_s=self.answered / load.measured_s,
            p50=1000 * float(np.quantile(found, 0.5)),
            p99=1000 * float(np.quantile(found, 0.99)),
            most_in_flight=self.most_in_flight,
            lateness_p99=1000 * float(np.quantile(self.lateness, 0.99)),
        )

    def finished(self, due: float, good: bool) -> None:
        now = asyncio.get_running_loop().time()
        self.in_flight -= 1
        self.answered += good and self._from <= now < self._to
        if self._from <= due < self._to:
            if good:
                self.latencies.append(now - due)
            else:
                self.failures += 1

    def _schedule(self, start: float) -> list[tuple[float, int, bytes]]:
        """(due, port, request), by time. Made before the load, so that it costs nothing during it."""
        load, rng = self.load, self.rng
        ports = [int(url.rsplit(":", 1)[1]) for url in load.urls]
        found: list[tuple[float, int, bytes]] = []
        at, end = start, start + load.warm_s + load.measured_s
        while (at := at + rng.expovariate(load.rate / load.group)) < end:
            prompt = [*range(_COMMON_TOKENS), *(rng.randrange(50_000) for _ in range(_OWN_TOKENS))]
            body = {"model": load.model, "prompt": prompt, "max_tokens": 16, "n": 1, "logprobs": 0, "seed": 1}
            for sample in range(load.group):
                data = json.dumps({**body, "seed": sample}, separators=(",", ":"))
                port = ports[len(found) % len(ports)]
                head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                request = f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()
                found.append((at + (rng.random() * _SPREAD_S if load.group > 1 else 0.0), port, request))
        return sorted(found)

    def _send(self, connection: Connection, request: bytes, due: float) -> None:
        self.lateness.append(asyncio.get_running_loop().time() - due)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        connection.send(request, due)

    async def _send_on_a_new_one(self, port: int, request: bytes, due: float) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self, port), "127.0.0.1", port)
        self._send(connection, request, due)

    def close(self) -> None:
        connections, self.idle = [c for waiting in self.idle.values() for c in waiting], defaultdict(list)
        for connection in connections:
            connection._transport.abort()  # type: ignore[attr-defined]


async def generate(seed: int) -> None:
    gc.disable()  # its pauses would look like those of what is measured
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        generator = Generator(Load(**json.loads(line)), rng)
        result = await generator.run()
        generator.close()
        print(json.dumps(asdict(result)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int)
    arguments = parser.parse_args()
    run_pinned(generate(arguments.seed), arguments.core)


if __name__ == "__main__":
    main()
