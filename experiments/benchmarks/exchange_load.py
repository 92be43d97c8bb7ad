"""A steady load of streamed completions: `python -m experiments.benchmarks.exchange_load URL OUT`

A process of its own, so that nothing but the fleet delays what it sees. It keeps a number of completions of the newest
policy streaming through a proxy, and notes when each token came. Beside them it asks the proxy for its policies, as a
worker does, and for one token under each that is new. It says on stdout, one JSON object a line, that all streams run,
and when a policy was first seen to answer; a line on stdin ends it. Times are monotonic seconds, which all processes of
a machine share.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

PROMPT_TOKENS = 24
_COMMON_TOKENS = 8192
_TELL_S = 0.1
_ASK_S = 0.01
_EVENT, _END = b"data: {", b"data: [DONE]"


class Load:
    """`times[i]` are those at which the tokens of the i-th completion came."""

    def __init__(self, url: str, new_tokens: int):
        self._url, self._models_url, self._new_tokens = f"{url}/v1/completions", f"{url}/v1/models", new_tokens
        self._models: set[str] = set()
        self._rng = random.Random(0)
        self.times: list[list[float]] = []
        self.failures = self.tokens = 0

    async def stream(self, session: aiohttp.ClientSession, started: asyncio.Event) -> None:
        """Completion after completion."""
        while True:
            times: list[float] = []
            self.times.append(times)
            await self._complete(session, "latest", self._new_tokens, times, started)

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """One token of each new policy, as soon as the proxy has it."""
        newest = None
        while True:
            async with session.get(self._models_url) as response:
                policies = [model["id"] for model in (await response.json())["data"]]
            if policies and policies[0] != newest:
                newest = policies[0]
                await self._complete(session, newest, 1, [], asyncio.Event())
            await asyncio.sleep(_ASK_S)

    async def _complete(
        self, session: aiohttp.ClientSession, model: str, new_tokens: int, times: list[float], started: asyncio.Event
    ) -> None:
        request = {
            "model": model,
            "prompt": [self._rng.randrange(_COMMON_TOKENS) for _ in range(PROMPT_TOKENS)],
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        try:
            async with session.post(self._url, json=request) as response:
                response.raise_for_status()
                while line := await response.content.readline():
                    if not line.startswith(_EVENT):
                        continue
                    now = time.monotonic()
                    if not times:
                        self._saw(json.loads(line[5:]), now)
                    times.append(now)
                    self.tokens += 1
                    started.set()
        except (aiohttp.ClientError, OSError, KeyError) as error:
            self.failures += 1
            say({"failure": repr(error)})
            await asyncio.sleep(0.2)

    async def tell(self) -> None:
        """How many tokens there were so far, now and then."""
        while True:
            await asyncio.sleep(_TELL_S)
            say({"count": self.tokens})

    def _saw(self, event: dict[str, Any], now: float) -> None:
        model = str(event["model"])
        if model not in self._models:
            self._models.add(model)
            say({"model": model, "t": now})


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def _all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def run(url: str, concurrency: int, new_tokens: int) -> Load:
    load = Load(url, new_tokens)
    loop = asyncio.get_running_loop()
    told = loop.run_in_executor(None, sys.stdin.readline)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = [asyncio.Event() for _ in range(concurrency)]
        tasks = [asyncio.create_task(load.stream(session, event)) for event in started]
        tasks += [asyncio.create_task(load.probe(session)), asyncio.create_task(load.tell())]
        running = asyncio.create_task(_all(started))
        await asyncio.wait({running, *tasks, told}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            say({"running": True})
            await asyncio.wait({*tasks, told}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, *tasks):
            task.cancel()
        results = await asyncio.gather(running, *tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams completions through a proxy and notes each token's time.")
    parser.add_argument("url")
    parser.add_argument("out", type=Path, help="npz: `t`, and for each of them the number of its `completion`")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    load = asyncio.run(run(arguments.url, arguments.concurrency, arguments.new_tokens))
    counts = [len(times) for times in load.times]
    np.savez(
        arguments.out,
        t=np.concatenate([np.zeros(0), *load.times]),
        completion=np.repeat(np.arange(len(counts)), counts),
    )
    say({"failures": load.failures, "tokens": sum(counts)})


if __name__ == "__main__":
    main()
