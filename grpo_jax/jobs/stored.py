"""Stored samples as rewards see them: from a JSONL file, or from the spool of a run."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.models.source import resolve_config
from grpo_jax.rollouts.drawing import completion_of
from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.tasks import Problem, load_task
from grpo_jax.rollouts.tokenizer import load_tokenizer
from grpo_jax.storage.bucket import Bucket, BucketError
from grpo_jax.storage.scrub import scrubbed
from grpo_jax.storage.spool import SpoolReader

log = logging.getLogger(__name__)

_LINES = (".jsonl", ".ndjson", ".jsonl.gz")
_OURS = frozenset({"prompt", "completion", "text", "answer", "metadata", "tokens", "finish_reason"})


@dataclass(frozen=True)
class StoredGroup:
    """Completions of one prompt; `name` says which, in a few words."""

    name: str
    completions: list[Completion]


@dataclass
class Stored:
    groups: list[StoredGroup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_stored(config: Config, on: str) -> Stored:
    """The samples in `on`; `notes` say what rewards do not see of them. UsageError if there are none.

    A JSONL file has a sample a line: `prompt` (a text or messages), `completion` or `text` (a text or messages),
    `answer`, and if there are such `tokens`, `finish_reason` and `metadata`; other keys are metadata, too. Lines with
    the same prompt are completions of one group. Anything else is a run's directory or its URL in a bucket: the groups
    of its spool, whose problems are looked up in the config's task by their ids.
    """
    stored = _from_lines(config, on) if on.endswith(_LINES) or Path(on).is_file() else _from_run(config, on)
    if not stored.groups:
        raise UsageError(f"{scrubbed(on)}: there are no samples in it")
    return stored


def _from_lines(config: Config, path: str) -> Stored:
    shown, stored = scrubbed(path), Stored()
    groups: dict[str, StoredGroup] = {}
    try:
        with fsspec.open(path, "rt", compression="infer", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                completion = _completion(line, f"{shown}, line {number}")
                key = json.dumps(completion.prompt, sort_keys=True)
                groups.setdefault(key, StoredGroup(f"line {number}", [])).completions.append(completion)
    except UsageError:
        raise
    except Exception as error:  # every filesystem raises errors of its own
        reason = getattr(error, "strerror", None) or scrubbed(str(error)).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{shown}: cannot be read: {reason}") from None
    stored.groups = list(groups.values())
    bare = sum(not completion.tokens for group in stored.groups for completion in group.completions)
    tokenizer = _tokenizer(config) if bare else None
    if tokenizer is not None:
        for group in stored.groups:
            group.completions[:] = [_with_tokens(completion, tokenizer) for completion in group.completions]
    elif bare:
        stored.notes.append(
            f"{bare} completions have no 'tokens', and the model's tokenizer is not on this machine: rewards see none"
        )
    return stored


def _with_tokens(completion: Completion, tokenizer: Any) -> Completion:
    tokens = completion.tokens or tokenizer.encode(completion.text, add_special_tokens=False)
    return replace(completion, tokens=tokens)


def _completion(line: str, where: str) -> Completion:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is no JSON: {error}") from None
    given = row.get("completion", row.get("text")) if isinstance(row, dict) else None
    text = given[-1].get("content") if isinstance(given, list) and given and isinstance(given[-1], dict) else given
    if not isinstance(text, str):
        raise UsageError(f"{where}: there is no text in 'completion' or 'text'")
    return Completion(
        text=text,
        tokens=row.get("tokens") or [],
        prompt=row.get("prompt", ""),
        answer=row.get("answer"),
        metadata={**{key: row[key] for key in row if key not in _OURS}, **(row.get("metadata") or {})},
        finish_reason=row.get("finish_reason", "stop"),
    )


def _from_run(config: Config, on: str) -> Stored:
    try:
        groups = SpoolReader(Bucket(on), patience_s=0.0).poll()
    except BucketError as error:
        raise UsageError(str(error)) from None
    problems, stored = _problems(config, {group.provenance.problem_id for group in groups}), Stored()
    for group in sorted(groups, key=lambda group: group.id):
        known = problems.get(group.provenance.problem_id)
        problem = known or Problem(group.provenance.problem_id, "", group.provenance.answer)
        completions = [completion_of(problem, sample) for sample in group.samples if sample.finish_reason != "failed"]
        if completions:
            stored.groups.append(StoredGroup(f"{group.id} ({problem.id})", completions))
    missing = {group.provenance.problem_id for group in groups} - problems.keys()
    if missing:
        stored.notes.append(
            f"{len(missing)} problems of the run, for example {min(missing)!r}, are not in the config's task: of them "
            "rewards see the recorded answer, but neither prompt nor metadata"
        )
    return stored


def _problems(config: Config, wanted: Iterable[str]) -> dict[str, Problem]:
    """The problems of the config's training split that have these ids; none if the task cannot be loaded."""
    wanted = set(wanted)
    try:
        train: Sequence[Problem] = load_task(config.task)["train"]
    except UsageError as error:
        log.warning("the samples' problems are not known: %s", error)
        return {}
    found: dict[str, Problem] = {}
    for i in range(len(train)):
        problem = train[i]
        if str(problem.id) in wanted:
            found.setdefault(str(problem.id), problem)
            if len(found) == len(wanted):
                break
    return found


def _tokenizer(config: Config) -> Any | None:
    try:
        return load_tokenizer(resolve_config(config.model.source, offline=True))
    except UsageError:
        return None
