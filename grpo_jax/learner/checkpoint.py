"""Checkpoints: Orbax for the arrays, a manifest as the commit mark, on every kind of bucket.

Orbax writes to local disk; the files then go to the bucket as immutable objects and `manifest.json` (sizes and
sha256) last. A checkpoint without a manifest, or with a file that does not match it, does not exist. So nothing
depends on what the store knows of renames, and a process killed in mid-save leaves nothing that could be taken for a
checkpoint.
"""

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from grpo_jax.learner.step import LearnerState
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json

log = logging.getLogger(__name__)

_PARALLEL_UPLOADS = 8
_LOOKS, _LOOK_AGAIN_S = 3, 1.0


class Checkpointer:
    """Saves in the background, one at a time; keeps the newest `keep`."""

    def __init__(self, run: Bucket, keep: int):
        self._run, self._keep = run, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._uploads = ThreadPoolExecutor(_PARALLEL_UPLOADS, thread_name_prefix="checkpoint-upload")
        self._pending: Future[None] | None = None
        self.kept: list[int] = []
        """Steps that a restart may find, as far as they were looked up or saved by this object."""

    @property
    def busy(self) -> bool:
        """Whether a save is still under way: another one would wait for it."""
        return self._pending is not None and not self._pending.done()

    def save(
        self, step: int, state: LearnerState, meta: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Copies `state` to the host now and writes it in the background; `then` is called there after the commit.

        Waits for a save that is under way, and raises what it failed with.
        """
        self.wait()
        host = jax.device_get(state)
        self._pending = self._thread.submit(self._save, step, host, {**meta, "step": step}, then)

    def wait(self) -> None:
        """Until the last save is committed. Raises what it failed with (OSError: the bucket), once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first."""
        keys = self._run.list(layout.CHECKPOINTS)
        return sorted(int(key.split("/")[1]) for key in keys if key.endswith(f"/{layout.MANIFEST}"))

    def restore_newest(self, target: LearnerState) -> tuple[LearnerState, dict[str, Any]] | None:
        """(state, meta) of the newest sound checkpoint, or None. Unsound ones are logged and passed over."""
        self.kept = self.steps()
        for step in reversed(self.kept):
            with tempfile.TemporaryDirectory(prefix="grpo_jax-restore-") as folder:
                try:
                    meta = self._download_patiently(step, Path(folder))
                except (ValueError, KeyError, OSError) as error:
                    log.warning("checkpoint %d is passed over: %s", step, error)
                    continue
                with _orbax() as checkpointer:
                    # Always with a target: without one Orbax guesses types.
                    state = checkpointer.restore(Path(folder) / "state", jax.eval_shape(lambda: target))
                return state, meta
        return None

    def _save(self, step: int, state: LearnerState, meta: dict[str, Any], then: Callable[[], None]) -> None:
        prefix = f"{layout.CHECKPOINTS}/{step:06d}"
        with tempfile.TemporaryDirectory(prefix="grpo_jax-save-") as name:
            folder = Path(name)
            with _orbax() as checkpointer:
                checkpointer.save(folder / "state", state)
            contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        keys = [f"{prefix}/{relative}" for relative in contents]
        list(self._uploads.map(self._run.put, keys, contents.values()))
        files = {
            relative: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for relative, data in contents.items()
        }
        self._run.put(f"{prefix}/{layout.MANIFEST}", canonical_json({"files": files, "meta": meta}))
        then()
        found = sorted({*self.steps(), step})
        for old in found[: -self._keep]:
            # The mark goes first, so that a deletion that stops half-way leaves no checkpoint that looks whole.
            self._run.delete(f"{layout.CHECKPOINTS}/{old:06d}/{layout.MANIFEST}")
            self._run.delete_folder(f"{layout.CHECKPOINTS}/{old:06d}")
        self.kept = found[-self._keep :]

    def _download_patiently(self, step: int, folder: Path) -> dict[str, Any]:
        """What does not match its manifest may only be late in coming, so it is looked at again."""
        for _ in range(_LOOKS - 1):
            try:
                return self._download(step, folder)
            except (ValueError, KeyError, OSError):
                time.sleep(_LOOK_AGAIN_S)
        return self._download(step, folder)

    def _download(self, step: int, folder: Path) -> dict[str, Any]:
        prefix = f"{layout.CHECKPOINTS}/{step:06d}"
        manifest = json.loads(self._run.read(f"{prefix}/{layout.MANIFEST}"))
        for relative, entry in manifest["files"].items():
            data = self._run.read(f"{prefix}/{relative}")
            if len(data) != entry["size"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ValueError(f"{prefix}/{relative} does not match the manifest")
            target = folder / relative
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{prefix}/{layout.MANIFEST} names a file outside the checkpoint")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return manifest["meta"]


def _orbax() -> ocp.StandardCheckpointer:
    """Of this process alone: of several only the first saves and restores, the others come to no barrier."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix="grpo_jax",
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)
