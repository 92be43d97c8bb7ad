"""Does a run stand anything? `python -m experiments.chaos --minutes N --seed S [--engine reference|vllm] [--json]`

Runs with two replicas, one after the other, each through `grpo-jax run`. Meanwhile learner, worker, proxy, the
generators' agents and their servers get SIGKILL, or SIGSTOP with SIGCONT some seconds later, or SIGSTOP for good; the
bucket is slow, late, torn, full or denied at random; connections between worker and proxy break. Which, and when, is
drawn from the seed; what the machine makes of it is its own.

- *back*: from the signal until the part is in service again: its heartbeat says so (a replica's with a proved policy),
  and proxy and servers answer.
- *step*: from the signal until the learner has finished another step.
- *trained twice*: groups in the batches of two steps of the lineage that counts. A step that is replayed after a resume
  from its own batch record is trained once.
- *lost*: groups that stood whole in the spool, and at the end are neither trained, nor dropped with a reason, nor
  there; and samples of trained groups that the metrics do not count.
- *orphans*: processes of a run, found by its mark in their environment, alive three seconds after its end.
- *growth*: of memory and descriptors a minute, by part, over the second halves of its lives, a minute after their
  start at the earliest: a line (± its standard error) through the least that it held in each few seconds. It is judged
  where there are five minutes of them.

With --json the last line is one JSON object. Exit code 1 if anything is not as it has to be.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from experiments.chaos.growth import Growth
from experiments.chaos.inject import Blow
from experiments.chaos.ordeal import Ordeal, Outcome
from experiments.chaos.parts import PARTS

_EVERY_S = {"reference": 12.0, "vllm": 30.0}
_WINDOW_S = {"reference": 5.0, "vllm": 20.0}
_FIRST_STEPS = {"reference": 12, "vllm": 8}
_LONGEST_RUN_S, _FEWEST_STEPS = 900.0, 6
_RECOVERY_S = 60.0
_GROWTH_PER_MINUTE, _DESCRIPTORS_PER_MINUTE = 0.02, 1.0
"""The most that counts as none: of a part's own memory; and descriptors."""
_WATCHED_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="experiments.chaos", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="of blows, without the time that a run takes to start"
    )
    parser.add_argument("--steps", type=int, help="of each run (default: as many as the time allows)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=sorted(_EVERY_S), default="reference")
    parser.add_argument("--every", type=float, metavar="S", help="mean seconds between two blows")
    parser.add_argument("--dir", type=Path, help="where the runs are left (default: a folder that is deleted)")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    arguments = parser.parse_args()
    growth = Growth(_WINDOW_S[arguments.engine])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo_jax-chaos-") as name:
        outcomes = _runs(arguments, Path(arguments.dir or name).absolute(), growth)
    if arguments.dir is not None:
        (arguments.dir / "growth.json").write_text(json.dumps(growth.series()))
    result = _result(outcomes, growth, (time.monotonic() - started) / 60)
    _print(outcomes, growth, result)
    failures = _failures(result)
    for failure in failures:
        print(f"NOT AS IT HAS TO BE: {failure}")
    if arguments.json:
        print(json.dumps(result))
    return 1 if failures else 0


def _runs(arguments: argparse.Namespace, folder: Path, growth: Growth) -> list[Outcome]:
    """One after the other, until they have been in service for long enough; the last one ends in peace."""
    folder.mkdir(parents=True, exist_ok=True)
    left_s, steps, outcomes = 60 * arguments.minutes, arguments.steps or _FIRST_STEPS[arguments.engine], list[Outcome]()
    every_s = arguments.every or _EVERY_S[arguments.engine]
    while left_s > 0:
        number = len(outcomes)
        print(f"chaos-{number}: {steps} steps", flush=True)
        ordeal = Ordeal(
            folder, f"chaos-{number}", arguments.engine, steps, 1000 * arguments.seed + number, every_s, growth
        )
        outcome = ordeal.go(left_s)
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        if not outcome.verdict.final_step_ok:
            print(ordeal.log.read_text(errors="replace")[-3000:])
        left_s -= outcome.served_s or outcome.wall_s
        if not arguments.steps and outcome.served_s:
            steps = max(_FEWEST_STEPS, int(steps * min(left_s, _LONGEST_RUN_S) / outcome.served_s))
    return outcomes


def _line(outcome: Outcome) -> str:
    v = outcome.verdict
    end = "ended at its last step" if v.final_step_ok else f"DID NOT END WELL ({v.why})"
    return (
        f"{outcome.name}: {end} after {outcome.wall_s:.0f} s and {len(outcome.blows)} blows; "
        f"{v.trained_twice} trained twice, {v.lost_groups} groups and {v.lost_samples} samples lost, "
        f"{v.rewritten} rewritten, {v.on_offer} still on offer, {len(outcome.orphans)} orphans"
    )


def _result(outcomes: list[Outcome], growth: Growth, minutes: float) -> dict[str, object]:
    blows = [blow for outcome in outcomes for blow in outcome.blows]
    back = [blow.waited_s for blow in blows if blow.waited_s is not None]
    memory, descriptors = _judged_growth(growth)
    verdicts = [outcome.verdict for outcome in outcomes]
    return {
        "minutes": round(minutes, 2),
        "kills": len(blows),
        "final_step_ok": all(v.final_step_ok for v in verdicts),
        "trained_twice": sum(v.trained_twice for v in verdicts),
        "lost": sum(v.lost_groups + v.lost_samples for v in verdicts),
        "rewritten": sum(v.rewritten for v in verdicts),
        "orphans": sum(len(outcome.orphans) for outcome in outcomes),
        "recovery_s_p95": round(float(np.percentile(back, 95)), 2) if back else None,
        "rss_growth": memory,
        "descriptors_growth": descriptors,
        "files_left": sum(v.files for v in verdicts) + sum(outcome.temporary for outcome in outcomes),
        "runs": len(outcomes),
        "steps": sum(v.steps for v in verdicts),
        "samples": {
            "generated": sum(v.generated for v in verdicts),
            "trained": sum(v.trained for v in verdicts),
            "wasted": sum(v.generated - v.trained for v in verdicts) + sum(blow.under_way for blow in blows),
        },
        "duplicates": sum(v.same_prompt for v in verdicts),
        "connections_broken": sum(outcome.connections_broken for outcome in outcomes),
    }


def _judged_growth(growth: Growth) -> tuple[float | None, float | None]:
    """A minute, of the part that grows most: of its resident memory, as a part of that; of its descriptors.

    Two standard errors below the slope: what grows for certain. None as long as nobody was watched for long enough.
    """
    watched_s, means = growth.watched_s(), growth.means("rss")
    parts = [part for part, seconds in watched_s.items() if seconds >= _WATCHED_S]
    if not parts:
        return None, None
    certain = {
        what: {part: slope - 2 * error for part, (slope, error) in growth.slopes(what).items()}
        for what in ("rss", "descriptors")
    }
    memory = max(certain["rss"][part] / means[part] for part in parts)
    return round(memory, 5), round(max(certain["descriptors"][part] for part in parts), 3)


def _failures(result: dict) -> list[str]:
    p95 = result["recovery_s_p95"]
    checks = {
        "a run did not end at its last step": not result["final_step_ok"],
        f"{result['trained_twice']} groups were trained twice": result["trained_twice"] > 0,
        f"{result['lost']} groups or samples were lost": result["lost"] > 0,
        f"{result['rewritten']} committed objects were rewritten": result["rewritten"] > 0,
        f"{result['orphans']} processes outlived their run": result["orphans"] > 0,
        f"95 % of the recoveries took up to {p95} s": p95 is not None and p95 >= _RECOVERY_S,
        f"memory grows by {result['rss_growth']} of itself a minute": (result["rss_growth"] or 0) > _GROWTH_PER_MINUTE,
        f"descriptors grow by {result['descriptors_growth']} a minute": (
            (result["descriptors_growth"] or 0) > _DESCRIPTORS_PER_MINUTE
        ),
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def _print(outcomes: list[Outcome], growth: Growth, result: dict) -> None:
    by_kind: dict[tuple[str, str], list[Blow]] = defaultdict(list)
    for outcome in outcomes:
        for blow in outcome.blows:
            by_kind[blow.part, blow.action].append(blow)
    print(f"\n{'part':<12} {'blow':<6} {'n':>4}  back: median  p95  longest   step: median  p95  longest  (seconds)")
    for (part, action), blows in sorted(by_kind.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1])):
        back = _times([blow.waited_s for blow in blows])
        print(f"{part:<12} {action:<6} {len(blows):>4}  {back}   {_times([blow.step_s for blow in blows])}")
    samples, drops = result["samples"], sum((outcome.verdict.drops for outcome in outcomes), Counter[str]())
    print(
        f"\nsamples: {samples['generated']} generated, {samples['trained']} trained, {samples['wasted']} wasted "
        f"(in groups that were not trained, or under way to a worker that was killed); "
        f"groups dropped: {', '.join(f'{n} {reason}' for reason, n in sorted(drops.items())) or 'none'}"
    )
    tokens = sum(outcome.verdict.tokens_generated for outcome in outcomes)
    unwritten = sum(outcome.verdict.tokens_wasted for outcome in outcomes)
    print(f"tokens: {tokens} generated, {unwritten} of groups that were not written")
    print(
        f"prompts trained by two attempts: {result['duplicates']}; connections broken: {result['connections_broken']}; "
        f"temporary files left: {result['files_left']}"
    )
    for part, (slope, error) in growth.slopes("rss").items():
        descriptors, threads = growth.slopes("descriptors")[part], growth.slopes("threads")[part]
        held = growth.means("rss")[part] / 2**20
        print(
            f"growth of {part:<12} {slope / 2**20:+7.2f} ± {error / 2**20:.2f} MiB a minute of {held:.0f}, "
            f"{descriptors[0]:+.2f} ± {descriptors[1]:.2f} descriptors, {threads[0]:+.2f} threads "
            f"({growth.watched_s()[part]:.0f} s)"
        )
    for outcome in outcomes:
        for orphan in outcome.orphans:
            print(f"orphan of {outcome.name}: {orphan}")


def _times(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return f"{'–':>12}  {'–':>5}  {'–':>5}"
    return f"{np.median(found):>12.1f} {np.percentile(found, 95):>5.1f} {max(found):>8.1f}"


if __name__ == "__main__":
    sys.exit(main())
