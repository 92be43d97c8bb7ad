"""What is run under chaos: a tiny random model with the reference engine, or SmolLM2 with a real vLLM."""

from pathlib import Path
from typing import Any

from grpo_jax.config.load import read_raw
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 2, 4
"""Groups of a step, and samples of a group."""

_BUCKET_FAULTS = "delay=0.02,late=0.3,stale_list=0.3,torn=0.02,error=0.03,denied=0.01,full=0.02"
"""Without `reorder`: no promise stands on a store that loses what it has acknowledged when the writer dies."""

_HUNG_S = {"reference": 15.0, "vllm": 30.0}
"""Time is short; what a real model computes may hold up a process for longer."""

_HASTY: dict[str, Any] = {
    "fleet": {"silent_s": 10.0, "idle_exit_s": 300.0},
    "checkpoints": {"every": 5, "keep": 2},
    "evaluation": {"samples": 0},
}


def make_config(engine: str, folder: Path, name: str, steps: int, seed: int, proxy_port: int) -> dict[str, Any]:
    """The config of one run; its bucket is `store(folder)`, with faults."""
    config = _tiny(folder) if engine == "reference" else _smollm2()
    hung_s = _HUNG_S[engine]
    config["generator"] = {**config["generator"], "replicas": 2, "hung_s": hung_s}
    return {
        **config,
        **_HASTY,
        # A part is killed far more often than in any real run.
        "local": {"restarts": 1000, "stuck_s": 60.0, "hung_s": hung_s},
        "run": name,
        "seed": seed,
        "bucket": f"faulty:seed={seed},{_BUCKET_FAULTS}:{store(folder)}",
        "steps": steps,
        "proxy": {"port": proxy_port},
    }


def store(folder: Path) -> Path:
    """The directory behind the bucket, in which nothing is wrong."""
    return folder / "bucket"


def _tiny(folder: Path) -> dict[str, Any]:
    model, cache = folder / "model", folder / "xla"
    if not model.is_dir():
        write_tiny_model(model)
    return {
        "max_staleness": 1,
        "model": {"source": str(model), "dtype": "float32"},
        "lora": {"rank": 8, "alpha": 16},
        "task": {"source": "experiments.tasks.addition:one_digit", "args": {"held_out": 4}},
        "rewards": [{"source": "tests.plugins:even_first_token"}],
        "sampling": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "batch": {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "row_tokens": 64, "rows_per_micro_batch": 2},
        "rollouts": {"max_redraws": 1000, "retry_deadline_s": 300.0, "request_timeout_s": 30.0},
        "generator": {
            "engine": "reference",
            # What one server has compiled, the next ones find.
            "env": {
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            },
        },
    }


def _smollm2() -> dict[str, Any]:
    config = read_raw(ROOT / "configs" / "quickstart.yaml")
    batch = {**config["batch"], "prompts_per_step": PROMPTS, "group_size": SAMPLES}
    rollouts = {"max_redraws": 1000, "retry_deadline_s": 300.0, "request_timeout_s": 120.0}
    return {**config, "batch": batch, "rollouts": rollouts}
