"""The site of the documentation: its C reference, and links that leave docs/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import header_pages

HEADER = """/* Lists: one
 * of each.
 *
 *   a  as it is
 *   b  the same
 */
#ifndef X_H
#define X_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- making lists ------------- */

/* A list_t of *all*, see lists/list.c. */
typedef struct list_s {
    int n;

    /* of n */
    int *v;
} list_t;

/* Adds to list. */
void list_add(list_t *list, int value);
static inline int list_count(const list_t *list) {
    return list->n;
}

#ifdef __cplusplus
}
#endif
#endif
"""
PAGE = """# lists.h

Lists: one
of each.

```text
a  as it is
b  the same
```

## Making lists

### `list_t`

```c
typedef struct list_s {
    int n;

    /* of n */
    int *v;
} list_t;
```

A `list_t` of \\*all\\*, see `lists/list.c`.

### `list_add`, `list_count`

```c
void list_add(list_t *list, int value);
static inline int list_count(const list_t *list);
```

Adds to list.
"""


def test_a_header_becomes_a_page(tmp_path: Path) -> None:
    (tmp_path / "lists.h").write_text(HEADER)
    assert header_pages.page(tmp_path, tmp_path / "lists.h") == PAGE


def test_a_header_without_a_comment_is_named(tmp_path: Path) -> None:
    (tmp_path / "lists.h").write_text(HEADER[HEADER.index("*/") + 2 :])
    with pytest.raises(ValueError, match=r"lists\.h: a header begins with a comment"):
        header_pages.page(tmp_path, tmp_path / "lists.h")


def test_every_function_of_the_library_has_a_heading() -> None:
    page = header_pages.page(ROOT, ROOT / "server" / "api" / "gradd.h")
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    for name in ("gradd_model_load", "gradd_plan_create", "gradd_run_forward", "gradd_live_t"):
        assert any(f"`{name}`" in heading for heading in headings)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The pages, the headers and the hooks, without sources."""
    for path in ("docs", "tools", "benchmarks", "samples", "adapters", *header_pages.FOLDERS):
        there = tmp_path / path
        shutil.copytree(ROOT / path, there, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / path, tmp_path)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess:
    """What `make site` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )


def test_links_lead_to_pages_and_wrong_ones_fail(tree: Path) -> None:
    status = tree / "docs" / "status.md"
    text = status.read_text()
    good = "[a](../README.md#install) [b](../shm/lease.h) [c](../LICENSE) `[d](e.md)`\n"
    shutil.copy(ROOT / "LICENSE", tree)
    status.write_text(f"{text}\n\n{good}")
    done = build(tree)
    assert done.returncode == 0, done.stderr
    page = (tree / "build" / "site" / "status.html").read_text()
    assert '<a href="index.html#install">a</a>' in page
    assert '<a href="reference/c/shm/lease.h.html">b</a> c <code>[d](e.md)</code>' in page
    names = (tree / "build" / "site" / "python.html").read_text()
    assert 'id="gradd.debug.DebugOptions"' in names and "DebugOptions.save" not in names
    wrong = ("nowhere.md", "engine.md#nowhere", "../server/nowhere.h")
    status.write_text("\n\n".join([text, *(f"[a]({target})" for target in wrong)]))
    done = build(tree)
    assert done.returncode != 0
    for target in wrong:
        assert f"'{target}'" in done.stderr
