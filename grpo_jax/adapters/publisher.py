"""Publishing never stalls: a background thread exports, uploads and moves the pointer; the loop only hands over.

`submit` returns at once. If uploads are slower than steps, the newest waiting adapter replaces the one that waited
(counted in `skipped`). Order in the bucket: files, manifest, pointer. A bucket that does not take an adapter is tried
until it does, or until a newer adapter waits.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_jax.adapters.manifest import Canary, Manifest, file_entry, manifest_bytes
from grpo_jax.adapters.names import PolicyName
from grpo_jax.adapters.peft import adapter_files, modules, update_norm
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record, RecordWriter

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_LOOK_AT_POINTER_S = 10.0


@dataclass(frozen=True)
class AdapterSpec:
    """What all adapters of a run have in common."""

    run: str
    rank: int
    alpha: float
    rslora: bool
    scale: float
    base_model: str
    base_digest: str


@dataclass(frozen=True)
class Published:
    """One version in the bucket: time of the hand-over (epoch seconds), and seconds until the pointer moved."""

    version: int
    step: int
    name: str
    submitted_at: float
    publish_s: float


@dataclass(frozen=True)
class _Pending:
    version: int
    step: int
    lora: Any
    canary_logprobs: Any
    submitted_at: float


def export_adapter_files(
    spec: AdapterSpec, lora: Any, *, version: int | None, step: int, canary: Canary
) -> tuple[Manifest, dict[str, bytes]]:
    """The files of an adapter and the manifest that describes them; `lora` is a tree of host arrays."""
    files = adapter_files(lora, rank=spec.rank, alpha=spec.alpha, rslora=spec.rslora, base_model=spec.base_model)
    digest = hashlib.sha256(files[layout.ADAPTER_CONFIG] + files[layout.ADAPTER_WEIGHTS]).hexdigest()
    manifest = Manifest(
        name=str(PolicyName(spec.run, version, digest[:8])),
        version=version,
        step=step,
        rank=spec.rank,
        alpha=spec.alpha,
        scale=spec.scale,
        targets=sorted(module.rpartition(".")[2] for module, _ in modules(lora)),
        base_digest=spec.base_digest,
        norm=update_norm(lora, spec.scale),
        digest=digest,
        files={name: file_entry(data) for name, data in files.items()},
        canary=canary,
    )
    return manifest, files


def upload_adapter(bucket: Bucket, manifest: Manifest, files: dict[str, bytes]) -> None:
    """Files first, the manifest last. Content-addressed, so doing it again writes the same bytes."""
    for name, data in files.items():
        bucket.put(layout.adapter(manifest.name, name), data)
    bucket.put(layout.adapter(manifest.name, layout.MANIFEST), manifest_bytes(manifest))


class Publisher:
    """Publishes adapters in the background and keeps `policy.json` and the lineage (version → name) of this run."""

    def __init__(
        self,
        bucket: Bucket,
        spec: AdapterSpec,
        incarnation: int,
        *,
        window: int,
        canary_tokens: np.ndarray,
        to_host: Callable[[Any], Any],
        lineage: dict[int, str] | None = None,
        pin: Callable[[int, Mapping[int, str]], str | None] | None = None,
    ):
        """
        Args:
          lineage: version → name of what an earlier life has published.
          pin: asked at each publish, with the version and the lineage: a policy that is to stay loaded beside the
            window.
        """
        self._pin = pin
        self._bucket, self._spec, self._window, self._to_host = bucket, spec, window, to_host
        self._canary_tokens = [int(token) for token in canary_tokens]
        self._pointer = RecordWriter(bucket, layout.POLICY, incarnation)
        self._probe = ""
        self._pointed: Record | None = None
        self._paced: frozenset[str] = frozenset()
        self.trouble: str | None = None
        """What the bucket last answered, while it does not take an adapter."""
        self.lineage: dict[int, str] = dict(lineage or {})
        self.published: list[Published] = []
        self.skipped = 0
        self._pending: _Pending | None = None
        self._busy = self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def publish_probe(self, lora: Any, canary_logprobs: Any) -> str:
        """Uploads the probe, in the foreground: nothing can be proved before it is there."""
        manifest, files = self._export(lora, canary_logprobs, version=None, step=0)
        upload_adapter(self._bucket, manifest, files)
        self._probe = manifest.name
        return manifest.name

    def point_to(self, version: int) -> None:
        """Makes a version that is in the bucket the current one; the window holds it, those before it, the pinned."""
        newest_first = sorted((v for v in self.lineage if version - self._window < v <= version), reverse=True)
        window = [self.lineage[v] for v in newest_first]
        self._paced = frozenset(window)
        pinned = None if self._pin is None else self._pin(version, self.lineage)
        if pinned is not None and pinned not in window:
            window.append(pinned)
        self._pointed = {
            "run": self._spec.run,
            "current": window[0],
            "window": window,
            "pinned": pinned,
            "probe": self._probe,
        }
        self._pointer.write(self._pointed)

    def settle(self, version: int, timeout_s: float) -> None:
        """Waits until `version` or a newer one is in the bucket, or the publisher has stopped, or time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._closed or max(self.lineage, default=-1) >= version, timeout_s
            )

    @property
    def current(self) -> str | None:
        """The policy that the pointer names as the newest."""
        return None if self._pointed is None else str(self._pointed["current"])

    @property
    def paced(self) -> frozenset[str]:
        """The window without what is only pinned: what training may name."""
        return self._paced

    @property
    def named(self) -> frozenset[str]:
        """What the pointer names: the window and the probe."""
        pointed = self._pointed
        return frozenset() if pointed is None else frozenset((*pointed["window"], pointed["probe"]))

    def submit(self, version: int, step: int, lora: Any, canary_logprobs: Any) -> None:
        """Hands over device arrays that nobody will donate. Raises what stopped the publisher, if anything."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self.skipped += self._pending is not None
            self._pending = _Pending(version, step, lora, canary_logprobs, time.time())
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything submitted is in the bucket; False if that took longer."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or (self._pending is None and not self._busy), timeout_s
            )
            if self._error is not None:
                raise self._error
            return done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5)

    @property
    def newest(self) -> Published | None:
        return self.published[-1] if self.published else None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._closed, _LOOK_AT_POINTER_S)
                pending, self._pending = self._pending, None
                if pending is None and self._closed:
                    return
                self._busy = pending is not None
            if pending is None:
                self._keep_pointer()
                continue
            error: Exception | None = None
            try:
                self._publish_with_retries(pending)
            except Exception as caught:
                log.exception("publishing version %d failed", pending.version)
                error = caught
            with self._changed:
                self._busy, self._error = False, error
                self._changed.notify_all()
                if error is not None:
                    return

    def _publish_with_retries(self, pending: _Pending) -> None:
        """A bucket that fails costs retries; a newer version that waits makes them pointless."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                self._publish(pending)
                self.trouble = None
                return
            except OSError as error:
                self.trouble = str(error)
                log.warning("publishing version %d: %s; once more in %.1f s", pending.version, error, pause)
            with self._changed:
                if self._changed.wait_for(lambda: self._pending is not None or self._closed, pause):
                    if self._pending is None:
                        return
                    self.skipped += 1
                    return
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _keep_pointer(self) -> None:
        """Writes the pointer again where the bucket shows an older one: a write that was given up may land late."""
        try:
            if not self._pointer.confirm():
                log.warning("the bucket showed an older pointer; the newest is written again")
        except OSError as error:
            log.warning("the pointer cannot be looked at: %s", error)

    def _publish(self, pending: _Pending) -> None:
        manifest, files = self._export(
            pending.lora, pending.canary_logprobs, version=pending.version, step=pending.step
        )
        upload_adapter(self._bucket, manifest, files)
        self.lineage = {**self.lineage, pending.version: manifest.name}
        self.point_to(pending.version)
        now = time.time()
        self.published.append(
            Published(pending.version, pending.step, manifest.name, pending.submitted_at, now - pending.submitted_at)
        )
        log.info("published %s %.2f s after step %d", manifest.name, now - pending.submitted_at, pending.step)

    def _export(
        self, lora: Any, canary_logprobs: Any, *, version: int | None, step: int
    ) -> tuple[Manifest, dict[str, bytes]]:
        lora, logprobs = self._to_host((lora, canary_logprobs))
        canary = Canary(tokens=self._canary_tokens, logprobs=[float(x) for x in logprobs])
        return export_adapter_files(self._spec, lora, version=version, step=step, canary=canary)
