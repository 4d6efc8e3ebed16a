"""Fails when a page has lines that are too long, links that lead nowhere, or history in it.

Every *.md of the repository is read: lines of at most 100 columns, tables included; relative links
and their anchors exist, those of references too; paths of files in backticks exist, and folders
that end in a slash; backticks are closed on their line; no hashes of commits and no words about
earlier times in prose. What a path may be besides a file of the repository is PATTERNS. Run by
`make lint`, `make check` and `make test`.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".venv", "build", "node_modules"}
COLUMNS = 100
# Paths that name no file of the repository: build output, placeholders, globs, other people's.
PATTERNS = re.compile(r"^(build|runs|demo-out|\.venv|~|\$\w+)/|[<>*{}$()\[\]…,=]|^/|\.\.\.")
# Where a page may leave out the first folders of a path.
FOLDERS = ("", "adapters/python/gradd", "adapters/python/gradd/graph", "server", "kernels")
# Pages that may say what was.
HISTORIC = frozenset({"CHANGELOG.md"})
HISTORY = re.compile(r"\b(previously|used\s+to\s+be|formerly|no\s+longer)\b", re.IGNORECASE)
REFERENCE = re.compile(r"(?<!!)\[([^\]]+)\]\[([^\]]*)\]")
DEFINITION = re.compile(r"^ {0,3}\[([^\]]+)\]:\s*<?([^\s>]+)>?")
FOLDER = re.compile(r"(?:[\w.-]+/)+")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w.<>*{}$~-]+(?:/[\w.<>*{}$~-]+)+\.[a-z0-9]{1,4}")
HASH = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def pages() -> list[Path]:
    """Every page of the repository, sorted."""
    found = ROOT.rglob("*.md")
    return sorted(p for p in found if not skipped(p.relative_to(ROOT)))


def skipped(path: Path) -> bool:
    """Whether a path lies in a folder that is built or installed."""
    return any(part in SKIPPED or part.startswith("build-") for part in path.parts[:-1])


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of fenced blocks with their numbers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchor(title: str) -> str:
    """What GitHub makes of a heading."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page; a heading that comes again gets a number."""
    names: dict[str, int] = {}
    found = set()
    for _, line in prose(page.read_text(encoding="utf-8")):
        if heading := re.match(r"#+ (.*)", line):
            name = anchor(heading[1])
            count = names.get(name, 0)
            names[name] = count + 1
            found.add(f"{name}-{count}" if count else name)
    return found


def wrong_link(page: Path, target: str) -> str:
    """What is wrong with the target of a link, or nothing."""
    if re.match(r"[a-z]+:", target):
        return ""
    path, _, name = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"link to {path}: there is no such file; correct the path, relative to the page"
    if name and name not in anchors(file):
        return f"link to {target}: no heading has that anchor; take one of the page's headings"
    return ""


@functools.cache
def folders(root: Path) -> frozenset[str]:
    """Every folder with sources; a page may leave out the first ones of its path."""
    found = []
    for at, inner, _ in os.walk(root):
        inner[:] = [n for n in inner if n not in SKIPPED and not n.startswith("build-")]
        found += [(Path(at) / n).relative_to(root).as_posix() for n in inner]
    return frozenset(found)


def references(text: str) -> Iterator[tuple[int, str]]:
    """References without a definition, with their lines."""
    lines = [(number, plain_links(line)) for number, line in prose(text)]
    known = {found[1].lower() for _, line in lines if (found := DEFINITION.match(line))}
    for number, line in lines:
        for words, name in REFERENCE.findall(line):
            if (name or words).lower() not in known:
                yield number, f"[{words}][{name}]: no line begins with [{name or words}]:"


def history(text: str) -> Iterator[tuple[int, str]]:
    """Words about earlier times, with their lines; two words may stand on two lines."""
    lines = {number: CODE.sub("", line) for number, line in prose(text)}
    plain = "\n".join(lines.get(n, "") for n in range(1, text.count("\n") + 2))
    for found in HISTORY.finditer(plain):
        said = " ".join(found[0].split())
        yield plain.count("\n", 0, found.start()) + 1, f"{said}: a page says what is, not what was"


def wrong_path(page: Path, text: str) -> str:
    """What is wrong with a path in backticks, or nothing."""
    path = text.split(":")[0]
    if PATTERNS.search(path):
        return ""
    if FOLDER.fullmatch(path):
        if any(f"/{folder}/".endswith(f"/{path}") for folder in folders(ROOT)):
            return ""
        return f"`{path}`: there is no such folder; write its path from the repository root"
    if not FILE.fullmatch(path):
        return ""
    if (page.parent / path).exists() or any((ROOT / f / path).exists() for f in FOLDERS):
        return ""
    return f"`{path}`: there is no such file; write its path from the repository root"


def problems(page: Path) -> list[str]:
    """What is wrong with one page, as lines to print."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT)
    out = [
        f"{name}:{number}: {len(line)} columns, the limit is {COLUMNS}; wrap the line, or make "
        "the table a list"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS
    ]
    for number, line in prose(text):
        plain = CODE.sub("", line)
        found = [wrong_link(page, a or b) for a, b in LINK.findall(plain_links(line))]
        found += [wrong_link(page, target) for _, target in DEFINITION.findall(plain_links(line))]
        found += [wrong_path(page, word) for code in CODE.findall(line) for word in code.split()]
        found += [
            f"{word}: looks like a commit; a page says what is, leave it out"
            for word in HASH.findall(plain)
        ]
        found += ["a line ends within backticks; keep them on one line"] * (line.count("`") % 2)
        out += [f"{name}:{number}: {what}" for what in found if what]
    out += [f"{name}:{number}: {what}" for number, what in references(text)]
    if name.as_posix() not in HISTORIC:
        out += [f"{name}:{number}: {what}" for number, what in history(text)]
    return out


def plain_links(line: str) -> str:
    """The line without code, in which brackets are no links; code within a link's text stays."""
    return re.sub(r"`[^`]*`(?![^\[]*\]\()", "", line)


def main() -> int:
    """Prints every problem; returns the exit status."""
    found = [line for page in pages() for line in problems(page)]
    print("\n".join(found) if found else f"pages: {len(pages())} are in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
