"""Plants bugs in kernels of GPUs and says whether the emulation finds them.

    python tests/emu/mutants.py

Each is one change of text in a copy of kernels/cuda: a barrier that is missing, one in a branch, a
thread that ends too early. The copy is compiled with a small caller, and its operator is run on
cases of its own, in several orders of threads. Exit status 1: a bug was not found, or a change no
longer applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A change of `file`: the text `old`, which is there once, becomes `new`.

    Of what includes it `source` alone is compiled, which has the kernels of `operator`.
    """

    name: str
    file: str
    old: str
    new: str
    source: str
    operator: str


JOIN = """        __syncthreads(); /* who called before has read its parts */
        if (threadIdx.x % GPU_WARP == 0) part[threadIdx.x / GPU_WARP] = v;
        __syncthreads();
"""
ROWS, NORM = "row/rows.h", "row/norm.cu"
LAYER = "LayerNormalization"
MUTANTS = [
    Mutant(
        "no barrier behind the parts", ROWS, JOIN, JOIN[: JOIN.rindex("        __")], NORM, LAYER
    ),
    Mutant(
        "no barrier before parts are written again",
        ROWS,
        JOIN,
        JOIN[JOIN.index("        if") :],
        NORM,
        LAYER,
    ),
    Mutant(
        "a barrier in a branch",
        ROWS,
        JOIN,
        "        if (threadIdx.x < 64) __syncthreads();\n" + JOIN,
        NORM,
        LAYER,
    ),
    Mutant(
        "a thread that ends early",
        ROWS,
        JOIN,
        "        if (threadIdx.x == blockDim.x - 1) return v;\n" + JOIN,
        NORM,
        LAYER,
    ),
    Mutant(
        "half a warp in a shuffle",
        ROWS,
        "        words[i] = __shfl_xor_sync(GPU_ALL, words[i], other);",
        "        if (threadIdx.x % 32 < 16) words[i] = __shfl_xor_sync(GPU_ALL, words[i], other);",
        NORM,
        LAYER,
    ),
    Mutant(
        "one part too many",
        ROWS,
        "        for (int i = 1; i < TEAM / GPU_WARP; i++)",
        "        for (int i = 1; i <= TEAM / GPU_WARP; i++)",
        NORM,
        LAYER,
    ),
    Mutant(
        "one element too far",
        "map.h",
        "threadIdx.x; i < n; i += all) {\n        int64_t at[sizeof...(T)];",
        "threadIdx.x; i <= n; i += all) {\n        int64_t at[sizeof...(T)];",
        "compare.cu",
        "Less",
    ),
]


def build(tree: Path) -> bool:
    """Brings the test of emulated kernels in that tree up to date."""
    command = ["make", "-s", "build/bin/test_emu"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:])
    return done.returncode == 0


def attempt(tree: Path, mutant: Mutant) -> str:
    """Plants the bug, runs the operator's cases, and takes it out again; what was found."""
    path, source = (tree / "kernels" / "cuda" / name for name in (mutant.file, mutant.source))
    text, times = path.read_text(), path.stat()
    if text.count(mutant.old) != 1:
        print(f"{mutant.name}: no such place in {mutant.file}")
        return ""
    path.write_text(text.replace(mutant.old, mutant.new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # others are not compiled again
    source.touch()
    said = found(tree, mutant.operator) if build(tree) else ""
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    source.touch()
    return said


def found(tree: Path, operator: str) -> str:
    """What the test says of the operator; "" if it passes."""
    env = {**os.environ, "GRADD_TEST_OP": operator}
    done = subprocess.run(
        [tree / "build/bin/test_emu"], env=env, capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    words = [line for line in lines if "emulated GPU:" in line or '" in ' in line]
    return (words or lines)[0] if done.returncode else ""


def main() -> int:
    """Tries one after the other."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="gradd-mutants-") as folder:
        tree = Path(folder) / "gradd"
        ignore = shutil.ignore_patterns(".git", "asan", "gpu", "cuda-*", ".venv")
        shutil.copytree(ROOT, tree, ignore=ignore, symlinks=True)
        (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
        if not build(tree):
            return 2
        for mutant in MUTANTS:
            said = attempt(tree, mutant)
            print(f"{mutant.name}: {'found: ' + said[:140] if said else 'MISSED'}", flush=True)
            missed += not said
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} found")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
