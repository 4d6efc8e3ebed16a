"""Tables and wrapped text of the generated pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

COLUMNS = 100
CODE = re.compile(r"`[^`]*`")
NO_BREAK = "\0"  # in the place of a blank


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def wrap(text: str, indent: str = "", first: str = "") -> str:
    """One paragraph, or one item of a list (first: its bullet); code stays on one line."""
    filled = textwrap.fill(
        CODE.sub(lambda code: code[0].replace(" ", NO_BREAK), " ".join(text.split())),
        COLUMNS,
        initial_indent=first or indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(NO_BREAK, " ") + "\n"


def items(texts: Iterable[str]) -> str:
    """A list, one wrapped item for each text."""
    return "".join(wrap(text, "  ", "* ") for text in texts)
