"""`grpo-jax sweep`: the runs of a sweep, one after the other, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from grpo_jax.config.compare import differing_keys
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import Sweep, Variant, load_sweep
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.generator.lifeline import PARENT_PID
from grpo_jax.jobs.local import Stop, default_environment, stop_on_signals
from grpo_jax.jobs.run import place
from grpo_jax.jobs.shared_fleet import Fleets, SharedFleet
from grpo_jax.observability.compare import compare
from grpo_jax.observability.compare_page import Written, write_comparison
from grpo_jax.observability.members import members_of_runs, members_of_sweep, write_index
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

_POLL_S = 0.2
# A run that is asked to stop gives its learner `local.stop_s`; it is killed if it takes so much longer.
_LONGER_S = 15.0
_CONFIGS = "configs"
_CONFIG_FILES = (".yaml", ".yml", ".json")
FINISHED, OTHER_CONFIG = "finished", "exists with another config"
_INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended: `finished`, `finished before`, `interrupted`, or `failed` and why."""

    variant: Variant
    state: str

    @property
    def is_done(self) -> bool:
        return self.state.startswith("finished")


def run_sweep(sweep: Sweep, only: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Runs what is not finished and continues what was begun; a run that fails does not keep the others from theirs.

    Args:
      only: names or globs of runs, with or without the sweep's name and the seed; none: all of them.
      dry_run: only says what there is to do.

    Returns the exit code: 0 once all of them are finished, 1 if one failed, 75 if a signal has stopped it.
    """
    default_environment()
    chosen = choose(sweep, only)
    if dry_run:
        _print(sweep, [Outcome(variant, state_of(variant.config)) for variant in chosen])
        return EXIT_DONE
    folder = _local_folder(sweep)
    write_index(Bucket(sweep.folder), sweep)
    outcomes: list[Outcome] = []
    to_do = [variant.config for variant in chosen if _may_run(state_of(variant.config))]
    with closing(Fleets(to_do, sweep.name, folder)) as fleets:
        _run_each(chosen, folder, fleets, outcomes)
    _print(sweep, outcomes)
    print(compare_sweep(sweep.folder))
    if outcomes[-1].state == _INTERRUPTED:
        print(f"interrupted after {len(outcomes) - 1} of {len(chosen)} runs; the same command goes on", file=sys.stderr)
        return EXIT_RESUMABLE
    failed = [outcome.variant.config.run for outcome in outcomes if not outcome.is_done]
    if failed:
        print(f"{len(failed)} of {len(chosen)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_DONE


def _run_each(chosen: Sequence[Variant], folder: Path, fleets: Fleets, outcomes: list[Outcome]) -> None:
    """Adds to `outcomes` what became of each, up to one that was interrupted."""
    for i, variant in enumerate(chosen, start=1):
        state = state_of(variant.config)
        print(f"{i} of {len(chosen)}: {variant.config.run}, {variant.config.steps} steps, {state}", flush=True)
        if state == FINISHED:
            outcomes.append(Outcome(variant, "finished before"))
        elif not _may_run(state):
            outcomes.append(Outcome(variant, f"failed: {state}"))
        else:
            outcomes.append(Outcome(variant, _outcome(variant.config, folder, fleets)))
        if outcomes[-1].state == _INTERRUPTED:
            return


def _may_run(state: str) -> bool:
    return state != FINISHED and not state.startswith(OTHER_CONFIG)


def _outcome(config: Config, folder: Path, fleets: Fleets) -> str:
    try:
        ready, fleet = fleets.enter(config)
        return _ended(config, _run(ready, folder, fleet))
    except RunFailed as error:
        fleets.close()
        return f"failed: {error}"


def compare_sweep(
    source: str, to: str | None = None, target: float | None = None, only: Sequence[str] = ()
) -> Written | None:
    """Compares the runs of a sweep, named by its folder or its config; None if `source` is neither.

    Args:
      only: names or globs of runs, as `run_sweep` takes them.
      to: folder of what is written; None: the sweep's own if it is a directory, else one of its name here.
      target: see `compare`.
    """
    folder = Bucket(source) if not source.endswith(_CONFIG_FILES) else None
    if folder is None:
        sweep = load_sweep(source)
        if sweep is None:
            raise UsageError(f"{source}: sweep: there is no such section, so there is nothing to compare")
        folder = Bucket(sweep.folder)
    found = members_of_sweep(folder)
    if found is None:
        if source.endswith(_CONFIG_FILES):
            raise UsageError(f"{source}: none of its runs has begun; `grpo-jax sweep {source}` runs them")
        return None
    name, members = found
    chosen = _chosen({m.run: (*(n := _names(name, m.run)), n[1].removesuffix(f"-s{m.seed}")) for m in members}, only)
    members = [member for member in members if member.run in chosen]
    own = folder.local_path() if folder.is_local else Path(name)
    return write_comparison(compare(name, members, target), Path(to) if to else own)


def compare_runs(runs: Sequence[str], to: str | None = None, target: float | None = None) -> Written:
    """Compares any runs, directories or URLs. `to`: None: the current directory."""
    members = members_of_runs([Bucket(run) for run in runs])
    return write_comparison(compare(f"{len(members)} runs", members, target), Path(to or "."))


def choose(sweep: Sweep, only: Sequence[str]) -> list[Variant]:
    """UsageError for a name that none of the runs has."""
    names = {variant.config.run: (*_names(sweep.name, variant.config.run), variant.name) for variant in sweep.variants}
    chosen = _chosen(names, only)
    return [variant for variant in sweep.variants if variant.config.run in chosen]


def _chosen(names: Mapping[str, Sequence[str]], only: Sequence[str]) -> set[str]:
    """Args: `names`: of each run those by which it may be called."""
    if not only:
        return set(names)
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for each in names.values() for name in each):
            raise UsageError(f"--only: {pattern!r} is none of {', '.join(names)}")
    return {run for run, each in names.items() if any(fnmatchcase(name, pattern) for pattern in only for name in each)}


def state_of(config: Config) -> str:
    """What the bucket holds of a run: `finished`, `goes on after step n`, `new`, or why it cannot go on as it is."""
    run = Bucket(config.bucket).child(config.run)
    record = RecordReader(run, layout.RUN).read()
    if record is None:
        return "new"
    differing = differing_keys(record["config"], config.model_dump(mode="json"))
    if differing:
        return f"{OTHER_CONFIG}; differing: {', '.join(differing)}"
    if record["status"] == "finished" and record["config"]["steps"] >= config.steps:
        return FINISHED
    learner = RecordReader(run, layout.LEARNER_STATE).read()
    return f"goes on after step {learner['step']}" if learner and learner["step"] else "begun, no step finished"


def _names(sweep: str, run: str) -> tuple[str, str]:
    return run, run.removeprefix(f"{sweep}-")


def _local_folder(sweep: Sweep) -> Path:
    """Where the runs' configs lie on this machine: beside the runs, or beside their caches."""
    first = sweep.variants[0].config
    return place(first, None)[1].parent


def _run(config: Config, folder: Path, fleet: SharedFleet | None) -> int:
    """`grpo-jax run` of one config to its end; a signal to this process is handed on.

    RunFailed if the fleet that serves it fails; the run can be resumed then.
    """
    path = folder / _CONFIGS / f"{config.run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
    with stop_on_signals() as stop:
        # In a session of its own, so that a Ctrl-C reaches it once, from here.
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_jax.cli", "run", str(path)],
            env={**os.environ, PARENT_PID: str(os.getpid())},
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stop.is_set():
                if fleet is not None:
                    fleet.poll()
                time.sleep(_POLL_S)
        finally:
            _interrupt(process, config, stop)
            if process.poll() is None:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LONGER_S)
        return EXIT_RESUMABLE if stop.is_set() else process.returncode


def _interrupt(process: subprocess.Popen[bytes], config: Config, stop: Stop) -> None:
    """What lives has the time to save its last step."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + config.local.stop_s + _LONGER_S
    while process.poll() is None and time.monotonic() < deadline and not stop.at_once.is_set():
        time.sleep(_POLL_S)
    if stop.at_once.is_set() and process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LONGER_S)


def _ended(config: Config, code: int) -> str:
    if code == EXIT_DONE:
        return FINISHED
    if code == EXIT_RESUMABLE:
        return _INTERRUPTED
    record = RecordReader(Bucket(config.bucket).child(config.run), layout.RUN).read()
    error = record.get("error") if record and code != EXIT_USAGE else None
    return f"failed: {error or f'exit code {code}'}"


def _print(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    table = Table(*(Column(name, overflow="fold") for name in ("run", *_factors(sweep), "seed", "steps", "state")))
    for outcome in outcomes:
        variant, config = outcome.variant, outcome.variant.config
        values = [str(variant.settings.get(key, "")) for key in _factors(sweep)]
        table.add_row(config.run, *values, str(config.seed), str(config.steps), outcome.state)
    Console().print(table)


def _factors(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(key for variant in sweep.variants for key in variant.settings))
