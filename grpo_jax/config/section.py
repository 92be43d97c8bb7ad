"""What every section of a config is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    # No infinity or NaN: a config is recorded as JSON, which has neither.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def import_path(value: str) -> str:
    """The value, if it names something in a module: package.module:name."""
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise ValueError("expected 'package.module:name'")
    return value
