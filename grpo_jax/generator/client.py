"""What an agent asks of its server: vLLM's HTTP interface, as far as it is used here."""

import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from grpo_jax.generator.vllm import SERVED_NAME

_SHORT = aiohttp.ClientTimeout(total=10)
_LOAD = aiohttp.ClientTimeout(total=120)
# The canary goes first among what waits, but may have to see one running request end.
_CANARY = aiohttp.ClientTimeout(total=300)
_METRIC = re.compile(r"^vllm:(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

UNREACHABLE = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""What a request raises when there was no answer: a fault of the server, never of the adapter."""


class ServerError(Exception):
    """The server answered, but not with success. The message is its own, with the status."""


@dataclass(frozen=True)
class Load:
    """Requests in the engine, the adapters that they name, and when they were asked for (monotonic seconds)."""

    running: int = 0
    waiting: int = 0
    busy: frozenset[str] = frozenset()
    asked_at: float = -math.inf


class EngineClient:
    """One server on this machine. Every call may raise one of `UNREACHABLE`, and `ServerError` for a refusal."""

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self._url = session, url

    async def healthy(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health", timeout=_SHORT) as response:
                return response.status == 200
        except UNREACHABLE:
            return False

    async def adapters(self) -> set[str]:
        """Names of the adapters that are loaded now."""
        models = await self._json("GET", "/v1/models", None, _SHORT)
        return {str(model["id"]) for model in models["data"]} - {SERVED_NAME}

    async def load(self, name: str, folder: Path) -> None:
        await self._text("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, _LOAD)

    async def unload(self, name: str) -> None:
        """Takes the name away; requests that run under it are finished."""
        await self._text("POST", "/v1/unload_lora_adapter", {"lora_name": name}, _SHORT)

    async def canary(self, name: str, tokens: list[int]) -> list[float]:
        """Raw log-probability of each token after the first; NaN where the server gives none."""
        request = {
            "model": name,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "priority": -1,
        }
        answer = await self._json("POST", "/v1/completions", request, _CANARY)
        try:
            given = answer["choices"][0]["prompt_logprobs"][1:]
            return [_logprob(position, token) for position, token in zip(given, tokens[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"no prompt log-probabilities in the answer ({error!r})") from None

    async def load_now(self) -> Load:
        asked_at = time.monotonic()
        return replace(parse_metrics(await self._text("GET", "/metrics", None, _SHORT)), asked_at=asked_at)

    async def _json(self, method: str, path: str, body: Any, timeout: aiohttp.ClientTimeout) -> Any:
        async with self._session.request(method, f"{self._url}{path}", json=body, timeout=timeout) as response:
            await _raise_for_error(response)
            return await response.json(content_type=None)

    async def _text(self, method: str, path: str, body: Any, timeout: aiohttp.ClientTimeout) -> str:
        async with self._session.request(method, f"{self._url}{path}", json=body, timeout=timeout) as response:
            await _raise_for_error(response)
            return await response.text()


def parse_metrics(text: str) -> Load:
    """The three gauges of vLLM's Prometheus text that matter here.

    `lora_requests_info` leaves a series behind for every set of adapters that there ever was; its value is the time at
    which the set was last seen, so the newest one is true.
    """
    counts = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
    newest, busy = -math.inf, frozenset[str]()
    for line in text.splitlines():
        metric = _METRIC.match(line)
        if metric is None:
            continue
        name, value = metric["name"], float(metric["value"])
        if name in counts:
            counts[name] += value
        elif name == "lora_requests_info" and value > newest:
            labels = dict(_LABEL.findall(metric["labels"] or ""))
            names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}"
            newest, busy = value, frozenset(filter(None, names.split(",")))
    return Load(int(counts["num_requests_running"]), int(counts["num_requests_waiting"]), busy)


def _logprob(position: Any, token: int) -> float:
    value = position[str(token)]["logprob"]
    return math.nan if value is None else float(value)


async def _raise_for_error(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    try:
        body = await response.json(content_type=None)
        message = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason or "no reason given"
    raise ServerError(f"HTTP {response.status}: {' '.join(message.split())[:500]}")
