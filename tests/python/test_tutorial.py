"""docs/adding-an-operator.md, followed to the letter in a copy of the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import BUILD, ROOT
from helpers.pages import blocks, environment

NAME = ROOT / "docs" / "adding-an-operator.md"
PAGE = NAME.read_text(encoding="utf-8")
FILE = "kernels/ops/elementwise/shrink.c"  # section 2 says so
GPU_FILE = "kernels/cuda/shrink.cu"  # section 8 says so
EXPLAIN = ("build/bin/gradd", "explain", "try.onnx", "--train", "w")
SOURCES = (
    *("Makefile", "mk", "shm", "platform", "kernels", "server", "train"),
    *("tests", "tools", "benchmarks", "adapters"),
)


def run(tree: Path, *command: str, **more: str) -> subprocess.CompletedProcess:
    """A command in the tree, with the daemon that is built there."""
    env = environment(tree, tree / "build", tree) | more
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sources and build of this tree: times are kept, so only what changes is built again."""
    copy = tmp_path_factory.mktemp("tutorial")
    for name in (*SOURCES, "constraints.txt", "requirements.txt", "requirements-dev.txt"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy)], check=True)
    subprocess.run(["cp", "-a", str(BUILD), str(copy / "build")], check=True)
    (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
    (copy / "try.py").write_text(blocks(NAME, "python")[0].text)
    yield copy
    run(copy, "build/bin/gradd", "stop")
    shutil.rmtree(copy)


def test_an_operator_is_added_as_the_page_says(tree: Path) -> None:
    assert run(tree, sys.executable, "try.py").returncode == 0
    before = run(tree, *EXPLAIN)
    assert f"$ .venv/bin/python try.py && {' '.join(EXPLAIN)}\n{before.stderr}" in PAGE
    assert "operator Shrink of opset 18 is not supported" in before.stderr
    source = "\n".join(block.text for block in blocks(NAME, "c"))
    (tree / FILE).write_text(source)
    # The page moves the expression to a header, for which all kernels would be built again.
    expression = "\n".join(re.findall(r"^#define .*", source, re.MULTILINE))
    (tree / GPU_FILE).write_text(f"{expression}\n{blocks(NAME, 'cpp')[0].text}")
    make = ["make", "-o", ".venv/gradd-setup.mk", "all"]
    one = {"GRADD_TEST_OP": "Shrink"}
    for command in (
        make,
        *([*make[:3], "unit", f"T={t}"] for t in ("ops", "ops_half", "expand", "emu")),
    ):
        done = run(tree, *command, **(one if "unit" in command else {}))
        assert done.returncode == 0, done.stdout + done.stderr
    sizes = run(tree, sys.executable, "tests/check_sizes.py")
    assert "within the limits" in sizes.stdout
    after = run(tree, *EXPLAIN)
    table = re.search(r"^forward: .*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    for line in table[0].splitlines() if table else ["no table"]:
        words = re.sub(r"\(.*", "", line).split()[:4]
        assert any(row.split()[: len(words)] == words for row in after.stdout.splitlines()), line
