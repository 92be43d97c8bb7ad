"""Requests and answers of the proxy's server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Stream(Protocol):
    """The way back to a client, for an answer whose length is not known."""

    def begin_stream(self, headers: Mapping[str, str]) -> None: ...
    async def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...


@dataclass(slots=True)
class Request:
    """A request that has arrived whole. `headers` have lower-case names; `path` is without the query."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    connection: Stream

    def header(self, name: str) -> str | None:
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


@dataclass(slots=True)
class Response:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def head(self) -> str:
        lines = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        return f"{STATUS_LINES[self.status]}{lines}Content-Length: {len(self.body)}\r\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})
