"""Results of operators have the same bits whatever vectors the machine has: an order of additions
that a compiler chooses for a machine would change them.

`case_bits` (tests/c/train) hashes the results of test cases. It exists with the library for
devices, with some of its kernels compiled for shorter vectors, with the daemon's engine, whose
kernels take the longest there are, and for other machines, which are emulated.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_library import SAME_BITS, B, clang_tools

from helpers import BUILD, ROOT

LENGTHS = 1, 7, 16, 17, 999, 4099
EMPTY = "cbf29ce484222325"  # the hash of no outputs: operators that are expanded


def of_row(n: int) -> Iterator[tuple[str, str, str]]:
    """Name, domain and opset, and text of the operators along rows of n elements."""
    row, labels, batch = f"f32[3,{n}]", f"i64[3]:(0,{n - 1})", f"f32[2,4,{n}]"
    ours = "com.gradd\t1"
    for op in ("Softmax", "LogSoftmax"):
        yield op, "\t13", row
        yield f"{op}Grad", ours, f"{row} {row}"
    for op in ("Sum", "Mean", "SumSquare", "L2", "Max", "LogSumExp", "Prod"):
        yield f"Reduce{op}", "\t18", f"{row} i64[1]={{1}}"
        yield f"Reduce{op}", "\t18", f"f32[{n},3] i64[1]={{0}}"
    yield "LayerNormalization", "\t17", f"{row} f32[{n}] f32[{n}] -> 3"
    yield "LayerNormGrad", ours, f"{row} {row} f32[{n}] f32[3,1] f32[3,1]:(0.5,2) -> 3"
    yield "RMSNormalization", "\t23", f"{row} f32[{n}]"
    yield "RMSNormGrad", ours, f"{row} {row} f32[{n}] f32[3,1]:(0.5,2) -> 2"
    yield "GroupNormalization", "\t21", f"{batch} f32[4] f32[4] | num_groups=2 -> 3"
    yield "InstanceNormalization", "\t6", f"{batch} f32[4] f32[4]"
    for groups in (2, 4):
        stats = f"f32[2,{groups}] f32[2,{groups}]:(0.5,2) | num_groups={groups} -> 3"
        yield "GroupNormGrad", ours, f"{batch} {batch} f32[4] {stats}"
    yield "BatchNorm", ours, f"{batch} f32[4] f32[4] -> 3"
    yield "BatchNormGrad", ours, f"{batch} {batch} f32[4] f32[4] f32[4]:(0.5,2) -> 3"
    yield "CrossEntropy", ours, f"{row} {labels} -> 2"
    yield "CrossEntropy", ours, f"{row} {labels} | smoothing=0.1 -> 2"
    yield "CrossEntropyGrad", ours, f"f32[] {row} {labels} f32[3,2]:(3,4)"
    yield "SoftmaxCrossEntropyLoss", "\t13", f"{row} {labels}"
    yield "LinearCrossEntropy", ours, f"f32[3,5] f32[5,{n}] {labels}"
    for size, count in ((8, n), (min(n, 999), 3)):
        query, keys = f"f32[1,2,3,{size}]", f"f32[1,2,{count},{size}]"
        stats = "f32[1,2,2,3]:(3,4) -> 3"
        yield "FusedAttention", ours, f"{query} {keys} {keys} -> 2"
        yield "FusedAttentionGrad", ours, f"{query} {query} {keys} {keys} {query} {stats}"


def rows() -> list[str]:
    """Their lines, for all lengths."""
    return ["\t".join(line) for n in LENGTHS for line in of_row(n)]


def hashes(program: Path | list[str], lines: list[str]) -> list[str]:
    """What a program, or a command, writes for these cases."""
    done = subprocess.run(
        program, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == len(lines)
    return found


def differing(lines: list[str], ours: list[str], theirs: list[str]) -> list[str]:
    """The cases whose bits differ."""
    return [line for line, a, b in zip(lines, ours, theirs, strict=True) if a != b]


@pytest.mark.parametrize("program", ["train/native/case_bits_short", "bin/case_bits"])
def test_rows_have_the_same_bits_with_other_vectors(program: str) -> None:
    """Short ones and long ones; and the hashes are of results, which are not all alike."""
    lines = rows()
    ours = hashes(BUILD / "train/native/case_bits", lines)
    failed = [found for found in ours if len(found) != len(EMPTY) or found == EMPTY]
    assert not failed
    assert len(set(ours)) > 0.9 * len(ours)
    assert not differing(lines, ours, hashes(BUILD / program, lines))


def elsewhere(target: str, lines: list[str], at: Path, *variables: str) -> list[str]:
    """The hashes on another machine; builds the program where it is missing."""
    at.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    make = ["make", "--no-print-directory", f"TARGET={target}", f"B={B}", f"CASES={at}"]
    done = subprocess.run(
        [*make, *variables, "train-cases"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-len(lines) :]


def all_cases() -> list[str]:
    """Those of the operators themselves, but in f64, which may differ in the last places."""
    listed = subprocess.check_output([BUILD / "bin/case_bits", "list"], text=True)
    return [line for line in listed.splitlines() if "f64" not in line]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", [*SAME_BITS, "clang"])
def test_another_machine_has_the_same_bits_in_every_case(target: str, tmp_path: Path) -> None:
    """Of every operator, and along rows; and this machine by another compiler."""
    missing = [program for program in SAME_BITS.get(target, ()) if not shutil.which(program)]
    if missing:
        pytest.skip(f"no {missing[0]}")
    clang, at = target == "clang", tmp_path / "cases"
    lines = all_cases() + rows()
    assert len(lines) > 1500
    ours = hashes(BUILD / "train/native/case_bits", lines)
    if clang:
        theirs = elsewhere("android", lines, at, *clang_tools())
    else:
        theirs = elsewhere(target, lines, at)
    assert not differing(lines, ours, theirs)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_webassembly_has_the_same_bits_along_rows(tmp_path: Path) -> None:
    """But for products, for which it has no fused multiply-add."""
    if not shutil.which("emcc"):
        pytest.skip("no emcc")
    lines = [line for line in rows() if not line.startswith(("FusedAttention", "Linear"))]
    ours = hashes(BUILD / "train/native/case_bits", lines)
    assert not differing(lines, ours, elsewhere("wasm", lines, tmp_path / "cases"))
