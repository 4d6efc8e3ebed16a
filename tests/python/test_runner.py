"""The runner of the C tests (tests/runner.c), with tests of its own: its output, and when."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import BINARY

from helpers import ROOT

pytestmark = pytest.mark.quick
LIST = "X(it, good, 10)\nX(it, bad, 10)\nX(it, endless, 60)\nX(it, never, 10)\n"
TESTS = """
#include <stdio.h>
#include <unistd.h>
#include "tests/test.h"
const char *gradd_status_name(gradd_status_t s) { return s ? "bad" : "ok"; }
const char *gradd_error_message(void) { return ""; }
const char *gradd_error_where(void) { return ""; }
void gradd_test_it__good(void) { printf("this is not read\\n"); }
void gradd_test_it__bad(void) { CHECK_EQ_INT(1, 2); }
void gradd_test_it__never(void) { printf("too late\\n"); }
void gradd_test_it__endless(void) {
    printf("begins\\n");
    for (;;) pause();
}
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runner with four tests, the third of which does not end."""
    folder = tmp_path_factory.mktemp("runner")
    (folder / "test_list.inc").write_text(LIST)
    (folder / "tests.c").write_text(TESTS)
    command = ["gcc", "-D_GNU_SOURCE", "-std=c11", f"-I{ROOT}", f"-I{folder}"]
    command += [str(ROOT / "tests/runner.c"), str(folder / "tests.c"), "-lm", "-o"]
    subprocess.run([*command, str(folder / "tests")], check=True)
    return folder / "tests"


def _said(runner: Path, *arguments: str) -> tuple[int, str]:
    command = [str(runner), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    return done.returncode, done.stdout


def test_a_stopped_runner_prints_its_results(runner: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with out.open("w") as to, subprocess.Popen([str(runner)], stdout=to) as running:
        for _ in range(1000):  # the failure is written before the next test starts
            if "it.bad" in out.read_text():
                break
            time.sleep(0.01)
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
    said = out.read_text()
    assert running.returncode == 128 + signal.SIGTERM
    assert "FAIL  it.bad" in said and "1 == 2: 1 != 2" in said
    _, end = said.split("FAIL  it.endless")
    assert "stopped by signal 15 while it ran\n      begins\n1 passed, 2 failed\n" in end
    assert "too late" not in end


def test_no_test_gets_more_than_the_limit(runner: Path) -> None:
    status, said = _said(runner, "--limit", "1", "--verbose")
    assert status == 1 and said.endswith("2 passed, 2 failed\n")
    assert "did not end within 1 s\n      begins\n" in said and "too late" in said


def test_a_filter_that_matches_nothing_fails(runner: Path) -> None:
    assert _said(runner, "--filter", "goood") == (1, "0 passed, 0 failed\n")
    assert _said(runner, "--filter", "good") == (0, "1 passed, 0 failed\n")


def test_quick_leaves_out_tests_with_a_longer_limit(runner: Path) -> None:
    status, said = _said(runner, "--quick", "--list")
    assert status == 0 and said.split() == ["it.good", "it.bad", "it.never"]


def test_an_operator_that_is_none_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = BINARY.with_name("tests")
    if not tests.exists():
        pytest.skip("the C tests were not built")
    for name, status in (("MatMull", 1), ("Not", 0)):
        monkeypatch.setenv("GRADD_TEST_OP", name)
        got, said = _said(tests, "--filter", "emu.every_case_runs", "--verbose")
        assert got == status, said
        assert ("there is no operator 'MatMull'" in said) == bool(status)
