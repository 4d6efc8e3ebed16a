"""The report at the end of `make test`, and its number of workers: tests/{outcome,machine}.py."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import machine
import outcome
import run_all

pytestmark = pytest.mark.quick
BUILD = ROOT / "build"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.python.daemon.test_a" file="tests/python/daemon/test_a.py"
  name="test_one[a b]" time="1.5"><failure message="x">text</failure></testcase>
<testcase classname="tests.python.daemon.test_a.TestIt" file="tests/python/daemon/test_a.py"
  name="test_two" time="0.25"><error message="x">text</error></testcase>
<testcase classname="tests.python.daemon.test_a" file="tests/python/daemon/test_a.py"
  name="test_three" time="2"/>
<testcase classname="tests.python.daemon.test_b" file="tests/python/daemon/test_b.py"
  name="test_four" time="4"><skipped message="x">text</skipped></testcase>
<testcase classname="" name="tests.python.daemon.test_c" time="0"><error message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def _no_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in outcome.MODES:
        monkeypatch.delenv(name, raising=False)


def test_failures_come_with_the_command_that_repeats_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "pytest.xml"
    report.write_text(REPORT)
    monkeypatch.setenv("GRADD_TEST_DEVICE", "fake")
    command = [f"{ROOT}/.venv/bin/python", "-m", "pytest", "-m", "not nightly"]
    out = outcome.of_python(command, 1, report, BUILD)
    assert (out.passed, out.failed) == (1, 3)
    begin = "GRADD_TEST_DEVICE=fake GRADD_BIN=$PWD/build/bin/gradd .venv/bin/python -m pytest "
    assert out.again == [
        f"{begin}'tests/python/daemon/test_a.py::test_one[a b]'",
        f"{begin}tests/python/daemon/test_a.py::TestIt::test_two",
        f"{begin}tests/python/daemon/test_c.py",
    ]
    report.unlink()
    assert outcome.of_python(command, 3, report, BUILD).failed == 1


def test_each_switch_runs_every_parity_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `make nightly`: under its variable alone, which failures are repeated with."""
    runs = []

    def run_python(build: Path, marked: str, files: list[str]) -> outcome.Outcome:
        runs.append((marked, files, {n: os.environ[n] for n in outcome.MODES if n in os.environ}))
        return outcome.Outcome(2, 1, again=[outcome.shell(["x"])])

    monkeypatch.setattr(run_all, "run_python", run_python)
    monkeypatch.setattr(run_all, "nightly_files", lambda: ["tests/python/values/test_parity.py"])
    monkeypatch.setenv("GRADD_NIGHTLY", "1")
    monkeypatch.setenv("GRADD_DRAW", "7")
    kept = tmp_path / "kept"
    other = "tests/python/values/test_parity.py: 9 passed, 0 failed, 1 s"
    kept.write_text(f"machine: x\n\n{other}\n")
    assert run_all.run_nightly(BUILD, kept, list(run_all.SWITCHES)) == 1
    for (marked, files, modes), switch in zip(runs, run_all.SWITCHES, strict=True):
        name, value = switch.split("=")
        assert marked == "nightly or not nightly"
        assert modes == {"GRADD_NIGHTLY": "1", "GRADD_DRAW": "7", name: value}
        assert {Path(f).stem for f in files} >= {"test_parity", "test_parity_bf16"}
    text = kept.read_text()
    assert other in text
    for switch in run_all.SWITCHES:
        assert (
            f"{switch}: 2 passed, 1 failed, 0 s\n  GRADD_NIGHTLY=1 GRADD_DRAW=7 {switch} x\n"
            in text
        )
    assert run_all.run_nightly(BUILD, kept, ["GRADD_LIVE_ROWS=2"]) == 2


