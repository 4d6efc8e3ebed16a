"""`make versions`: its environments, the README's table, and the warning about an unknown torch."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import versions

from gradd import tried

pytestmark = pytest.mark.quick
PAGE = f"before\n{versions.BEGIN}\nold\n{versions.END}\nafter\n"


def _row(python: str, torch_: str, tests: str = "9 passed, 0 failed") -> versions.Row:
    return versions.Row(python, torch_, "5.24.0", "passes", tests)


def test_the_environments_are_those_that_the_product_knows() -> None:
    of_tool = {tuple(map(int, one.torch.split("."))) for one in versions.ENVIRONMENTS}
    assert of_tool == set(tried.TORCH)
    assert {one.python for one in versions.ENVIRONMENTS} == {"3.11", "3.12", "3.13"}
    assert "5.17" in {one.transformers for one in versions.ENVIRONMENTS}


def test_rows_come_in_the_order_of_the_environments_and_are_replaced() -> None:
    page = versions.with_rows(PAGE, {"2.14-3.13": _row("3.13.0", "2.14.1")})
    known = versions.rows(page)
    known["2.11-3.11"] = _row("3.11.7", "2.11.0", "8 passed, 1 failed")
    page = versions.with_rows(page, known)
    found = versions.rows(page)
    assert list(found) == ["2.11-3.11", "2.14-3.13"]
    assert [row.is_good for row in found.values()] == [False, True]
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page


def test_rows_of_the_readme_are_those_of_environments() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(versions.rows(page)) <= {one.name for one in versions.ENVIRONMENTS}
    assert versions.with_rows(page, versions.rows(page)) == page


def test_an_interpreter_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", "/nowhere")
    known = Path(sys.executable)
    monkeypatch.setattr(versions.shutil, "which", lambda name: None)
    wanted = [versions.Environment("2.14", "3.77")]
    assert versions.interpreter("3.77") is None
    assert versions.missing(wanted) == ["python3.77"]
    own = "{}.{}".format(*sys.version_info[:2])
    monkeypatch.setattr(versions.shutil, "which", lambda name: str(known))
    assert versions.interpreter(own) == known
    assert versions.interpreter("3.77") is None  # a shim that starts another one


def test_the_example_is_the_readme_s() -> None:
    assert "ORTModule(net)" in versions.example()
    compile(versions.example(), "try.py", "exec")


def test_pins_leave_out_what_is_tried() -> None:
    pins = versions.constraints()
    assert re.search("^onnx==", pins, re.MULTILINE)
    assert not re.search("^(torch|transformers)==", pins, re.MULTILINE)
    assert "pytest" in versions.requirements() and "torch" not in versions.requirements()


@pytest.mark.parametrize(
    ("version", "said"), [("2.15.0", 1), ("3.0.0+cpu", 1), ("2.14.9", 0), ("2.11.0", 0), ("x", 0)]
)
def test_a_newer_torch_gets_one_line(
    version: str, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    tried.tell.cache_clear()
    with caplog.at_level(logging.INFO, logger="gradd"):
        tried.tell()
        tried.tell()
    assert [version in r.getMessage() for r in caplog.records] == [True] * said


def test_requirements_have_no_upper_bound() -> None:
    for part, name in (("python", "torch>=2.11"), ("optimum", "transformers>=5.17")):
        text = (ROOT / "adapters" / part / "pyproject.toml").read_text()
        assert f'"{name}"' in text and 'requires-python = ">=3.11"' in text
