"""The plugin inside a vLLM process: once, by whichever way it comes, and only where an agent has asked for it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.generator.index import run_folder, write_index
from grpo_jax.generator.plugin import ADAPTERS, CPU_LORA
from grpo_jax.generator.vllm import package_path, vllm_version

ROOT = Path(__file__).parents[2]
NAME, OTHER = "r.v000001.0123abcd", "r.v000002.0123abcd"


def _python(code: str, **env: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in (ADAPTERS, CPU_LORA)}
    environment |= {"PYTHONPATH": package_path(os.environ), **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_outside_our_servers_it_does_nothing():
    code = "import sys; from grpo_jax.generator.plugin import register; register(); print('vllm' in sys.modules)"
    assert _python(code).strip() == "False"


_REPORT = """
import asyncio, json
from grpo_jax.generator import plugin
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.platforms.cpu import CpuPlatform
from vllm.plugins import load_general_plugins
load_general_plugins()
resolvers = list(LoRAResolverRegistry.get_supported_resolvers())
plugin.register()  # as the launcher does
found = {}
if resolvers:
    resolver = LoRAResolverRegistry.get_resolver("grpo_jax")
    for name in NAMES:
        request = asyncio.run(resolver.resolve_lora("base", name))
        found[name] = None if request is None else [request.lora_name, request.lora_path, request.load_inplace]
print("REPORT", json.dumps({
    "resolvers": resolvers, "found": found, "layer": CpuPlatform.get_punica_wrapper(),
    "registrations": plugin.register.cache_info().misses,
}))
"""


def _report(**env: str) -> dict[str, Any]:
    code = f"NAMES = {[NAME, OTHER, '../x', 'base']!r}\n{_REPORT}"
    (line,) = [line for line in _python(code, **env).splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one run; its parent is the folder of all runs."""
    folder = run_folder(tmp_path / "adapters", "r")
    for name in (NAME, OTHER):
        (folder / name).mkdir(parents=True)
    write_index(folder, [NAME])
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """PYTHONPATH on which the package counts as installed, with the entry point that pyproject.toml gives it."""
    info = tmp_path / "site" / "grpo_jax-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo_jax\nVersion: 0.0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {target}" for name, target in groups["vllm.general_plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return f"{info.parent}:{package_path(os.environ)}"


@pytest.mark.slow
@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_it_resolves_what_is_in_the_index_and_nothing_else(folder, installed):
    report = _report(**{ADAPTERS: str(folder.parent), CPU_LORA: "1", "PYTHONPATH": installed})
    assert report["resolvers"] == ["grpo_jax"]
    assert report["registrations"] == 1
    assert report["found"] == {NAME: [NAME, str(folder / NAME), False], OTHER: None, "../x": None, "base": None}
    assert report["layer"] == "grpo_jax.generator.cpu_lora.GroupedPunicaWrapperCPU"


@pytest.mark.slow
@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_installed_in_anybodys_vllm_it_changes_nothing(installed):
    report = _report(PYTHONPATH=installed)
    assert report["resolvers"] == []
    assert "grpo_jax" not in report["layer"]
