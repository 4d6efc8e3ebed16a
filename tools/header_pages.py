"""C reference of the site: one page of Markdown for each header, made from its comments.

A header begins with a comment about the file; comments of sections (`/* ---- name ---- */`) become
headings, the comment before a group of declarations becomes prose behind them. Comments within a
declaration stay in the code.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("server/api", "shm", "kernels/contract", "kernels/rules", "kernels/describe")
COMMENT = re.compile(r"/\*.*?\*/\n?", re.S)
SECTION = re.compile(r"/\* -{3,} (.+?) -{3,} \*/\n?")
FRAME = re.compile(
    r"^#ifdef __cplusplus\n(?:extern \"C\" \{|\})\n#endif\n|^#(?:include|ifndef|endif|ifdef).*\n"
    r"|^#define \w+_H\n",
    re.M,
)
BODY = re.compile(r"^(static inline [^{;]+?) \{\n.*?^\}$", re.M | re.S)
NAMES = re.compile(
    r"^#define (\w+)|^\} (\w+);|^typedef [^(]+\(\*(\w+)\)|^typedef (?:struct|enum) \w+ (\w+);"
    r"|^(?!typedef|#)(?:\w[^(\n=]*[ *])(\w+)\(",
    re.M,
)
# Code in a comment: backticks, paths, names with underscores, calls.
CODE = re.compile(r"`[^`]+`|\b[\w./]+/[\w.]*\w|\b\w+_\w+(?:\(\))?|\b\w+\(\)")
SPECIAL = re.compile(r"([\\*_\[\]<>|#])")
IN_TITLE = 4


def headers(root: Path) -> list[Path]:
    """The headers of the interface, in the order of FOLDERS."""
    return [h for folder in FOLDERS for h in sorted((root / folder).glob("*.h"))]


def page(root: Path, header: Path) -> str:
    """The reference of one header.

    Raises:
        ValueError: The header has no comment at its head.
    """
    name = header.relative_to(root).as_posix()
    text = FRAME.sub("", header.read_text(encoding="utf-8"))
    head = COMMENT.match(text)
    if not head:
        raise ValueError(f"{name}: a header begins with a comment about the file")
    parts = [f"# {name}\n", prose(head[0])]
    for chunk in chunks(text[head.end() :]):
        section = SECTION.match(chunk)
        parts.append(
            f"## {section[1][0].upper()}{section[1][1:]}\n" if section else declaration(chunk)
        )
    return "\n".join(parts)


def chunks(text: str) -> Iterator[str]:
    """Comments of sections, and declarations with the comment before them, in order."""
    chunk: list[str] = []
    depth = 0
    for line in [*text.splitlines(keepends=True), "\n"]:
        if depth == 0 and chunk and (not line.strip() or line.startswith("/*")):
            yield "".join(chunk)
            chunk = []
        if depth or line.strip():
            chunk.append(line)
            depth += weight(line)


def weight(line: str) -> int:
    """By how much a line changes the depth of nested comments and braces."""
    outside = re.sub(r"/\*.*?\*/", "", line)
    return sum(outside.count(w) for w in ("{", "/*")) - sum(outside.count(w) for w in ("}", "*/"))


def declaration(chunk: str) -> str:
    """A heading with the declared names, the declarations, and their comment."""
    comment = COMMENT.match(chunk)
    said = prose(comment[0]) if comment else ""
    code = BODY.sub(r"\1;", chunk[comment.end() :] if comment else chunk).strip()
    if not code:
        return said
    names = dict.fromkeys(next(filter(None, found)) for found in NAMES.findall(code))
    title = ", ".join(f"`{name}`" for name in [*names][:IN_TITLE])
    more = ", ..." if len(names) > IN_TITLE else ""
    heading = f"### {title}{more}\n\n" if title else ""
    return f"{heading}```c\n{code}\n```\n\n{said}"


def prose(comment: str) -> str:
    """The text of a comment as Markdown; tables and code are indented there, and stay as is."""
    lines = [re.sub(r"^ \* ?", "", line) for line in comment.strip()[2:-2].splitlines()]
    alike = itertools.groupby(lines, lambda line: (not line.strip(), line.startswith("  ")))
    return "\n\n".join(paragraph([*run]) for (empty, _), run in alike if not empty) + "\n"


def paragraph(lines: list[str]) -> str:
    """Lines as a paragraph, as a list, or as they are."""
    if lines[0].startswith("  ") and not lines[0].lstrip().startswith("- "):
        return "```text\n" + textwrap.dedent("\n".join(lines)) + "\n```"
    text = "\n".join(line.strip() for line in lines)
    parts, last = [], 0
    for code in CODE.finditer(text):
        parts += [SPECIAL.sub(r"\\\1", text[last : code.start()]), f"`{code[0].strip('`')}`"]
        last = code.end()
    return "".join([*parts, SPECIAL.sub(r"\\\1", text[last:])])
