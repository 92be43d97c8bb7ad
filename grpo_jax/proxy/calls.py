"""A client's completion request, and the errors that it may be answered with."""

import json
from dataclasses import dataclass
from typing import Any

from grpo_jax.proxy.affinity import Chain, prompt_chain
from grpo_jax.proxy.answers import error_object, parse_json

COMPLETIONS_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
_MAX_SAMPLES = 4096  # bounds what a nonsensical `n` counts for


class RequestError(Exception):
    """The client is told `status` and an OpenAI error object, and is counted under `outcome`."""

    def __init__(self, status: int, message: str, code: str, outcome: str, param: str | None = None):
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.outcome = status, outcome
        self.body = error_object(message, kind, code, param)


@dataclass(slots=True)
class Call:
    """A completion request as it came. `raw` is sent on unless the model's name has to be filled in."""

    path: str
    raw: bytes
    fields: dict[str, Any]
    model: str
    samples: int
    stream: bool
    chain: Chain
    named: str | None  # the replica that its group was told of

    def body(self, policy: str) -> bytes:
        if self.model == policy:
            return self.raw
        return json.dumps({**self.fields, "model": policy}, separators=(",", ":")).encode()


def parse_call(path: str, raw: bytes, named: str | None = None) -> Call:
    """RequestError(400) for what is no JSON object with a `model`."""
    try:
        fields = parse_json(raw)
    except ValueError:
        raise RequestError(400, "the body is not valid JSON", "invalid_json", "request_error") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object", "invalid_json", "request_error")
    model = fields.get("model")
    if not isinstance(model, str):
        raise RequestError(400, "'model' must name a policy", "invalid_model", "request_error", "model")
    stream = fields.get("stream")
    if not (stream is None or type(stream) is bool):  # servers take 1 and "yes" as well, and would answer with a stream
        raise RequestError(400, "'stream' must be true or false", "invalid_stream", "request_error", "stream")
    prompt = fields.get("messages" if path == CHAT_PATH else "prompt")
    n = fields.get("n")
    samples = (n if type(n) is int and n > 0 else 1) * _count(prompt)
    chain = prompt_chain(prompt)
    return Call(path, raw, fields, model, min(samples, _MAX_SAMPLES), stream is True, chain, named)


def _count(prompt: object) -> int:
    """How many prompts these are."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
