"""What a config means before anything is started: shapes, sizes, costs, and whether task, rewards and prompts fit."""

from dataclasses import dataclass, field
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator.vllm import max_model_len, on_cpu, vllm_flags
from grpo_jax.models.config import ModelConfig, parameter_count, projection_shapes, resolve_targets
from grpo_jax.models.source import resolve_model
from grpo_jax.rollouts.rewards import load_rewards
from grpo_jax.rollouts.tasks import Splits, load_task, prompt_tokens
from grpo_jax.rollouts.tokenizer import load_tokenizer
from grpo_jax.storage.bucket import Bucket

_MAX_PROMPTS = 20_000


@dataclass(frozen=True)
class Plan:
    """Rows of (what, value) for people, and what could not be checked."""

    rows: list[tuple[str, str]]
    unchecked: list[str] = field(default_factory=list)


def check_config(config: Config, *, offline: bool = False) -> Plan:
    """Checks all that can be checked without starting anything; UsageError names the key.

    Args:
      offline: do not fetch a model; what needs it is listed as unchecked.
    """
    Bucket(config.bucket)
    resolve_targets(config.lora.targets)
    load_rewards(config.rewards)
    splits = load_task(config.task)
    evaluation = config.evaluation
    if evaluation.samples and not splits.get(evaluation.split):
        raise UsageError(f"evaluation.split: {config.task.source} has no split {evaluation.split!r}")
    rows = _batch_rows(config)
    rows.append(("task", ", ".join(f"{len(problems)} {name}" for name, problems in splits.items())))
    try:
        directory = resolve_model(config.model.source, offline=offline)
    except UsageError as error:
        if not offline:
            raise UsageError(f"model.source: {error}") from None
        return Plan(rows, [f"model.source: {error}", "whether the prompts fit into a row"])
    model = ModelConfig.from_dir(directory)
    rows += _model_rows(config, model)
    longest = _longest_prompt(config, splits, directory)
    rows.append(
        ("longest prompt", f"{longest} tokens, + {config.sampling.max_tokens} new ≤ row of {config.batch.row_tokens}")
    )
    if config.generator.engine == "vllm" and config.generator.replicas:
        rows.append(("vLLM", " ".join(vllm_flags(config, directory, port=0, seed=config.seed, cpu=on_cpu()))))
    return Plan(rows)


def _batch_rows(config: Config) -> list[tuple[str, str]]:
    batch = config.batch
    return [
        ("run", f"{config.run} in {config.bucket}"),
        ("steps", f"{config.steps} of {batch.prompts_per_step} prompts × {batch.group_size} samples"),
        ("rows", f"{batch.row_tokens} tokens, {batch.rows_per_micro_batch} a micro-batch"),
        ("staleness", f"at most {config.max_staleness} versions; one is published every {config.sync_every} steps"),
        ("adapter slots", f"{config.slots} per generator"),
    ]


def _model_rows(config: Config, model: ModelConfig) -> list[tuple[str, str]]:
    shapes = projection_shapes(model)
    targets = resolve_targets(config.lora.targets)
    adapter = model.num_layers * sum(
        config.lora.rank * sum(shape) for module, shape in shapes.items() if module.rpartition(".")[2] in targets
    )
    parameters = parameter_count(model)
    width = 4 if config.model.dtype == "float32" else 2
    # Forward 2 N and backward through the activations 2 N; a frozen base has no weight gradient.
    flops = 4 * (parameters - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size))
    return [
        ("model", f"{model.family}, {parameters / 1e6:.1f} M parameters, {parameters * width / 1e9:.2f} GB"),
        ("adapter", f"rank {config.lora.rank}, {adapter / 1e6:.2f} M parameters, {adapter * 4 / 1e6:.1f} MB a version"),
        ("learner memory", f"{(parameters * width + adapter * 4 * 5) / 1e9:.2f} GB before activations"),
        ("FLOPs", f"{flops / 1e9:.2f} G a token, forward and backward, frozen base (4 N)"),
        ("generator context", f"{max_model_len(config)} tokens"),
    ]


def _longest_prompt(config: Config, splits: Splits, directory: Path) -> int:
    """Tokens of the longest prompt; UsageError when one does not fit into a row with its completion."""
    tokenizer = load_tokenizer(directory)
    longest, room = 0, config.batch.row_tokens - config.sampling.max_tokens
    for split, problems in splits.items():
        for problem in problems[:_MAX_PROMPTS]:
            try:
                length = len(prompt_tokens(problem, config.task, tokenizer))
            except Exception as error:
                raise UsageError(
                    f"task.source: the prompt of problem {problem.id!r} cannot be rendered: {error}"
                ) from None
            if length > room:
                raise UsageError(
                    f"batch.row_tokens: {config.batch.row_tokens} is too short for problem {problem.id!r} of the split "
                    f"{split!r}: {length} prompt tokens and {config.sampling.max_tokens} new ones (sampling.max_tokens)"
                )
            longest = max(longest, length)
    return longest
