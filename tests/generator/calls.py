"""HTTP calls of a test: plain, blocking, any status."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        """The message of an OpenAI error object."""
        return self.json()["error"]["message"]


def call(url: str, body: Any = None, timeout_s: float = 120.0) -> Answer:
    """POST with a JSON body, GET without; raises TimeoutError, or OSError where nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def complete(url: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of a completion with token ids and log-probabilities."""
    asked = {"logprobs": 0, "return_token_ids": True, "temperature": 1.0, "max_tokens": 8, **body}
    answer = call(f"{url}/v1/completions", asked)
    assert answer.status == 200, answer.text
    return answer.json()["choices"]


def prompt_logprobs(url: str, model: str, tokens: list[int]) -> list[float]:
    """Raw log-probability of each token after the first."""
    (choice,) = complete(url, model=model, prompt=tokens, max_tokens=1, prompt_logprobs=0)
    return [
        given[str(token)]["logprob"] for given, token in zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
    ]
