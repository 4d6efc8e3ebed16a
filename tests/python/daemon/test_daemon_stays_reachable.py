"""A daemon stays within reach: its files are removed, its log is full, its process is stopped.

A cleaner of /tmp takes sockets, the lock, or the whole directory. Sessions go on with the same
bits, new clients find the same daemon as before, and `gradd ps` and `gradd stop` reach it.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest
import pytest
import torch
from conftest import Daemon

from gradd import ORTModule
from gradd.session import client
from gradd.session import daemon as daemons
from helpers.hostile.raw_client import Raw
from helpers.nets import Net, batch, loss_of
from helpers.waiting import until

pytestmark = pytest.mark.one_in(2)

_SOCKETS = ("cmd.sock", "ctl.sock")


def _steps(model: torch.nn.Module, n: int) -> list[torch.Tensor]:
    found = []
    for seed in range(n):
        model.zero_grad()
        loss = loss_of(model(*batch(5, seed=seed)))
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return found


def _listens(directory: Path) -> bool:
    connected = daemons.try_connect(directory)
    if connected is not None:
        connected.close()
    return connected is not None


def _until_restored(daemon: Daemon, times: int) -> None:
    said = "event=sockets_restored"
    until(lambda: daemon.log().count(said) == times, "the daemon did not notice")
    with Raw(daemon.directory).open() as session:
        session.step()


def _remove(*names: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return act


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def _replace(folder: Path) -> None:
    for name in _SOCKETS:
        (folder / name).unlink()
        (folder / name).write_text("something else")


LOSSES = {
    "control": _remove("ctl.sock"),
    "commands": _remove("cmd.sock"),
    "both": _remove(*_SOCKETS),
    "lock": _remove("lock"),
    "all": _remove(*_SOCKETS, "lock"),
    "folder": shutil.rmtree,
    "moved": _move,
    "replaced": _replace,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_daemon_with_a_session_comes_back(daemon: Daemon, loss: str) -> None:
    pid = daemon.pid()
    model = ORTModule(Net(), strict=True)
    expected = _steps(model, 2)
    for times in (1, 2):
        LOSSES[loss](daemon.directory)
        for a, b in zip(_steps(model, 2), expected, strict=True):
            assert torch.equal(a, b)
        _until_restored(daemon, times)
        assert daemon.pid() == pid and client.get_client().recoveries == 0
        shutil.rmtree(daemon.directory.with_name("moved"), ignore_errors=True)


@pytest.mark.parametrize("loss", ["control", "commands", "both", "lock", "replaced"])
def test_an_idle_daemon_comes_back_to_its_directory(daemon: Daemon, loss: str) -> None:
    pid = daemon.pid()
    LOSSES[loss](daemon.directory)
    _until_restored(daemon, 1)
    assert daemon.pid() == pid
    _steps(ORTModule(Net(), strict=True), 1)
    assert client.get_client().daemon_pid == pid


@pytest.mark.parametrize("loss", ["folder", "moved"])
def test_an_idle_daemon_leaves_with_its_directory(daemon: Daemon, loss: str) -> None:
    LOSSES[loss](daemon.directory)
    assert daemon.process.wait(60) == 0
    assert loss == "moved" or not daemon.directory.exists()


def test_a_client_that_connects_meanwhile_waits(daemon: Daemon) -> None:
    """No second daemon beside one that only has lost its sockets."""
    pid = daemon.pid()
    _remove(*_SOCKETS)(daemon.directory)
    _steps(ORTModule(Net(), strict=True), 1)
    assert client.get_client().daemon_pid == pid


def test_a_daemon_whose_place_was_taken_finishes_its_work(daemon: Daemon) -> None:
    model = ORTModule(Net(), strict=True)
    expected = _steps(model, 2)
    shutil.rmtree(daemon.directory)
    other = subprocess.Popen(
        [str(conftest.BINARY), "serve", "--dir", str(daemon.directory)], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _listens(daemon.directory), "the other one does not listen")
        until(lambda: f"event=displaced by={other.pid}" in daemon.log(), "it did not notice")
        for a, b in zip(_steps(model, 2), expected, strict=True):
            assert torch.equal(a, b)
        client.close_all()
        assert daemon.process.wait(60) == 0
        assert daemon.pid() == other.pid, "its sockets are not the first one's"
    finally:
        other.terminate()
        other.wait(60)


@pytest.mark.nightly
def test_losing_the_sockets_again_and_again_ends(daemon: Daemon) -> None:
    """Each listener of commands keeps a descriptor: there is a limit, and sessions outlive it."""
    model = ORTModule(Net(), strict=True)
    expected = _steps(model, 1)
    for _ in range(70):
        before = daemon.log().count("sockets_restored")
        (daemon.directory / "cmd.sock").unlink()
        until(
            lambda n=before: (
                daemon.log().count("sockets_restored") > n or "unreachable" in daemon.log()
            ),
            "it did not notice",
        )
        if "unreachable" in daemon.log():
            break
    assert re.search(r'unreachable what=".*cmd.sock was removed 64 times', daemon.log())
    for a, b in zip(_steps(model, 1), expected, strict=True):
        assert torch.equal(a, b)
    client.close_all()
    assert daemon.process.wait(60) == 0, "it is out of reach, and it stays"


# ---- limits that a shell had ----

_TRAINER = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from gradd import ORTModule
from gradd.session import client
from gradd.session import daemon as daemons
model = ORTModule(torch.nn.Linear(8, 4), strict=True)
model(torch.ones(2, 8)).sum().backward()
print(model.weight.grad.sum().item(), client.get_client().daemon_pid)
"""


