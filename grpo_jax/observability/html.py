"""What the pages are made of. Whatever comes from a run must go through `text` before it is put between tags."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from grpo_jax.observability.page_style import CSS


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A page without network assets; empty parts are left out. `style` is added to the style sheet of all pages."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)} · grpo_jax</title>\n<style>{CSS}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, content: Any) -> str:
    """ "" where there is no content."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def details(title: str, content: Any) -> str:
    """A section that is closed at first."""
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def table(head: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> str:
    """Cells are texts. Without a head: pairs, the first of which names the second. "" for no rows."""
    rows = list(rows)
    if not rows:
        return ""
    top = f"<thead><tr>{''.join(f'<th>{text(h)}</th>' for h in head)}</tr></thead>" if head else ""
    cells = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{"list" if head else "pairs"}">{top}<tbody>{cells}</tbody></table></div>'


def bullets(items: Iterable[Any]) -> str:
    """ "" for no items."""
    shown = "".join(f"<li>{text(item)}</li>" for item in items)
    return shown and f"<ul>{shown}</ul>"


def picture(pngs: Sequence[bytes], alt: str) -> str:
    """The light and the dark PNG, or "" for none."""
    if not pngs:
        return ""
    light, dark = (f"data:image/png;base64,{b64encode(png).decode()}" for png in pngs)
    return (
        f'<section><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{text(alt)}"></picture></section>'
    )


def text(value: Any) -> str:
    return escape(str(value))
