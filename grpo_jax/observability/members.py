"""The runs that are compared: of a sweep, whether they have begun or not, or any others."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.config.compare import differing_keys
from grpo_jax.config.sweep import Sweep
from grpo_jax.errors import UsageError
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import load_run
from grpo_jax.storage.bucket import Bucket

INDEX = "sweep.json"
"""In the folder of a sweep: which runs it consists of, whether they have begun or not."""
NOT_STARTED = "not started"


@dataclass(frozen=True)
class Member:
    """One run. `settings`: the factors by which the runs compared differ, but for the seed.

    `status` is that of the run's record, or NOT_STARTED; `note` says more of a run that is not finished.
    """

    run: str
    settings: dict[str, Any]
    seed: int | None
    status: str
    note: str
    metrics: list[Metrics] = field(repr=False)
    held_out: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean reward) of the steps that have one."""
        return [(r["step"], r["reward"]) for r in self.metrics if "reward" in r]


def write_index(folder: Bucket, sweep: Sweep) -> None:
    """Records which runs the sweep in this folder consists of: those that it has now, after those of earlier times.

    Seeds and values may be added one after the other; what was run before belongs to the comparison all the same, if it
    has the same factors.
    """
    runs: list[dict[str, Any]] = [
        {"run": v.config.run, "settings": _plain(v.settings), "seed": v.config.seed, "steps": v.config.steps}
        for v in sweep.variants
    ]
    now, factors = {run["run"] for run in runs}, {key for run in runs for key in run["settings"]}
    earlier = []
    with contextlib.suppress(
        ValueError, KeyError, TypeError, AttributeError, RecursionError
    ):  # no record: it becomes one
        for run in json.loads(folder.read_or_none(INDEX) or b'{"runs": []}')["runs"]:
            kept = {"run": run["run"], "settings": dict(run["settings"]), "seed": run["seed"], "steps": run["steps"]}
            if RUN_NAME.fullmatch(kept["run"]) and kept["run"] not in now and kept["settings"].keys() == factors:
                earlier.append({**kept, "earlier": True})
    folder.replace(INDEX, json.dumps({"sweep": sweep.name, "runs": [*earlier, *runs]}, indent=1).encode())


def members_of_sweep(folder: Bucket) -> tuple[str, list[Member]] | None:
    """The name and the runs of the sweep in this folder; None if there is no sweep in it."""
    try:
        data = folder.read_or_none(INDEX)
        if data is None:
            return None
        index = json.loads(data)
        if not all(RUN_NAME.fullmatch(r["run"]) for r in index["runs"]):
            raise ValueError("a run without a name")
        members = [_member(folder.child(r["run"]), dict(r["settings"]), r["seed"], r["steps"]) for r in index["runs"]]
        gone = [bool(r.get("earlier")) and m.status == NOT_STARTED for r, m in zip(index["runs"], members, strict=True)]
        return str(index["sweep"]), [m for m, is_gone in zip(members, gone, strict=True) if not is_gone]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{folder.address}/{INDEX} is no record of a sweep") from None


def members_of_runs(runs: Sequence[Bucket]) -> list[Member]:
    """Runs of which nothing else is known: their settings are the keys in which their configs differ.

    UsageError for a prefix in which no run has left anything.
    """
    loaded = [load_run(None, run, groups=False) for run in runs]
    for run, data in zip(runs, loaded, strict=True):
        if not (data.run or data.metrics):
            raise UsageError(f"{run.address}: no run has left anything here")
    keys = {key for data in loaded for key in differing_keys(loaded[0].config, data.config)} - {"seed"}
    if any(key.startswith("staleness") for key in keys):
        keys.discard("max_staleness")  # it follows
    if "algorithm.preset" in keys and all(data.config_value("algorithm.preset", None) for data in loaded):
        keys = {key for key in keys if not key.startswith("algorithm.")} | {"algorithm.preset"}
    return [
        _member(run, {key: data.config_value(key, None) for key in sorted(keys)}, data.config_value("seed", None), None)
        for run, data in zip(runs, loaded, strict=True)
    ]


def _member(run: Bucket, settings: dict[str, Any], seed: int | None, steps: int | None) -> Member:
    data = load_run(run.local_path() if run.is_local else None, run, groups=False)
    total = data.config_value("steps", steps)
    status = str(data.run.get("status") or ("unknown" if data.metrics else NOT_STARTED))
    done = f"{len(data.metrics)} of {total} steps"
    note = f"{data.run['error']} ({done})" if data.run.get("error") else done
    trained = data.held_out[1]
    held_out = None if trained is None else float(trained["reward"])
    return Member(data.name, settings, seed, status, note, data.metrics, held_out)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings, default=str))
