"""Additions to mkdocs for the site (mkdocs.yml): pages from outside docs/, and a C reference.

README.md is the start of the site; CONTRIBUTING.md, CHANGELOG.md and the pages of benchmarks/ and
samples/ are in it at their own paths, and each header of the C interface has a page. A link from
docs/ to one of them leads to its page; a link to another file of the repository becomes plain text,
for the site has no sources (`tests/check_pages.py` checks that the file exists).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
import header_pages  # noqa: E402

OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/**/*.md", "samples/**/*.md")
OUTSIDE += ("benchmarks/results/*.svg",)
C_FOLDER = "reference/c"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the headers in the navigation, by folder."""
    for entry in config.nav or []:
        if "C headers" in entry:
            entry["C headers"] = c_navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/ and those of the headers."""
    for path in outside():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path(path), content=text))
    for header in header_pages.headers(ROOT):
        path = site_path(header.relative_to(ROOT).as_posix())
        files.append(File.generated(config, path, content=header_pages.page(ROOT, header)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page, which are paths of the repository, into paths of the site."""
    here = repository_path(page.file.src_uri)

    def linked(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        there = site_path(path)
        if files.get_file_from_path(there):
            start = os.path.dirname(page.file.src_uri) or "."
            return f"{text}({os.path.relpath(there, start)}{anchor})"
        outside_docs = (ROOT / path).exists() and not path.startswith("docs/")
        return text.strip("[]") if outside_docs else match[0]

    return LINK.sub(linked, markdown)


def outside() -> list[str]:
    """Pages and pictures outside docs/, as paths of the repository."""
    found = (p for pattern in OUTSIDE for p in sorted(ROOT.glob(pattern)))
    return [p.relative_to(ROOT).as_posix() for p in found]


def site_path(path: str) -> str:
    """The page of the site for a path of the repository."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".h"):
        return f"{C_FOLDER}/{path}.md"
    return path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """The path in the repository of a page of the site."""
    if path == "index.md":
        return "README.md"
    if path.startswith(f"{C_FOLDER}/"):
        return path.removeprefix(f"{C_FOLDER}/").removesuffix(".md")
    return path if path in outside() else f"docs/{path}"


def c_navigation() -> list[dict[str, Any]]:
    """Folders of headers with their pages."""
    paths = [h.relative_to(ROOT).as_posix() for h in header_pages.headers(ROOT)]
    return [
        {folder: [{Path(p).name: site_path(p)} for p in paths if Path(p).parent == Path(folder)]}
        for folder in header_pages.FOLDERS
    ]
