"""Tables and wrapped text of the generated pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

COLUMNS = 100


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def wrap(text: str, indent: str = "", first: str = "") -> str:
    """One paragraph, or one item of a list (first: its bullet)."""
    filled = textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=first or indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled + "\n"


def items(texts: Iterable[str]) -> str:
    """A list, one wrapped item for each text."""
    return "".join(wrap(text, "  ", "* ") for text in texts)
