"""Plain tables for notebooks, with escaped text: of statistics, explanations and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


def table(rows: Sequence[Sequence[str]], heads: bool = True) -> str:
    """Rows of cells.

    Args:
        rows: The first column has headings.
        heads: The first row has headings as well.
    """
    right = ' style="text-align:right"'
    lines = []
    for i, (heading, *cells) in enumerate(rows):
        kind = "td" if i or not heads else "th"
        own = "".join(f"<{kind}{right}>{escape(cell)}</{kind}>" for cell in cells)
        lines.append(f'<tr><th style="text-align:left">{escape(heading)}</th>{own}</tr>')
    return f"<table>{''.join(lines)}</table>"


class Stats(dict[str, Any]):
    """Statistics: a dict, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return table([(name, _cell(value)) for name, value in self.items()], heads=False)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