@pytest.fixture
def no_daemon(daemon: Daemon) -> Iterator[Daemon]:
    """A directory in which the first client starts the daemon."""
    daemon.process.terminate()
    daemon.process.wait(60)
    yield daemon
    subprocess.run([str(conftest.BINARY), "stop", "--dir", str(daemon.directory)], check=False)
    until(lambda: not (daemon.directory / "ctl.sock").exists(), "it does not end")


def _train(limit: int) -> list[str]:
    command = [sys.executable, "-c", _TRAINER, str(limit)]
    env = {**os.environ, "PYTHONPATH": conftest.PYTHONPATH}
    return subprocess.check_output(command, text=True, env=env).split()


def test_a_limit_on_files_does_not_end_the_daemon(no_daemon: Daemon) -> None:
    """The trainer that starts it may write 2 MiB; its log is longer than that already."""
    log = no_daemon.directory / "daemon.log"
    log.write_text("x" * 4095 + "\n")
    os.truncate(log, 3 << 20)
    total, pid = _train(2 << 20)
    assert float(total) == 64.0
    with Raw(no_daemon.directory).open() as session:
        session.step()
    assert log.stat().st_size > 3 << 20, "nothing was written"
    assert resource.prlimit(int(pid), resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_daemon_that_cannot_write_its_log_goes_on(daemon: Daemon) -> None:
    pid = daemon.pid()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    for _ in range(3):
        with Raw(daemon.directory).open() as session:
            session.step()
    assert daemon.pid() == pid


_FULL = """
mount -t tmpfs -o size=4k,mode=700 none "$1" || exit 42
head -c 4096 /dev/zero > "$1/fill"
"$0" serve --dir "$1" 2> "$1/daemon.log" &
until [ -S "$1/cmd.sock" ]; do kill -0 $! || exit 1; sleep 0.02; done
"$0" ps --dir "$1" && "$0" stop --dir "$1" && wait $!
"""


def test_a_full_disk_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    """Its lock counts, not the pid in there, and sockets need no room."""
    command = ["unshare", "--mount", "sh", "-c", _FULL, str(conftest.BINARY), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 42 or "unshare:" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    assert "0 sessions" in done.stdout and "stopped" in done.stdout


def test_an_unread_log_does_not_stop_the_daemon(daemon: Daemon, tmp_path: Path) -> None:
    read, write = os.pipe()
    folder = daemon.directory.with_name("other")
    other = subprocess.Popen(
        [str(conftest.BINARY), "serve", "--log", "debug", "--dir", str(folder)], stderr=write
    )
    try:
        until(lambda: _listens(folder), "it does not listen")
        for _ in range(1200):  # some 100 bytes each; a pipe holds 65,536
            with Raw(folder):
                pass
        with Raw(folder).open() as session:
            session.step()
    finally:
        other.terminate()
        assert other.wait(60) == 0
        os.close(read)
        os.close(write)


# ---- turns of the event loop ----


def test_a_slow_turn_is_logged_with_its_cause(daemon: Daemon) -> None:
    """A process that is stopped in the middle of a turn has a slow one."""
    pid, done = daemon.worker(), threading.Event()

    def ask() -> None:
        with Raw(daemon.directory).open() as session:
            while not done.is_set():
                session.ask("ps")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(100):
            time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.12)
            os.kill(pid, signal.SIGCONT)
            if "slow_turn" in daemon.log():
                break
    finally:
        done.set()
        thread.join()
    assert re.search(
        r'level=warn event=slow_turn ms=\d{3,} cause="[a-z ]+" session=\d+ cause_ms=\d+ others=\d+',
        daemon.log(),
    ), daemon.log()


# A session that goes on when its process does.
STOPPED = """
import pathlib, sys
from helpers.hostile.raw_client import Raw
with Raw(pathlib.Path(sys.argv[1])).open() as session:
    print(session.step().hex(), flush=True)
    sys.stdin.readline()
    print(session.step().hex(), flush=True)
"""


def test_a_stopped_client_keeps_its_session(daemon: Daemon) -> None:
    command = [sys.executable, "-c", STOPPED, str(daemon.directory)]
    paths = os.pathsep.join([conftest.PYTHONPATH, str(Path(conftest.__file__).parent)])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # more than two of the daemon's heartbeats
        process.send_signal(signal.SIGCONT)
        assert process.communicate("\n", timeout=60)[0] == first != ""
