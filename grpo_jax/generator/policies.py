"""Makes the adapters that a server holds equal to what the run asks for, and proves each of them.

Level-triggered: every `step` compares what is wanted with what the server says it has, and does one thing about it. A
server that was restarted, a response that was lost or ten versions that were missed end in the right state by one path.
"""

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grpo_jax.adapters.manifest import AdapterError, Manifest, download_adapter, read_manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.adapters.proof import NotProved, calibrate, check
from grpo_jax.generator.client import UNREACHABLE, EngineClient, Load, ServerError
from grpo_jax.generator.sameness import Make, difference, read_make
from grpo_jax.generator.vllm import SERVED_NAME
from grpo_jax.rollouts.threads import in_daemon_thread
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket

log = logging.getLogger(__name__)

T = TypeVar("T")

# What a bucket shows may change (a slow mount, a listing that lags), what a server answered does not.
_RETRY_S = 5.0
_COMPARE_S = 5.0
# Time for a request that was accepted just before the unloading to show up in the metrics.
_KEEP_FILES_S = 5.0
_DEATHS = 3


@dataclass(frozen=True)
class Wanted:
    """What `policy.json` says. `window` is newest first and holds `current`."""

    probe: str
    current: str
    window: tuple[str, ...]


@dataclass(frozen=True)
class _Refusal:
    reason: str
    retry_at: float | None = None  # monotonic seconds; None: it stands as long as the server lives


class _Refused(Exception):
    """An adapter that must not be served. The message is the reason."""


