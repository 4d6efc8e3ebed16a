"""The page about model families, from rows made by hand: nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import families_page

pytestmark = pytest.mark.quick


def row(family: str, status: str, **more: object) -> dict:
    return {
        **{"family": family, "model": f"{family.title()}Model", "status": status},
        **{"versions": "torch 1.2, transformers 3.4", **more},
    }


TRAINS = row("aa", "daemon", gradient=8.14e-7, leftovers={"Tanh": 1, "Exp": 2})
IN_PART = row(
    "bb",
    "partly",
    share=0.83,
    gradient=2e-6,
    reason="unsupported",
    text="GRADD_E_UNSUPPORTED: operator DFT (node n2, bb.layer @ /home/me/x/bb.py:7) and 3 more is "
    "not in the daemon; use a | b\ninstead",
)
FUNCTION = row(
    "bc",
    "partly",
    share=0.4,
    gradient=3e-6,
    reason="autograd_function",
    text="autograd_function: a.b.c.Special.apply was called; it has a | b: write it anew",
)
UNTRIED = row("cc", "untried", text="ValueError: " + "word " * 100)


def section(page: str, title: str) -> str:
    """The text under a title."""
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def test_page_names_the_classes_that_were_not_run() -> None:
    page = families_page.page([TRAINS], [("dd", "DdModel"), ("ee-x", "EeModel")])
    assert "`DdModel` of dd, `EeModel` of ee-x." in section(page, "Not run")
    assert "Not run" not in families_page.page([TRAINS])


def test_page_has_one_table_or_list_for_each_outcome() -> None:
    page = families_page.page([TRAINS, IN_PART, FUNCTION, UNTRIED])
    said = " ".join(page.split())
    assert (
        "Of the 3 model classes that were run 1 train wholly" in said
        and "and 1 with at least" in said
    )
    assert "torch 1.2, transformers 3.4" in page
    assert "| aa | `AaModel` | 8.1e-07 | Exp×2, Tanh |\n" in section(page, "Train in the daemon")
    assert "BbModel" not in section(page, "Train in the daemon")
    told = " ".join(section(page, "Train partly in the daemon").split())
    assert "| bb | `BbModel` | 83% | 2.0e-06 | | bc | `BcModel` | 40% | 3.0e-06 |" in told
    shown = "operator DFT (bb.layer @ bb.py:7) and 3 more is not in the daemon"
    assert f"* bb, `BbModel`: `unsupported`, {shown} * bc" in told
    assert told.endswith("`autograd_function`, Special.apply was called; it has a | b")
    *_, first, second = section(page, "Not tried").strip().splitlines()
    assert len(first) <= 100 and second.startswith("  word")
    last = f"{first} {second.strip()}"
    assert last.startswith("* cc, `CcModel`: ValueError: word word") and last.endswith(" …")
    assert len(last) < 200
    assert "## Errors" not in page and "/home" not in page


def test_page_counts_kinds_of_input_and_causes() -> None:
    seen = {**TRAINS, "family": "ii", "task": "image"}
    page = families_page.page([TRAINS, IN_PART, {**IN_PART, "family": "bd"}, FUNCTION, seen])
    assert "| text | 4 | 1 | 0 | 2 | 1 | 0 |" in page
    assert "| images | 1 | 1 | 0 | 0 | 0 | 0 |" in page and "| sounds |" not in page
    assert "`DFT` 2, `autograd_function` 1." in section(page, "Train partly in the daemon")


def test_page_names_errors_and_differences() -> None:
    wrong = row("dd", "differs", gradient=0.5, loss=0.25, where="a.weight")
    died = row("ee", "error", reason="process", text="its process died")
    told = section(families_page.page([TRAINS, wrong, died]), "Errors and differences")
    assert "* dd, `DdModel`: gradient of `a.weight` differs by 5.0e-01, the loss by" in told
    assert "* ee, `EeModel`: `process`: its process died\n" in told


def test_what_is_too_long_for_a_line_follows_its_table() -> None:
    long = {**TRAINS, "family": "gg", "leftovers": {f"Operator{k}": 2 for k in range(9)}}
    told = section(families_page.page([TRAINS, long]), "Train in the daemon")
    assert "| gg | `AaModel` | 8.1e-07 | see below |\n" in told
    assert "* gg, `AaModel`: not recognised Operator0×2, Operator1×2" in told
    assert max(map(len, told.splitlines())) <= 100


def test_last_row_of_a_family_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert families_page.read(file) == []
    rows = [IN_PART, {**TRAINS, "status": "untried"}, TRAINS]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert families_page.read(file) == [TRAINS, IN_PART]


def test_rows_are_kept_in_order(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    families_page.write(file, [IN_PART, TRAINS])
    families_page.write(file, families_page.read(file))
    assert list(map(json.loads, file.read_text().splitlines())) == [TRAINS, IN_PART]


def test_messages_are_without_the_folders_of_a_machine() -> None:
    text = "no graph has eq @ /home/me/.venv/lib/modeling_bb.py:7 (either/or)"
    assert families_page.without_folders(text) == "no graph has eq @ modeling_bb.py:7 (either/or)"
