"""What a config means before anything is started: shapes, sizes, costs, and whether task, rewards and prompts fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_jax.algorithms.registry import LOSSES, bound_loss
from grpo_jax.config.schema import Algorithm, Config, Task
from grpo_jax.errors import UsageError
from grpo_jax.generator.vllm import max_model_len, on_cpu, vllm_flags
from grpo_jax.models.config import LoraConfig, ModelConfig, adapter_count, parameter_count, resolve_targets
from grpo_jax.models.flops import flops_per_token
from grpo_jax.models.source import resolve_config, resolve_model, shipped_config
from grpo_jax.rollouts.rewards import load_rewards
from grpo_jax.rollouts.task_lint import lint_task
from grpo_jax.rollouts.tasks import NotHere, Splits, load_task
from grpo_jax.rollouts.tokenizer import load_tokenizer, prompt_length, require_chat_template
from grpo_jax.storage.bucket import Bucket

_MAX_PROMPTS = 20_000


@dataclass(frozen=True)
class Plan:
    """Rows of (what, value) for people, what could not be checked, and the model, if anything says what it is."""

    rows: list[tuple[str, str]]
    unchecked: list[str] = field(default_factory=list)
    model: ModelConfig | None = None


def check_config(config: Config, *, offline: bool = False, weights: bool = False, lint: bool = False) -> Plan:
    """Checks all that can be checked without starting anything; UsageError names the key.

    Of a model on the Hub only config and tokenizer are fetched. Where they cannot be had, what `configs/models` says of
    the model is used, and what needs the tokenizer is listed as unchecked.

    Args:
      offline: fetch nothing; a task's data and a model of which nothing is known here are unchecked, too.
      weights: fetch the whole model, for what is about to run; nothing takes its place.
      lint: look at every problem of the task (`task_lint`); its warnings become rows, its errors are raised.
    """
    Bucket(config.bucket)
    resolve_targets(config.lora.targets)
    load_rewards(config.rewards)
    unchecked = _check_loss(config.algorithm)
    rows = _batch_rows(config) + _objective_rows(config.algorithm)
    splits: Splits = {}
    try:
        splits = load_task(config.task, offline=offline)
        rows.append(("task", ", ".join(f"{len(problems)} {name}" for name, problems in splits.items())))
    except NotHere as error:
        unchecked.append(f"the problems: {error}")
    evaluation = config.evaluation
    if splits and evaluation.samples and not splits.get(evaluation.split):
        raise UsageError(f"evaluation.split: {config.task.source} has no split {evaluation.split!r}")
    source = config.model.source
    directory: Path | None = None
    try:
        directory = resolve_model(source) if weights else resolve_config(source, offline=offline)
        model = ModelConfig.from_dir(directory)
    except UsageError as error:
        known = None if weights or directory is not None else shipped_config(source)
        if known is None and not offline:
            nowhere = "" if weights or directory is not None else _nowhere(source)
            raise UsageError(f"model.source: {error}{nowhere}") from None
        unchecked += [f"model.source: {error}", "whether the prompts fit into a row"]
        if known is None:
            rows += _findings(config, splits, None) if lint else []
            return Plan(rows, [*unchecked, f"all that depends on the model's size{_nowhere(source)}"])
        model = known
    rows += _model_rows(config, model, "its own config" if directory else "configs/models, not its own config")
    if lint:
        rows += _findings(config, splits, directory)
    if directory is not None and splits:
        rows += _prompt_rows(config, splits, directory)
    if config.generator.engine == "vllm" and config.generator.replicas:
        flags = vllm_flags(config, directory or Path(source), port=0, seed=config.seed, cpu=on_cpu())
        rows.append(("vLLM", " ".join(flags)))
    return Plan(rows, unchecked, model)


def _findings(config: Config, splits: Splits, directory: Path | None) -> list[tuple[str, str]]:
    """Warnings of the lint as rows; UsageError with all of them, where one is an error.

    Args:
      directory: the model's, for its tokenizer.
    """
    found = lint_task(config, None if directory is None else _tokenizer(directory, config.task), splits)
    said = [f"{finding.count} {finding.what}, for example {finding.example}" for finding in found]
    if any(finding.is_error for finding in found):
        kinds = ["task" if finding.is_error else "warning" for finding in found]
        raise UsageError("\n".join(f"{kind}: {text}" for kind, text in zip(kinds, said, strict=True)))
    return [("warning", text) for text in said]


def _nowhere(source: str) -> str:
    return f"; nor is there a configs/models/{source.replace('/', '--')}.json beside this package"


def _check_loss(algorithm: Algorithm) -> list[str]:
    """Imports a loss of the user's own and checks its numbers; returns what could not be checked."""
    if algorithm.loss in LOSSES:
        return []
    if find_spec("jax") is None:
        return [f"algorithm.loss: {algorithm.loss}, as jax is not installed here"]
    bound_loss(algorithm.loss, algorithm.loss_numbers)
    return []


