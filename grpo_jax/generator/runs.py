"""The runs that one replica serves: what each of them wants, and what the server holds of it.

Most replicas serve one. A fleet that the runs of a sweep share serves `fleet.runs_at_once` of them at a time; the next
takes the place of one that is over.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator.client import UNREACHABLE, EngineClient, Load
from grpo_jax.generator.index import run_folder
from grpo_jax.generator.observer import Observer
from grpo_jax.generator.policies import Policies
from grpo_jax.generator.sources import LocalCopies
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import Record

log = logging.getLogger(__name__)

_TICK_S, _PAUSE_S = 0.05, 1.0
_SHARED = ("bucket", "model", "generator", "fleet")
"""Sections in which runs that share a replica have to agree; ranks, lengths and staleness may differ."""


def disagreement(configs: Sequence[Config], more: Sequence[str] = ()) -> str | None:
    """The first dotted key by which these runs cannot share a replica, or None. `more`: further sections."""
    sections = (*_SHARED, *more)
    first, *others = [config.model_dump(mode="json", include=set(sections)) for config in configs]
    for other in others:
        for section in sections:
            if first[section] == other[section]:
                continue
            if not isinstance(first[section], dict):
                return section
            return next(f"{section}.{key}" for key in first[section] if first[section][key] != other[section][key])
    # Without a name of its own a fleet has that of its run.
    return "fleet.name" if len({config.fleet_name for config in configs}) > 1 else None


def require_agreement(configs: Sequence[Config]) -> None:
    """UsageError if these runs cannot share a replica."""
    names = [config.run for config in configs]
    if (key := disagreement(configs)) is not None:
        raise UsageError(f"{key}: runs that share a replica agree in it, and of {', '.join(names)} two do not")
    if len(set(names)) < len(names):
        raise UsageError(f"run: two of the runs that share a replica have one name: {', '.join(names)}")


def in_fleet(config: Config, name: str) -> Config:
    """The config with this name for its fleet, unless it has one."""
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"name": config.fleet.name or name})})


def sharing(configs: Sequence[Config], more: Sequence[str] = ()) -> list[list[Config]]:
    """The runs, put together where one fleet can serve them; `more`: further sections in which they have to agree."""
    groups: list[list[Config]] = []
    for config in configs:
        group = next((group for group in groups if disagreement([group[0], config], more) is None), None)
        if group is None:
            groups.append(group := [])
        group.append(config)
    return groups


class ServedRun:
    """One run on this replica."""

    def __init__(self, config: Config, adapters: Path, of: int, asked: asyncio.Event, changed: asyncio.Event):
        """
        Args:
            of: so many runs are looked at from here, and those that have nothing to do must not cost much.
            asked: set whenever the run wants something else.
            changed: see `Policies`.
        """
        run = Bucket(config.bucket).child(config.run)
        self.name = config.run
        self.observer = Observer(run, of, asked)
        self.policies = Policies(
            LocalCopies(run, run_folder(adapters, config.run)),
            config.run,
            dtype=config.model.dtype,
            slots=config.slots,
            reproof_s=config.fleet.reproof_s,
            changed=changed,
        )
        self.error: str | None = None
        self.wait_until = float("-inf")  # monotonic seconds

    def compare_base(self, ours: str | None) -> None:
        theirs = self.observer.base_digest
        wrong = ours is not None and theirs is not None and ours != theirs
        self.policies.wrong_base = (
            f"the base model here has the digest {str(ours)[:12]}, and the run's has {str(theirs)[:12]}"
            if wrong
            else None
        )


class Runs:
    """All runs of one replica. `step` is for one task; the rest may be read at any time."""

    def __init__(self, configs: Sequence[Config], adapters: Path):
        """`configs` agree (see `require_agreement`)."""
        fleet = configs[0].fleet
        self._at_once, self._silent_s, self._idle_exit_s = fleet.runs_at_once, fleet.silent_s, fleet.idle_exit_s
        self.asked = asyncio.Event()
        """Set whenever a run wants other policies than before."""
        self.changed = asyncio.Event()
        """Set whenever something was proved, refused or unloaded."""
        self._runs = [ServedRun(config, adapters, len(configs), self.asked, self.changed) for config in configs]
        self._serving: list[ServedRun] = []

    @property
    def error(self) -> str | None:
        problems = (run.policies.wrong_base or run.error for run in self._runs)
        return next((problem for problem in problems if problem), None)

    def record(self) -> Record:
        """What a heartbeat says of all of them together."""
        found: Record = {"runs": [run.name for run in self._runs]}
        for run in self._runs:
            for key, value in run.policies.record().items():
                found[key] = _joined(found[key], value) if key in found else value
        return found

    async def watch(self) -> str:
        """Reads what the runs say until there is nothing more to be done here, and returns why."""
        tasks = [asyncio.create_task(run.observer.watch()) for run in self._runs]
        try:
            while (reason := self._end()) is None:
                done, _ = await asyncio.wait(tasks, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def forget_server(self) -> None:
        """The server is another process."""
        for run in self._runs:
            run.policies.forget_server()

    def compare_base(self, digest: str | None) -> None:
        """`digest`: of the base model here, once it is known."""
        for run in self._runs:
            run.compare_base(digest)

    async def step(self, client: EngineClient, load: Load) -> bool:
        """Does the most urgent thing for each run that is served; whether there was any. Raises one of `UNREACHABLE`.

        What goes wrong with one run, a bucket's error or a bug, keeps no other from its policies.
        """
        self._take_up()
        busy = False
        for run in self._runs:
            if time.monotonic() < run.wait_until:
                continue
            try:
                busy |= await self._step(run, client, load)
                run.error = None
            except UNREACHABLE:
                raise
            except Exception as error:
                log.exception("a policy of %s could not be dealt with, and is tried again", run.name)
                run.error = f"{type(error).__name__}: {error}"
                run.wait_until = time.monotonic() + _PAUSE_S
        return busy

    async def _step(self, run: ServedRun, client: EngineClient, load: Load) -> bool:
        busy = False
        if run in self._serving and run.observer.wanted is not None:
            busy = await run.policies.step(client, run.observer.wanted)
        elif run.policies.held:
            await run.policies.retire(client)
        await run.policies.sweep(load)
        return busy

    def _take_up(self) -> None:
        """Runs come in the order in which they were given. One keeps its place until it is over.

        Or until it has fallen silent while one that lives waits. A place that nobody else wants goes to a silent run,
        too: its learner may be about to come back, and what it has published can be asked for.
        """
        self._serving = [run for run in self._serving if run.observer.over is None]
        waiting = [run for run in self._runs if run not in self._serving and run.observer.wants_anything]
        for run in sorted(waiting, key=lambda run: not self._is_alive(run)):
            if len(self._serving) == self._at_once:
                silent = next((other for other in self._serving if not self._is_alive(other)), None)
                if silent is None or not self._is_alive(run):
                    return
                self._serving.remove(silent)
            log.info("serving %s from now on", run.name)
            self._serving.append(run)

    def _is_alive(self, run: ServedRun) -> bool:
        return run.observer.silent_s < self._silent_s

    def _end(self) -> str | None:
        ends = [run.observer.over for run in self._runs]
        if all(ends):
            return ends[-1] if len(ends) == 1 else "all runs are over"
        silent_s = min(run.observer.silent_s for run in self._runs)
        if silent_s > self._idle_exit_s:
            return f"{'the learner has' if len(ends) == 1 else 'all learners have'} been silent for {silent_s:.0f} s"
        return None


def _joined(one: Any, other: Any) -> Any:
    """Of two runs: names and times of both, and the sum of what is counted."""
    return one | other if isinstance(one, dict) else one + other
