"""The quickstart against another system on the same work: `python -m experiments.benchmarks.quickstart [--against trl]`

Both sides run whole and in turn, on the same cores, for `--rounds` rounds: ours as `grpo-jax run` (vLLM, proxy, worker
and learner, evaluations included), the peer as one process in an environment of its own. Model, problems and their
order, rewards, batch, adapter, learning rates, clipping and sampling are those of our resolved config.

A step's time is from the end of the step before to its own end, the same on both sides; start-up and compilation are in
none, but in the whole command's time, which is given besides. With --json the last line is one JSON object: `step_s` is
the median, `first_09_s` counts from the start of the command, `ratio` is the peer's `step_s` divided by ours.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.benchmarks.peers.environment import peer_python
from experiments.benchmarks.peers.result import Result, Step, machine, natural_dtype, rewards, summary, table
from experiments.benchmarks.peers.watch import watched
from experiments.benchmarks.peers.work import Work
from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_USAGE, UsageError
from grpo_jax.models.config import resolve_targets
from grpo_jax.models.source import resolve_model
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.rollouts.tasks import load_task, messages, problem_at
from grpo_jax.versions import versions

ROOT = Path(__file__).parents[2]
SCRIPTS = {"trl": "trl_grpo", "tunix": "tunix_grpo"}
# What the peers are set up for; another objective would be compared with this one.
_OBJECTIVE = {
    "loss": "dual_clip", "advantages": "dr_grpo", "aggregation": "token_mean", "kl_coef": 0.0, "entropy_coef": 0.0,
    "zero_variance": "keep", "overlong": "keep", "overlong_cache": 0, "updates_per_step": 1,
}  # fmt: skip


def work_of(config: Config, dtype: str) -> Work:
    """The config as plain numbers, with its problems and learning rates drawn up for every step."""
    # The rates come out of an optax schedule; this process must not take an accelerator from those that it starts.
    import jax

    from grpo_jax.learner.optimizer import learning_rate

    jax.config.update("jax_platforms", "cpu")
    different = [key for key, value in _OBJECTIVE.items() if getattr(config.algorithm, key) != value]
    if different:
        key = different[0]
        raise UsageError(f"algorithm.{key}: the peers are set up for {_OBJECTIVE[key]!r} only")
    rate = learning_rate(config.optimizer, config.steps)
    train, batch = load_task(config.task)["train"], config.batch
    problems = [problem_at(train, config.seed, i)[1] for i in range(config.steps * batch.prompts_per_step)]
    clip = config.algorithm.loss_numbers
    return Work(
        model=str(resolve_model(config.model.source)),
        dtype=dtype,
        seed=config.seed,
        prompts_per_step=batch.prompts_per_step,
        group_size=batch.group_size,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        rslora=config.lora.rslora,
        targets=list(resolve_targets(config.lora.targets)),
        clip_low=clip["clip_low"],
        clip_high=clip["clip_high"],
        dual_clip=clip["cap"],
        learning_rates=[float(rate(step)) for step in range(config.steps)],
        **config.optimizer.model_dump(include={"beta1", "beta2", "eps", "weight_decay", "max_grad_norm"}),
        rewards=[reward.model_dump() for reward in config.rewards],
        reward_timeout_s=config.rollouts.reward_timeout_s,
        problems=[
            {"messages": messages(p, config.task), "prompt": p.prompt, "answer": p.answer, "metadata": p.metadata}
            for p in problems
        ],
    )


def run_ours(config: Path, overrides: list[str], folder: Path) -> Result:
    run_dir = folder / "quickstart"
    command = [sys.executable, "-m", "grpo_jax.cli", "run", str(config), *overrides, "--dir", str(run_dir)]
    run = watched(command, label="grpo_jax", log=folder / "ours.log", folder=ROOT)
    steps = [Step(record["time/finished"], record["reward"]) for record in read_metrics(run_dir)]
    return Result(run, steps, versions())


def run_peer(peer: str, python: Path, work: Work, folder: Path) -> Result:
    file = folder / "work.json"
    work.write(file)
    command = [str(python), "-m", f"{__package__}.peers.{SCRIPTS[peer]}", str(file)]
    run = watched(command, label=peer, log=folder / "peer.log", folder=ROOT)
    said = [message for line in run.lines if (message := _message(line))]
    steps = [Step(message["t"], message["reward"]) for message in said if "step" in message]
    if len(steps) != work.steps:
        raise SystemExit(f"{peer} told of {len(steps)} steps instead of {work.steps}")
    return Result(run, steps, next(message["versions"] for message in said if "versions" in message))


def _message(line: str) -> dict[str, Any] | None:
    """What a peer says is JSON; its libraries may print something else."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The quickstart against another system on the same work.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config, for both sides")
    parser.add_argument("--against", choices=SCRIPTS, default="trl")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side, each with a seed of its own")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--peer-dtype", choices=("bfloat16", "float32"), help="default: bfloat16 if hardware has it")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="default: an environment made in the cache")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    # So that a benchmark that is stopped stops what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    peer: str = arguments.against
    overrides = [*arguments.overrides, *([f"steps={arguments.steps}"] if arguments.steps else [])]
    ours, theirs = [], []
    try:
        seed = load_config(arguments.config, overrides).seed
        python, dtype = arguments.peer_python or peer_python(peer), arguments.peer_dtype or natural_dtype()
        for i in range(arguments.rounds):
            seeded = [*overrides, f"seed={seed + i}"]
            work = work_of(load_config(arguments.config, seeded), dtype)
            with tempfile.TemporaryDirectory(prefix="grpo_jax-benchmark-") as folder:
                ours.append(run_ours(arguments.config, seeded, Path(folder)))
                theirs.append(run_peer(peer, python, work, Path(folder)))
            print(f"round {i}\n  grpo_jax {rewards(ours[-1])}\n  {peer:8} {rewards(theirs[-1])}", flush=True)
    except UsageError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    a, b = summary(ours), summary(theirs)
    print(f"{table(a, b, peer)}\nmachine: {machine()}; {peer} in {dtype}")
    for name, result in (("grpo_jax", ours[-1]), (peer, theirs[-1])):
        print(f"{name}: {', '.join(f'{package} {number}' for package, number in result.versions.items())}")
    if arguments.json:
        keys = ("step_s", "reward_last5", "first_09_s", "peak_rss_gb")
        found = {key: a[key] for key in keys} | {f"{peer}_{key}": b[key] for key in keys}
        ratio = b["step_s"] / a["step_s"] if a["step_s"] and b["step_s"] else None
        print(json.dumps({**found, "ratio": ratio}))


if __name__ == "__main__":
    main()
