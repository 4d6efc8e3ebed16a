"""Fails where a source or a page uses a replaced word, or calls a thing a person.

REPLACED lists expressions with the word of docs/glossary.md to use instead. A thing (a module, a
process, a thread, data) is no "who" and no "somebody": the sentence gets the thing as its subject.
A blank in an expression stands for the end of a line as well, with what begins the next line of a
comment. The changelog is left out. A line that is found is printed with what to write instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/glossary.md"
SKIPPED = {"CHANGELOG.md", "tests/check_words.py", "tests/python/test_pages.py"}
SEARCHED = ("*.c", "*.h", "*.inc", "*.cu", "*.cc", "*.py", "*.sh", "*.md", "Makefile", "*.mk")
GAP = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:(?:[*#>]|//)[ \t]*)?)"  # between two words
REPLACED = (
    ("row", r"command_rows_t"),
    ("launch", r"\bstep_t\b|steps? of (?:a )?(?:the )?plan|among the steps"),
    ("workspace", r"->work\b"),
    ("choice", r"\bcall_t\b|kernel (?:for )?(?:that takes )?a call\b"),
    ("plan", r"map_plan_t|reduce_plan_t|plan_work_t|work_plan_t"),
    ("run", r"gradd_run_handle_t|work_run_t"),
    ("session objects", r"\bwork_t\b"),
    ("location", r"\bplace_of\b|\btest_places\b|place in the source"),
    ("interval", r"match_spans"),
    ("selection", r"\bwishes\b"),
    ("open session, open run, plan of the daemon", r"\blive (?:session|run|plan)s?\b"),
    ("fast path, slow path", r"\b(?:short|long)(?:er)?(?: |_)way\b"),
)
PEOPLE = ("user", "users", "people", "person", "reader", "readers", "developer", "newcomer")
# Behind the word: what comes before it is looked at where it was found alone.
_NOT_OF_PEOPLE = "".join(rf"(?<!{word}\x20who)" for word in PEOPLE)
THINGS = (
    "it with the thing as the subject",
    # In names as well, where underscores stand around a word.
    rf"(?<![a-z])(?:who(?![a-z]){_NOT_OF_PEOPLE}|(?:whoever|whom|somebody|nobody)s?(?![a-z]))",
)


@dataclass(frozen=True)
class Rule:
    """What must not be written, and what to say instead."""

    pattern: re.Pattern[str]
    word: str


def rules(table: tuple[tuple[str, str], ...] = (*REPLACED, THINGS)) -> list[Rule]:
    """The rules of a table."""
    spread = ((word, text.replace(" ", GAP)) for word, text in table)
    return [Rule(re.compile(text, re.IGNORECASE), word) for word, text in spread]


def tracked() -> Iterator[str]:
    """Names of the files that are searched."""
    command = ["git", "ls-files", "-z", *SEARCHED]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    yield from (name for name in listed.stdout.split("\0") if name and name not in SKIPPED)


def problems(name: str, known: list[Rule]) -> Iterator[str]:
    """What is wrong with one file, as lines to print."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = [(match, rule) for rule in known for match in rule.pattern.finditer(text)]
    for match, rule in sorted(found, key=lambda entry: entry[0].start()):
        number = text.count("\n", 0, match.start()) + 1
        said = " ".join(match[0].split())
        yield f"{name}:{number}: '{said}': say {rule.word}, see {PAGE}"


def main() -> int:
    """Prints every problem; returns the exit status."""
    known = rules()
    names = [name for name in tracked() if (ROOT / name).exists()]
    found = [line for name in names for line in problems(name, known)]
    print("\n".join(found) if found else f"words: {len(known)} rules hold in {len(names)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
