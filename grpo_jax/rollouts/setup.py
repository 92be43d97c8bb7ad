"""Loads what a worker works with before it starts."""

from dataclasses import dataclass

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.models.source import resolve_model
from grpo_jax.rollouts.rewards import Reward, load_rewards, missing_packages
from grpo_jax.rollouts.tasks import Splits, load_task
from grpo_jax.rollouts.tokenizer import Prompts, fitting, load_tokenizer, prompt_length


@dataclass(frozen=True)
class Plugins:
    """What the config names of the user's: problems by split, rewards, and prompts in the model's own tokens."""

    splits: Splits
    rewards: list[Reward]
    prompts: Prompts


def load_plugins(config: Config) -> Plugins:
    """Loads task, rewards and tokenizer, and makes the first prompt; UsageError names the key that does not fit."""
    splits, rewards = load_task(config.task), load_rewards(config.rewards)
    for missing in missing_packages(rewards):
        raise UsageError(missing)
    tokenizer = load_tokenizer(resolve_model(config.model.source))
    prompts = Prompts(config, tokenizer)
    splits = fitting(splits, config, tokenizer)
    split = config.evaluation.split
    if config.evaluation.samples and not len(splits.get(split, ())):
        raise UsageError(f"evaluation.split: {config.task.source} has no problems in a split {split!r}")
    prompt_length(splits["train"][0], config, tokenizer)
    prompts.tokens(splits["train"][0])
    return Plugins(splits, rewards, prompts)
