"""The HTML of a report: one page without network assets. Whatever comes from a run goes through `html.text`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import yaml

from grpo_jax.observability import format as f
from grpo_jax.observability.curves import curves_html, gains_html
from grpo_jax.observability.evaluations import evaluation_rows
from grpo_jax.observability.html import bullets, details, document, picture, section, table, text
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.samples import Shown
from grpo_jax.observability.scrubbing import scrubbed_config
from grpo_jax.observability.svg import timeline_svg

_LONGEST_TEXT = 1200  # characters of a prompt or completion that are shown
_STATUSES = ("running", "finished", "failed")


def render(run: RunData, summary: dict[str, Any], pictures: Sequence[bytes], samples: list[Shown]) -> str:
    """The whole page. `pictures` are PNGs: none, or the light and the dark one."""
    svg = timeline_svg(run)
    alt = f"Reward, staleness, time and mismatch of {run.name} by step"
    return document(
        run.name,
        [
            _header(run, summary),
            _tiles(summary),
            picture(pictures, alt),
            section("Timeline", svg and f'<div class="wide">{svg}</div>{_LEGEND}'),
            section("Bottleneck", gains_html(summary["gains"])),
            section("Curves", curves_html(run)),
            section("Numbers", table(None, _numbers(summary))),
            section("Evaluations", _evaluations(run)),
            section("Replicas", _replicas(run, summary)),
            section("Groups in quarantine", _quarantined_groups(run)),
            section("Samples", _samples(samples)),
            section("Not there", bullets(summary["missing"])),
            details("Config", run.config and f"<pre>{text(_yaml(run.config))}</pre>"),
            details("Versions", run.run.get("versions") and table(None, sorted(run.run["versions"].items()))),
        ],
    )


_LEGEND = (
    '<p class="note">Filled above: the learner from a complete batch to the end of its step; blank: it waits. '
    "Filled below: groups in flight on a replica. Triangles: a new policy goes to the publisher.</p>"
)


def _header(run: RunData, summary: dict[str, Any]) -> str:
    status = summary["status"] if summary["status"] in _STATUSES else "unknown"
    model = run.config_value("model.source", None)
    facts = [
        model and f"{model}, LoRA rank {run.config_value('lora.rank', '?')}",
        run.config_value("task.source", None),
        _batch(run),
        _when(run.run),
    ]
    error = summary["error"]
    return (
        f'<header><h1>{text(run.name)}<span class="status {status}">{text(summary["status"])}</span></h1>'
        f'<p class="facts">{" · ".join(text(fact) for fact in facts if fact)}</p>'
        + (f'<p class="error">{text(error)}</p>' if error else "")
        + f'<p class="verdict">{text(summary["verdict"])}</p></header>'
    )


def _batch(run: RunData) -> str | None:
    prompts, group = (run.config_value(f"batch.{k}", None) for k in ("prompts_per_step", "group_size"))
    return f"{prompts} prompts × {group} samples a step" if prompts and group else None


def _when(record: dict[str, Any]) -> str | None:
    created, finished = record.get("created_at"), record.get("finished_at")
    if created is None:
        return None
    started = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{started}, {f.duration(finished - created)}" if finished else started


def _tiles(s: dict[str, Any]) -> str:
    tiles = [
        ("Held-out reward", f.arrow(s["held_out_base"], s["held_out_trained"]), "base → trained"),
        ("Training reward", f.arrow(s["reward_first3"], s["reward_last5"]), "first 3 → last 5 steps"),
        ("Steps", f"{s['steps']}", f"of {f.number(s['total_steps'])}"),
        ("Time per step", f.duration(s["step_s_median"]), "median"),
        ("Overlap", f.percent(s["overlap_fraction"]), "sampling while training"),
        ("Staleness", f.number(s["staleness_max"]), "versions, at most"),
    ]
    return (
        '<section class="tiles">'
        + "".join(f"<div><h2>{a}</h2><strong>{text(b)}</strong><small>{text(c)}</small></div>" for a, b, c in tiles)
        + "</section>"
    )


def _numbers(s: dict[str, Any]) -> list[tuple[str, str]]:
    times, generated, wasted = s["overlap"], s["generated_tokens"], s["wasted_tokens"]
    share = f" ({f.percent(wasted / generated)})" if generated and wasted is not None else ""
    return [
        ("Steps", f"{s['steps']} of {f.number(s['total_steps'])}"),
        ("Reward, mean of the first 3 and the last 5 steps", f.arrow(s["reward_first3"], s["reward_last5"])),
        ("Held-out reward, base and trained", f.arrow(s["held_out_base"], s["held_out_trained"])),
        *((f"Held-out pass@{k}, base and trained", f.arrow(*both)) for k, both in s["held_out_pass_at"].items()),
        ("Time per step, median", f.duration(s["step_s_median"])),
        ("Forward and backward per step, median", f.duration(s["fwd_bwd_s_median"])),
        (
            "Sampling and training at the same time",
            f"{f.duration(times['both_s'])} of {f.duration(times['span_s'])} ({f.percent(times['fraction'])})",
        ),
        ("Learner busy", f.duration(times["learner_busy_s"])),
        ("Generators busy", f.duration(times["generation_busy_s"])),
        ("Longest pause of all generators", f.duration(times["largest_generation_gap_s"])),
        ("Learner waiting for rollouts", f.percent(s["learner_wait_share"])),
        ("Rollouts held back by the limit on staleness", f.percent(s["backpressure_share"])),
        ("Staleness in versions, mean and max", f"{f.number(s['staleness_mean'])}, {f.number(s['staleness_max'])}"),
        (
            "Publishing stall per step, p50 and p99",
            f"{f.duration(s['publish_stall_s_p50'])}, {f.duration(s['publish_stall_s_p99'])}",
        ),
        ("From publish to first answer, p50", f.duration(s["time_to_serve_s_p50"])),
        (
            "|log π − log μ|, median step's p50 and p99, and max",
            ", ".join(f.number(s[f"mismatch_{k}"]) for k in ("p50", "p99", "max")),
        ),
        ("Groups in the spool", f.number(s["groups"])),
        ("Groups dropped", _counts(s["dropped"])),
        ("Groups in quarantine", f.number(s["quarantined_groups"])),
        ("Prompts skipped", _counts(s["skipped"])),
        ("Groups drawn again", f.number(s["redraws"])),
        ("Failed requests, failed rewards", f"{f.number(s['request_failures'])}, {f.number(s['reward_failures'])}"),
        ("Generated tokens", f.number(generated)),
        ("Wasted tokens", f"{f.number(wasted)}{share}"),
        ("Starts of the learner, of the worker", f"{f.number(s['learner_starts'])}, {f.number(s['worker_starts'])}"),
        ("Restarts of replicas", f.number(s["replica_restarts"])),
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def _evaluations(run: RunData) -> str:
    return table(*evaluation_rows(run.evaluations, run.config_value("sync_every", 1)))


def _replicas(run: RunData, summary: dict[str, Any]) -> str:
    rows = []
    for key, r in run.replicas.items():
        engine = " ".join(str(r[k]) for k in ("engine", "engine_version", "dtype") if r.get(k))
        faults = [f"{policy}: {reason}" for policy, reason in summary["quarantined"][key].items()]
        faults += [r["error"]] if r.get("error") else []
        proved = sum(1 for name in r.get("proved", []) if name.startswith(f"{run.name}."))
        counts = (f.number(r.get(k)) for k in ("proofs", "refused_total", "restarts"))
        rows.append((key, r.get("state", "?"), engine, str(proved), *counts, "; ".join(faults) or "none"))
    head = ("Replica", "State", "Engine", "Proved now", "Proofs", "Refused", "Restarts")
    return table((*head, "Quarantined policies and errors"), rows)


def _quarantined_groups(run: RunData) -> str:
    found = run.learner.get("quarantined") or []
    more = run.learner.get("quarantined_total", 0) - len(found)
    note = f'<p class="note">And {more} before these.</p>' if more > 0 else ""
    return table(("Object in the spool", "Why it is not trained"), found) + note


def _samples(samples: list[Shown]) -> str:
    if not samples:
        return ""
    out = ['<p class="note">The first sample of the first groups of a batch; nothing is selected.</p>']
    for title in dict.fromkeys(s.title for s in samples):
        out.append(f"<h3>{text(title)}</h3>")
        for s in (s for s in samples if s.title == title):
            facts = f"{s.problem} · expected {s.answer}" if s.answer is not None else s.problem
            ends = f"{f.number(s.tokens)} tokens, {s.finish_reason} · {s.policy}"
            prompt = f'<pre class="prompt">{text(_cut(s.prompt))}</pre>' if s.prompt else ""
            parts = ", ".join(f"{label} {f.reward(value)}" for label, value in s.parts.items())
            of_parts = f"<small>{text(parts)}</small>" if len(s.parts) > 1 else ""
            out.append(
                f'<article><p><b class="reward">{text(f.reward(s.reward))}</b>{of_parts} {text(facts)}'
                f"<span>{text(ends)}</span></p>{prompt}<pre>{text(_cut(s.completion))}</pre></article>"
            )
    return "".join(out)


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(scrubbed_config(config), sort_keys=False, allow_unicode=True, width=100)


def _cut(whole: str) -> str:
    return whole if len(whole) <= _LONGEST_TEXT else f"{whole[:_LONGEST_TEXT]} … ({len(whole):,} characters)"
