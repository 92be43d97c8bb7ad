"""What `launch`, `status` and `--dry-run` print."""

import sys
from collections.abc import Mapping, Sequence

from grpo_jax.config.schema import Config
from grpo_jax.jobs.hub_jobs import Job
from grpo_jax.jobs.launch_cost import hourly, so_far, usd
from grpo_jax.jobs.launch_spec import LEARNER, Launch, Spec, Target, launch_folder, slots, spec_of
from grpo_jax.jobs.launch_start import replica_id
from grpo_jax.jobs.launch_view import RunRecords, replicas, rewards
from grpo_jax.jobs.preflight import Findings
from grpo_jax.observability.logs import mask_secrets
from grpo_jax.storage.bucket import Bucket


def say(text: str) -> None:
    print(mask_secrets(text), flush=True)


def complain(text: str) -> None:
    print(f"grpo-jax: {mask_secrets(text)}", file=sys.stderr, flush=True)


def ask_what_to_do() -> str:
    """`cancel` or `detach`; a second Ctrl-C means cancel."""
    try:
        while True:
            answer = input("\ncancel the jobs, or leave them running (detach)? [c/d] ").strip().lower()
            if answer and answer[0] in "cd":
                return {"c": "cancel", "d": "detach"}[answer[0]]
    except KeyboardInterrupt:
        return "cancel"
    except EOFError:
        return "detach"


def shown(found: Findings) -> bool:
    """Prints what was found; whether nothing is in the way."""
    for note in found.notes:
        say(f"not checked: {note}")
    for problem in found.problems:
        complain(problem)
    return not found.problems


def print_plan(target: Target, environ: Mapping[str, str]) -> None:
    """What a launch would start: each job, and what all of them cost an hour."""
    config, *others = target.configs
    package = "grpo_jax.whl" if config.jobs.package == "wheel" else config.jobs.package
    files = f"{launch_folder()}/(digest)" if target.is_sweep else f"{config.run}/{launch_folder()}/(digest)"
    pretended = Launch("(each launch its own)", files, package, target.labels)
    for slot in slots(config.generator.replicas):
        _print_spec(spec_of(config, slot, pretended, environ), config)
    if target.is_sweep:
        say(f"the generators serve {', '.join(c.run for c in target.configs)}, one after the other")
        say(f"when the learner of one has ended, that of the next is started: {len(others)} more like this one")
    say(f"all jobs, an hour: {usd(hourly(config))}")


def print_jobs(jobs: Sequence[Job], prices: Mapping[str, float]) -> None:
    rows = [("job", "slot", "stage", "flavor", "time", "cost")]
    for job in jobs:
        minutes, seconds = divmod(round(job.running_s), 60)
        cost = usd(prices[job.flavor] * job.running_s / 3600) if job.flavor in prices else ""
        rows.append((job.id, job.slot, job.stage, job.flavor, f"{minutes}:{seconds:02d}", cost))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    say(f"cost so far {usd(so_far(jobs, prices))}")


def print_runs(bucket: Bucket, configs: Sequence[Config], jobs: Sequence[Job]) -> None:
    """The replicas that they share, and where each run is."""
    # Nobody removes the last word of a machine that was taken away.
    gone = {replica_id(job.slot, job.id) for job in jobs if not job.is_live}
    for record in replicas(bucket, configs[0].fleet_name):
        if record["id"] in gone:
            continue
        error = f", {record['error']}" if record.get("error") else ""
        say(f"replica {record['id']}: {record['state']}, {len(record.get('proved', []))} policies proved{error}")
    for config in configs:
        _print_run(bucket.child(config.run), config)


def _print_run(run: Bucket, config: Config) -> None:
    view = RunRecords(run).view()
    steps, _, last = rewards(run)
    reward = "" if last is None else f", reward {last:.2f} (mean of the last {min(steps, 5)} steps)"
    why = f" ({view.error})" if view.error else ""
    say(f"run {config.run}: {view.status or 'not begun'}{why}, step {view.step}/{config.steps}{reward}")


def _print_spec(spec: Spec, config: Config) -> None:
    price = config.jobs.prices.get(spec.flavor)
    at = spec.mount
    network = f"group {spec.network_group}" if spec.network_group else ""
    network += f" as {', '.join(spec.network_aliases)}" if spec.network_aliases else ""
    rows = {
        "image": spec.image,
        "flavor": f"{spec.flavor}, {usd(price)} an hour" if price is not None else f"{spec.flavor}, no price given",
        "time limit": f"{spec.timeout}, {spec.attempts} {'attempt' if spec.attempts == 1 else 'attempts'}",
        "mount": "none" if at is None else f"hf://buckets/{'/'.join(filter(None, [at.id, at.prefix]))} at /bucket",
        "ports": ", ".join(map(str, spec.expose)) or "none",
        **({"network": network} if network else {}),
        "environment": ", ".join(f"{key}={value!r}" for key, value in spec.env.items()),
        "secrets": ", ".join(spec.secrets),
        "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()),
        "command": f"{' '.join(spec.command[:2])} (runs start.py from the bucket: pip, then `grpo-jax {_role(spec)}`)",
    }
    say(spec.slot)
    for key, value in rows.items():
        say(f"  {key:<11}  {value}")


def _role(spec: Spec) -> str:
    return "trainer" if spec.role == LEARNER else "generator"
