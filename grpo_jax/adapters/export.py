"""A published policy as a PEFT directory with a model card, checked against its manifest."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_jax.adapters.manifest import AdapterError, Manifest, download_adapter, read_manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.errors import UsageError
from grpo_jax.observability import format as f
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.observability.summary import mean_of
from grpo_jax.storage.bucket import Bucket


def export_adapter(bucket: Bucket, to: Path, name: str | None = None) -> Path:
    """Writes the run's last policy, or the policy `name`, into the directory `to`, which must be empty or not exist.

    Returns:
      `to`. It appears complete or not at all.

    Raises:
      UsageError: there is no such policy, it does not match its manifest, or `to` holds something.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to}: not empty; export writes into a new directory")
    run = load_run(None, bucket, groups=False)
    manifest = _manifest(bucket, name or _last(run, bucket))
    to.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".tmp", dir=to.parent))
    try:
        try:
            folder = download_adapter(bucket, manifest, work)
        except AdapterError as error:
            raise UsageError(f"the policy cannot be exported: {error}") from None
        (folder / "README.md").write_text(model_card(run, manifest), encoding="utf-8")
        if to.exists():
            to.rmdir()
        os.rename(folder, to)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return to


def model_card(run: RunData, manifest: Manifest) -> str:
    """Markdown with YAML front matter. Only what the run has recorded is said."""
    source = (run.run.get("base") or {}).get("source") or run.config_value("model.source", None)
    front: dict[str, Any] = {"library_name": "peft", "tags": ["grpo", "grpo_jax", "lora", "reinforcement-learning"]}
    if source and _is_hub_id(source):
        front = {"base_model": source, **front}
    rewards = ", ".join(f"`{r['source']}`" for r in run.config.get("rewards", []) if "source" in r)
    metrics = [r for r in run.metrics if r["step"] < manifest.step]
    base, _ = run.held_out
    own = next((e for e in run.evaluations if e["policy"] == manifest.name), None)
    facts = [
        ("Base model", source and f"`{source}`"),
        ("Base digest", f"`{manifest.base_digest}`"),
        ("Run", f"`{run.name}`"),
        ("Policy", f"`{manifest.name}`"),
        ("Step", f"{manifest.step} of {f.number(run.config_value('steps', None))}"),
        ("LoRA", f"rank {manifest.rank}, alpha {manifest.alpha:g}, scale {manifest.scale:g}"),
        ("Targets", ", ".join(f"`{t}`" for t in manifest.targets)),
        ("Task", _code(run.config_value("task.source", None))),
        ("Rewards", rewards or None),
        ("Mean reward, first 3 steps", _mean(metrics[:3])),
        ("Mean reward, last 5 steps", _mean(metrics[-5:])),
        ("Held-out reward, base", _reward(base)),
        ("Held-out reward, this policy", _reward(own)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in sorted((run.run.get("versions") or {}).items())) or None),
    ]
    table = "\n".join(f"| {what} | {_cell(value)} |" for what, value in facts if value)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {manifest.name}\n\n"
        "A LoRA adapter in PEFT's format, trained with asynchronous GRPO by grpo_jax.\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _last(run: RunData, bucket: Bucket) -> str:
    current = run.policy.get("current")
    if not current:
        raise UsageError(f"{bucket.url}: no policy has been published (there is no sound policy.json)")
    return str(current)


def _manifest(bucket: Bucket, name: str) -> Manifest:
    try:
        if parse_policy(name).version is None:
            raise UsageError(f"{name} is the run's probe, which is random; name a policy")
        return read_manifest(bucket, name)
    except (ValueError, AdapterError) as error:
        raise UsageError(f"the policy cannot be exported: {error}") from None


def _is_hub_id(source: str) -> bool:
    """As the config reads it: a path that exists is a directory, and a scheme (`pypi:`) is no Hub id."""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return not Path(source).exists()


def _code(text: Any) -> str | None:
    return None if text is None else f"`{text}`"


def _mean(metrics: list[Metrics]) -> str | None:
    value = mean_of(metrics, "reward")
    return None if value is None else f.reward(value)


def _reward(evaluation: dict[str, Any] | None) -> str | None:
    return None if evaluation is None or evaluation["reward"] is None else f.reward(evaluation["reward"])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
