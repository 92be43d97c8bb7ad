"""The config of an agent under test."""

from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.models.config import LoraConfig

LORA = LoraConfig(rank=4, alpha=8.0)
VLLM_START_S = 500.0


def make_config(bucket: Path, model_dir: Path, run: str = "tiny", **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "run": run,
        "bucket": str(bucket),
        "max_staleness": 1,
        "model": {"source": str(model_dir), "dtype": "float32"},
        "lora": {"rank": LORA.rank, "alpha": LORA.alpha},
        "task": {"source": "tests.plugins:none"},
        "rewards": [{"source": "tests.plugins:even_first_token"}],
        "batch": {"row_tokens": 64},
        # A stand-in beats only when it publishes, and a busy machine may take long from one test to the next.
        "fleet": {"idle_exit_s": 7200.0},
        # What one server has compiled, the next one finds.
        "generator": {"engine": "reference", "start_timeout_s": 120, "env": _compile_cache(model_dir.parent / "xla")},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return Config.model_validate(raw)


def _compile_cache(folder: Path) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
