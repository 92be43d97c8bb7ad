"""A reference server that misbehaves, seeded: in a test's own process, or as `python -m tests.faults.replica …`.

It is the real server with the real engine; only what it does with a completion request, and which adapter it takes for
it, may be wrong. Texts of answers that a fault has touched carry a mark, so that a sample made of one can be found.
"""

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from grpo_jax.generator import reference
from grpo_jax.generator.reference import ReferenceServer
from grpo_jax.generator.reference_engine import Adapter, Engine

VARIABLE = "GRPO_JAX_TEST_FAULTS"
MARK = "\N{SKULL}"

REQUEST_FAULTS = (
    "hang",  # the request is taken, and never answered
    "reset",  # the connection breaks before the answer
    "reset_midway",  # and in the middle of its body
    "slow",  # a right answer, late
    "error_500",
    "html",  # a page where JSON is meant to be
    "truncated",  # half of the JSON, as if it were all
    "not_found",  # a policy that it holds is denied
    "other_name",  # the answer is of another policy, and says so
    "other_run",  # and of one that nobody has heard of
    "no_choices",
    "short_logprobs",  # one log-probability less than there are tokens
    "long_logprobs",
    "no_tokens",
)
WRONG_POLICY = "wrong_policy"
"""Some versions are answered, canaries included, with the weights of the one loaded before them."""


@dataclass(frozen=True)
class Faults:
    """Every request of a client (not an agent's canary) meets one of `kinds` with the probability `rate`."""

    kinds: tuple[str, ...]
    rate: float = 1.0
    seed: int = 0
    slow_s: float = 1.0
    count_file: str | None = None

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "Faults":
        fields = json.loads(os.environ[VARIABLE])
        return cls(**{**fields, "kinds": tuple(fields["kinds"])})

    def counts(self) -> Counter[str]:
        """Of the process that writes `count_file`."""
        assert self.count_file is not None
        file = Path(self.count_file)
        return Counter(json.loads(file.read_text())) if file.is_file() else Counter()


class FaultyServer(ReferenceServer):
    def __init__(self, engine: Engine, model_dir: Path, *, seed: int, max_loras: int, faults: Faults):
        super().__init__(engine, model_dir, seed=seed, max_loras=max_loras)
        self._faults, self._rng = faults, random.Random(faults.seed)
        self._kinds = [kind for kind in faults.kinds if kind != WRONG_POLICY]
        self.injected: Counter[str] = Counter()

    async def complete(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        if body.get("prompt_logprobs") is not None or not self._kinds or self._rng.random() >= self._faults.rate:
            return await super().complete(request)
        kind = self._rng.choice(self._kinds)
        self._count(kind)
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "reset":
            return _aborted(request)
        if kind == "slow":
            await asyncio.sleep(self._faults.slow_s)
            return await super().complete(request)
        if kind == "html":
            return web.Response(status=self._rng.choice((200, 502)), text="<html>ill</html>", content_type="text/html")
        if kind in ("error_500", "not_found"):
            status = 500 if kind == "error_500" else 404
            error = {"message": f"{MARK} {kind}", "type": "Error", "param": None, "code": status}
            return web.json_response({"error": error}, status=status)
        answer = await super().complete(request)
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        payload = _distorted(kind, json.loads(answer.body))
        data = json.dumps(payload).encode()
        if kind == "reset_midway":
            return await _half(request, data)
        if kind == "truncated":
            data = data[: len(data) // 2]
        return web.Response(body=data, content_type="application/json")

    def _adapter(self, name: Any) -> Adapter:
        adapter = super()._adapter(name)
        earlier = [other for other in self._adapters.values() if other.name != name]
        if WRONG_POLICY not in self._faults.kinds or not earlier or adapter.lora is None:
            return adapter
        if random.Random(f"{self._faults.seed}/{name}").random() >= 0.5:
            return adapter
        self._count(WRONG_POLICY)
        return replace(earlier[-1], name=adapter.name)

    def _count(self, kind: str) -> None:
        self.injected[kind] += 1
        if self._faults.count_file is not None:
            Path(self._faults.count_file).write_text(json.dumps(self.injected))


def _distorted(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    for choice in payload["choices"]:
        choice["text"] = MARK + choice["text"]
        logprobs = choice["logprobs"]["token_logprobs"]
        if kind == "short_logprobs":
            logprobs.pop()
        elif kind == "long_logprobs":
            logprobs.append(-1.0)
        elif kind == "no_tokens":
            choice["token_ids"] = None
    if kind == "other_name":
        run, _, _ = payload["model"].split(".")
        payload["model"] = f"{run}.v000999.{'0' * 8}"
    elif kind == "other_run":
        payload["model"] = "base"
    elif kind == "no_choices":
        payload["choices"] = []
    return payload


def _aborted(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _half(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    _aborted(request)
    return response


def main() -> None:
    faults = Faults.from_environment()
    reference.ReferenceServer = lambda *args, **kwargs: FaultyServer(*args, **kwargs, faults=faults)  # type: ignore
    reference.main()


if __name__ == "__main__":
    main()
