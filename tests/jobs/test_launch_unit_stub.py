"""How a job finds its first file, in an image that has nothing but Python."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from grpo_jax.jobs.launch_spec import STUB

TOKEN = "hf_atokenthatnobodymaysee"
START = b"print('started with', fetch('config.json').decode())"
FILES = {"start.py": START, "config.json": b"{}"}


class Hub(BaseHTTPRequestHandler):
    """Answers a request for a file with a redirect, but the first one with 503."""

    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        name = self.path.rpartition("%2F")[2] if "%2F" in self.path else self.path.rpartition("/")[2]
        if len(self.seen) == 1:
            self.send_error(503)
        elif self.path.startswith("/buckets/someone/bucket/resolve/folder%2Frun%2Flaunch%2Ffiles%2F0123%2F"):
            self.send_response(302)
            # Another name is another host to a client.
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/bytes/{name}")
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(FILES[name])

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def run_stub(environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STUB],
        env={"GRPO_JAX_FILES": "run/launch/files/0123", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_over_the_api_the_token_goes_to_the_hub_and_to_nobody_else(hub: str) -> None:
    environ = {"GRPO_JAX_BUCKET": "hf://buckets/someone/bucket/folder", "HF_ENDPOINT": hub, "HF_TOKEN": TOKEN}
    assert "started with {}" in run_stub(environ)
    assert len(Hub.seen) == 5
    for path, token in Hub.seen:
        assert token == (f"Bearer {TOKEN}" if path.startswith("/buckets/") else None)


def test_in_a_mounted_bucket_nobody_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run/launch/files/0123"
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    assert run_stub({"GRPO_JAX_BUCKET": str(tmp_path)}) == "started with {}\n"