class Policies:
    """State of one server. `step` and `sweep` are called by one task in turn; the rest may be read at any time."""

    def __init__(self, run: Bucket, folder: Path, *, dtype: str, slots: int):
        """
        Args:
            run: the run's prefix.
            folder: on local disk, for the adapters; what an earlier agent left there is deleted.
            dtype: what the server computes in.
            slots: adapters that it holds at one time.
        """
        self._run, self._folder, self._dtype, self._slots = run, folder, dtype, slots
        self.loaded: list[str] = []  # in the order of loading
        self._proved: set[str] = set()
        self._refused: dict[str, _Refusal] = {}
        self._deaths: Counter[str] = Counter()
        self._trying: str | None = None
        self._leaving: dict[str, float] = {}  # unloaded, files still on disk: since when
        self._probe: str | None = None  # the probe that the next two belong to
        self._make: Make | None = None
        self._bound: float | None = None
        self._compared_at = float("-inf")
        self._wanted = Wanted("", "", ())
        self.wrong_base: str | None = None
        """Why nothing can be served here at all: the base is not the run's."""
        self.changed = asyncio.Event()
        """Set whenever something was proved, refused or unloaded."""
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def proved(self) -> list[str]:
        """The policies that may be routed to, in the order in which they were loaded."""
        return [name for name in self.loaded if name in self._proved]

    @property
    def quarantined(self) -> dict[str, str]:
        reasons = {name: refusal.reason for name, refusal in self._refused.items()}
        blocked = self._blocked()
        return reasons | {name: blocked for name in self._wanted.window if blocked and name not in reasons}

    def forget_server(self) -> None:
        """The server is another process: it holds nothing, and nothing is proved or refused there."""
        if self._trying is not None:
            self._deaths[self._trying] += 1
        self.loaded, self._trying, self._probe, self._make, self._bound = [], None, None, None, None
        self._proved.clear()
        self._refused.clear()
        self._compared_at = float("-inf")
        self.changed.set()

    async def step(self, client: EngineClient, wanted: Wanted) -> bool:
        """Does the most urgent thing; returns whether there was any. Raises one of `UNREACHABLE` without a server."""
        self._wanted = wanted
        if wanted.probe != self._probe:
            self._probe, self._make, self._bound = wanted.probe, None, None
        keep = {wanted.probe, *wanted.window}
        self._refused = {name: refusal for name, refusal in self._refused.items() if name in keep}
        if self._next(wanted) is None and time.monotonic() - self._compared_at < _COMPARE_S:
            return False
        await self._compare(client)
        name = self._next(wanted)
        if name is None:
            return False
        self._trying = name
        try:
            await self._try(client, name, keep)
            self._refused.pop(name, None)
        except _Refused as refused:
            await self._refuse(client, name, _Refusal(str(refused)))
        except AdapterError as error:
            await self._refuse(client, name, _Refusal(str(error), time.monotonic() + _RETRY_S))
        except UNREACHABLE:  # if it has died, this adapter is a suspect
            raise
        except Exception:
            self._trying = None
            raise
        self._trying = None
        self.changed.set()
        return True

    async def sweep(self, load: Load) -> None:
        """Deletes the files of adapters that were unloaded a while ago and that no request names any more.

        vLLM may read an adapter again for a request that it accepted before the unloading, and dies if it is not there.
        """
        for name, since in list(self._leaving.items()):
            if name in self.loaded:
                del self._leaving[name]
            elif load.asked_at - since >= _KEEP_FILES_S and name not in load.busy:
                del self._leaving[name]
                await in_daemon_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    def _blocked(self) -> str | None:
        """Why no policy can be served, whatever it is."""
        if self.wrong_base is not None:
            return self.wrong_base
        if self._bound is None and self._probe in self._refused:
            return f"this replica has not proved the probe: {self._refused[self._probe].reason}"
        return None

    def _next(self, wanted: Wanted) -> str | None:
        """The probe until it is proved, then the current policy, then the rest of the window, newest first."""
        if self.wrong_base is not None:
            return None
        if self._bound is None:
            return wanted.probe if self._is_open(wanted.probe) else None
        names = dict.fromkeys((wanted.current, *wanted.window))
        return next((name for name in list(names)[: self._slots] if self._is_open(name)), None)

    def _is_open(self, name: str) -> bool:
        refusal = self._refused.get(name)
        due = refusal is None or (refusal.retry_at is not None and refusal.retry_at <= time.monotonic())
        return due and name not in self.proved

    async def _compare(self, client: EngineClient) -> None:
        there = await client.adapters()
        gone = [name for name in self.loaded if name not in there]
        if gone:
            log.warning("the server has lost %s", ", ".join(gone))
        self.loaded = [name for name in self.loaded if name in there] + sorted(there - set(self.loaded))
        self._proved &= there
        self._compared_at = time.monotonic()

    async def _try(self, client: EngineClient, name: str, keep: set[str]) -> None:
        """Loads and proves one adapter. Raises _Refused or AdapterError with the reason, if it has one."""
        if self._deaths[name] >= _DEATHS:
            raise _Refused(f"the server has died {self._deaths[name]} times while this adapter was loaded or proved")
        started = time.monotonic()
        manifest, make, folder = await in_daemon_thread(self._fetch, name)
        if self._make is not None and (problem := difference(self._make, make)) is not None:
            raise _Refused(problem)
        await self._make_room(client, name, keep)
        if name not in self.loaded:
            await _answered(client, "does not load it", client.load(name, folder))
            self.loaded.append(name)
        canary = client.canary(name, manifest.canary.tokens)
        measured = await _answered(client, "does not score the canary", canary)
        if name == self._probe:
            await self._accept_probe(client, manifest, make, measured)
        else:
            assert self._bound is not None
            if (problem := check(manifest.canary.logprobs, measured, self._bound)) is not None:
                raise _Refused(problem)
            self._proved.add(name)
        log.info("proved %s in %.2f s", name, time.monotonic() - started)

    def _fetch(self, name: str) -> tuple[Manifest, Make, Path]:
        try:
            manifest = read_manifest(self._run, name)
        except ValueError as error:
            raise AdapterError(str(error)) from None
        folder = download_adapter(self._run, manifest, self._folder.resolve())
        return manifest, read_make(manifest, folder), folder

    async def _accept_probe(self, client: EngineClient, manifest: Manifest, make: Make, measured: list[float]) -> None:
        base = await self._base_logprobs(client, manifest)
        try:
            self._bound = calibrate(manifest.canary.logprobs, measured, base, self._dtype)
        except NotProved as error:
            raise _Refused(str(error)) from None
        self._make = make
        await self._unload(client, manifest.name)

    async def _base_logprobs(self, client: EngineClient, probe: Manifest) -> list[float]:
        """Of the probe's canary under the base: the learner's, in the manifest of v0.

        A replica that joins late may find v0 gone from the bucket; then its own base has to do.
        """
        v0 = await in_daemon_thread(self._v0_manifest)
        if v0 is not None and v0.canary.tokens == probe.canary.tokens:
            return v0.canary.logprobs
        canary = client.canary(SERVED_NAME, probe.canary.tokens)
        return await _answered(client, "does not score the base", canary)

    def _v0_manifest(self) -> Manifest | None:
        for key in self._run.list(layout.ADAPTERS):
            name = key.split("/")[1]
            if key == layout.adapter(name, layout.MANIFEST) and _age(name) == 0:
                return read_manifest(self._run, name)
        return None

    async def _make_room(self, client: EngineClient, name: str, keep: set[str]) -> None:
        """Unloads what has left the window, oldest first, but only as much as needed: a straggler may still name it."""
        for old in sorted((x for x in self.loaded if x not in keep), key=_age):
            if name in self.loaded or len(self.loaded) < self._slots:
                return
            await self._unload(client, old)

    async def _refuse(self, client: EngineClient, name: str, refusal: _Refusal) -> None:
        log.warning("%s is quarantined: %s", name, refusal.reason)
        self._refused[name] = refusal
        if name in self.loaded:
            await self._unload(client, name)
        else:
            self._leaving[name] = time.monotonic()

    async def _unload(self, client: EngineClient, name: str) -> None:
        self._proved.discard(name)
        try:
            await client.unload(name)
        except ServerError as error:
            log.warning("%s could not be unloaded: %s", name, error)
        self.loaded.remove(name)
        self._leaving[name] = time.monotonic()


async def _answered(client: EngineClient, failure: str, call: Awaitable[T]) -> T:
    """The result of a call. A refusal by a sound server is a verdict; one by a server that is dying is not."""
    try:
        return await call
    except ServerError as error:
        if not await client.healthy():
            raise ConnectionError(f"the server is ill: {error}") from None
        raise _Refused(f"the server {failure}: {error}") from None


def _age(name: str) -> int:
    """Sorts the oldest first, and before it what is no version of a run."""
    try:
        version = parse_policy(name).version
    except ValueError:
        return -1
    return -1 if version is None else version