def _batch_rows(config: Config) -> list[tuple[str, str]]:
    batch = config.batch
    lag, k = "at most", config.max_staleness
    if config.staleness is not None:
        lag = "exactly"
    rows = [
        ("run", f"{config.run} in {config.bucket}"),
        ("steps", f"{config.steps} of {batch.prompts_per_step} prompts × {batch.group_size} samples"),
        ("rows", f"{batch.row_tokens} tokens, {batch.rows_per_micro_batch} a micro-batch"),
        ("staleness", f"{lag} {k} versions; one is published every {config.sync_every} steps"),
        ("adapter slots", f"{config.slots} per generator"),
    ]
    if config.staleness is not None and config.steps < 5 * (k + 1) * config.sync_every:
        few = f"steps: the first {(k + 1) * config.sync_every} of {config.steps} all train on the base's samples"
        rows.append(("warning", f"{few}; {5 * (k + 1) * config.sync_every} or more would say something about this lag"))
    return rows


def _objective_rows(algorithm: Algorithm) -> list[tuple[str, str]]:
    parts = [f"{_called(algorithm.loss, algorithm.loss_numbers)} against {_ANCHORS[algorithm.anchor]}"]
    parts += [f"times {_called(name, numbers)}" for name, numbers in algorithm.factors.items()]
    parts += [f"advantages {algorithm.advantages}", f"aggregation {algorithm.aggregation}"]
    if algorithm.kl_coef:
        parts.append(f"KL to the base {algorithm.kl_coef:g} × {algorithm.kl_estimator}")
    if algorithm.entropy_coef:
        parts.append(f"entropy bonus {algorithm.entropy_coef:g}")
    rows = [
        ("objective", ", ".join(parts)),
        (
            "updates a step",
            f"{algorithm.updates_per_step} (passes {algorithm.num_iterations} × minibatches {algorithm.minibatches})",
        ),
    ]
    if algorithm.inert_clip:
        rows.append(
            (
                "warning",
                "anchor recomputed with one update a step: the ratio is always 1, so no clip of the loss does anything",
            )
        )
    return rows


_ANCHORS = {"sampler": "the sampler's log-probabilities", "recomputed": "log-probabilities recomputed at arrival"}


def _called(name: str, numbers: Mapping[str, float]) -> str:
    return f"{name}({', '.join(f'{key} {value:g}' for key, value in numbers.items())})"


def _model_rows(config: Config, model: ModelConfig, origin: str) -> list[tuple[str, str]]:
    wanted = config.lora
    lora = LoraConfig(wanted.rank, wanted.alpha, wanted.rslora, resolve_targets(wanted.targets))
    parameters, adapter = parameter_count(model), adapter_count(model, lora)
    width = 4 if config.model.dtype == "float32" else 2
    flops = flops_per_token(model, lora) / 1e9
    return [
        ("model", f"{model.family}, {model.num_layers} layers, by {origin}"),
        ("parameters", f"{parameters:,}; {parameters * width / 1e9:.2f} GB in {config.model.dtype}"),
        ("adapter", f"rank {lora.rank}, {adapter:,} parameters, {adapter * 4 / 1e6:.1f} MB a version"),
        ("FLOPs a token", f"{flops:.2f} G, forward and backward: 4 a parameter of the frozen base, 6 of the adapter"),
        ("generator context", f"{max_model_len(config)} tokens"),
    ]


def _tokenizer(directory: Path, task: Task) -> Any:
    tokenizer = _tokenizer_in(directory)
    require_chat_template(tokenizer, task)
    return tokenizer


@lru_cache(2)  # the runs of a sweep have one model
def _tokenizer_in(directory: Path) -> Any:
    return load_tokenizer(directory)


def _prompt_rows(config: Config, splits: Splits, directory: Path) -> list[tuple[str, str]]:
    """What there is to say of the prompts' lengths; UsageError when one does not fit into a row with its completion."""
    tokenizer = _tokenizer(directory, config.task)
    new, row = config.sampling.max_tokens, config.batch.row_tokens
    longest, looked_at, dropped = 0, 0, 0
    for split, problems in splits.items():
        for problem in problems[:_MAX_PROMPTS]:
            length = prompt_length(problem, config, tokenizer)
            looked_at += 1
            if length + new > row and config.task.drop_overlong:
                dropped += 1
                continue
            if length + new > row:
                raise UsageError(
                    f"batch.row_tokens: {row} is too short for problem {problem.id!r} of the split {split!r}: {length} "
                    f"prompt tokens and {new} new ones (sampling.max_tokens); task.drop_overlong=true leaves such out"
                )
            longest = max(longest, length)
    rows = [("longest prompt", f"{longest} tokens, + {new} new ≤ row of {row}")]
    if dropped:
        rows.append(("left out", f"{dropped} of {looked_at} problems, whose prompts are longer (task.drop_overlong)"))
    return rows
