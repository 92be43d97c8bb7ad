"""Checkpoints: Orbax for the arrays, a manifest as the commit mark, on every kind of bucket.

Orbax writes to local disk; the files then go to the bucket under their digests, and a manifest (sizes and sha256) last.
A checkpoint without a manifest, or with a file that does not match it, does not exist. So nothing depends on what the
store knows of renames, and a process killed in mid-save leaves nothing that could be taken for a checkpoint. Each save
has a manifest of its own, named by the learner's incarnation: no save overwrites another one, not even that of a
learner which was stopped in the middle of it and goes on after it has been replaced.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from grpo_jax.learner.step import LearnerState
from grpo_jax.scratch import scratch
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import canonical_json

log = logging.getLogger(__name__)

_PARALLEL_UPLOADS = 8
_LOOKS, _LOOK_AGAIN_S = 3, 1.0
_MANIFEST = re.compile(rf"{layout.CHECKPOINTS}/([0-9]{{6,}})/manifest\.([0-9]{{6,}})\.([0-9]{{2,}})\.json")

# What reading one may raise that is not whole, or no manifest at all. A bucket that fails says nothing about it.
_UNSOUND = (ValueError, KeyError, TypeError, AttributeError, RecursionError, FileNotFoundError)

Meta = dict[str, Any]


class Saved(NamedTuple):
    """One committed save, and which life of the learner made it."""

    step: int
    incarnation: int
    attempt: int

    @property
    def key(self) -> str:
        return layout.checkpoint(self.step, f"manifest.{self.incarnation:06d}.{self.attempt:02d}.json")


class Checkpointer:
    """Saves in the background, one at a time; keeps the newest `keep`, and the first of every `keep_every` steps."""

    def __init__(self, run: Bucket, keep: int, keep_every: int | None = None, incarnation: int = 0):
        self._run, self._keep, self._keep_every, self._incarnation = run, keep, keep_every, incarnation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._uploads = ThreadPoolExecutor(_PARALLEL_UPLOADS, thread_name_prefix="checkpoint-upload")
        self._pending: Future[None] | None = None
        self._attempts = 0
        self.kept: list[int] = []
        """Steps that a restart may find, as far as they were looked up or saved by this object; oldest first."""

    @property
    def busy(self) -> bool:
        """Whether a save is still under way: another one would wait for it."""
        return self._pending is not None and not self._pending.done()

    def save(
        self,
        step: int,
        state: LearnerState,
        meta: Meta | Callable[[], Meta],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies `state` to the host now and writes it in the background.

        Waits for a save that is under way, and raises what it failed with.

        Args:
          meta: what to keep with the state, or what says it; asked in the background, after `first`.
          first: called in the background before the commit: what has to be in the bucket once the checkpoint is.
        """
        self.wait()
        host = jax.device_get(state)
        self._attempts += 1
        saved = Saved(step, self._incarnation, self._attempts)
        self._pending = self._thread.submit(self._save, saved, host, meta, first)

    def wait(self) -> None:
        """Until the last save is committed. Raises what it failed with (OSError: the bucket), once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first."""
        return sorted({saved.step for saved in self._saved()})

    def restore_newest(
        self, target: LearnerState, counts: Callable[[int, int], bool] = lambda step, incarnation: True
    ) -> tuple[LearnerState, Meta] | None:
        """(state, meta) of the newest sound checkpoint, or None. Unsound ones are logged and passed over.

        Raises OSError where the bucket fails.

        Args:
          counts: (step, incarnation) → whether a checkpoint belongs to what the run has become.
        """
        found = [saved for saved in self._saved() if counts(saved.step, saved.incarnation)]
        for saved in reversed(found):
            with scratch() as folder:
                try:
                    meta = self._download_patiently(saved, folder)
                except _UNSOUND as error:
                    log.warning("checkpoint %d is passed over: %s", saved.step, error)
                    continue
                with _orbax() as checkpointer:
                    # Always with a target: without one Orbax guesses types.
                    state = checkpointer.restore(folder / "state", jax.eval_shape(lambda: target))
                self.kept = sorted({older.step for older in found if older.step <= saved.step})
                return state, meta
        return None

    def _saved(self) -> list[Saved]:
        """All that have a manifest, oldest first; of one step the latest life's last."""
        matches = map(_MANIFEST.fullmatch, self._run.list(layout.CHECKPOINTS))
        return sorted(Saved(*map(int, match.groups())) for match in matches if match)

    def _save(
        self, saved: Saved, state: LearnerState, meta: Meta | Callable[[], Meta], first: Callable[[], None]
    ) -> None:
        with scratch() as folder:
            try:
                with _orbax() as checkpointer:
                    checkpointer.save(folder / "state", state)
            except ValueError as error:  # what TensorStore makes of a disk that is full or fails
                if "os_error_code" not in str(error):
                    raise
                raise OSError(f"writing it to {folder.parent} failed: {error!s:.300}") from None
            contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        files = {
            relative: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for relative, data in contents.items()
        }
        keys = [layout.checkpoint(saved.step, str(files[relative]["sha256"])) for relative in contents]
        list(self._uploads.map(self._run.put, keys, contents.values()))
        first()
        meta = {**(meta() if callable(meta) else meta), "step": saved.step}
        self._run.put(saved.key, canonical_json({"files": files, "meta": meta}))
        self.kept = self._to_keep({*self.kept, saved.step})
        try:
            self._delete_others(saved.step)
        except OSError as error:  # the next save does it
            log.warning("old checkpoints could not be deleted: %s", error)

    def _to_keep(self, steps: set[int]) -> list[int]:
        ordered = sorted(steps)
        kept, passed = set(ordered[-self._keep :]), 0
        if self._keep_every is not None:
            # A save that was due may have come a step later, so it is the first one after each multiple that stays.
            for step in ordered:
                if step // self._keep_every > passed:
                    kept.add(step)
                    passed = step // self._keep_every
        return sorted(kept)

    def _delete_others(self, newest: int) -> None:
        """What is not kept, what a killed save has left, and what a learner wrote that had been replaced."""
        folders: dict[int, list[Saved]] = {}
        for key in self._run.list(layout.CHECKPOINTS):
            if (name := key.split("/")[1]).isdecimal():
                folders.setdefault(int(name), [])
            if match := _MANIFEST.fullmatch(key):
                folders[int(name)].append(Saved(*map(int, match.groups())))
        for step, saves in sorted(folders.items()):
            is_later = any(saved.incarnation > self._incarnation for saved in saves)
            if step > newest or step in self.kept or is_later:
                continue
            # The mark goes first, so that a deletion that stops half-way leaves no checkpoint that looks whole.
            for saved in saves:
                self._run.delete(saved.key)
            self._run.delete_folder(f"{layout.CHECKPOINTS}/{step:06d}")

    def _download_patiently(self, saved: Saved, folder: Path) -> Meta:
        """What does not match its manifest may only be late in coming, so it is looked at again."""
        for _ in range(_LOOKS - 1):
            try:
                return self._download(saved, folder)
            except _UNSOUND:
                time.sleep(_LOOK_AGAIN_S)
        return self._download(saved, folder)

    def _download(self, saved: Saved, folder: Path) -> Meta:
        manifest = json.loads(self._run.read(saved.key))
        for relative, entry in manifest["files"].items():
            target = folder / relative
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{saved.key} names a file outside the checkpoint")
            data = self._run.read(layout.checkpoint(saved.step, entry["sha256"]), size=int(entry["size"]))
            if len(data) != entry["size"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ValueError(f"{relative} does not match {saved.key}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        if manifest["meta"]["step"] != saved.step:
            raise ValueError(f"{saved.key} is of step {manifest['meta']['step']}")
        return manifest["meta"]


def _orbax() -> ocp.StandardCheckpointer:
    """Of this process alone: of several only the first saves and restores, the others come to no barrier."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix="grpo_jax",
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)
