"""The HTML of a report: one page without network assets. Whatever comes from a run is escaped by `_text`."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import yaml

from grpo_jax.observability import format as f
from grpo_jax.observability.curves import curves_html, gains_html
from grpo_jax.observability.page_style import CSS
from grpo_jax.observability.rundata import RunData
from grpo_jax.observability.samples import Shown
from grpo_jax.observability.scrubbing import scrubbed_config
from grpo_jax.observability.svg import timeline_svg

_LONGEST_TEXT = 1200  # characters of a prompt or completion that are shown
_STATUSES = ("running", "finished", "failed")


def render(run: RunData, summary: dict[str, Any], pictures: Sequence[bytes], samples: list[Shown]) -> str:
    """The whole page. `pictures` are PNGs: none, or the light and the dark one."""
    missing = summary["missing"]
    svg = timeline_svg(run)
    body = [
        _header(run, summary),
        _tiles(summary),
        _picture(pictures, run.name),
        _section("Timeline", svg and f'<div class="wide">{svg}</div>{_LEGEND}'),
        _section("Bottleneck", gains_html(summary["gains"])),
        _section("Curves", curves_html(run)),
        _section("Numbers", _table(None, _numbers(summary))),
        _section("Evaluations", _evaluations(run)),
        _section("Replicas", _replicas(run, summary)),
        _section("Samples", _samples(samples)),
        _section("Not there", missing and "<ul>" + "".join(f"<li>{_text(m)}</li>" for m in missing) + "</ul>"),
        _details("Config", run.config and f"<pre>{_text(_yaml(run.config))}</pre>"),
        _details("Versions", run.run.get("versions") and _table(None, sorted(run.run["versions"].items()))),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(run.name)} · grpo_jax</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
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
        f'<header><h1>{_text(run.name)}<span class="status {status}">{_text(summary["status"])}</span></h1>'
        f'<p class="facts">{" · ".join(_text(fact) for fact in facts if fact)}</p>'
        + (f'<p class="error">{_text(error)}</p>' if error else "")
        + f'<p class="verdict">{_text(summary["verdict"])}</p></header>'
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
        + "".join(f"<div><h2>{a}</h2><strong>{_text(b)}</strong><small>{_text(c)}</small></div>" for a, b, c in tiles)
        + "</section>"
    )


def _picture(pictures: Sequence[bytes], name: str) -> str:
    if not pictures:
        return ""
    light, dark = (f"data:image/png;base64,{b64encode(png).decode()}" for png in pictures)
    return (
        f'<section><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="Reward, staleness, time and mismatch of {_text(name)} by step"></picture></section>'
    )


def _numbers(s: dict[str, Any]) -> list[tuple[str, str]]:
    times, generated, wasted = s["overlap"], s["generated_tokens"], s["wasted_tokens"]
    share = f" ({f.percent(wasted / generated)})" if generated and wasted is not None else ""
    return [
        ("Steps", f"{s['steps']} of {f.number(s['total_steps'])}"),
        ("Reward, mean of the first 3 and the last 5 steps", f.arrow(s["reward_first3"], s["reward_last5"])),
        ("Held-out reward, base and trained", f.arrow(s["held_out_base"], s["held_out_trained"])),
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
        ("Prompts skipped", _counts(s["skipped"])),
        ("Groups drawn again", f.number(s["redraws"])),
        ("Failed requests, failed rewards", f"{f.number(s['request_failures'])}, {f.number(s['reward_failures'])}"),
        ("Generated tokens", f.number(generated)),
        ("Wasted tokens", f"{f.number(wasted)}{share}"),
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def _evaluations(run: RunData) -> str:
    labels = sorted({label for e in run.evaluations for label in e.get("rewards", {})})
    rows = [
        (
            e["policy"], e["split"], f.number(e.get("problems")), f.number(e.get("samples")), f.reward(e["reward"]),
            *(f.reward(e.get("rewards", {}).get(label)) for label in labels), f.number(e.get("unscorable")),
        )
        for e in run.evaluations
    ]  # fmt: skip
    return _table(("Policy", "Split", "Problems", "Samples each", "Reward", *labels, "Unscorable"), rows)


def _replicas(run: RunData, summary: dict[str, Any]) -> str:
    rows = []
    for key, r in run.replicas.items():
        engine = " ".join(str(r[k]) for k in ("engine", "engine_version", "dtype") if r.get(k))
        quarantined = summary["quarantined"][key]
        faults = [f"{policy}: {reason}" for policy, reason in quarantined.items()] + (
            [r["error"]] if r.get("error") else []
        )
        proved = sum(1 for name in r.get("proved", []) if name.startswith(f"{run.name}."))
        rows.append(
            (key, r.get("state", "?"), engine, str(proved), f.number(r.get("restarts")), "; ".join(faults) or "none")
        )
    return _table(("Replica", "State", "Engine", "Proved now", "Restarts", "Quarantined policies and errors"), rows)


def _samples(samples: list[Shown]) -> str:
    if not samples:
        return ""
    parts = ['<p class="note">The first sample of the first groups of a batch; nothing is selected.</p>']
    for title in dict.fromkeys(s.title for s in samples):
        parts.append(f"<h3>{_text(title)}</h3>")
        for s in (s for s in samples if s.title == title):
            facts = f"{s.problem} · expected {s.answer}" if s.answer is not None else s.problem
            ends = f"{f.number(s.tokens)} tokens, {s.finish_reason} · {s.policy}"
            prompt = f'<pre class="prompt">{_text(_cut(s.prompt))}</pre>' if s.prompt else ""
            parts.append(
                f'<article><p><b class="reward">{_text(f.reward(s.reward))}</b> {_text(facts)}'
                f"<span>{_text(ends)}</span></p>{prompt}<pre>{_text(_cut(s.completion))}</pre></article>"
            )
    return "".join(parts)


def _table(head: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    top = f"<thead><tr>{''.join(f'<th>{_text(h)}</th>' for h in head)}</tr></thead>" if head else ""
    cells = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{"list" if head else "pairs"}">{top}<tbody>{cells}</tbody></table></div>'


def _section(title: str, content: Any) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _details(title: str, content: Any) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(scrubbed_config(config), sort_keys=False, allow_unicode=True, width=100)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} … ({len(text):,} characters)"


def _text(value: Any) -> str:
    return escape(str(value))
