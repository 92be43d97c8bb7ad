"""Files that appear whole: a fake server may be asked while it writes."""

import json
import secrets
from pathlib import Path
from typing import Any


def save(path: Path, value: Any) -> None:
    write(path, json.dumps(value).encode())


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(data)
    temporary.replace(path)
