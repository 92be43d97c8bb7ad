"""Makes the adapters that a server holds equal to what the run asks for, and proves each of them.

Level-triggered: every `step` compares what is wanted with what the server says it has, and does one thing about it. A
server that was restarted, a response that was lost or ten versions that were missed end in the right state by one path.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from grpo_jax.adapters.manifest import AdapterError, Canary, Manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.adapters.proof import NotProved
from grpo_jax.generator import verdicts
from grpo_jax.generator.client import UNREACHABLE, EngineClient, Load, ServerError
from grpo_jax.generator.files import Files
from grpo_jax.generator.proofs import Proofs
from grpo_jax.generator.sources import Fetched, Source
from grpo_jax.generator.verdicts import Refused
from grpo_jax.generator.vllm import SERVED_NAME
from grpo_jax.rollouts.threads import in_daemon_thread
from grpo_jax.storage.records import Record

log = logging.getLogger(__name__)

# What a bucket shows may change (a slow mount, a listing that lags), what a server answered does not.
_RETRY_S = 5.0
_COMPARE_S = 5.0
# So many servers within so many seconds may one adapter cost. It may not be to blame: a neighbour takes the memory.
_DEATHS, _DEATHS_S = 3, 3600.0


@dataclass(frozen=True)
class Wanted:
    """What `policy.json` says. `window` is newest first and holds `current`."""

    probe: str
    current: str
    window: tuple[str, ...]

    @staticmethod
    def is_in(record: Record) -> bool:
        """Whether the record has all of it."""
        return record.keys() >= {"probe", "current", "window"}

    @classmethod
    def of(cls, record: Record) -> "Wanted":
        return cls(record["probe"], record["current"], tuple(record["window"]))


@dataclass(frozen=True)
class _Refusal:
    reason: str
    retry_at: float | None = None  # monotonic seconds; None: it stands as long as the server lives


class Policies:
    """State of one server. `compare`, `step` and `sweep` are for one task in turn; the rest may be read at any time."""

    def __init__(
        self,
        source: Source,
        run: str,
        *,
        dtype: str,
        slots: int,
        reproof_s: float,
        changed: asyncio.Event | None = None,
    ):
        """
        Args:
            source: where the adapters' files come from.
            run: the name of the run; adapters of others are left alone.
            dtype: what the server computes in.
            slots: adapters of the run that it holds at one time.
            reproof_s: mean time after which a proved policy is proved once more.
            changed: see the attribute; several runs may share one.
        """
        self._source, self._run, self._slots = source, run, slots
        self._files = Files(source)
        self._proofs = Proofs(dtype, reproof_s)
        self.loaded: list[str] = []  # in the order of loading
        self._refused: dict[str, _Refusal] = {}
        self._refused_total = 0
        self._deaths: dict[str, deque[float]] = {}  # of servers, while an adapter was loaded or proved
        self._trying: str | None = None
        self._probe: str | None = None  # the probe by which versions are judged
        self._compared_at = float("-inf")
        self._wanted = Wanted("", "", ())
        self.wrong_base: str | None = None
        """Why nothing can be served here at all: the base is not the run's."""
        self.changed = changed or asyncio.Event()
        """Set whenever something was proved, refused or unloaded."""

    @property
    def proved(self) -> list[str]:
        """The policies that may be routed to, in the order in which they were loaded."""
        return [name for name in self.loaded if name in self._proofs]

    @property
    def quarantined(self) -> dict[str, str]:
        reasons = {name: refusal.reason for name, refusal in self._refused.items()}
        blocked = self._blocked()
        return reasons | {name: blocked for name in self._wanted.window if blocked and name not in reasons}

    @property
    def held(self) -> list[str]:
        """The policies whose files the server may still read: loaded, or unloaded a moment ago."""
        return list(dict.fromkeys((*self.loaded, *self._files.leaving)))

    def record(self) -> Record:
        """What a heartbeat says of the policies. `proofs` and `refused_total` only grow, whatever the server does."""
        return {
            "proved": self.proved,
            "proved_at": self._proofs.times,
            "quarantined": self.quarantined,
            "loaded": list(self.loaded),
            "proofs": self._proofs.count,
            "refused_total": self._refused_total,
        }

    def forget_server(self) -> None:
        """The server is another process: it holds nothing, and nothing is proved or refused there."""
        if self._trying is not None:
            self._deaths.setdefault(self._trying, deque(maxlen=_DEATHS)).append(time.monotonic())
        self.loaded, self._trying, self._probe = [], None, None
        self._proofs.forget()
        self._refused.clear()
        self._compared_at = float("-inf")
        self.changed.set()

    async def compare(self, client: EngineClient) -> list[str]:
        """Takes over what the server says that it holds; returns what it has lost, which is not proved any more."""
        there = {name for name in await client.models() if self._is_ours(name)}
        gone = [name for name in self.loaded if name not in there]
        if gone:
            log.warning("the server has lost %s", ", ".join(gone))
        for name in gone:
            self._proofs.discard(name)
        self.loaded = [name for name in self.loaded if name in there] + sorted(there - set(self.loaded))
        self._compared_at = time.monotonic()
        self._files.leave_all_but(self._keep | there)
        return gone

    async def step(self, client: EngineClient, wanted: Wanted) -> bool:
        """Does the most urgent thing; returns whether there was any. Raises one of `UNREACHABLE` without a server."""
        self._wanted = wanted
        if wanted.probe != self._probe:
            self._probe = wanted.probe
            self._proofs.uncalibrate()
        self._refused = {name: refusal for name, refusal in self._refused.items() if name in self._keep}
        idle = self._next() is None and not self._proofs.is_due
        if idle and time.monotonic() - self._compared_at < _COMPARE_S:
            return False
        await self.compare(client)
        if (name := self._next()) is not None:
            await self._settle(client, name)
        elif (due := self._proofs.due()) is not None:
            await self._prove_again(client, *due)
        else:
            return False
        self.changed.set()
        return True

    async def retire(self, client: EngineClient) -> bool:
        """The run is over: unloads what there is of it; whether there was anything. Raises one of `UNREACHABLE`.

        It looks again after that, now and then, as long as files are to be released: what the server lists decides.
        """
        if time.monotonic() - self._compared_at < _COMPARE_S and not (self.loaded and self._source.loads):
            return False
        await self.compare(client)
        names = list(self.loaded) if self._source.loads else []
        for name in names:
            await self._unload(client, name)
        if names:
            self.changed.set()
        return bool(names)

    async def sweep(self, load: Load) -> None:
        """Releases the files of adapters that were unloaded a while ago and that no request names any more."""
        await self._files.sweep(self.loaded, self._compared_at, load)

    @property
    def _keep(self) -> set[str]:
        return {self._wanted.probe, *self._wanted.window}

    def _is_ours(self, name: str) -> bool:
        try:
            return parse_policy(name).run == self._run
        except ValueError:
            return False

    def _blocked(self) -> str | None:
        """Why no policy can be served, whatever it is."""
        if self.wrong_base is not None:
            return self.wrong_base
        if not self._proofs.calibrated and self._probe in self._refused:
            return f"this replica has not proved the probe: {self._refused[self._probe].reason}"
        return None

    def _next(self) -> str | None:
        """The probe until it is proved, then the current policy, then the rest of the window, newest first."""
        wanted = self._wanted
        if self.wrong_base is not None:
            return None
        if not self._proofs.calibrated and (self._source.loads or wanted.probe in self.loaded):
            return wanted.probe if self._is_open(wanted.probe) else None
        names = list(dict.fromkeys((wanted.current, *wanted.window)))
        able = names[: self._slots] if self._source.loads else [name for name in names if name in self.loaded]
        return next((name for name in able if self._is_open(name)), None)

    def _is_open(self, name: str) -> bool:
        refusal = self._refused.get(name)
        due = refusal is None or (refusal.retry_at is not None and refusal.retry_at <= time.monotonic())
        return due and name not in self.proved

    async def _settle(self, client: EngineClient, name: str) -> None:
        """Proves or refuses an adapter."""
        self._trying = name
        try:
            await self._try(client, name)
            self._refused.pop(name, None)
            self._deaths.pop(name, None)
        except Refused as refused:
            if name == self._probe:
                self._proofs.forget()
            await self._refuse(client, name, _Refusal(str(refused), refused.retry_at))
        except AdapterError as error:
            await self._refuse(client, name, _Refusal(str(error), time.monotonic() + _RETRY_S))
        except UNREACHABLE:  # if it has died, this adapter is a suspect
            raise
        except Exception:
            self._trying = None
            raise
        self._trying = None

    async def _try(self, client: EngineClient, name: str) -> None:
        """Loads and proves one adapter. Raises Refused or AdapterError with the reason, if it has one."""
        deaths = self._deaths.get(name) or deque[float]()
        if len(deaths) == _DEATHS and (again := deaths[0] + _DEATHS_S) > time.monotonic():
            said = f"the server has died {_DEATHS} times while this adapter was loaded or proved"
            raise Refused(said, retry_at=again)
        started = time.monotonic()
        fetched = await self._files.fetch(name)
        if (problem := self._proofs.unlike(fetched.make)) is not None:
            raise Refused(problem)
        if name not in self.loaded:
            await self._load(client, name, fetched.path)
        measured = await verdicts.score(client, name, fetched.manifest.canary.tokens)
        if name == self._probe:
            await self._accept_probe(client, fetched, measured)
        elif (problem := self._proofs.judge(name, fetched.manifest.canary, measured)) is not None:
            raise Refused(problem)
        else:
            self._files.offer(name)
        log.info("proved %s in %.2f s", name, time.monotonic() - started)

    async def _prove_again(self, client: EngineClient, name: str, canary: Canary) -> None:
        try:
            problem = self._proofs.judge(name, canary, await verdicts.score(client, name, canary.tokens))
        except Refused as refused:
            problem = str(refused)
        if problem is not None:
            await self._refuse(client, name, _Refusal(f"it was proved, and is no more: {problem}"))

    async def _load(self, client: EngineClient, name: str, path: str) -> None:
        """Into a slot that is made free if it must: a straggler may still name what has left the window."""
        for old in sorted((x for x in self.loaded if x not in self._keep), key=_age):
            if len(self.loaded) < self._slots:
                break
            await self._unload(client, old)
        try:
            await verdicts.load(client, name, path)
        except Refused as refused:
            if self._source.may_lag:
                raise AdapterError(str(refused)) from None
            raise
        self.loaded.append(name)

    async def _accept_probe(self, client: EngineClient, probe: Fetched, measured: list[float]) -> None:
        base = await self._base_logprobs(client, probe.manifest)
        try:
            self._proofs.calibrate(probe.manifest, probe.make, measured, base)
        except NotProved as error:
            raise Refused(str(error)) from None
        if self._source.loads:
            await self._unload(client, probe.manifest.name)

    async def _base_logprobs(self, client: EngineClient, probe: Manifest) -> list[float]:
        """Of the probe's canary under the base: the learner's, in the manifest of v0.

        A replica that joins late may find v0 gone from the bucket; then its own base has to do.
        """
        v0 = await in_daemon_thread(self._source.first)
        if v0 is not None and v0.canary.tokens == probe.canary.tokens:
            return v0.canary.logprobs
        base = next((name for name in await client.models() if not _is_policy(name)), SERVED_NAME)
        return await verdicts.score(client, base, probe.canary.tokens)

    async def _refuse(self, client: EngineClient, name: str, refusal: _Refusal) -> None:
        known = self._refused.get(name)
        if known is None or known.reason != refusal.reason:
            log.warning("%s is quarantined: %s", name, refusal.reason)
            self._refused_total += 1
        self._refused[name] = refusal
        self._proofs.discard(name)
        if name in self.loaded and self._source.loads:
            await self._unload(client, name)
        else:
            self._files.leave(name)

    async def _unload(self, client: EngineClient, name: str) -> None:
        self._proofs.discard(name)
        self._files.withdraw(name)
        try:
            await client.unload(name)
        except ServerError as error:
            log.warning("%s could not be unloaded: %s", name, error)
        self.loaded.remove(name)
        self._files.leave(name)


def _is_policy(name: str) -> bool:
    try:
        parse_policy(name)
    except ValueError:
        return False
    return True


def _age(name: str) -> int:
    """Sorts the oldest first, and before it the probe."""
    version = parse_policy(name).version
    return -1 if version is None else version
