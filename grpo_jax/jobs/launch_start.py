"""What a job of the Hub does first: it installs what its role misses, then becomes the role.

Read as text and run by the image's own Python, with nothing but that, pip, and the function `fetch` of the launcher's
stub. An image is never changed: packages go into a folder of this job, which comes first on the path. A generator gets
only what its image lacks altogether, and no dependency of that which is there: vLLM's own packages stay as they are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_CLIENT = "huggingface_hub>=1.5"  # the first that knows buckets


def main(fetch: Callable[[str], bytes]) -> None:
    """Never returns. `fetch(name)` reads one of the launch's files."""
    environ, folder = os.environ, Path(tempfile.mkdtemp(prefix="grpo_jax-"))
    site, code = folder / "site", folder / "code"
    configs = []
    for i, config in enumerate(json.loads(fetch(environ["GRPO_JAX_CONFIG"]))):
        configs.append(str(folder / f"config-{i}.json"))
        Path(configs[-1]).write_text(json.dumps(config))
    zipfile.ZipFile(io.BytesIO(fetch("code.zip"))).extractall(code)
    package = environ["GRPO_JAX_PACKAGE"]
    if package.endswith(".whl"):
        (folder / package).write_bytes(fetch(package))
        package = str(folder / package)
    install = pip_into(site)
    install("--no-deps", *(["--no-index"] if package.endswith(".whl") else []), package)
    sys.path.insert(0, str(site))
    generator = environ["GRPO_JAX_ROLE"] == "generator"
    extras = set(filter(None, environ["GRPO_JAX_EXTRAS"].split(",")))
    wanted = [*requirements("grpo_jax", extras), *filter(None, environ["GRPO_JAX_PIP"].split("\n"))]
    complete(wanted, install, keep=generator)
    newer = hub_client(folder / "newer") if generator and environ["GRPO_JAX_BUCKET"].startswith("hf://") else None
    argv = [*role_arguments(environ, configs, str(folder / "work")), "--bucket", environ["GRPO_JAX_BUCKET"]]
    path = os.pathsep.join([str(site), *filter(None, [environ.get("PYTHONPATH")])])
    command = ["-m", "grpo_jax.cli", *argv]
    if newer is not None:
        # By sys.path, which the server that this role starts does not inherit.
        run = f"import runpy, sys; sys.path.insert(0, {str(newer)!r}); sys.argv = ['grpo-jax', *sys.argv[1:]]; "
        command = ["-c", f"{run}runpy.run_module('grpo_jax.cli', run_name='__main__', alter_sys=True)", *argv]
    os.chdir(code)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], {**environ, "PYTHONPATH": path})


def role_arguments(environ: Mapping[str, str], configs: list[str], work: str) -> list[str]:
    given = [word for config in configs for word in ("--config", config)]
    if environ["GRPO_JAX_ROLE"] == "learner":
        return ["trainer", *given, "--dir", work]
    slot, job = environ["GRPO_JAX_SLOT"], environ.get("JOB_ID", "job")
    url = re.sub(r"\{(\w+)\}", lambda name: environ.get(name[1], ""), environ["GRPO_JAX_URL"])
    where = ["--host", environ["GRPO_JAX_HOST"], "--port", environ["GRPO_JAX_PORT"], "--url", url]
    return ["generator", *given, "--dir", work, "--id", replica_id(slot, job), *where]


def replica_id(slot: str, job: str) -> str:
    return f"{slot}-{job[:24]}"


def pip_into(site: Path) -> Callable[..., None]:
    def install(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--root-user-action=ignore", "--target", str(site), *arguments])
        if done.returncode:
            sys.exit(f"pip could not install {' '.join(arguments)} (exit code {done.returncode})")
        importlib.invalidate_caches()

    return install


def complete(wanted: list[str], install: Callable[..., None], keep: bool) -> None:
    """Installs what is missing. `keep`: a package that is there stays, whatever its version, and so do its needs."""
    if not keep:
        missing = [text for text in wanted if not satisfied(text)]
        if missing:
            print(f"installing {', '.join(missing)}", flush=True)
            install("--upgrade", *missing)
        return
    asked: set[str] = set()
    while missing := [text for text in wanted if version(text) is None and text not in asked]:
        asked.update(missing)
        print(f"installing {', '.join(missing)}", flush=True)
        install("--no-deps", *missing)
        wanted = [need for text in missing if (name := _NAME.match(text)) for need in requirements(name[0], set())]


def requirements(distribution: str, extras: Iterable[str]) -> list[str]:
    """What a distribution needs here, with these of its extras, those that name itself resolved."""
    names = set(extras)
    texts = parsed(importlib.metadata.requires(distribution) or [])
    while True:
        found = [r for r in texts if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *names))]
        own = {e for r in found if same(r.name, distribution) for e in r.extras}
        if own <= names:
            return [plain(r) for r in found if not same(r.name, distribution)]
        names |= own


def satisfied(text: str) -> bool:
    (requirement,) = parsed([text])
    here = version(text)
    if here is None or requirement.url:
        return False
    if requirement.extras:  # whether what an extra asks for is here, too
        return all(satisfied(need) for need in requirements(requirement.name, requirement.extras))
    return requirement.specifier.contains(here, prereleases=True)


def version(text: str) -> str | None:
    name = _NAME.match(text)
    try:
        return importlib.metadata.version(name[0]) if name else None
    except importlib.metadata.PackageNotFoundError:
        return None


def hub_client(folder: Path) -> Path | None:
    """A folder with a client that knows buckets, for this role alone; None if the image's own does."""
    try:
        if importlib.util.find_spec("huggingface_hub._buckets") is not None:
            return None
    except ImportError:
        pass
    pip_into(folder)(_HUB_CLIENT)
    return folder


def parsed(texts: Iterable[str]) -> list[Any]:
    try:
        module = importlib.import_module("packaging.requirements")
    except ImportError:
        module = importlib.import_module("pip._vendor.packaging.requirements")
    return [module.Requirement(text) for text in texts]


def plain(requirement: Any) -> str:
    requirement.marker = None
    return str(requirement)


def same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


if __name__ == "__main__":
    main(globals()["fetch"])
