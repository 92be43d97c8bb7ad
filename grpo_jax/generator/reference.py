"""`python -m grpo_jax.generator.reference …`: the part of vLLM's HTTP contract used here, served by our own model.

Slow (see `reference_engine`), but small, exact and quick to start: what runs without vLLM, and what tests run against.
"""

import argparse
import asyncio
import itertools
import logging
import math
import os
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.generator.lifeline import die_with_parent, parent_pid_from_environment
from grpo_jax.generator.reference_engine import Adapter, Engine, Sequence, eos_tokens
from grpo_jax.generator.vllm import SERVED_NAME

log = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 16
# Settings that would change what is computed, and the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "logprobs": (0,),
    "prompt_logprobs": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
_KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "n", "seed", "stop", "ignore_eos", "return_token_ids", "priority",
    "user", *_NEUTRAL,
}  # fmt: skip


class _HttpError(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ReferenceServer:
    """Handlers over one engine. Adapters are kept by name; a request holds its own as long as it runs."""

    def __init__(self, engine: Engine, model_dir: Path, *, seed: int, max_loras: int):
        self._engine, self._model_dir, self._max_loras = engine, model_dir, max_loras
        self._adapters: dict[str, Adapter] = {}
        self._eos = eos_tokens(model_dir)
        self._tokenizer = _tokenizer(model_dir)
        self._seeds = itertools.count(seed << 32)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_objects], client_max_size=32 * 2**20)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        cards = [
            {"id": name, "object": "model", "root": str(root), "max_model_len": self._engine.max_model_len}
            for name, root in [(SERVED_NAME, self._model_dir), *((a.name, a.folder) for a in self._adapters.values())]
        ]
        return web.json_response({"object": "list", "data": cards})

    async def metrics(self, request: web.Request) -> web.Response:
        running, waiting, names = self._engine.load()
        labels = (
            f'max_lora="{self._max_loras}",running_lora_adapters="{",".join(sorted(names))}",waiting_lora_adapters=""'
        )
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0",model_name="{SERVED_NAME}"}} {running}\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="{SERVED_NAME}"}} {waiting}\n'
            f"vllm:lora_requests_info{{{labels}}} {time.time()}\n"
        )

    async def load(self, request: web.Request) -> web.Response:
        body = await _body(request)
        name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
        if not name or not path:
            raise _HttpError(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._adapters or name == SERVED_NAME:
            raise _HttpError(400, f"The lora adapter '{name}' has already been loaded.")
        if not Path(path).is_dir():
            raise _HttpError(404, f"Loading lora {name} failed: No adapter found for {path}")
        try:
            self._adapters[name] = await asyncio.to_thread(self._engine.read_adapter, name, Path(path))
        except AdapterError as error:
            raise _HttpError(500, str(error)) from None
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = str((await _body(request)).get("lora_name") or "")
        if self._adapters.pop(name, None) is None:
            raise _HttpError(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def complete(self, request: web.Request) -> web.Response:
        body = await _body(request)
        _refuse_unsupported(body)
        adapter = self._adapter(body.get("model"))
        prompt = self._prompt(body.get("prompt"))
        sequences = self._sequences(body, adapter, prompt)
        try:
            prompt_logprobs: list[float] | None = None
            if body.get("prompt_logprobs") is not None:
                scored: asyncio.Future[list[float]] = asyncio.wrap_future(self._engine.score(adapter, prompt))
                prompt_logprobs = await scored
            self._engine.decode(sequences)
            for sequence in sequences:
                await asyncio.wrap_future(sequence.done)
        finally:
            for sequence in sequences:
                sequence.abandoned = True
        values = [*(prompt_logprobs or []), *(x for sequence in sequences for x in sequence.logprobs)]
        if not all(map(math.isfinite, values)):
            raise _HttpError(400, "the log-probabilities are not finite")
        choices = [self._choice(body, i, prompt, prompt_logprobs, s) for i, s in enumerate(sequences)]
        completion_tokens = sum(len(s.completion) for s in sequences)
        return web.json_response(
            {
                "id": f"cmpl-{uuid.uuid4().hex}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": adapter.name or SERVED_NAME,
                "choices": choices,
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": completion_tokens,
                    "total_tokens": len(prompt) + completion_tokens,
                },
            }
        )

    def _adapter(self, name: Any) -> Adapter:
        if name == SERVED_NAME:
            return self._engine.base
        if name not in self._adapters:
            raise _HttpError(404, f"The model `{name}` does not exist.")
        return self._adapters[name]

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise _HttpError(400, "prompt: this model has no tokenizer; give token ids")
            prompt = self._tokenizer.encode(prompt).ids
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise _HttpError(400, "prompt: expected a text or a list of token ids")
        if not all(0 <= token < self._engine.config.vocab_size for token in prompt):
            raise _HttpError(400, "prompt: a token id is outside the vocabulary")
        if len(prompt) >= self._engine.max_model_len:
            raise _HttpError(
                400, f"prompt: {len(prompt)} tokens leave no room in a context of {self._engine.max_model_len}"
            )
        return prompt

    def _sequences(self, body: dict[str, Any], adapter: Adapter, prompt: list[int]) -> list[Sequence]:
        n, seed = _integer(body, "n", 1), body.get("seed")
        wanted = _integer(body, "max_tokens", _DEFAULT_MAX_TOKENS)
        temperature = body.get("temperature")
        stop = body.get("stop") or []
        stops = [stop] if isinstance(stop, str) else list(stop)
        if stops and self._tokenizer is None:
            raise _HttpError(400, "stop: this model has no tokenizer")
        eos = frozenset() if body.get("ignore_eos") else self._eos

        def stopped(tokens: list[int]) -> bool:
            return tokens[-1] in eos or any(text in self._text(tokens) for text in stops)

        return [
            Sequence(
                adapter,
                list(prompt),
                min(wanted, self._engine.max_model_len - len(prompt)),
                1.0 if temperature is None else float(temperature),
                np.random.default_rng(next(self._seeds) if seed is None else seed + i),
                stopped,
            )
            for i in range(n)
        ]

    def _text(self, tokens: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

    def _choice(
        self, body: dict[str, Any], index: int, prompt: list[int], prompt_logprobs: list[float] | None, s: Sequence
    ) -> dict[str, Any]:
        tokens, text = s.completion, self._text(s.completion)
        stop = body.get("stop") or []
        for end in [stop] if isinstance(stop, str) else stop:
            text = text.partition(end)[0]
        named = [f"token_id:{token}" for token in tokens]
        ids = bool(body.get("return_token_ids"))
        return {
            "index": index,
            "text": text,
            "finish_reason": s.finish_reason,
            "logprobs": None
            if body.get("logprobs") is None
            else {
                "tokens": named,
                "token_logprobs": s.logprobs,
                "top_logprobs": [{name: value} for name, value in zip(named, s.logprobs, strict=True)],
                "text_offset": [0] * len(tokens),
            },
            "token_ids": tokens if ids else None,
            "prompt_token_ids": prompt if ids else None,
            "prompt_logprobs": None
            if prompt_logprobs is None
            else [None, *({str(t): {"logprob": x}} for t, x in zip(prompt[1:], prompt_logprobs, strict=True))],
        }


@web.middleware
async def _errors_as_objects(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except _HttpError as error:
        status, message = error.status, str(error)
    except (web.HTTPException, asyncio.CancelledError):
        raise
    except Exception as error:
        log.exception("%s failed", request.path)
        status, message = 500, f"{type(error).__name__}: {error}"
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise _HttpError(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise _HttpError(400, "the body is no JSON object")
    return body


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if key not in _KNOWN:
            raise _HttpError(400, f"{key}: the reference server does not know this setting")
        if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
            raise _HttpError(400, f"{key}: the reference server supports only {_NEUTRAL[key][0]!r}, not {value!r}")
    if body.get("seed") is not None:
        _integer(body, "seed", 0, least=0)


def _integer(body: dict[str, Any], key: str, default: int, *, least: int = 1) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise _HttpError(400, f"{key}: expected an integer of at least {least}, not {value!r}")
    return value


def _tokenizer(model_dir: Path) -> Any:
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def main() -> None:
    die_with_parent(parent_pid_from_environment())
    parser = argparse.ArgumentParser(prog="grpo_jax.generator.reference")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--max-loras", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    engine = Engine(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_lora_rank=arguments.max_lora_rank,
    )
    server = ReferenceServer(engine, arguments.model, seed=arguments.seed, max_loras=arguments.max_loras)
    web.run_app(
        server.app(),
        host=arguments.host,
        port=arguments.port,
        access_log=None,
        print=None,
        handler_cancellation=True,
        shutdown_timeout=0.2,
    )
    # The decoding thread may be inside compiled code, which would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
