"""Text with places to fill in, `{name}`: in one pass, so that a text filled in is never itself a template."""

import re
from collections.abc import Mapping
from typing import Any


def filled(template: str, values: Mapping[str, Any]) -> str:
    """`template` with each `{name}` of `values` replaced; other braces, as in LaTeX or JSON, stay what they are."""
    names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
    return re.sub(rf"\{{({names})\}}", lambda found: str(values[found[1]]), template) if names else template
