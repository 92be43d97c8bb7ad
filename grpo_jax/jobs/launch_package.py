"""What goes into the bucket for the jobs of a launch: this package as a wheel, the user's own code, the configs."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_jax
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.jobs.launch_spec import GENERATOR, LEARNER, config_file, launch_folder, role_config

_PACKAGE = Path(grpo_jax.__file__).parent
_MOST_CODE = 64 << 20  # bytes
# Zip files know no earlier time; with a fixed one, equal files make equal archives.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Files:
    """Contents by name, the place that follows from them, and what a job is told to install."""

    contents: dict[str, bytes]
    package: str

    @property
    def folder(self) -> str:
        """Key below the target: the same files lie in the same place, and no job ever sees another's."""
        digest = hashlib.sha256()
        for name, data in sorted(self.contents.items()):
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\0".encode())
        return f"{launch_folder()}/{digest.hexdigest()[:16]}"


def build_files(configs: Sequence[Config], here: Path) -> Files:
    """All files of a launch. `here`: the directory whose code goes along. UsageError names what is not there."""
    first = configs[0]
    start = importlib.util.find_spec("grpo_jax.jobs.launch_start")
    assert start is not None
    assert start.origin is not None
    contents = {
        "start.py": Path(start.origin).read_bytes(),
        "code.zip": _zip(_code(configs, here)),
        config_file(GENERATOR, ""): _json(configs, GENERATOR),
        **{config_file(LEARNER, config.run): _json([config], LEARNER) for config in configs},
    }
    if first.jobs.package != "wheel":
        return Files(contents, first.jobs.package)
    name, data = build_wheel()
    return Files({**contents, name: data}, name)


def build_wheel() -> tuple[str, bytes]:
    """(File name, bytes) of a wheel of this package as it is here, installed or in a checkout; nothing is fetched."""
    metadata, entry_points, version = _metadata()
    info = f"grpo_jax-{version}.dist-info"
    files = {f"grpo_jax/{path.relative_to(_PACKAGE).as_posix()}": path.read_bytes() for path in _sources(_PACKAGE)}
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: grpo_jax\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = entry_points.encode()
    lines = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "".join(f"{line}\n" for line in [*lines, f"{info}/RECORD,,"]).encode()
    return f"grpo_jax-{version}-py3-none-any.whl", _zip(files)


def code_paths(config: Config, here: Path) -> list[Path]:
    """What of `here` goes along: as `jobs.code` says, else the top-level modules that the config names."""
    if config.jobs.code is not None:
        return [here / name for name in config.jobs.code]
    plugins = [config.task.source, *(reward.source for reward in config.rewards)]
    modules = [source.partition(":")[0] for source in (*plugins, config.algorithm.loss) if ":" in source]
    top = dict.fromkeys(module.partition(".")[0] for module in modules)
    places = [place for name in top for place in (here / name, here / f"{name}.py") if place.exists()]
    return [place for place in places if place.name != "grpo_jax"]


def _json(configs: Sequence[Config], role: str) -> bytes:
    return json.dumps([role_config(config, role).model_dump(mode="json") for config in configs], indent=2).encode()


def _code(configs: Sequence[Config], here: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for place in dict.fromkeys(place for config in configs for place in code_paths(config, here)):
        if not place.exists() or not place.resolve().is_relative_to(here.resolve()):
            raise UsageError(f"jobs.code: {place.name} is not in the directory in which this is called")
        for path in [place] if place.is_file() else _sources(place):
            files[path.relative_to(here).as_posix()] = path.read_bytes()
        if sum(map(len, files.values())) > _MOST_CODE:
            raise UsageError(f"jobs.code: more than {_MOST_CODE >> 20} MB; name what the jobs need")
    return files


def _sources(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
        if path.is_file() and not path.is_symlink() and not hidden:
            yield path


def _metadata() -> tuple[str, str, str]:
    """(METADATA, entry_points.txt, version): of the checkout that this is, or of what is installed."""
    checkout = _PACKAGE.parent / "pyproject.toml"
    if checkout.is_file():
        return _of_project(tomllib.loads(checkout.read_text(encoding="utf-8"))["project"])
    try:
        found = importlib.metadata.distribution("grpo_jax")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "jobs.package: this is neither an installed grpo_jax nor a checkout; name a pip requirement"
        ) from None
    return found.read_text("METADATA") or "", found.read_text("entry_points.txt") or "", found.version


def _of_project(project: dict[str, Any]) -> tuple[str, str, str]:
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {text}" for text in project["dependencies"]),
    ]
    for extra, texts in extras.items():
        lines.append(f"Provides-Extra: {extra}")
        for text in texts:
            requirement, _, marker = text.partition(";")
            both = f"({marker.strip()}) and " if marker else ""
            lines.append(f'Requires-Dist: {requirement.strip()} ; {both}extra == "{extra}"')
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    points = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    return "".join(f"{line}\n" for line in lines), "\n".join(points), project["version"]


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
