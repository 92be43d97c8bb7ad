"""The section `sweep` of a config: one config becomes several, each a run of its own name in one folder."""

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.config.load import parse_config, read_raw, sentence, set_key
from grpo_jax.config.schema import Config
from grpo_jax.config.section import Section
from grpo_jax.errors import UsageError

_LONGEST_NAME = 63
_LONGEST_VALUE = 24
# A variant's name and place follow from the sweep's.
_NOT_SWEPT = ("run", "bucket", "sweep", "extends")


class SweepSection(Section):
    """Each of the named variants under each point of the grid, with each seed."""

    grid: dict[str, Any] = Field({}, description="section.key -> list of values; every combination")
    variants: dict[str, dict[str, Any] | None] = Field({}, description="name -> keys that it overrides")
    seeds: list[int] = Field([], description="values of `seed`; none: the config's own")


@dataclass(frozen=True)
class Variant:
    """One run of a sweep.

    Attributes:
      name: what tells it from those with other settings; the runs of one name differ by their seeds.
      settings: the factors that it has a value for: the dotted keys of the grid, and `variant` where some are named.
    """

    name: str
    settings: dict[str, Any]
    config: Config


@dataclass(frozen=True)
class Sweep:
    """`folder` is the bucket of all its runs: `<bucket>/<run>` of the config that it was written in."""

    name: str
    folder: str
    variants: list[Variant]


def load_sweep(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Sweep | None:
    """The sweep that a config describes, every run of it checked as a config is; None for a config of one run.

    `extends:` and the overrides are applied before it is expanded, so they can change the section `sweep` as well.
    """
    raw = read_raw(path, overrides)
    section = raw.pop("sweep", None)
    return None if section is None else expand(raw, section, str(path))


def expand(raw: dict[str, Any], section: Any, origin: str) -> Sweep:
    """Args: `raw`: the config without its section `sweep`. `origin`: the file, for errors."""
    name = raw.get("run")
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise UsageError(f"{origin}: run: a sweep needs a name of a-z, 0-9, '-' and '_'")
    try:
        sweep = SweepSection.model_validate(section)
    except ValidationError as error:
        raise UsageError(f"{origin}: sweep.{sentence(error)}") from None
    grid = dict(_flat(sweep.grid))
    _check(sweep, grid, origin)
    grid = {key: [_number(value) for value in values] for key, values in grid.items()}
    folder = f"{str(raw.get('bucket', Config.model_fields['bucket'].default)).rstrip('/')}/{name}"
    found: list[Variant] = []
    named: dict[str, dict[str, Any] | None] = sweep.variants or {"": None}
    seeds: list[int | None] = list(sweep.seeds) or [None]
    for (variant, overrides), values, seed in itertools.product(
        named.items(), itertools.product(*grid.values()), seeds
    ):
        settings = ({"variant": variant} if variant else {}) | dict(zip(grid, values, strict=True))
        label = _label(settings)
        one = copy.deepcopy(raw)
        seeded = f"-s{seed}" if seed is not None else ""
        one |= {"run": shortened("-".join([name, *([label] if label else [])]) + seeded), "bucket": folder}
        changes = dict(_flat(overrides or {})) | dict(zip(grid, values, strict=True))
        try:
            for key, value in changes.items():
                set_key(one, key.split("."), copy.deepcopy(value))
        except UsageError as error:
            raise UsageError(f"{origin}: sweep: {key}: {error}") from None
        if seed is not None:
            one["seed"] = seed
        found.append(Variant(label, settings, parse_config(one, f"{origin}: {one['run']}")))
    _check_distinct(found, origin)
    return Sweep(name, folder, found)


def shortened(name: str) -> str:
    """The name if it may be that of a run, else its beginning and a hash of all of it."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _check(sweep: SweepSection, grid: Mapping[str, Any], origin: str) -> None:
    if not (sweep.grid or sweep.variants or sweep.seeds):
        raise UsageError(f"{origin}: sweep: has neither grid, variants nor seeds")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{origin}: sweep.grid.{key}: expected a list of values")
    for name, overrides in sweep.variants.items():
        if not RUN_NAME.fullmatch(name):
            raise UsageError(f"{origin}: sweep.variants.{name}: a name is made of a-z, 0-9, '-' and '_'")
        for key in dict(_flat(overrides or {})):
            if key in grid:
                raise UsageError(f"{origin}: sweep.variants.{name}.{key}: is in the grid as well")
    for where, keys in (("grid", sweep.grid), *((f"variants.{n}", o or {}) for n, o in sweep.variants.items())):
        for key in keys:
            if key in _NOT_SWEPT or (key == "seed" and sweep.seeds):
                why = "the seeds are in sweep.seeds" if key == "seed" else "it follows from the sweep"
                raise UsageError(f"{origin}: sweep.{where}.{key}: cannot be set there; {why}")


def _check_distinct(variants: list[Variant], origin: str) -> None:
    seen: set[str] = set()
    for variant in variants:
        if variant.config.run in seen:
            raise UsageError(f"{origin}: sweep: two of its runs are called {variant.config.run}")
        seen.add(variant.config.run)


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a mapping is a section (an empty one is a value)."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any) -> Any:
    """1e-3 is a text to YAML 1.1 and a number to everybody else."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _label(settings: Mapping[str, Any]) -> str:
    """`gspo-rank8`: a named variant by its name, a key of the grid by its last word and its value."""
    short = {key: key.rpartition(".")[2] for key in settings}
    names = list(short.values())
    parts = []
    for key, value in settings.items():
        if key == "variant":
            parts.append(str(value))
            continue
        word = short[key] if names.count(short[key]) == 1 else key
        parts.append(_slug(word) + _value(value))
    return "-".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, list | dict):
        text = json.dumps(value, default=str)
        return f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    slug = _slug(text.replace(".", "p"))
    if len(slug) > _LONGEST_VALUE:
        slug = f"{slug[: _LONGEST_VALUE - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return slug if isinstance(value, int | float) and not isinstance(value, bool) else f"-{slug}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")
