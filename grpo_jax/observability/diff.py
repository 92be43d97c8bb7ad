"""In what two runs differ: config, versions, metrics at the end, and the step at which they part (`grpo-jax diff`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.observability import format as f
from grpo_jax.observability.flow import mean_of
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import RunData, load_run
from grpo_jax.observability.scrubbing import scrubbed_config
from grpo_jax.storage.bucket import Bucket

_LAST = 5
_WIDEST = 48
# What depends on the clock and on the neighbours; two equal runs differ in it at their first step.
_OF_THE_CLOCK = ("perf/", "time/", "rollout/", "cost/", "fleet/", "policy/", "logging/", "sample/")
_ABSENT = "(none)"


def compare_runs(first: Bucket, second: Bucket) -> str:
    """A text for the terminal. UsageError if one of the two has left nothing."""
    a, b = (_load(bucket) for bucket in (first, second))
    names = (a.name, b.name) if a.name != b.name else (first.address, second.address)
    sections = [
        ("config", _differing(_flat(scrubbed_config(a.config)), _flat(scrubbed_config(b.config)))),
        ("versions", _differing(_versions(a), _versions(b))),
        (f"metrics, mean of the last {_LAST} steps", _last_metrics(a, b)),
    ]
    parts = [_table((title, *names), rows) if rows else f"{title}: no difference" for title, rows in sections]
    return "\n\n".join([*parts, _parting(a.metrics, b.metrics)])


def _load(bucket: Bucket) -> RunData:
    run = load_run(bucket.local_path() if bucket.is_local else None, bucket, groups=False)
    if not (run.run or run.metrics):
        raise UsageError(f"{bucket.address}: no run has left anything here")
    return run


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, ...]]:
    keys = [key for key in dict.fromkeys((*a, *b)) if a.get(key, _ABSENT) != b.get(key, _ABSENT)]
    return [(key, _told(a.get(key, _ABSENT)), _told(b.get(key, _ABSENT))) for key in keys]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """{dotted key: value}; where a run lies is no difference."""
    if isinstance(node, dict) and node:
        found: dict[str, Any] = {}
        for key, value in node.items():
            found |= _flat(value, f"{path}.{key}" if path else key)
        return found
    return {} if path in ("run", "bucket", "fleet.name") else {path: node}


def _versions(run: RunData) -> dict[str, Any]:
    digest = (run.run.get("base") or {}).get("digest")
    return {**(run.run.get("versions") or {}), **({"base weights": digest[:12]} if digest else {})}


def _last_metrics(a: RunData, b: RunData) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("steps", str(_steps(a)), str(_steps(b)))]
    for row, e, g in zip(("held-out reward, base", "held-out reward, trained"), a.held_out, b.held_out, strict=True):
        if e is not None or g is not None:
            rows.append((row, *(f.reward(None if x is None else x["reward"]) for x in (e, g))))
    last = [run.metrics[-_LAST:] for run in (a, b)]
    keys = dict.fromkeys(key for records in last for r in records for key, v in r.items() if _is_number(v))
    for key in sorted(keys, key=lambda k: (k.startswith(_OF_THE_CLOCK), "/" in k, k)):
        if key != "step" and not key.startswith("time/"):
            rows.append((key, *(f.number(mean_of((r for r in records if key in r), key)) for records in last)))
    return rows


def _parting(a: Sequence[Metrics], b: Sequence[Metrics]) -> str:
    """The first step at which what was learned differs. What the clock decides is left out."""
    others = {r["step"]: r for r in b}
    common = [(r, others[r["step"]]) for r in a if r["step"] in others]
    if not common:
        return "the runs have no step in common"
    for mine, theirs in common:
        keys = [k for k in mine.keys() & theirs.keys() if not k.startswith(_OF_THE_CLOCK) and mine[k] != theirs[k]]
        if keys:
            told = ", ".join(f"{key} {f.number(mine[key])} and {f.number(theirs[key])}" for key in sorted(keys)[:4])
            more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            return f"the metrics part at step {mine['step']}: {told}{more}"
    return f"the metrics of all {len(common)} common steps are equal"


def _steps(run: RunData) -> int:
    return run.metrics[-1]["step"] + 1 if run.metrics else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _told(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
