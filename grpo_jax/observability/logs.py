"""Logging of one role: time, role, level, message; and no secret of the environment in it, tracebacks included."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_SHORTEST_SECRET = 8  # shorter values ("true", "0") would blank ordinary words
_MASK = "***"

# Libraries that tell each request or each compilation at INFO.
_QUIET = (
    "aiohttp.access",
    "absl",
    "asyncio",
    "filelock",
    "fsspec",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "huggingface_hub",
    "jax",
    "orbax",
    "urllib3",
)


def configure_logging(role: str, path: Path | None) -> None:
    """Sends the process's log, from INFO up, to the file `path` (appended) or, with None, to stderr."""
    if path is None:
        handler: logging.Handler = StderrHandler()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(RoleFormatter(role))
    handler.set_name("grpo_jax")
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == "grpo_jax"]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


@contextmanager
def log_to(path: Path, role: str) -> Iterator[None]:
    """The process's log also goes to a file (appended), as long as this lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(RoleFormatter(role))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class StderrHandler(logging.StreamHandler):
    """Looks stderr up for each line, because a progress display redirects it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # not setStream, which flushes the old one: it may be closed
        super().emit(record)


class RoleFormatter(logging.Formatter):
    """Masks after everything is formatted: a secret may come in by an argument, a traceback or a stack."""

    def __init__(self, role: str):
        super().__init__(f"%(asctime)s {role.replace('%', '%%')} %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{moment}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record))


def mask_secrets(text: str) -> str:
    """`text` without the values of environment variables that are named like secrets."""
    values = {v for k, v in os.environ.items() if is_secret_name(k) and len(v) >= _SHORTEST_SECRET}
    for value in sorted(values, key=len, reverse=True):  # one may contain another
        text = text.replace(value, _MASK)
    return text


def is_secret_name(name: str) -> bool:
    return any(word in name.upper() for word in _SECRET_WORDS)
