"""Problems from JSONL, CSV or Parquet files, on this machine or in any bucket that fsspec knows."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import fsspec

from experiments.tasks.columns import Columns, Row, by_column, held_out
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem
from grpo_jax.storage.scrub import scrubbed

FORMATS = ("jsonl", "csv", "parquet")


def table(
    path: str | Sequence[str],
    eval_path: str | Sequence[str] | None = None,
    *,
    prompt: str = "prompt",
    answer: str | None = "answer",
    id: str | None = None,
    template: str | None = None,
    answer_after: str | None = None,
    split_column: str | None = None,
    held_out: int = 0,
    seed: int = 0,
    format: str | None = None,
) -> dict[str, list[Problem]]:
    """Rows of files as problems.

    Args:
      path: a file or several; `eval_path`: those of the split `eval`.
      prompt, answer, id, template, answer_after: see `Columns`; what they do not name becomes metadata.
      split_column: its values are the splits; one of them must be `train`.
      held_out: with neither, so many rows become `eval`, chosen by `seed`.
      format: jsonl, csv or parquet; None: by the file's ending.
    """
    columns = Columns(prompt, answer, id, template, answer_after)
    eval_rows = None if eval_path is None else read(eval_path, format)
    return split_rows(read(path, format), eval_rows, columns, split_column, held_out, seed)


def split_rows(
    rows: Sequence[Row],
    eval_rows: Sequence[Row] | None,
    columns: Columns,
    split_column: str | None,
    held: int,
    seed: int,
    origin: str = "the table",
) -> dict[str, list[Problem]]:
    """Problems by split, however the splits are given."""
    if sum((eval_rows is not None, split_column is not None, held > 0)) > 1:
        raise UsageError("task.args: the split is given twice; take one of eval, split_column and held_out")
    if split_column is not None:
        splits = by_column(rows, split_column, origin)
        return {name: columns.problems(found, name, origin) for name, found in splits.items()}
    if eval_rows is not None:
        return {
            "train": columns.problems(rows, "train", origin),
            "eval": columns.problems(eval_rows, "eval", origin),
        }
    return held_out(columns.problems(rows, "train", origin), held, seed)


def read(paths: str | Sequence[str], format: str | None = None) -> list[dict[str, Any]]:
    """The rows of all files, in order; a UsageError names the file that cannot be read."""
    rows: list[dict[str, Any]] = []
    for path in [paths] if isinstance(paths, str) else paths:
        shown = scrubbed(path)
        kind = format or PurePosixPath(path.removesuffix(".gz")).suffix.removeprefix(".").replace("ndjson", "jsonl")
        if kind not in FORMATS:
            raise UsageError(f"{shown}: the format {kind!r} is none of {', '.join(FORMATS)}; task.args.format names it")
        try:
            with fsspec.open(path, "rb", compression="infer") as file:
                data = file.read()
        except Exception as error:  # every filesystem raises errors of its own
            reason = getattr(error, "strerror", None) or scrubbed(str(error)).partition("\n")[0] or type(error).__name__
            raise UsageError(f"{shown}: cannot be read: {reason}") from None
        try:
            rows += _READERS[kind](data)
        except ImportError:
            raise UsageError(f"{shown}: reading Parquet needs the package pyarrow") from None
        except Exception as error:
            raise UsageError(f"{shown}: is no {kind} file: {error!s:.200}") from None
    return rows


def _jsonl(data: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield row


def _csv(data: bytes) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as the header")
        yield row


def _parquet(data: bytes) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()


_READERS = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
