"""docs/kernels.md: the kernels of each operator, from the output of `gradd --list-ops --json`."""

from __future__ import annotations

import page_text
from operators_doc import name, short

HEAD = """# Kernels

What runs each operator on each device, generated from the kernel rows by `make pages`. The first
kernel that takes a node is the one that a plan chooses; `gradd explain` shows it for every node.
[operators.md](operators.md) says what the operators are and which types they have.

* *oneDNN*: a primitive of that library. *blocked*: the product that gradd brings itself.
* *of bf16*, *of f16*: reads that half and computes in f32. An operand in bf16 or f16 that no kernel
  takes is cast to f32 and back.
* *tiles*: attention block by block, without a matrix of scores.
* *loop*: vectorised, threaded loops.
"""
SIMPLE = """
### One kernel for every type

"""
TABLE = """
### Several kernels, or fewer types

In the order in which they are asked. The types are those of the first input.

"""
EXPANDED = """
## Written out in others

These operators have an expansion: a device without a kernel, and a plain plan (`GRADD_FUSE=0`), run
them as simpler operators. *always*: none of the devices above has a kernel for it.

"""


def everything(row: dict, kernels: list[dict]) -> bool:
    """Whether one kernel runs every call of an operator."""
    return len(kernels) == 1 and kernels[0]["types"][0] == row["types"][0]


def device(rows: list[dict], device: str) -> str:
    """The part about one device."""
    own = {id(row): [k for k in row["kernels"] if k["device"] == device] for row in rows}
    simple: dict[str, list[str]] = {}
    lines = []
    for row in rows:
        kernels = own[id(row)]
        if everything(row, kernels):
            simple.setdefault(kernels[0]["name"], []).append(name(row))
            continue
        for index, kernel in enumerate(kernels):
            first = name(row) if index == 0 else ""
            lines.append((first, kernel["name"], short(kernel["types"][0])))
    text = f"\n## Device {device}\n" + SIMPLE
    text += page_text.items(
        f"{kernel}: {', '.join(dict.fromkeys(names))}" for kernel, names in simple.items()
    )
    return text + TABLE + page_text.table(("Operator", "Kernel", "Types"), lines)


def page(rows: list[dict]) -> str:
    """The whole page for the rows of `gradd --list-ops --json`."""
    devices = dict.fromkeys(k["device"] for row in rows for k in row["kernels"])
    text = HEAD + "".join(device(rows, d) for d in devices) + EXPANDED
    expanded = [row for row in rows if row["expands"]]
    return text + page_text.items(
        name(row) + ("" if row["kernels"] else " (always)") for row in expanded
    )