def test_what_runs_on_the_emulated_gpu_is_kept_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern chooses; files of a device's own run as a whole, others with tensors there."""
    runs = []

    def run_python(build: Path, marked: str, files: list[str]) -> outcome.Outcome:
        on = tuple(os.environ.get(f"GRADD_TEST_{name}") for name in ("DEVICE", "TENSORS"))
        runs.append((*files, marked, *on))
        return outcome.Outcome(2)

    monkeypatch.setattr(run_all, "run_python", run_python)
    monkeypatch.setattr(run_all, "nightly_files", lambda: [])
    monkeypatch.setenv("GRADD_NIGHTLY", "1")
    kept = tmp_path / "kept"
    assert run_all.run_nightly(BUILD, kept, ["emu:*/test_emu_ddp.py", "emu:*/test_r*"]) == 0
    alone, *others = runs
    assert alone == ("tests/python/device/test_emu_ddp.py", "emu", "emu", None)
    assert ("tests/python/values/test_reduce.py", "not nightly", "emu", "emu") in others
    lines = [f"emu:{run[0]}: 2 passed, 0 failed, 0 s\n" for run in runs]
    assert all(line in kept.read_text() for line in lines)
    assert "GRADD_TEST_TENSORS" not in os.environ


@pytest.mark.slow
def test_files_with_long_tests_are_found() -> None:
    found = run_all.nightly_files("tests/python/training")
    assert "tests/python/training/test_trajectories.py" in found
    assert all((ROOT / name).exists() for name in found)


def test_c_tests_are_counted_timed_and_named(tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("0.250 segment.close\n0.500 ops.grad\n")
    said = "FAIL  ops.grad (0.50 s): killed by signal 11 (x)\n      text\n1 passed, 1 failed\n"
    command = [str(BUILD / "bin" / "tests"), "--part", "1/2"]
    out = outcome.of_c(command, 1, said, times, BUILD)
    assert (out.passed, out.failed) == (1, 1)
    assert out.times["tests/c/shm/test_segment.c", "segment.close"] == 0.25
    again = "GRADD_BIN=$PWD/build/bin/gradd build/bin/tests --verbose --filter ops.grad"
    assert out.again == [again]
    assert outcome.of_c(command, 139, "", times, BUILD).failed == 1


def test_checks_say_their_command() -> None:
    assert outcome.of_script(["python", "tests/check_layers.py"], 0) == outcome.Outcome(1)
    assert outcome.of_script(["sh", f"{ROOT}/a b"], 1).again == ["sh 'a b'"]


def test_slowest_of_all_parts() -> None:
    one = outcome.Outcome(times=Counter({("a.py", "x"): 1.0, ("a.py", "y"): 2.0}))
    two = outcome.Outcome(times=Counter({("b.py", "z"): 2.5, ("a.py", "x"): 0.5}))
    lines = outcome.slowest((one + two).times).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["z", "y", "x"]
    assert lines[-2].split() == ["3.5", "s", "a.py", "(2", "tests)"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 cores and 64 GiB, in a group below another one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for folder in ("proc/self", "sys/fs/cgroup/above/ours"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {64 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/above/ours\n")
    return tmp_path


def test_a_worker_per_core(root: Path) -> None:
    assert machine.workers(root) == 8


@pytest.mark.parametrize("folder", ["above", "above/ours"])
def test_a_quota_counts_wherever_it_is(root: Path, folder: str) -> None:
    group = root / "sys/fs/cgroup" / folder
    (group / "cpu.max").write_text("350000 100000\n")
    assert machine.workers(root) == 3
    (group / "cpu.max").write_text("50000 100000\n")
    assert machine.workers(root) == 1
    (group / "cpu.max").write_text("max 100000\n")
    assert machine.workers(root) == 8


def test_memory_bounds_them(root: Path) -> None:
    (root / "proc/meminfo").write_text(f"MemAvailable: {4 << 20} kB\n")
    assert machine.workers(root) == 2
    (root / "proc/meminfo").write_text(f"MemAvailable: {64 << 20} kB\n")
    group = root / "sys/fs/cgroup/above"
    (group / "memory.max").write_text(f"{10 << 30}\n")
    (group / "memory.current").write_text(f"{6 << 30}\n")
    assert machine.workers(root) == 2
    (group / "memory.stat").write_text(f"anon 5\nactive_file {2 << 30}\n")
    assert machine.workers(root) == 3


def test_groups_of_the_first_version(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("3:cpu,cpuacct:/ours\n2:memory:/ours\n")
    cpu, memory = (root / "sys/fs/cgroup" / name for name in ("cpu", "memory"))
    cpu.mkdir()
    memory.mkdir()
    (cpu / "cpu.cfs_quota_us").write_text("200000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.workers(root) == 2
    (memory / "memory.limit_in_bytes").write_text(f"{3 << 30}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{1 << 30}\n")
    assert machine.workers(root) == 1
