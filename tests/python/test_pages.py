"""The checks of pages and words, on pages made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import check_pages
import check_words

pytestmark = pytest.mark.quick


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_pages, "ROOT", tmp_path)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "a.c").write_text("")
    (tmp_path / "other.md").write_text("# Other page\n\n## A `b` and c\n\n## Twice\n\n## Twice\n")
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md), [a](other.md#a-b-and-c), [a](other.md#twice-1), [a](https://x.y/z)",
        "`server/a.c:12`, `build/bin/x.txt`, `ops/<family>.c`, `tests/*.py`, `a/b`",
        "![picture](other.md) and `list[0](x)`",
        "```\n[a](nowhere.md) `server/b.c` 84928e7\n```",
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
        ("see `server/b.c`", "`server/b.c`: there is no such file"),
        ("measured at 84928e7", "84928e7: looks like a commit"),
    ],
)
def test_what_is_wrong_is_named(page: Path, text: str, said: str) -> None:
    page.write_text(text)
    (problem,) = check_pages.problems(page)
    assert said in problem


GLOSSARY = r"""# Page

## Glossary

| word | meaning | C | Python | never |
|---|---|---|---|---|
| launch | one execution | `launch_t` |  | `\bstep_t\b` |
|  | of a kernel | `other_t` |  | `plan_step` |
| plan | a graph |  |  |  |

### More

| word | never |
|---|---|
| workspace | `->work\b` |

## Next

| x | y |
|---|---|
| no rule | `in another section` |
"""


def test_rules_are_read_from_the_tables_of_the_glossary() -> None:
    rules = check_words.rules(GLOSSARY)
    assert [(r.word, r.pattern.pattern) for r in rules] == [
        ("launch", r"\bstep_t\b"),
        ("launch", "plan_step"),
        ("workspace", r"->work\b"),
    ]
    assert rules[0].names == "launch_t"


def test_words_are_found_with_the_word_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    (tmp_path / "a.c").write_text("int x;\nstep_t *s;\nr->worker\nr->work;\n")
    rules = check_words.rules(GLOSSARY)
    first, second = check_words.problems("a.c", rules)
    assert first.startswith("a.c:2: 'step_t': say 'launch' (launch_t)")
    assert second.startswith("a.c:4: '->work': say 'workspace'")
