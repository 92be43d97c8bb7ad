"""Containers of the fake Hub: a Python environment of the job's own, its processes, their end."""

import os
import re
import signal
import site
import sys
import time
import venv
from collections.abc import Collection, Mapping
from pathlib import Path

_NOT_IN_IMAGES = re.compile(r"grpo_jax|__editable__|__pycache__")


def make_environment(folder: Path) -> None:
    """A virtual environment with every package of this one but the project itself, which a job must install.

    Packages are links, so whatever a job installs or removes stays in `folder`.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for source in map(Path, site.getsitepackages()):
        for path in source.iterdir() if source.is_dir() else ():
            target = packages / path.name
            if not _NOT_IN_IMAGES.match(path.name) and not target.exists():
                target.symlink_to(path)
    for library in (Path(sys.prefix) / "lib").glob("*.so*"):
        (folder / "lib" / library.name).symlink_to(library)
    for name in ("pip", "pip3"):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip "$@"\n')
        script.chmod(0o755)


def in_container(
    text: str, mounts: Mapping[str, Path], ports: Mapping[int, int], aliases: Collection[str], exposed: str
) -> str:
    """`text` with what is true in a container replaced by what stands for it on this machine.

    Args:
        mounts: directories, by mount path.
        ports: ports of this machine, by port of the container.
        aliases: what the job calls itself in its network group; every job is on loopback.
        exposed: address of the exposed ports.
    """
    for mount_path, folder in sorted(mounts.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w.-]){re.escape(mount_path.rstrip('/'))}(?![\w.-])", str(folder), text)
    text = re.sub(r"https://([^/]+?)--([^/]+?)\.hf\.jobs", rf"{exposed}/\1/\2", text)
    for alias in aliases:
        text = re.sub(rf"\$?\{{HF_NETWORK_GROUP_PREFIX\}}{re.escape(alias)}(?![\w-])", "127.0.0.1", text)
    for port, own in ports.items():
        text = re.sub(rf"(?<![\w.]){port}(?![\w.])", str(own), text)
    return text.replace("0.0.0.0", "127.0.0.1")


def processes_of(job_id: str) -> dict[int, str]:
    """pid → command line of all that a job has started and that is alive, whatever session it is in."""
    found, mark = {}, f"JOB_ID={job_id}".encode()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line:
                    found[int(folder.name)] = line
        except OSError:
            continue
    return found


def kill_container(job_id: str) -> None:
    """Ends all processes of a job, as the end of a container does."""
    while alive := processes_of(job_id):
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
