"""The checks of pages, words and imports, on files made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import check_imports
import check_pages
import check_words

pytestmark = pytest.mark.quick


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_pages, "ROOT", tmp_path)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "a.c").write_text("")
    (tmp_path / "server" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "other.md").write_text("# Other page\n\n## A `b` and c\n\n## Twice\n\n## Twice\n")
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md), [a](other.md#a-b-and-c), [a](other.md#twice-1), [a](https://x.y/z)",
        "`server/a.c:12`, `build/bin/x.txt`, `ops/<family>.c`, `tests/*.py`, `a/b`",
        "![picture](other.md) and `list[0](x)`",
        "```\n[a](nowhere.md) `server/b.c` 84928e7\n```",
        "`server/`, `deep/er/`, `er/`, `build/gone/`, `/abs/`",
        "[a][one], [one][] and `x[2][3]`\n\n[one]: other.md#twice",
        "`no longer` is code\n```\nformerly\n```",
        "deadbeef is a word, 1576960 a number, `84928e7` is code",
        "x" * 100,
    ],
)
def test_pages_in_order(page: Path, text: str) -> None:
    page.write_text(text)
    assert check_pages.problems(page) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x" * 101, "page.md:1: 101 columns"),
        ("\n\n| " + "x" * 101, "page.md:3: 103 columns"),
        ("[a](nowhere.md)", "page.md:1: link to nowhere.md: there is no such file"),
        ("[a](other.md#d)", "page.md:1: link to other.md#d: no heading"),
        ("![a](picture.png)", "link to picture.png"),
        ("[`code`](nowhere.md)", "link to nowhere.md"),
        ("[a][two]", "page.md:1: [a][two]: no line begins with [two]:"),
        ("[two][]", "page.md:1: [two][]: no line begins with [two]:"),
        ("[two]: nowhere.md", "page.md:1: link to nowhere.md: there is no such file"),
        ("see `server/no/`", "`server/no/`: there is no such folder"),
        ("see `eep/`", "`eep/`: there is no such folder"),
        ("It\nno\nlonger is.", "page.md:2: no longer: a page says what is"),
        ("see `a` and `b", "page.md:1: a line ends within backticks"),
        ("Formerly", "page.md:1: Formerly: a page"),
        ("see `server/b.c`", "`server/b.c`: there is no such file"),
        ("measured at 84928e7", "84928e7: looks like a commit"),
    ],
)
def test_what_is_wrong_is_named(page: Path, text: str, said: str) -> None:
    page.write_text(text)
    (problem,) = check_pages.problems(page)
    assert said in problem


TABLE = (("launch", r"\bstep_t\b|plan_step"), ("workspace", r"->work\b"), ("use", "of no use"))


def test_words_are_found_with_the_word_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    (tmp_path / "a.c").write_text("int x;\nstep_t *s;\nr->worker\nr->work;\n")
    first, second = check_words.problems("a.c", check_words.rules(TABLE))
    assert first.startswith("a.c:2: 'step_t': say launch")
    assert second.startswith("a.c:4: '->work': say workspace")


@pytest.mark.parametrize(
    "text",
    [
        "a PLAN_STEP\n",
        "/* of no\n * use */\n",
        "# of no\n# use\n",
        "of  no use\n",
        "of no\nuse\n",
    ],
)
def test_words_are_found_in_capitals_and_over_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    (tmp_path / "a.inc").write_text(f"\n{text}")
    (problem,) = check_words.problems("a.inc", check_words.rules(TABLE))
    assert problem.startswith("a.inc:2: ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a module who reads it", True),
        ("whoever closed the segment", True),
        ("Nobody reads it", True),
        ("a user who reads it", False),
        ("for people who train", False),
        ("the whole of it", False),
        ("def test_who_reads(): pass", True),
        ("a_log_that_nobody_reads", True),
        ("in_nobodys_way", True),
        ("test_whole_table", False),
    ],
)
def test_a_thing_is_no_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: bool
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(f"# {text}\n")
    assert bool(list(check_words.problems("a.py", check_words.rules()))) == found


def test_lists_scripts_and_the_makefile_are_searched() -> None:
    names = set(check_words.tracked())
    assert {"Makefile", "server/explain/columns.inc", "tests/run_all.py"} <= names


def _graph(folder: Path, files: dict[str, str]) -> dict[str, set[str]]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = check_imports.modules(folder, "top.gradd")
    return {name: check_imports.imports(name, tree, known) for name, tree in known.items()}


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    graph = _graph(
        tmp_path,
        {
            "top/gradd/__init__.py": "from . import a\n",
            "top/gradd/a.py": "from .room import b\n",
            "top/gradd/room/__init__.py": "",
            "top/gradd/room/b.py": "def late():\n    from .. import a\n    from .b import x\n",
        },
    )
    assert graph["top.gradd"] == {"top.gradd.a"}
    assert graph["top.gradd.a"] == {"top.gradd.room", "top.gradd.room.b"}
    assert graph["top.gradd.room.b"] == {"top.gradd.a"}
    assert check_imports.circle(graph)


@pytest.mark.parametrize("line", ["from .a import _x", "from gradd.a import _x"])
def test_private_names_are_found_however_they_are_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "gradd").mkdir()
    (tmp_path / "gradd" / "a.py").write_text("_x = 1\n")
    (tmp_path / "gradd" / "b.py").write_text(f"{line}\n")
    known = check_imports.modules(tmp_path, "gradd")
    assert list(check_imports.privates("gradd.b", known["gradd.b"], {"_x"})) == [
        "gradd.b:1: imports _x: give it a public name"
    ]
