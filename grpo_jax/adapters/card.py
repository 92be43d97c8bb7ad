"""The model card of an exported policy. Only what the run has recorded is said."""

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_jax.adapters.manifest import Manifest
from grpo_jax.observability import format as f
from grpo_jax.observability.flow import mean_of
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.scrubbing import scrubbed_config

_TAGS = ["grpo", "grpo_jax", "lora", "reinforcement-learning"]
_OBJECTIVE = (
    "preset", "loss", "loss_args", "advantages", "aggregation", "anchor", "weight", "weight_args", "masks", "kl_coef",
    "entropy_coef", "overlong", "zero_variance",
)  # fmt: skip


def model_card(run: RunData, manifest: Manifest, rounding: float | None = None) -> str:
    """Markdown with YAML front matter.

    Args:
      rounding: of merged weights, what rounding to the base's dtype moved as a share of the update; None: an adapter.
    """
    merged = rounding is not None
    source = (run.run.get("base") or {}).get("source") or run.config_value("model.source", None)
    hub_id = source if source and _is_hub_id(source) else None
    front: dict[str, Any] = {"library_name": "transformers" if merged else "peft", "tags": _TAGS}
    if merged:
        front["pipeline_tag"] = "text-generation"
    if hub_id:
        front = {"base_model": hub_id, **({"base_model_relation": "finetune"} if merged else {}), **front}
    kind = "A model with a LoRA adapter merged into its weights" if merged else "A LoRA adapter in PEFT's format"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {manifest.name}",
        f"{kind}, trained with asynchronous GRPO by grpo_jax.",
        _table([*_facts(run, manifest, source), *_results(run, manifest)]),
    ]
    if merged:
        parts.append(
            f"Merging rounds to the base's dtype, which has moved the weights by {f.percent(rounding)} of the size of "
            "the update; the adapter itself is exact."
        )
    else:
        parts.append(_usage(hub_id or "BASE MODEL"))
    if run.config:
        config = yaml.safe_dump(scrubbed_config(run.config), sort_keys=False, allow_unicode=True, width=100)
        parts.append(
            f"## Training it again\n\n`grpo-jax run config.yaml`, with this `config.yaml`:\n\n```yaml\n{config}```"
        )
    return "\n\n".join(parts) + "\n"


def _facts(run: RunData, manifest: Manifest, source: str | None) -> list[tuple[str, str | None]]:
    rewards = ", ".join(f"`{r['source']}`" for r in run.config.get("rewards", []) if "source" in r)
    algorithm = run.config.get("algorithm") or {}
    objective = [f"{key} {_short(algorithm[key])}" for key in _OBJECTIVE if algorithm.get(key)]
    return [
        ("Base model", source and f"`{source}`"),
        ("Base digest", f"`{manifest.base_digest}`"),
        ("Run", f"`{run.name}`"),
        ("Policy", f"`{manifest.name}`"),
        ("Step", f"{manifest.step} of {f.number(run.config_value('steps', None))}"),
        ("LoRA", f"rank {manifest.rank}, alpha {manifest.alpha:g}, scale {manifest.scale:g}"),
        ("Targets", ", ".join(f"`{t}`" for t in manifest.targets)),
        ("Task", _code(run.config_value("task.source", None))),
        ("Rewards", rewards or None),
        ("Objective", ", ".join(objective) or None),
        ("Batch", _batch(run)),
        ("Learning rate", _rate(run)),
    ]


def _results(run: RunData, manifest: Manifest) -> list[tuple[str, str | None]]:
    metrics = [r for r in run.metrics if r["step"] < manifest.step]
    base, _ = run.held_out
    own = next((e for e in run.evaluations if e["policy"] == manifest.name), None)
    return [
        ("Mean reward, first 3 steps", _mean(metrics[:3], "reward")),
        ("Mean reward, last 5 steps", _mean(metrics[-5:], "reward")),
        ("Held-out reward, base", _reward(base)),
        ("Held-out reward, this policy", _reward(own)),
        ("Entropy, first 3 and last 5 steps", _both(metrics, "entropy")),
        ("Completion length, first 3 and last 5 steps", _both(metrics, "completions/mean_length")),
        ("Versions", ", ".join(f"{k} {v}" for k, v in sorted((run.run.get("versions") or {}).items())) or None),
    ]


def _usage(base: str) -> str:
    return (
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "THIS REPOSITORY")\n```'
    )


def _table(facts: list[tuple[str, str | None]]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {what} | {_cell(value)} |" for what, value in facts if value)


def _batch(run: RunData) -> str | None:
    prompts, group = (run.config_value(f"batch.{k}", None) for k in ("prompts_per_step", "group_size"))
    if not (prompts and group):
        return None
    return f"{prompts} prompts × {group} samples, staleness at most {run.config_value('max_staleness', '?')}"


def _rate(run: RunData) -> str | None:
    rate, schedule = (run.config_value(f"optimizer.{k}", None) for k in ("learning_rate", "schedule"))
    return None if rate is None else f"{rate:g}" + (f", {schedule}" if schedule else "")


def _is_hub_id(source: str) -> bool:
    """As the config reads it: a path that exists is a directory, and a scheme (`pypi:`) is no Hub id."""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return not Path(source).exists()


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _code(text: Any) -> str | None:
    return None if text is None else f"`{text}`"


def _mean(metrics: list[Metrics], key: str) -> str | None:
    value = mean_of(metrics, key)
    return None if value is None else f.reward(value)


def _both(metrics: list[Metrics], key: str) -> str | None:
    first, last = mean_of(metrics[:3], key), mean_of(metrics[-5:], key)
    return None if first is None or last is None else f"{f.number(first)}, {f.number(last)}"


def _reward(evaluation: dict[str, Any] | None) -> str | None:
    return None if evaluation is None or evaluation["reward"] is None else f.reward(evaluation["reward"])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
