"""Text that a model wrote, fit for a terminal: it is data, and may not move the cursor or hide what stands there."""

import unicodedata

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Controls, those that turn the direction of text around, and halves of surrogate pairs.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, longest: int | None = None) -> str:
    """`text` with every control character but line breaks and tabs shown as �; at most `longest` characters of it."""
    cut = text if longest is None or len(text) <= longest else f"{text[:longest]}…"
    return "".join(char if char in "\n\t" or unicodedata.category(char) not in _UNFIT else _REPLACEMENT for char in cut)
