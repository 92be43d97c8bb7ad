"""`grpo-jax sample`: the base model's completions and rewards, by the same roles and code paths as a run."""

import math
import time

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_jax.config.plan import check_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed
from grpo_jax.jobs.keeper import last_line
from grpo_jax.jobs.local import Supervisor, default_environment, stop_on_signals
from grpo_jax.learner.batch import trainable
from grpo_jax.observability.printable import printable
from grpo_jax.rollouts.sample import Group
from grpo_jax.scratch import scratch
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.spool import SpoolReader

_SHOWN = 8


def sample_base(config: Config, n: int) -> int:
    """Samples at least `n` completions of v0 (the base) in whole groups and prints them with their rewards."""
    default_environment()
    groups_wanted = math.ceil(n / config.batch.group_size)
    with scratch() as folder, stop_on_signals() as stop:
        # One step of all groups under v0: admission lets them all start, the learner publishes and only holds.
        config = config.model_copy(
            update={
                "bucket": str(folder),
                "steps": 1,
                "batch": config.batch.model_copy(update={"prompts_per_step": groups_wanted}),
                "evaluation": config.evaluation.model_copy(update={"samples": 0}),
            }
        )
        check_config(config, weights=True)
        run_dir = folder / config.run
        run_dir.mkdir()
        supervisor = Supervisor(config, run_dir, learner_arguments=("--hold",))
        spool, groups = SpoolReader(Bucket(config.bucket).child(config.run)), list[Group]()
        try:
            supervisor.start()
            while len(groups) < groups_wanted:
                if stop.is_set():
                    return EXIT_RESUMABLE
                supervisor.poll()
                groups += spool.poll()
                time.sleep(0.2)
        except RunFailed as error:
            logs = "; ".join(f"{path.stem}: {last_line(path)}" for path in sorted(supervisor.logs.glob("*.log")))
            raise RunFailed(f"{error} ({logs})") from None
        finally:
            supervisor.stop(stop.at_once)
        _print(groups)
    return EXIT_DONE


def _print(groups: list[Group]) -> None:
    table = Table("problem", "completion", "reward", "finish")
    for group in groups[:_SHOWN]:
        for sample in group.samples[:2]:
            reward = "unscorable" if sample.reward is None else f"{sample.reward:g}"
            cells = (group.provenance.problem_id, sample.text, reward, sample.finish_reason)
            table.add_row(*(Text(printable(cell)) for cell in cells))
    Console().print(table)
    rewards = [group.rewards[trainable(group)] for group in groups]
    mixed = float(np.mean([r.std() > 0 for r in rewards]))
    scored = np.concatenate(rewards)
    lengths = [len(sample.tokens) for group in groups for sample in group.samples]
    print(
        f"{len(scored)} completions of {len(groups)} prompts: mean reward {scored.mean():.3f}, {mixed:.0%} of the "
        f"groups are mixed (only those teach anything), {np.mean(lengths):.1f} tokens a completion"
    )
