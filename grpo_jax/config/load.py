"""From a file, `extends:` and `key=value` overrides to a checked `Config`."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError

_DEEPEST = 40


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML (or JSON) config. `extends: other.yaml` is read first, relative to the file that names it.

    Args:
      overrides: `section.key=value`, the value read as YAML; a list item is named by its index (`rewards.0.weight=2`).
    """
    raw = read_raw(path, overrides)
    if raw.pop("sweep", None) is not None:
        raise UsageError(f"{path}: sweep: this config describes several runs; `grpo-jax sweep {path}` runs them")
    return parse_config(raw, str(path))


def read_raw(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a config with its parents and the overrides, not checked yet."""
    raw = _read(Path(path), ())
    override(raw, overrides)
    return raw


def override(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Applies `section.key=value` texts in place; UsageError names the one that cannot be applied."""
    for text in overrides:
        _override(raw, text)


def parse_config(raw: dict[str, Any], origin: str) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{origin}: {sentence(error)}") from None


def _named(path: Path) -> str:
    """In one line, whatever an `extends` may hold."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 1000 else f"{text!r:.200}"


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    try:
        if path.resolve() in seen:
            raise UsageError(f"{path}: extends itself")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such config file") from None
    except (OSError, ValueError, RuntimeError) as error:  # no UTF-8, no name of a file, links that go in a circle
        raise UsageError(f"{_named(path)}: cannot be read: {error}") from None
    try:
        raw = _parse(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: expected a mapping of keys, found {type(raw).__name__}")
    if (wrong := _not_json(raw, ())) is not None:
        raise UsageError(f"{path}: {wrong}")
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str):
        raise UsageError(f"{path}: extends: expected a file name")
    return _merged(_read(path.parent / parent, (*seen, path.resolve())), raw)


def _parse(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """YAMLError for whatever is wrong: those who make dates and numbers of a text raise errors of their own."""
    depth = 0
    for char in text:  # the parser takes time with the square of it
        depth += (char in "[{") - (char in "]}")
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"more than {_DEEPEST} brackets are open at one place")
    try:
        return yaml.load(text, loader)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read ({type(error).__name__}: {error})") from None


def _not_json(node: Any, path: tuple[str, ...]) -> str | None:
    """The first place at which stands what a recorded config, which is JSON, cannot hold; with what is wrong there."""
    where = f"{'.'.join(path)}: " if path else ""
    if len(path) > _DEEPEST:
        return f"{'.'.join(path[:3])}: nested too deeply"
    if isinstance(node, str) and not _is_text(node):
        return f"{where}holds what is no character"
    if isinstance(node, float) and not math.isfinite(node):
        return f"{where}{node} is no value; a config has finite numbers"
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str) or not _is_text(key):
                return f"{where}the key {key!r:.100} is no text; put it in quotes"
            if (wrong := _not_json(value, (*path, key))) is not None:
                return wrong
    elif isinstance(node, list):
        return next((w for i, item in enumerate(node) if (w := _not_json(item, (*path, str(i)))) is not None), None)
    elif node is not None and not isinstance(node, str | int | float):
        return f"{where}a {type(node).__name__} is no value of a config; put a text in quotes"
    return None


def _is_text(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key silently replace an earlier one of the same name; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands twice in one section{node.start_mark}")
        return super().construct_mapping(node, deep)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings are merged key by key, anything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _override(raw: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or not _is_text(path):
        raise UsageError(f"override {override!r}: expected key=value")
    try:
        value = _parse(text, yaml.SafeLoader)
    except yaml.YAMLError:
        raise UsageError(f"override {override!r}: the value is not valid YAML") from None
    if (wrong := _not_json(value, tuple(keys))) is not None:
        raise UsageError(f"override {override!r:.200}: {wrong}")
    try:
        set_key(raw, keys, value)
    except UsageError as error:
        raise UsageError(f"override {override!r}: {error}") from None


def set_key(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    """Sets `section.key` in place; sections that are not there are made, an item of a list is named by its index.

    Raises:
      UsageError: the way there leads through what is no section, or the list has no such item.
    """
    node: Any = raw
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(node, list):
            if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) >= len(node):
                raise UsageError(f"{'.'.join(keys[:i])} has no item {key!r}")
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = value
            else:
                if node.get(key) is None:
                    node[key] = {}
                node = node[key]
        else:
            raise UsageError(f"{'.'.join(keys[:i])} is no section")


def sentence(error: ValidationError) -> str:
    """The first problem as `path.of.key: what is wrong` (and how many more there are)."""
    problems = error.errors()
    first = problems[0]
    # For a union pydantic appends the branch's name to the location; the key's path ends before it.
    keys = [str(part) for part in first["loc"] if not (isinstance(part, str) and ("[" in part or part in _BRANCHES))]
    message = {
        "extra_forbidden": "unknown key",
        "missing": "this key is required",
    }.get(first["type"], first["msg"].removeprefix("Value error, "))
    found = first.get("input")
    if first["type"] not in ("extra_forbidden", "missing", "value_error") and isinstance(
        found, str | int | float | bool
    ):
        message += f" (found {found!r})"
    where = ".".join(key if key.isprintable() else repr(key) for key in keys)
    same_key = [p for p in problems if p["loc"][: len(keys)] == first["loc"][: len(keys)]]
    if len(same_key) > 1:  # a union: each branch has its own complaint
        message = " or ".join(dict.fromkeys(p["msg"] for p in same_key)) + f" (found {found!r})"
    others = len(problems) - len(same_key)
    more = f" (and {others} more)" if others else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"


_BRANCHES = frozenset({"literal"})
