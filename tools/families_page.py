"""docs/families.md from the rows that tools/families.py has written.

page() is pure: it needs neither torch nor transformers. A family that was run twice counts with
its last row.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = 100  # of the page
LONGEST = 160  # characters of a reason

HEAD = """# Model families

{summary}

{kinds}
Each class was built small and with random weights from the family's own configuration class: two to
four layers, of the kinds that the default configuration lists; fp32, dropout off. It ran forward
and backward in PyTorch eager and through `ORTModule(model, strict=True)`, with three batch shapes,
texts with padding, and the loss and the gradient of every parameter were compared; what
`strict=True` refuses ran without it. A checkpoint may set options that the default configuration
does not: `ORTModule` compares the first step with PyTorch, `strict=True` raises instead of running
anything in PyTorch, and `print(model.gradd_explain())` shows what was recognised.

`make families` tries the classes of which `benchmarks/results/families.jsonl` has no row and writes
this page of its rows; remove rows to try their classes again. All take about four hours on two
cores.
"""
SUMMARY = """
Does a family of Hugging Face models train in gradd? Of the {tried} model classes that were run
{trains} train wholly in the daemon, and {most} with at least half of the operations of their
products{left}. Written by `make families` with {versions}.
"""
KINDS = {
    "image": "images",
    "segmentation": "images",
    "video": "videos",
    "audio": "sounds",
    "ctc": "sounds",
    "speech": "sounds",
    "contrastive": "images and text",
    "image_text": "images and text",
}  # of families_media.TASKS; the others are of text
COUNTED = """
What ran in PyTorch first, and in how many classes: {causes}.
"""
DAEMON = """
## Train in the daemon

*Gradient difference* is the norm of the difference to PyTorch, relative to the norm of the gradient
(or to a thousandth of the largest norm in the model, if that is more): the largest of all
parameters and batch shapes. *Not recognised* are operators of activations, normalisation, attention
and losses that run one by one instead of as one operator: correct, but slower. How many operators
of each kind the authors of nearly all classes put in, and what the ones not recognised are, is
counted by hand from their source in `tests/python/helpers/counts`; `make test` compares the plans
with that.

"""
PARTLY = """
## Train partly in the daemon

What the daemon cannot run is cut out and runs in PyTorch between pieces in the daemon, with one
warning that gives the reason. *Share* is that of the daemon in the floating-point operations of
products and convolutions of a forward, counted by PyTorch's profiler: with the tiny sizes of this
page, so that a cut weighs more here than in a real model.

| Family | Model class | Share | Gradient difference |
| --- | --- | --- | --- |
"""
PROBLEMS = """
## Errors and differences

These stop with an error, or their loss or gradients differ from those of PyTorch by more than one
in a thousand, and from those in f64 by more than PyTorch's do. Where gradd's own check of the first
step finds a difference (`self_check`), it says so and the model trains in PyTorch.

"""
UNTRIED = """
## Not tried

With such sizes and the usual inputs of their task PyTorch itself does not run these, or they need a
library that is not installed. Nothing is known about them.

"""

LEFT = """
## Not run

`make families` has not come to these yet.

"""


def read(path: Path) -> list[Row]:
    """The rows of a file, one per family and class, sorted; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {(r["family"], r["model"]): r for r in map(json.loads, lines)}
    return [rows[key] for key in sorted(rows)]


def write(path: Path, rows: list[Row]) -> None:
    """Such a file, of rows as read() returns them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def page(rows: list[Row], left: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page.

    Args:
        rows: Of the classes that were run.
        left: Family and class of those that were not.
    """
    by_status = {s: [r for r in rows if r["status"] == s] for s in ("daemon", "partly", "untried")}
    problems = [r for r in rows if r["status"] in ("differs", "error")]
    summary = SUMMARY.strip().format(
        trains=len(by_status["daemon"]),
        most=sum(r["share"] >= 0.5 for r in by_status["partly"]),
        tried=len(rows) - len(by_status["untried"]),
        left=f"; {len(left)} more, at the end, were not" if left else "",
        versions="; ".join(sorted({r["versions"] for r in rows})),
    )
    text = HEAD.format(summary=wrapped(summary), kinds=kinds(rows))
    text += DAEMON + table(by_status["daemon"])
    partly = by_status["partly"]
    text += PARTLY + "".join(map(part, partly)) + counted(partly) + "\nWhat was cut out first:\n\n"
    text += items(partly, lambda r: f"`{r['reason']}`, {reason(r)}")
    if problems:
        text += PROBLEMS + items(problems, problem)
    if by_status["untried"]:
        text += UNTRIED + items(by_status["untried"], reason)
    if left:
        names = ", ".join(f"`{model}` of {family}" for family, model in left)
        text += LEFT + wrapped(names + ".") + "\n"
    return text


