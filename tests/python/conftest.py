"""The `daemon` fixture: a real daemon in a directory of its own, and the proof of a clean end.

A test that asks for `daemon` gets a fresh daemon, or with `shared_daemon` the one of its module;
GRADD_DIR points to it, so ORTModule and ORTTrainer use it. When the test (the module) is over,
everything must be gone: sessions, sockets, descriptors, mappings and processes; and the daemon must
have ended with status 0. Tests may kill it: clients then start another one, which is checked in the
same way.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.guards

from helpers import BUILD, ROOT, emu_torch, gpu_tensors
from helpers.selection import SEED, mark_undrawn

TESTS = ROOT / "tests/python"
# For processes that a test starts: the adapters, and the helpers of the tests.
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "adapters/python", ROOT / "adapters/optimum", TESTS)))
for _folder in ("adapters/python", "adapters/optimum"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.insert(0, str(ROOT / _folder))
logging.getLogger("torch.__trace").addFilter(lambda record: False)  # megabytes per compilation
# It only logs a time, for which it writes through all caches of the processor: 20 ms per graph.
torch._dynamo.guards.profile_guard_manager = lambda *unused: 0.0
torch.set_num_threads(1)  # there is a worker for each core (tests/machine.py)

os.environ.setdefault("GRADD_QUIET", "1")  # at the end of the run
os.environ.setdefault("GRADD_CACHE", "0")  # tests of the translation are no tests of files

from gradd.memory import devices  # noqa: E402
from gradd.session import client as gradd_client  # noqa: E402
from gradd.session import control  # noqa: E402
from gradd.session import daemon as gradd_daemon  # noqa: E402

DEVICE = os.environ.get("GRADD_TEST_DEVICE", "cpu")
if DEVICE == "emu" and not emu_torch.why_not():
    emu_torch.load()  # autograd's first backward counts the devices of the process
    os.environ.setdefault("GRADD_NCCL", str(BUILD / "lib" / "libnccl_sim.so"))
    torch.set_default_device(os.environ.get("GRADD_TEST_TENSORS", "cpu"))
    if gpu_tensors.is_on():  # each operator of torch works on the device: closing it takes long
        os.environ.setdefault("GRADD_SIM_CLOSE", "50")
BINARY = BUILD / "bin" / "gradd"
if DEVICE != "cpu":  # the daemon that has the device of the tests, too
    BINARY = BINARY.with_name("gradd-fake")
# Marks of tests that make sense on some devices alone, and whether this is one.
MARKED = (("fake_only", DEVICE != "cpu"), ("emu", DEVICE == "emu"))
_SECONDS = 60.0  # against a hanging test; a busy machine may need some of them
_LOG_LINES = 50  # of the daemon, below a failure


def gpu_directories(directory: Path) -> list[Path]:
    """Of the daemons of GPUs beside the one of this directory."""
    return sorted(directory.glob("GPU-*"))


class Daemon:
    """A running daemon of a test.

    Attributes:
        root: The user's directory, GRADD_DIR.
        directory: Its own: the same, or that of its GPU.
        process: The process that the fixture started (a client may have started later ones).
    """

    def __init__(self, root: Path, memory: devices.Host | devices.Gpu = devices.HOST) -> None:
        self.root = root
        self.directory = root / memory.uuid
        self._memory = memory
        self.killed: set[int] = set()
        self._kept = ""
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        for folder in (self.root, self.directory):
            folder.mkdir(mode=0o700, exist_ok=True)
        with open(self.root.parent / "log", "ab") as log:
            process = subprocess.Popen(
                [str(BINARY), "serve", "--dir", str(self.directory), *self._memory.serve],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._memory.environment},
            )
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            sock = gradd_daemon.try_connect(self.directory)
            if sock is not None:
                sock.close()
                return process
            assert process.poll() is None, f"the daemon ended at once:\n{self.log()}"
            time.sleep(0.005)
        process.kill()
        raise AssertionError(f"the daemon does not listen:\n{self.log()}")

    def log(self) -> str:
        """What the daemon has written."""
        path = self.root.parent / "log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """The same, and what those have written that clients started; also when all is over."""
        if self.root.parent.exists():
            later = [d / "daemon.log" for d in (self.root, *gpu_directories(self.root))]
            return self.log() + "".join(p.read_text(errors="replace") for p in later if p.exists())
        return self._kept

    def keep_logs(self) -> None:
        """The folder of the logs is going to be removed."""
        self._kept = self.logs()

    def processes(self) -> list[subprocess.Popen]:
        """The daemon of the fixture and those that clients of this process started."""
        return [self.process, *gradd_daemon.started]

    def pid(self) -> int:
        """The daemon that serves now."""
        return int(self.ps()["pid"])

    def worker(self) -> int:
        """Its process that computes."""
        return int(self.ps()["worker"])

    def ps(self) -> dict[str, Any]:
        """What `gradd ps --json` says of it, not of the daemons of GPUs beside it."""
        command = [str(BINARY), "ps", "--json", "--dir", str(self.directory)]
        text = subprocess.check_output(command, text=True, timeout=_SECONDS)
        return json.loads(text.splitlines()[0])

    def operators(self) -> set[str]:
        """Names of the operators that the daemon has."""
        text = subprocess.check_output([str(BINARY), "--list-ops"], text=True, timeout=_SECONDS)
        return {line.split()[0] for line in text.splitlines() if line.split()}

    def kill(self, pid: int = 0) -> None:
        """kill -9 of the daemon that serves now, or of a GPU's; returns when it is dead."""
        pid = pid or self.pid()
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        for process in self.processes():
            if process.pid == pid:
                process.wait(_SECONDS)

    def workers(self) -> list[int]:
        """Processes of these daemons that compute, or start to."""
        owners = {p.pid for p in self.processes() if p.poll() is None}
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
                if int(parent) in owners and state != "Z":
                    found.append(int(entry.parent.name))
        return found

    def kill_worker(self) -> None:
        """kill -9 of the process that computes now; returns when the next one does."""
        found = self.ps()
        os.kill(int(found["worker"]), signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS
        while self.ps()["workers_lost"] == found["workers_lost"]:
            assert time.monotonic() < deadline, "there is no other worker"

    def stop(self) -> None:
        """Ends every daemon by SIGTERM; each that was not killed must end with status 0.

        Or with 4: a client has started it, and another one was there already.
        """
        for process in self.processes():
            if process.poll() is None:
                process.terminate()
        for process in self.processes():
            status = process.wait(_SECONDS)
            if process.pid not in self.killed:
                fine = (0,) if process is self.process else (0, gradd_daemon._EXIT_ALREADY)
                assert status in fine, f"the daemon ended with status {status}:\n{self.log()}"
        gradd_daemon.reap()


def _own_descriptors() -> list[str]:
    """What this process has open that could be ours: memfds and sockets."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "memfd:gradd" in target or target.startswith("socket:"):
            found.append(target)
    return sorted(found)


def _own_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:gradd" in line for line in maps)


def _settle(what: str, read: Any, expected: Any) -> None:
    """Waits until read() gives `expected`: sockets are closed by another thread of ZeroMQ."""
    deadline = time.monotonic() + _SECONDS
    while True:
        got = read()
        if got == expected:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} left over by the test: {got}")
        gc.collect()
        time.sleep(0.02)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    setattr(item, f"report_{report.when}", report)
    if report.failed:
        _show_logs(item, report)


def _show_logs(item: pytest.Item, report: pytest.TestReport) -> None:
    """The report of a failed test ends with what its daemon had to say."""
    for name in ("daemon", "shared_daemon"):
        server = getattr(item, "funcargs", {}).get(name)
        if isinstance(server, Daemon):
            lines = server.logs().splitlines()
            left_out = [f"({len(lines) - _LOG_LINES} lines before)"] * (len(lines) > _LOG_LINES)
            text = "\n".join([*left_out, *lines[-_LOG_LINES:]]) or "(nothing)"
            report.sections.append((f"log of the daemon in {server.directory}", text))


@contextlib.contextmanager
def _serving(monkeypatch: pytest.MonkeyPatch, passed: Callable[[], bool]) -> Iterator[Daemon]:
    """A daemon in a directory of its own; if `passed()`, also the proof that nothing is left."""
    if not BINARY.exists():
        pytest.fail(f"{BINARY} is missing: run make")
    folder = Path(tempfile.mkdtemp(prefix="gradd-"))
    directory = folder / "run"
    monkeypatch.setenv("GRADD_DIR", str(directory))
    monkeypatch.setenv("GRADD_BIN", str(BINARY))
    monkeypatch.setenv("GRADD_THREADS", "2" if DEVICE == "cpu" else "1")
    monkeypatch.setenv("GRADD_DEVICE", DEVICE)
    gradd_client.close_all()
    emu_torch.forget_ways()
    control.warm_up()  # ZeroMQ's own threads and descriptors belong to the process
    # What a failed test before this one holds in its traceback may go during this one.
    before = (Counter(_own_descriptors()), _own_mappings())
    server = Daemon(directory, devices.of(torch.get_default_device()))
    try:
        yield server
        if passed():
            _check_nothing_left(server, before)
    finally:
        gradd_client.close_all()
        try:
            server.stop()
        finally:
            server.keep_logs()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon for one test. See the top of this file."""

    def passed() -> bool:
        report = getattr(request.node, "report_call", None)
        return report is not None and report.passed

    with _serving(monkeypatch, passed) as server:
        yield server


@pytest.fixture(scope="module")
def shared_daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon for all tests of a module, with the same proof at the end of the module."""
    failed = request.session.testsfailed

    def passed() -> bool:
        return request.session.testsfailed == failed

    with pytest.MonkeyPatch.context() as monkeypatch, _serving(monkeypatch, passed) as server:
        yield server


def _unreleased() -> list[int]:
    for client in gradd_client.clients():
        client.flush()
    return [run for client in gradd_client.clients() for run in client.unreleased_runs()]


def _check_nothing_left(server: Daemon, before: tuple[Counter[str], int]) -> None:
    if _unreleased():  # held in cycles: a collection takes a third of a second here
        gc.collect()
    left = _unreleased()
    assert not left, f"runs that were not released: {left}"
    gradd_client.close_all()
    if any(p.poll() is None for p in server.processes()):
        _settle("sessions of the daemon", lambda: server.ps()["sessions"], [])
    server.stop()
    sockets = ("cmd.sock", "ctl.sock")
    directories = (server.root, *gpu_directories(server.root))
    leftover = [d / name for d in directories for name in sockets if (d / name).exists()]
    if server.processes()[-1].pid in server.killed:
        leftover = []  # the last daemon was killed on purpose and could not remove them
    assert not leftover, f"sockets left behind: {leftover}"
    _settle("descriptors", lambda: list((Counter(_own_descriptors()) - before[0]).elements()), [])
    _settle("mappings of shared memory", lambda: max(_own_mappings() - before[1], 0), 0)


def _keep_from_collections() -> None:
    """Takes everything that is alive out of the garbage collector's sight.

    torch and transformers are half a million objects that live as long as the process, and torch
    keeps some ten thousand more of each capture; every collection would walk over them again.
    """
    gc.collect()
    gc.freeze()


def _name_of(item: pytest.Item) -> str:
    """FILE::NAME of a test, the file below tests/python."""
    return f"{item.path.relative_to(TESTS)}::{item.name}"


@pytest.hookimpl(tryfirst=True)  # before -m "not nightly" counts
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only the device of the tests can do, unless it is there."""
    mark_undrawn(items)
    if gpu_tensors.is_on():
        for item in items:
            if why := gpu_tensors.why_not(_name_of(item)):
                item.add_marker(pytest.mark.skip(reason=why))
    elsewhere = [mark for mark, here in MARKED if not here]
    left = [i for i in items if any(map(i.get_closest_marker, elsewhere))]
    config.hook.pytest_deselected(items=left)
    items[:] = [i for i in items if i not in left]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which tests were drawn."""
    terminalreporter.write_line(f"GRADD_DRAW={SEED}")


def pytest_collection_finish() -> None:
    _keep_from_collections()


@pytest.fixture(scope="module", autouse=True)
def _lighten_collections(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if gpu_tensors.is_on() and gpu_tensors.waits(str(request.path.relative_to(TESTS))):
            monkeypatch.setenv("GRADD_WAIT", "1")
        yield
    torch.compiler.reset()  # graphs of modules that are gone
    _keep_from_collections()
