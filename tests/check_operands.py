"""Fails where the order of an operator's operands is known from anywhere but its contract header.

FAMILIES lists the headers that fix the order of operands for several files, each with the files
that are about this family alone: there an operand is named, never counted: `in[GRADD_ROPE_COS]`,
not `in[1]`. Elsewhere no enumeration may list operands of a family once more: one with two of the
header's names is taken for a copy. Run by `make lint`, `make check` and `make test`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = "kernels/describe/"
FAMILIES = {
    "attention.h": (
        "kernels/ops/attention/attention.c",
        "kernels/describe/attention*.[ch]",
        "kernels/cpu/attention/*.[ch]",
        "kernels/cuda/attention/*",
        "server/graph/live/*.[ch]",
        "server/graph/passes/range_attention.c",
    ),
    "rope.h": ("kernels/ops/attention/rope.c", "kernels/cuda/rope.cu"),
    "cross_entropy.h": ("kernels/ops/loss/crossentropy.c", "kernels/cuda/row/crossentropy.cu"),
    "head.h": ("kernels/describe/head.c", "kernels/cpu/linear_loss.c", "kernels/cuda/row/head.cu"),
    "conv.h": (
        "kernels/ops/product/conv.c",
        "kernels/describe/conv.c",
        "kernels/cpu/conv/*.[ch]",
        "kernels/cuda/product/conv.cu",
    ),
    "batch_norm.h": ("kernels/ops/norm/batchnorm.c", "kernels/cuda/row/batchnorm.cu"),
    "recurrence.h": (
        "kernels/ops/recurrent/recurrence.c",
        "kernels/describe/recurrence.c",
        "kernels/cpu/recurrent/*.[ch]",
        "kernels/cuda/recurrence.cu",
    ),
    "norm.h": ("kernels/ops/norm/norm.c", "kernels/cuda/row/norm.cu"),
}
# Operators of ONNX with an order of their own, under the same names.
OTHERS = {"kernels/ops/attention/onnx_attention.c", "kernels/ops/attention/onnx_rotary.c"}
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
# An operand by its number, or a result that is not the first.
COUNTED = re.compile(r"(?<!sizeof out)(?:->|\.)(?:(?:in|need|din)\[\d+\]|out\[[1-9]\d*\])")
ENUM = re.compile(r"\benum\b[^{;()]*\{([^}]*)\}")
NAME = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
COPIED = 2  # names of one header that make an enumeration a copy of it


def names(text: str) -> list[list[str]]:
    """The enumerators of each enumeration of a file."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return [NAME.findall(re.sub(r"=[^,}]*", "", body)) for body in ENUM.findall(text)]


def operands(header: str) -> set[str]:
    """The names of operands and results without what stands in front: Q, MASK, DY, ...

    What has a number is no operand but a bit or a kind.
    """
    header = re.sub(r"\w+\s*=\s*\d+(?=\s*[,}])", "", header)
    found = {name for listed in names(header) for name in listed if name.startswith("GRADD_")}
    return {name.split("_", 2)[2].removeprefix("GRAD_") for name in found if name.count("_") > 1}


def counted(root: Path) -> Iterator[str]:
    """Operands that are counted in files of one family."""
    for header, patterns in FAMILIES.items():
        for path in sorted({p for pattern in patterns for p in root.glob(pattern)}):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if found := COUNTED.search(line):
                    place = f"{path.relative_to(root)}:{number}"
                    yield f"{place}: {found[0]}: name the operand as {CONTRACTS}{header} does"


def copied(root: Path) -> Iterator[str]:
    """Enumerations that list a family's operands once more."""
    headers = [root / CONTRACTS / header for header in FAMILIES]
    known = {path: operands(path.read_text(encoding="utf-8")) for path in headers if path.exists()}
    for folder in ("kernels", "server"):
        for path in sorted((root / folder).rglob("*")):
            other = str(path.relative_to(root)) in OTHERS
            if path.suffix not in SUFFIXES or path in known or other:
                continue
            for listed in names(path.read_text(encoding="utf-8")):
                bare = {name.split("_", 2)[-1] if "_" in name else name for name in listed}
                for header, theirs in known.items():
                    if len(bare & theirs) >= COPIED:
                        same = ", ".join(sorted(bare & theirs))
                        yield f"{path.relative_to(root)}: lists {same} of {header.name} again"


def problems(root: Path) -> list[str]:
    """All of them, as lines to print."""
    return [*counted(root), *copied(root)]


def main() -> int:
    """Prints every problem; returns the exit status."""
    found = problems(ROOT)
    print("\n".join(found) if found else f"operands: {len(FAMILIES)} contracts, none copied")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
