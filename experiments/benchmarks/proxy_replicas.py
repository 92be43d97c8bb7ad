"""Replicas that answer any completion request after a fixed time, for `proxy`. Many servers in one cheap process.

Protocol: prints `{"urls": […]}` once it listens. For every line on stdin it prints `{"samples": […], "repeated": […]}`,
by replica: how many samples were asked for since the last line, and of how many the replica had seen the prompt before.
The end of stdin ends it.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from functools import cache

from experiments.benchmarks.proxy_loop import run_pinned

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MODEL = re.compile(rb'"model": ?"([^"]+)"')
_PROMPT = re.compile(rb'"prompt": ?(\[[^\]]*\])')
_TOKENS = 13


@cache
def answer(model: bytes) -> bytes:
    """A whole response: one sample, with token ids and log-probabilities as vLLM gives them."""
    choice = {
        "index": 0,
        "text": "the answer is 12",
        "token_ids": list(range(1000, 1000 + _TOKENS)),
        "logprobs": {"token_logprobs": [-0.123456789] * _TOKENS, "tokens": ["token"] * _TOKENS},
        "finish_reason": "stop",
    }
    body = json.dumps({"id": "cmpl-0", "object": "text_completion", "model": model.decode(), "choices": [choice]})
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


class Replica:
    def __init__(self) -> None:
        self.samples = self.repeated = 0
        self._seen: set[bytes] = set()

    def asked(self, prompt: bytes) -> None:
        self.samples += 1
        self.repeated += prompt in self._seen
        self._seen.add(prompt)

    def counts(self) -> tuple[int, int]:
        found = self.samples, self.repeated
        self.samples = self.repeated = 0
        return found


class Server(asyncio.Protocol):
    def __init__(self, replica: Replica, answer_s: float):
        self._replica, self._answer_s, self._data = replica, answer_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._data, 0, head) if head > 3 else None
        if length is None or len(self._data) < head + int(length[1]):
            return
        body, self._data = self._data[head:], b""
        model, prompt = _MODEL.search(body), _PROMPT.search(body)
        assert model is not None
        assert prompt is not None
        self._replica.asked(prompt[1])
        asyncio.get_running_loop().call_later(self._answer_s, self._transport.write, answer(model[1]))  # type: ignore[attr-defined]


async def serve(count: int, answer_s: float) -> None:
    loop = asyncio.get_running_loop()
    replicas = [Replica() for _ in range(count)]
    urls = []
    for replica in replicas:
        server = await loop.create_server(lambda r=replica: Server(r, answer_s), "127.0.0.1", 0, backlog=4096)  # type: ignore[misc]
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(json.dumps({"urls": urls}), flush=True)
    ended = asyncio.Event()

    def command() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            ended.set()
            return
        samples, repeated = zip(*(replica.counts() for replica in replicas), strict=True)
        print(json.dumps({"samples": samples, "repeated": repeated}), flush=True)

    loop.add_reader(sys.stdin.fileno(), command)
    await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--answer-s", type=float, default=2.0)
    parser.add_argument("--core", type=int)
    arguments = parser.parse_args()
    run_pinned(serve(arguments.count, arguments.answer_s), arguments.core)


if __name__ == "__main__":
    main()
