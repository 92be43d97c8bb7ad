"""The state of a fleet, as JSON for `/fleet` and as a page for people."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from grpo_jax.proxy.routing import Router
from grpo_jax.proxy.usage import MAX_POLICIES

_REFRESH_S = 2
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222 }
table { border-collapse: collapse; margin-bottom: 1.5em }
th, td { text-align: left; vertical-align: top; padding: .2em .8em; border-bottom: 1px solid #ddd }
th { color: #666; font-weight: normal }
.ready { color: #170 } .starting, .draining { color: #850 } .silent, .bad { color: #a00 }
"""


def describe(table: dict[str, Any], router: Router) -> dict[str, Any]:
    """`table` is what the fleet's observers know; added are each replica's work, the policies and the hit rates."""
    total = sum(replica.samples_total for replica in router.replicas.values())
    for row in table["replicas"]:
        replica = router.replicas.get(row["id"])
        samples = replica.samples_total if replica is not None else 0
        row["newest"] = replica.newest if replica is not None else None
        row["samples"], row["share"] = samples, _ratio(samples, total)
    usage = router.usage.total
    return {
        **table,
        "policies": _policies(router),
        "samples": usage.samples,
        "hit_rate": usage.hit_rate,
        "best_hit_rate": usage.best_hit_rate,
    }


def _policies(router: Router) -> list[dict[str, Any]]:
    """Those that are served, newest first, then others that were used lately."""
    served, used = router.policies(), router.usage.policies()
    names = list(dict.fromkeys([*list(served)[:MAX_POLICIES], *used]))
    total = sum(usage.samples for usage in used.values())
    rows = []
    for name in names:
        usage = used.get(name)
        rows.append(
            {
                "policy": name,
                "replicas": sum(replica.ready and name in replica.proved for replica in router.replicas.values()),
                "samples": usage.samples if usage else 0,
                "share": _ratio(usage.samples if usage else 0, total),
                "hit_rate": usage.hit_rate if usage else None,
                "best_hit_rate": usage.best_hit_rate if usage else None,
            }
        )
    return rows


def render(described: dict[str, Any], requests_in_flight: int) -> str:
    """A page without scripts or anything that would have to be loaded. Everything that others wrote is escaped."""
    replicas = [
        (
            row["id"], row["state"], _blocked(row), row["newest"], len(row["proved"]), row["in_flight"], row["samples"],
            _percent(row["share"]), row["strikes"], _seconds(row["heartbeat_age_s"]), _troubles(row),
        )
        for row in described["replicas"]
    ]  # fmt: skip
    policies = [
        (row["policy"], row["replicas"], row["samples"], _percent(row["share"]), _hits(row))
        for row in described["policies"]
    ]
    run = escape(str(described["run"]))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{_REFRESH_S}">
<title>{run}</title><style>{_STYLE}</style></head><body>
<h1>{run}</h1>
<p>fleet {escape(str(described["fleet"]))}: {sum(row["ready"] for row in described["replicas"])} of {len(replicas)}
replicas ready, {requests_in_flight} requests under way, {described["samples"]} samples answered,
prefix hits {_hits(described)}</p>
{_table(_REPLICA_HEADINGS, replicas)}
{_table(("policy", "proved on", "samples", "share", "prefix hits (best possible)"), policies)}
</body></html>
"""


_REPLICA_HEADINGS = (
    "replica", "state", "left alone", "newest proved", "proved", "in flight", "samples", "share", "strikes",
    "heartbeat", "troubles",
)  # fmt: skip


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    style = f' class="{text}"' if text in ("ready", "starting", "draining", "silent") else ""
    return f"<td{style}>{escape(text)}</td>"


def _troubles(row: dict[str, Any]) -> str:
    reasons = [f"{name} quarantined: {reason}" for name, reason in row["quarantined"].items()]
    errors = [str(error) for error in (row["last_error"], row.get("error")) if error]
    return "; ".join(reasons + errors)


def _blocked(row: dict[str, Any]) -> str | None:
    return _seconds(row["blocked_s"]) if row["blocked_s"] else None


def _hits(row: dict[str, Any]) -> str:
    return f"{_percent(row['hit_rate'])} ({_percent(row['best_hit_rate'])})"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} s"


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