def kinds(rows: list[Row]) -> str:
    """A markdown table: how many classes of each kind of input train how."""
    names = ("Input", "Classes", "Wholly", "At least 95 %", "At least half", "Less", "Not right")
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    tried = [row for row in rows if row["status"] != "untried"]
    for kind in dict.fromkeys(("text", *KINDS.values())):
        found = [row for row in tried if KINDS.get(row.get("task", ""), "text") == kind]
        wholly = sum(row["status"] == "daemon" for row in found)
        shares = [row.get("share", 0.0) for row in found if row["status"] in ("partly", "pytorch")]
        most, half = sum(s >= 0.95 for s in shares), sum(0.5 <= s < 0.95 for s in shares)
        counts = (len(found), wholly, most, half, len(shares) - most - half)
        counts = (*counts, len(found) - wholly - len(shares))
        if found:
            lines.append("| " + " | ".join((kind, *map(str, counts))) + " |")
    return "\n".join(lines) + "\n"


def counted(rows: list[Row]) -> str:
    """A paragraph: causes and how many classes have them, the most frequent first."""
    causes = Counter(map(cause, rows)).most_common()
    told = ", ".join(f"{name} {count}" for name, count in causes)
    return "\n" + wrapped(COUNTED.strip().format(causes=told)) + "\n" if rows else ""


def wrapped(text: str) -> str:
    """A paragraph within the columns of the page; names stay whole."""
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def cause(row: Row) -> str:
    """ "`Einsum`" or "`aten.sort`" where an operator is named, else the reason's name."""
    named = r"\boperator (\w+)|\b(aten\.\w+)|(\w+) (?:puts|computes with)"
    found = re.search(named, row["text"])
    return f"`{next(filter(None, found.groups()))}`" if found else f"`{row['reason']}`"


def items(rows: list[Row], what: Callable[[Row], str]) -> str:
    """A list with family, class, and what is said of a row; its lines are wrapped."""
    lines = [f"* {row['family']}, `{row['model']}`: {what(row)}" for row in rows]
    fill = functools.partial(
        textwrap.fill,
        width=COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(fill(line) + "\n" for line in lines)


def table(rows: list[Row]) -> str:
    """A markdown table of models that train, and behind it what is too long for its lines."""
    names = ("Family", "Model class", "Gradient difference", "Not recognised")
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    long = []
    for row in rows:
        cells = (row["family"], f"`{row['model']}`", gradient(row))
        line = "| " + " | ".join((*cells, leftovers(row))) + " |"
        if len(line) > COLUMNS:
            long.append(row)
            line = "| " + " | ".join((*cells, "see below")) + " |"
        lines.append(line)
    below = "\n" + items(long, lambda r: f"not recognised {leftovers(r)}") if long else ""
    return "\n".join(lines) + "\n" + below


def part(row: Row) -> str:
    """A line of the table of models that train partly in the daemon."""
    cells = (row["family"], f"`{row['model']}`", f"{row['share']:.0%}", gradient(row))
    return "| " + " | ".join(cells) + " |\n"


def gradient(row: Row) -> str:
    """ "8.1e-07"."""
    return f"{row['gradient']:.1e}"


def leftovers(row: Row) -> str:
    """ "Exp×2, Tanh"."""
    counts = sorted(row["leftovers"].items())
    return ", ".join(op if count == 1 else f"{op}×{count}" for op, count in counts)


def problem(row: Row) -> str:
    """What is wrong with a row that neither trains nor falls back."""
    if row["status"] == "differs":
        where = f"gradient of `{row['where']}`"
        return f"{where} differs by {gradient(row)}, the loss by {row['loss']:.1e}"
    return f"`{row['reason']}`: {reason(row)}"


def without_folders(text: str) -> str:
    """Files without the folders of the machine that they lie in."""
    return re.sub(r"(?<![\w.])/(?:[^/\s():]+/)+", "", text)


def reason(row: Row) -> str:
    """The message in short: no advice, no code, files without folders."""
    text = " ".join(row["text"].replace("`", "").split())  # a line may end within them
    text = re.sub(r"^GRADD_E_[A-Z]+: ", "", text).removeprefix(f"{row.get('reason')}: ")
    text = without_folders(text)
    text = re.sub(r"\(node \w+, ", "(", text)
    text = re.sub(
        r" \(\w+(Error|Node): .*", "", text
    )  # internals of torch that mean nothing to users
    text = re.sub(r" Class validation error for validator '\w+':", "", text)
    text = re.sub(r"(?:\w+\.){2,}(\w+\.apply) ", r"\1 ", text)
    text = re.split(r"; use |: write |\. Please ", text)[0].rstrip(".:")
    if len(text) > LONGEST:
        text = text[:LONGEST].rpartition(" ")[0] + " …"
    return text
