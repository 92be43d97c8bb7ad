"""From rows of a table to problems: which column is what, and which rows are held out."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.template import filled
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """`prompt` holds a text or chat messages; the columns that are not named here become the problem's metadata.

    Attributes:
      id: None: `<split>-<number of the row>`.
      template: a prompt made of columns, `{question}` and so on; then `prompt` names no column.
      answer_after: only what follows this text in the answer is the answer (GSM8K: `####`), stripped; the whole of it
        stays in the metadata as `solution`.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    id: str | None = None
    template: str | None = None
    answer_after: str | None = None

    def problem(self, row: Row, fallback_id: str, origin: str) -> Problem:
        answer = None if self.answer is None else _cell(row, self.answer, "answer", origin)
        prompt = _cell(row, self.prompt, "prompt", origin) if self.template is None else filled(self.template, row)
        identity = fallback_id if self.id is None else str(_cell(row, self.id, "id", origin))
        used = {self.answer, self.id, self.prompt if self.template is None else None}
        metadata = {str(key): value for key, value in row.items() if key not in used}
        if self.answer_after is not None and isinstance(answer, str):
            metadata["solution"], answer = answer, answer.rpartition(self.answer_after)[2].strip()
        return Problem(identity, prompt if isinstance(prompt, list) else str(prompt or ""), answer, metadata)

    def problems(self, rows: Sequence[Row], split: str, origin: str) -> list[Problem]:
        return [self.problem(row, f"{split}-{i}", origin) for i, row in enumerate(rows)]


def by_column(rows: Sequence[Row], column: str, origin: str) -> dict[str, list[Row]]:
    """The rows by what their split column says."""
    splits: dict[str, list[Row]] = {}
    for row in rows:
        splits.setdefault(str(_cell(row, column, "split_column", origin)), []).append(row)
    return splits


def held_out(problems: Sequence[Problem], count: int, seed: int) -> dict[str, list[Problem]]:
    """`train` and `eval`: `count` problems chosen by the seed alone, both in their original order."""
    if not 0 <= count < len(problems):
        raise UsageError(f"task.args.held_out: {count} of {len(problems)} problems leave none to train on")
    chosen = set(random.Random(seed).sample(range(len(problems)), count))
    splits = {"train": [problem for i, problem in enumerate(problems) if i not in chosen]}
    return splits | {"eval": [problems[i] for i in sorted(chosen)]} if count else splits


def _cell(row: Row, column: str, argument: str, origin: str) -> Any:
    try:
        return row[column]
    except KeyError:
        raise UsageError(
            f"task.args.{argument}: {origin} has no column {column!r}, but {', '.join(map(repr, row)) or 'none'}"
        ) from None
