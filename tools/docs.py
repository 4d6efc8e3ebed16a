"""Writes the pages under docs/ that are made from lists of the sources; each list has a tool here.

Usage: docs.py GRADD [--check]. With --check nothing is written, and the exit status says whether
every page is current; `make check` runs that, `make pages` rewrites the pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import kernels_doc
import messages_doc
import operators_doc
import options_doc
import patterns_doc

ROOT = Path(__file__).resolve().parent.parent


def pages(gradd: str) -> dict[str, str]:
    """Every generated page with the text that it should have."""
    command = [gradd, "--list-ops", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {
        "docs/operators.md": operators_doc.page(rows),
        "docs/kernels.md": kernels_doc.page(rows),
        "docs/messages.md": messages_doc.page(ROOT),
        "docs/options.md": options_doc.page(ROOT),
        "docs/patterns.md": patterns_doc.page(ROOT),
    }


def main() -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gradd", help="the gradd binary")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name, text in pages(args.gradd).items():
        page = ROOT / name
        if page.exists() and page.read_text() == text:
            continue
        stale.append(name)
        if not args.check:
            page.write_text(text)
    if not args.check:
        return 0
    for name in stale:
        print(f"{name} is not what the sources say: run `make pages` and commit it")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
