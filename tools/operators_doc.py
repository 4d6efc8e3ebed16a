"""Writes docs/operators.md from what `gradd --list-ops --json` prints.

Usage: operators_doc.py GRADD PAGE [--check]. With --check nothing is written and the exit status
says whether the page is current; `make check` runs that, `make docs` rewrites the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HEAD = """# Operators

What `gradd` runs, generated from the operator table by `make docs` (`gradd --list-ops` prints the
same). A model may use ONNX opset 13 to 25 and `com.gradd` 1. A graph with any other operator loads,
is named in the reply to `graph.put`, and falls back to PyTorch.

"Types" lists the element types of each input, the last one for all further inputs. A required
attribute is bold. The last columns say what runs the operator on each device: the first kernel that
accepts a call. Where a kernel takes fewer types than the operator has, those of the first input are
in parentheses. bf16 that none of them takes is cast to f32 and back. "expansion": the operator
is written out in others.

"""
INTERNAL = """
## Internal

Emitted by gradient rules and passes; refused when a model contains them.

"""
COLUMNS = ["Operator", "Opset", "Inputs", "Outputs", "Types", "Attributes", "Gradient"]
UNBOUNDED = 64  # GRADD_OP_MAX_IN


def span(bounds: list[int]) -> str:
    """ "1", "1-3" or "1+" for [min, max]."""
    low, high = bounds
    if high >= UNBOUNDED:
        return f"{low}+"
    return str(low) if low == high else f"{low}-{high}"


def opset(row: dict) -> str:
    """The opset range of a row: "13+" or "1-12"."""
    return f"{row['since']}+" if row["until"] is None else f"{row['since']}-{row['until']}"


def kernels(row: dict, device: str) -> str:
    """What runs the operator on a device, in order: its expansion, or "-", if no kernel does."""
    names = []
    for kernel in (k for k in row["kernels"] if k["device"] == device):
        first = kernel["types"][0]
        narrow = first != row["types"][0]
        names.append(f"{kernel['name']} ({' '.join(first)})" if narrow else kernel["name"])
    return ", ".join(names) or ("expansion" if row["expands"] else "-")


def types(row: dict) -> str:
    """Element types of each input, separated by semicolons."""
    return "; ".join(t if t == "any" else " ".join(t) for t in row["types"])


def attributes(row: dict) -> str:
    """Attribute names, required ones in bold."""
    names = (f"**{a['name']}**" if a["required"] else a["name"] for a in row["attributes"])
    return ", ".join(names)


def table(rows: list[dict]) -> str:
    """A markdown table of these rows."""
    devices = list(dict.fromkeys(k["device"] for row in rows for k in row["kernels"]))
    columns = [*COLUMNS, *(device.upper() for device in devices)]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        name = row["name"] if row["domain"] == "ai.onnx" else f"{row['domain']} {row['name']}"
        cells = [name, opset(row), span(row["inputs"]), span(row["outputs"]), types(row)]
        cells += [attributes(row), "yes" if row["gradient"] else "no"]
        cells += [kernels(row, device) for device in devices]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(rows: list[dict]) -> str:
    """The whole page for the rows of `gradd --list-ops --json`."""
    text = HEAD + table([row for row in rows if row["from_model"]])
    internal = [row for row in rows if not row["from_model"]]
    return text + (INTERNAL + table(internal) if internal else "")


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gradd", help="the gradd binary")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    command = [args.gradd, "--list-ops", "--json"]
    text = page(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    if not args.check:
        args.page.write_text(text)
        return 0
    if args.page.exists() and args.page.read_text() == text:
        return 0
    print(f"{args.page} is not what the operator table says: run `make docs` and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
