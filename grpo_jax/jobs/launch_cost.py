"""What jobs cost, by the prices that the config gives."""

from collections.abc import Iterable, Mapping

from grpo_jax.config.schema import Config
from grpo_jax.jobs.hub_jobs import Job


def hourly(config: Config) -> float | None:
    """USD an hour of all jobs of a run; None if a flavor has no price."""
    jobs = config.jobs
    flavors = [jobs.learner.flavor, *[jobs.generator.flavor] * config.generator.replicas]
    prices = [jobs.prices.get(flavor) for flavor in flavors]
    return None if None in prices else sum(price for price in prices if price is not None)


def so_far(jobs: Iterable[Job], prices: Mapping[str, float]) -> float | None:
    """USD of all that these jobs have run; None if the flavor of one that has run has no price."""
    total = 0.0
    for job in jobs:
        if job.running_s and job.flavor not in prices:
            return None
        total += prices.get(job.flavor, 0.0) * job.running_s / 3600
    return total


def usd(amount: float | None) -> str:
    return "unknown (jobs.prices has not all flavors)" if amount is None else f"{amount:.2f} USD"
