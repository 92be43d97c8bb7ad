"""A published policy as a directory or a repository of the Hub: a PEFT adapter or merged weights, with a model card."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from grpo_jax.adapters import hub
from grpo_jax.adapters.card import model_card
from grpo_jax.adapters.manifest import AdapterError, Manifest, download_adapter, read_manifest
from grpo_jax.adapters.merge import merge
from grpo_jax.adapters.names import parse_policy
from grpo_jax.errors import UsageError
from grpo_jax.models.source import base_digest, resolve_model
from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.scratch import scratch
from grpo_jax.storage.bucket import Bucket


def export(bucket: Bucket, to: str, name: str | None = None, *, merged: bool = False, public: bool = False) -> str:
    """`export_adapter` or `export_merged`, into a directory or, with `hub:OWNER/NAME`, a repository of the Hub.

    Returns:
      Where it is. UsageError, in one sentence, when it cannot be had or cannot be put there.
    """
    write = export_merged if merged else export_adapter
    if not to.startswith(hub.PREFIX):
        return str(write(bucket, Path(to), name))
    repository = hub.repository(to)
    hub.check_token()  # before anything large is read
    with scratch() as folder:
        written = write(bucket, folder / "model", name)
        title = (written / "README.md").read_text(encoding="utf-8").partition("\n# ")[2].partition("\n")[0]
        return hub.push(written, repository, public=public, message=f"{title}, exported by grpo_jax")


def export_adapter(bucket: Bucket, to: Path, name: str | None = None) -> Path:
    """Writes the run's last policy, or the policy `name`, into the directory `to`, which must be empty or not exist.

    Returns:
      `to`. It appears complete or not at all.

    Raises:
      UsageError: there is no such policy, it does not match its manifest, or `to` holds something.
    """

    def write(run: RunData, manifest: Manifest, adapter: Path) -> Path:
        (adapter / "README.md").write_text(model_card(run, manifest), encoding="utf-8")
        return adapter

    return _exported(bucket, to, name, write)


def export_merged(bucket: Bucket, to: Path, name: str | None = None) -> Path:
    """As `export_adapter`, but the whole model: the run's base with the policy merged into its weights.

    Raises:
      UsageError: also when the base is not to be had here, or is not the one that the run was trained on.
    """

    def write(run: RunData, manifest: Manifest, adapter: Path) -> Path:
        source = (run.run.get("base") or {}).get("source") or run.config_value("model.source", None)
        if not source:
            raise UsageError("the run has not recorded which base it was trained on, so nothing can be merged")
        base = resolve_model(source)
        if base_digest(base) != manifest.base_digest:
            raise UsageError(f"the weights of {source} are not those that {run.name} was trained on; nothing is merged")
        folder = adapter.with_name("merged")
        rounding = merge(base, adapter, manifest.scale, folder)
        (folder / "README.md").write_text(model_card(run, manifest, rounding), encoding="utf-8")
        return folder

    return _exported(bucket, to, name, write)


def _exported(bucket: Bucket, to: Path, name: str | None, write: Callable[[RunData, Manifest, Path], Path]) -> Path:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to}: not empty; export writes into a new directory")
    run = load_run(None, bucket, groups=False)
    manifest = _manifest(bucket, name or _last(run, bucket))
    to.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".tmp", dir=to.parent))
    try:
        try:
            folder = write(run, manifest, download_adapter(bucket, manifest, work))
        except AdapterError as error:
            raise UsageError(f"the policy cannot be exported: {error}") from None
        if to.exists():
            to.rmdir()
        os.rename(folder, to)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return to


def _last(run: RunData, bucket: Bucket) -> str:
    current = run.policy.get("current")
    if not current:
        raise UsageError(f"{bucket.address}: no policy has been published (there is no sound policy.json)")
    return str(current)


def _manifest(bucket: Bucket, name: str) -> Manifest:
    try:
        if parse_policy(name).version is None:
            raise UsageError(f"{name} is the run's probe, which is random; name a policy")
        return read_manifest(bucket, name)
    except (ValueError, AdapterError) as error:
        raise UsageError(f"the policy cannot be exported: {error}") from None
