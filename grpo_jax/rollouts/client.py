"""Asks the proxy for policies and completions, and tells apart what is worth trying again."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from grpo_jax.adapters.names import parse_policy
from grpo_jax.config.schema import Rollouts, Sampling
from grpo_jax.proxy.tokens import CLIENT_TOKEN_VARIABLE, read_token
from grpo_jax.rollouts.answers import Answer, BadAnswer, read_answer

log = logging.getLogger(__name__)

_POLICY_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
# How long the proxy tries a failing request elsewhere before it says so; going on after that is the client's part.
_PROXY_RETRY_S = 30.0
_LONGEST_WAIT_S = 5.0
_NO_FAULT_OF_THE_REQUEST = frozenset({408, 429})
_MAX_ANSWER = 256 * 2**20  # bytes
_REPLICA_HEADER = "x-grpo-replica"
# Said with every request: a server that was not started by us takes what is not said from the model's card, which may
# cut the distribution or penalise repetition, and neither its log-probabilities nor a canary would show it.
_WHOLE = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class RequestError(Exception):
    """A request that has no answer. The message is one sentence."""


class PolicyGone(RequestError):
    """No replica serves this policy (any more, or yet)."""


class RequestRefused(RequestError):
    """The request itself is wrong; the same again would be refused again."""


class RequestFailed(RequestError):
    """It failed until the deadline for trying again had passed."""


class _Fault(Exception):
    """An attempt that failed for reasons that may pass."""


class Client:
    """An async context manager around one HTTP session with the proxy of run `run`.

    Sends GRPO_JAX_CLIENT_TOKEN, where that is set, to the proxy and to nobody else.
    """

    def __init__(self, proxy_url: str, run: str, config: Rollouts):
        self._url, self._run, self._config = proxy_url.rstrip("/"), run, config
        token = read_token(CLIENT_TOKEN_VARIABLE)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._unreachable = False
        self._named: tuple[str, str] | None = None  # the policy that was asked for last, and where it was found

    async def __aenter__(self) -> "Client":
        # How many requests are in flight is decided by admission, so the connector must not have a limit of its own.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def current_policy(self) -> tuple[str, int]:
        """(name, version) of the newest policy that can be had now; waits, without end, until there is one."""
        for wait_s in _waits():
            try:
                body, replica = await self._attempt("GET", "/v1/policy", _POLICY_TIMEOUT_S)
                found = self._policy_in(body)
            except (_Fault, RequestError) as error:
                if not self._unreachable:
                    self._unreachable = True
                    log.warning("no policy can be had, waiting: %s", error)
                await asyncio.sleep(wait_s)
                continue
            if self._unreachable:
                self._unreachable = False
                log.info("%s is served", found[0])
            self._named = found[0], replica
            return found
        raise AssertionError("the waits have no end")

    async def sample(self, policy: str, prompt_tokens: Sequence[int], n: int, seed: int, sampling: Sampling) -> Answer:
        """`n` completions of one prompt under `policy`, in one request that is tried again while that may help.

        Raises:
          PolicyGone, RequestRefused: at once. RequestFailed: `rollouts.retry_deadline_s` after the first failure.
        """
        named = self._take_named(policy)
        request = {
            "model": policy,
            "prompt": list(prompt_tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            **_WHOLE,
            "top_p": sampling.top_p,
            "n": n,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            **({"stop": sampling.stop} if sampling.stop else {}),
        }
        proxy_retry_s = min(_PROXY_RETRY_S, self._config.retry_deadline_s)
        # Only for a proxy that is gone without a word: the proxy itself ends each attempt after request_timeout_s.
        timeout_s = 2 * self._config.request_timeout_s + 2 * proxy_retry_s
        deadline = None
        for wait_s in _waits():
            try:
                headers = {"x-grpo-deadline-s": f"{proxy_retry_s:g}", **named}
                body, replica = await self._attempt("POST", "/v1/completions", timeout_s, request, headers)
                return read_answer(body, policy=policy, replica=replica, n=n, max_tokens=sampling.max_tokens)
            except (_Fault, BadAnswer) as error:
                named = {}
                deadline = deadline or time.monotonic() + self._config.retry_deadline_s
                if time.monotonic() + wait_s > deadline:
                    raise RequestFailed(
                        f"no answer from {self._url}, tried again until the deadline: {error}"
                    ) from None
                log.info("a request to %s failed and is tried again: %s", self._url, error)
                await asyncio.sleep(wait_s)
        raise AssertionError("the waits have no end")

    async def _attempt(
        self, method: str, path: str, timeout_s: float, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Any, str]:
        """(JSON body of a 200, replica id)."""
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                headers={**self._headers, **(headers or {})},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            ) as response:
                content = await _read(response)
                status, replica = response.status, response.headers.get(_REPLICA_HEADER, "unknown")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Fault(f"{error!r:.300}") from None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise _Fault(f"HTTP {status} with a body that is no JSON") from None
        if status == 200:
            return answer, replica
        reason = _openai_error(answer)
        if reason is None or status >= 500 or status < 400 or status in _NO_FAULT_OF_THE_REQUEST:
            raise _Fault(f"HTTP {status}: {reason or 'no OpenAI error object'}")
        if status == 404:
            raise PolicyGone(reason)
        raise RequestRefused(f"HTTP {status}: {reason}")

    def _take_named(self, policy: str) -> dict[str, str]:
        """Headers that send a group where its policy was found: a replica that loads late keeps its share.

        For the first request after the policy has been asked for only; where that replica has fallen behind, the proxy
        takes another.
        """
        named, self._named = self._named, None
        return {_REPLICA_HEADER: named[1]} if named is not None and named[0] == policy else {}

    def _policy_in(self, body: Any) -> tuple[str, int]:
        try:
            name = parse_policy(body["policy"])
        except (ValueError, KeyError, TypeError):
            raise _Fault("/v1/policy does not name a policy") from None
        if name.version is None or name.run != self._run:
            raise _Fault(f"/v1/policy names {name}, which is no policy of run {self._run}")
        return str(name), name.version


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body; _Fault for one that is larger than any answer has reason to be."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_ANSWER:
            raise _Fault(f"an answer of more than {_MAX_ANSWER >> 20} MiB")
    return b"".join(pieces)


def _openai_error(body: Any) -> str | None:
    """The message of an OpenAI error object, or None for anything else."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message[:300] if isinstance(message, str) else None


def _waits() -> Iterator[float]:
    """Seconds between attempts: doubling up to a bound, spread at random so that clients do not return in step."""
    longest = 0.1
    while True:
        yield random.uniform(0.5, 1.0) * longest
        longest = min(2 * longest, _LONGEST_WAIT_S)
