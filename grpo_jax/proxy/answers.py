"""What counts as an answer: OpenAI's objects, told apart from the request's own errors and from faults of a replica."""

import json
from typing import Any

# These statuses say that the request itself is wrong; another replica would say the same.
_REQUEST_ERRORS = frozenset({400, 413, 422})


class ReplicaFault(Exception):
    """A replica did not do its work; another one may. The message goes on from "replica x …".

    `policy_only`: it denies one policy and may be sound otherwise. `lost`: the connection broke after the request was
    sent, so that the request itself may have killed the server.
    """

    def __init__(self, message: str, policy_only: bool = False, lost: bool = False):
        super().__init__(message)
        self.policy_only, self.lost = policy_only, lost


def error_object(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(data: bytes) -> Any:
    """ValueError for anything that is not strict JSON in UTF-8 (NaN and bottomless nesting included)."""
    try:
        return _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def judge(status: int, body: bytes, policy: str, with_tokens: bool = False) -> bool:
    """True: `body` is a completion of `policy`. False: an error that belongs to the request. Else ReplicaFault.

    `with_tokens`: the request has asked for token ids.
    """
    try:
        payload = parse_json(body)
    except ValueError:
        raise ReplicaFault(f"answered {status} without JSON") from None
    if status == 200:
        check_completion(payload, policy)
        _check_tokens(payload["choices"], with_tokens)
        return True
    if _is_error(payload):
        if status in _REQUEST_ERRORS:
            return False
        if status == 404:
            raise ReplicaFault(f"answered 404 for {policy}", policy_only=True)
    raise ReplicaFault(f"answered {status}")


def check_completion(payload: Any, policy: str) -> None:
    """ReplicaFault unless `payload` is a completion (or a piece of a streamed one) of exactly `policy`."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ReplicaFault("answered 200 without choices")
    if payload.get("model") != policy:
        raise ReplicaFault(f"answered under another model name than {policy}")


def _check_tokens(choices: list[Any], asked: bool) -> None:
    """ReplicaFault if tokens are missing that were asked for, or if there are not as many log-probabilities.

    A replica that answers such things is fast, and would attract all that it spoils.
    """
    for choice in choices:
        tokens = choice.get("token_ids") if isinstance(choice, dict) else None
        if not isinstance(tokens, list):
            if asked:
                raise ReplicaFault("answered without token ids")
            continue
        given = choice.get("logprobs")
        logprobs = given.get("token_logprobs") if isinstance(given, dict) else None
        if isinstance(logprobs, list) and len(tokens) != len(logprobs):
            raise ReplicaFault("answered with another number of log-probabilities than of tokens")


def _is_error(payload: Any) -> bool:
    error = payload.get("error") if isinstance(payload, dict) else None
    return isinstance(error, dict) and isinstance(error.get("message"), str)
