"""The peers' Python environments: made on first use in the user's cache, from the pinned requirements beside this."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from grpo_jax.cache import cache_dir
from grpo_jax.errors import UsageError

# The Python that each peer's requirements are pinned for.
_PYTHON = {"trl": "3.11", "tunix": "3.12"}
# What fails to import beside torch's wheel for CPUs breaks transformers too; work on text needs none of these.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def peer_python(peer: str) -> Path:
    """The Python of a peer's environment. Made anew (minutes) when there is none or its requirements have changed."""
    requirements = Path(__file__).with_name(f"{peer}.txt")
    folder = cache_dir() / "peers" / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    pins = [line for line in requirements.read_text().splitlines() if not line.startswith("#")]
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()
    if ready.is_file() and ready.read_text() == digest and python.exists():
        return python
    print(f"making the environment of {peer} in {folder}", file=sys.stderr, flush=True)
    _run(_base_python(_PYTHON[peer]), "-m", "venv", "--clear", str(folder))
    _run(str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements))
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED)
    ready.write_text(digest)
    return python


def _base_python(version: str) -> str:
    """A Python of this version: the one that runs this, one on the PATH, or one that pyenv has installed."""
    # That of an environment has `-m venv` as well, but then the new one would hang on the old.
    candidates = [str(Path(sys.base_prefix) / "bin" / f"python{version}"), f"python{version}"]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        candidates += map(str, sorted(Path(root).glob(f"versions/{version}.*/bin/python")))
    for candidate in candidates:
        if shutil.which(candidate) and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    raise UsageError(f"no Python {version} on this machine; --peer-python names an environment made by hand")


def _run(*command: str) -> None:
    # What pip prints on stdout would stand between the benchmark's own lines.
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise UsageError(f"failed: {' '.join(command)}")
