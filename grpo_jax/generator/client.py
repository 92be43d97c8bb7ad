"""What is asked of a server: vLLM's HTTP interface, as far as it is used here."""

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

_SHORT = aiohttp.ClientTimeout(total=10)
_LOAD = aiohttp.ClientTimeout(total=120)
# The canary goes first among what waits, but may have to see one running request end.
_CANARY = aiohttp.ClientTimeout(total=300)
_MAX_ANSWER = 16 * 2**20  # bytes
_METRIC = re.compile(r"^vllm:(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')

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
    """One server. Every call may raise one of `UNREACHABLE`, and `ServerError` for a refusal.

    Redirects are not followed: they would carry the headers to wherever the server likes.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        priority: int | None = -1,
    ):
        """
        Args:
            headers: sent with each request. A bearer token stays out of errors, even where a server quotes it.
            priority: of canaries, lower goes first; None for a server that does not schedule by priority.
        """
        self._session, self._url = session, url.rstrip("/")
        self._headers, self._priority = dict(headers or {}), priority
        self._secret = self._headers.get("Authorization", "").removeprefix("Bearer ")

    async def healthy(self) -> bool:
        try:
            await self._ask("GET", "/health", None, _SHORT)
        except (ServerError, *UNREACHABLE):
            return False
        return True

    async def models(self) -> list[str]:
        """The base's name and those of the adapters that are loaded now."""
        try:
            return [str(model["id"]) for model in (await self._json("GET", "/v1/models", None, _SHORT))["data"]]
        except (KeyError, TypeError):
            raise ServerError("no list of models in the answer") from None

    async def load(self, name: str, path: str) -> None:
        await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, _LOAD)

    async def unload(self, name: str) -> None:
        """Takes the name away; requests that run under it are finished."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, _SHORT)

    async def canary(self, name: str, tokens: list[int]) -> list[float]:
        """Raw log-probability of each token after the first; NaN where the server gives none."""
        request = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        if self._priority is not None:
            request["priority"] = self._priority
        answer = await self._json("POST", "/v1/completions", request, _CANARY)
        try:
            given = answer["choices"][0]["prompt_logprobs"][1:]
            return [_logprob(position, token) for position, token in zip(given, tokens[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ServerError(f"no prompt log-probabilities in the answer ({error!r})") from None

    async def load_now(self) -> Load:
        asked_at = time.monotonic()
        text = await self._ask("GET", "/metrics", None, _SHORT)
        try:
            return replace(parse_metrics(text.decode(errors="replace")), asked_at=asked_at)
        except (ValueError, OverflowError):
            raise ServerError("the metrics are not in Prometheus' format") from None

    async def _json(self, method: str, path: str, body: Any, timeout: aiohttp.ClientTimeout) -> Any:
        answer = await self._ask(method, path, body, timeout)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise ServerError("the answer is not JSON") from None

    async def _ask(self, method: str, path: str, body: Any, timeout: aiohttp.ClientTimeout) -> bytes:
        async with self._session.request(
            method, f"{self._url}{path}", json=body, headers=self._headers, allow_redirects=False, timeout=timeout
        ) as response:
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _MAX_ANSWER:
                    raise ServerError(f"the answer is larger than {_MAX_ANSWER} bytes")
        if response.status < 300:
            return bytes(answer)
        message = _message(answer) or response.reason or "no reason given"
        if self._secret:
            message = message.replace(self._secret, "***")
        raise ServerError(f"HTTP {response.status}: {' '.join(message.split())[:500]}")


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


def _message(answer: bytes | bytearray) -> str | None:
    """That of an OpenAI error object."""
    try:
        # Half a character, which JSON can escape, could be written nowhere.
        return str(json.loads(answer)["error"]["message"]).encode(errors="replace").decode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
