"""Problems from a data set on the Hugging Face Hub, by its name."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.tasks.columns import Columns
from experiments.tasks.files import FORMATS, read, split_rows
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import NotHere, Problem

# Where the Hub keeps every data set converted to Parquet: <subset>/<split>/0000.parquet.
_CONVERTED = "refs/convert/parquet"


def dataset(
    name: str,
    subset: str | None = None,
    *,
    train: str = "train",
    eval: str | None = None,
    prompt: str = "prompt",
    answer: str | None = "answer",
    id: str | None = None,
    template: str | None = None,
    answer_after: str | None = None,
    held_out: int = 0,
    seed: int = 0,
    limit: int | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> dict[str, list[Problem]]:
    """Splits of a data set as problems, by the package `datasets` where it is installed, else from its Parquet files.

    Args:
      name, subset, revision: as on the Hub (`openai/gsm8k`, `main`).
      train, eval: the data set's splits that become ours; without `eval`, `held_out` rows do, chosen by `seed`.
      prompt, answer, id, template, answer_after: see `Columns`; what they do not name becomes metadata.
      limit: so many rows of each split at most.
      offline: only what is in the cache already; NotHere otherwise.
    """
    columns = Columns(prompt, answer, id, template, answer_after)

    def rows(split: str) -> list[dict[str, Any]]:
        load = _by_datasets if find_spec("datasets") is not None else _by_files
        try:
            return load(name, subset, split, revision, offline)[:limit]
        except UsageError:
            raise
        except Exception as error:  # the clients pass on what HTTP, cache and validation raise: no common base class
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            kind, where = (NotHere, "is not in the cache") if offline else (UsageError, "cannot be fetched")
            raise kind(f"task.args.name: the data set {name!r} {where}: {reason:.300}") from None

    held = None if eval is None else rows(eval)
    return split_rows(rows(train), held, columns, None, held_out, seed, f"the data set {name!r}")


def _by_datasets(name: str, subset: str | None, split: str, revision: str | None, offline: bool) -> list[Any]:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        return datasets.load_dataset(name, subset, split=split, revision=revision).to_list()
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _by_files(name: str, subset: str | None, split: str, revision: str | None, offline: bool) -> list[Any]:
    from huggingface_hub import snapshot_download

    at = revision or _CONVERTED
    folder = snapshot_download(
        name,
        repo_type="dataset",
        revision=at,
        allow_patterns=[f"*{split}*.{kind}" for kind in FORMATS] + [f"*{split}/*.{kind}" for kind in FORMATS],
        local_files_only=offline,
    )
    return read([str(path) for path in split_files(Path(folder), name, subset, split)])


def split_files(folder: Path, name: str, subset: str | None, split: str) -> list[Path]:
    """The files of a split in a data set's folder: in a folder of its name, or `<split>.*`, `<split>-00000-of-….*`."""
    by_subset: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        *folders, file = path.relative_to(folder).parts
        in_folder = bool(folders) and folders[-1] == split
        if path.suffix.removeprefix(".") in FORMATS and (in_folder or re.match(rf"{re.escape(split)}[-.]", file)):
            by_subset.setdefault("/".join(folders[:-1] if in_folder else folders), []).append(path)
    found = by_subset if subset is None else {key: by_subset[key] for key in by_subset if subset in key.split("/")}
    if len(found) > 1:
        raise UsageError(f"task.args.subset: the data set {name!r} has several: {', '.join(map(repr, found))}")
    if not found:
        raise UsageError(f"task.args: the data set {name!r} has no files of a split {split!r}, subset {subset!r}")
    return next(iter(found.values()))
