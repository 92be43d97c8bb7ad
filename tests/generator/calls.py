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
