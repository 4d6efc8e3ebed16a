"""Fails when a source or a page uses a word that the glossary replaces by another.

The tables under "Glossary" in docs/architecture.md have a column "never": regular expressions in
backticks, each of which must not occur, in capitals or not, in tracked sources, scripts and pages.
A blank in one stands for the end of a line as well, with what begins the next line of a comment.
The changelog and the glossary itself are left out. A line that is found is printed with the word to
use instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
SKIPPED = {"CHANGELOG.md", "tests/check_words.py", "tests/python/test_pages.py"}
SEARCHED = ("*.c", "*.h", "*.inc", "*.py", "*.sh", "*.md", "Makefile", "*.mk")
GAP = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:(?:[*#>]|//)[ \t]*)?)"  # between two words
GLOSSARY = re.compile(r"^## Glossary\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """What must not be written, and the row of the glossary that says so."""

    pattern: re.Pattern[str]
    word: str
    names: str  # what stands for the word in the sources


def cells(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rules(text: str) -> list[Rule]:
    """The rules of the glossary. A row without a word goes on with the one above it."""
    found = []
    column, word, names = -1, "", ""
    for line in glossary(text).splitlines():
        if not line.startswith("|"):
            column = -1
            continue
        row = cells(line)
        if "never" in row:
            column = row.index("never")
        elif column >= 0 and not set(line) <= set("|- "):
            if row[0]:
                word = row[0]
                names = ", ".join(cell.strip("`") for cell in row[2:column] if cell)
            for pattern in re.findall(r"`([^`]+)`", row[column]):
                spread = re.compile(pattern.replace(" ", GAP), re.IGNORECASE)
                found.append(Rule(spread, word, names))
    return found


def glossary(text: str) -> str:
    """The section of the page that holds the tables."""
    section = GLOSSARY.search(text)
    if not section:
        raise SystemExit(f"{PAGE}: there is no section 'Glossary' before another one")
    return section[0]


def tracked() -> Iterator[str]:
    """Names of the files that are searched."""
    command = ["git", "ls-files", "-z", *SEARCHED]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    yield from (name for name in listed.stdout.split("\0") if name and name not in SKIPPED)


def searched(name: str) -> str:
    """The text of a file; the glossary's lines are empty, so that numbers of lines hold."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name != PAGE:
        return text
    return GLOSSARY.sub(lambda section: "\n" * section[0].count("\n"), text)


def problems(name: str, known: list[Rule]) -> Iterator[str]:
    """What is wrong with one file, as lines to print."""
    text = searched(name)
    found = [(match, rule) for rule in known for match in rule.pattern.finditer(text)]
    for match, rule in sorted(found, key=lambda entry: entry[0].start()):
        number = text.count("\n", 0, match.start()) + 1
        instead = f"'{rule.word}'" + (f" ({rule.names})" if rule.names else "")
        said = " ".join(match[0].split())
        yield f"{name}:{number}: '{said}': say {instead}, see {PAGE}#glossary"


def main() -> int:
    """Prints every problem; returns the exit status."""
    known = rules((ROOT / PAGE).read_text(encoding="utf-8"))
    names = [name for name in tracked() if (ROOT / name).exists()]
    found = [line for name in names for line in problems(name, known)]
    print("\n".join(found) if found else f"words: {len(known)} rules hold in {len(names)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
