"""Daemons that die while they start, and the error when none can be started.

GRADD_BIN is a script here: it counts its starts and dies in the first ones, in different ways and
at different times.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest
import pytest
import torch

from gradd import ORTModule, errors
from gradd.memory import devices
from gradd.session import client
from gradd.session import daemon as daemons
from helpers.nets import Net, batch, loss_of

_SCRIPT = """#!/bin/sh
echo x >> {count}
n=$(wc -l < {count})
if [ $n -le {deaths} ]; then {death}; fi
exec {binary} "$@"
"""
# It is killed at once, by a signal without a name of its own, or after a while; it fails.
_DEATHS = {
    "killed": "kill -9 $$",
    "aborted": "kill -6 $$",
    "killed later": "sleep 0.2; kill -9 $$",
    "failed": "echo 'gradd: IO: no room' >&2; exit 1",
    "missing library": "exit 127",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose daemon is the script's; a short path for sockets."""
    folder = Path("/tmp") / f"gradd-start-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("GRADD_DIR", str(folder))
    client.close_all()
    yield folder
    client.close_all()
    for process in daemons.started:
        process.terminate()
        process.wait(60)
    daemons.reap()
    shutil.rmtree(folder, ignore_errors=True)


def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, death: str) -> Path:
    count, script = tmp_path / "count", tmp_path / "gradd"
    script.write_text(
        _SCRIPT.format(count=count, deaths=deaths, death=death, binary=conftest.BINARY)
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("GRADD_BIN", str(script))
    return count


def _starts(count: Path) -> int:
    return len(count.read_text().splitlines())


def test_settings_of_one_trainer_are_not_the_daemons(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("GRADD_FUSE", "GRADD_CHUNKED_LOSS", "GOMP_SPINCOUNT")
    for name in own:
        monkeypatch.setenv(name, "1")
    _script(tmp_path, monkeypatch, deaths=1, death=f"env > {tmp_path}/env; exit 1")
    ORTModule(torch.nn.Linear(3, 2))(torch.ones(1, 3))
    settings = (tmp_path / "env").read_text().splitlines()
    assert f"GRADD_DIR={directory}" in settings
    assert not [line for line in settings if line.startswith(own)]


@pytest.mark.parametrize("deaths", [1, 4])
@pytest.mark.parametrize("death", _DEATHS)
def test_another_one_is_started(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, deaths: int
) -> None:
    count = _script(tmp_path, monkeypatch, deaths, _DEATHS[death])
    sock = daemons.connect(directory)
    assert sock.family == socket.AF_UNIX
    sock.close()
    assert _starts(count) == deaths + 1


def test_a_trainer_notices_nothing(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _script(tmp_path, monkeypatch, 2, _DEATHS["killed"])
    plain, model = Net(), ORTModule(Net(), strict=True)
    for one in (plain, model):
        loss_of(one(*batch())).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == ["the daemon died during its start, by SIGKILL; starting another one"] * 2


def test_too_few_open_files_are_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(tmp_path, monkeypatch, 1000, f'ulimit -n 20; exec {conftest.BINARY} "$@"')
    with pytest.raises(errors.SessionError, match="`ulimit -n` allows 20 open files, a daemon"):
        daemons.connect(directory)


@pytest.mark.parametrize("death", _DEATHS)
def test_the_end_of_tries_is_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    count = _script(tmp_path, monkeypatch, 1000, _DEATHS[death])
    begin = time.monotonic()
    with pytest.raises(errors.SessionError) as caught:
        daemons.connect(directory)
    took = time.monotonic() - begin
    text = str(caught.value)
    assert _starts(count) == daemons._STARTS
    assert f"was started {daemons._STARTS} times" in text and f"{directory}/daemon.log" in text
    how = {
        "killed": "by SIGKILL",
        "killed later": "by SIGKILL",
        "aborted": "by SIGABRT",
        "failed": "with exit code 1",
        "missing library": "with exit code 127",
    }
    assert how[death] in text
    assert ('("gradd: IO: no room")' in text) == (death == "failed")
    said = float(text.split(" times in ")[1].split(" s ")[0])
    assert took - 5.0 < said < took + 0.1  # a busy machine may need seconds for the error alone


def test_the_last_words_are_the_daemons_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the linker says around them, nor what a daemon of before has said."""
    said = "echo 'gradd: IO: no room' >&2; echo 'a library complains' >&2; exit 1"
    _script(tmp_path, monkeypatch, 1000, said)
    with pytest.raises(errors.SessionError, match=r'"gradd: IO: no room"'):
        daemons.connect(directory)
    _script(tmp_path, monkeypatch, 1000, "echo 'a library is missing' >&2; exit 127")
    with pytest.raises(errors.SessionError, match=r'"a library is missing"'):
        daemons.connect(directory)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("log", path)])
def test_a_log_that_is_no_file_is_named(directory: Path, make: Callable[[Path], None]) -> None:
    """Nor is it waited for: a fifo has no reader."""
    directory.mkdir(mode=0o700, exist_ok=True)
    make(directory / "daemon.log")
    with pytest.raises(daemons.DirectoryError, match=rf"cannot write {directory}/daemon.log: "):
        daemons.connect(directory)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("GRADD_THREADS", "abc", "GRADD_THREADS: expected a number from 0 to 1024, got 'abc'"),
        ("GRADD_THREADS", "1025", "GRADD_THREADS: expected a number from 0 to 1024, got '1025'"),
        ("GRADD_IDLE_EXIT", "-1", "GRADD_IDLE_EXIT: expected a number from 0 to 1000000000, got"),
        ("GRADD_LOG", "loud", "--log: expected error, warn, info or debug, got 'loud'"),
    ],
)
def test_wrong_options_are_not_tried_again(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    said: str,
) -> None:
    count = _script(tmp_path, monkeypatch, 0, ":")
    monkeypatch.setenv(name, text)
    with pytest.raises(errors.SessionError) as caught:
        daemons.connect(directory)
    assert said in str(caught.value) and f"{directory}/daemon.log" in str(caught.value)
    assert "usage" not in str(caught.value) and _starts(count) == 1


def _gradd(*args: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(conftest.BINARY), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--threads", "1025"), "--threads: expected a number from 0 to 1024, got '1025'"),
        (("--fuse", "maybe"), "--fuse: expected one of 1, 0, true, false, yes, no, on, off, got"),
        (("--wrong",), "unknown option '--wrong' (gradd --help lists them)"),
    ],
)
def test_a_wrong_option_is_one_line(directory: Path, args: tuple[str, ...], said: str) -> None:
    code, out, error = _gradd("serve", "--dir", str(directory), *args)
    assert code == 2 and out == "" and said in error
    assert error.startswith("gradd: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option", "readers"),
    [
        ("ps", "--fuse=0", "serve"),
        ("ps", "--now", "stop"),
        ("stop", "--device=cpu", "serve, doctor"),
        (
            "serve",
            "--json",
            "ps, show, logs, drain, quota, stop, restart, version, doctor, cache, --list-ops",
        ),
        (
            "version",
            "--dir=/",
            "serve, ps, top, show, logs, drain, quota, web, stop, restart, trace, forget, doctor",
        ),
        ("--list-ops", "--threads=1", "serve"),
    ],
)
def test_an_option_without_an_effect_is_refused(command: str, option: str, readers: str) -> None:
    for words in ((command, option), (option, command)):
        name = option.split("=", 1)[0]
        said = f"gradd: {name} is for {readers}; it has no effect on {command}\n"
        assert _gradd(*words) == (2, "", said)


def test_each_spelling_of_a_command_reads_the_same_options() -> None:
    assert _gradd("--version", "--json") == _gradd("version", "--json")
    assert _gradd("version", "--json")[0] == 0
    wrong = (2, "", "gradd: unknown command 'sync' (gradd --help lists them)\n")
    for words in (("sync", "--json"), ("sync", "--help"), ("help", "sync")):
        assert _gradd(*words) == wrong


def test_the_demo_of_the_wheels_is_named() -> None:
    code, out, error = _gradd("demo")
    assert (code, out) == (2, "") and "make demo" in error
    assert "make demo" in _gradd("--help")[1]
    code, out, error = _gradd("artifacts", "model.onnx", "--train", "head.*")
    assert (code, out) == (2, "") and "python -m gradd.train artifacts" in error


def test_help_is_printed_beside_wrong_options() -> None:
    for args in (["--help"], ["help"], ["-h"], ["--wrong", "--help"]):
        code, out, _ = _gradd(*args, GRADD_THREADS="abc" if "--help" in args else "")
        assert code == 0 and out.startswith("usage: gradd COMMAND")
    for args in (["stop", "--help"], ["help", "stop"], ["stop", "--wrong", "-h"]):
        code, out, _ = _gradd(*args)
        assert code == 0 and out.startswith("usage: gradd stop [options]\n\n  end the daemon")
        assert "--now" in out and "--threads" not in out


def test_a_wrong_variable_is_the_daemons_alone(directory: Path) -> None:
    code, _, error = _gradd("ps", GRADD_THREADS="abc", GRADD_FUSE="maybe", GRADD_DIR=str(directory))
    assert (code, error) == (3, f"gradd: no daemon runs in {directory}\n")


def test_the_error_has_the_time_that_passed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(tmp_path, monkeypatch, 1000, "exec sleep 60")
    begin = time.monotonic()
    with pytest.raises(errors.SessionError, match=r"no daemon listens in .* after ([\d.]+) s"):
        daemons.connect(directory, wait=0.7)
    assert 0.7 <= time.monotonic() - begin < 15
    daemons.started[-1].kill()


def test_without_a_start_the_command_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("GRADD_AUTOSTART", "0")
    with pytest.raises(
        errors.SessionError, match=r"after ([\d.]+) s .*run `gradd serve`"
    ) as caught:
        daemons.connect(directory, wait=0.3)
    assert float(str(caught.value).split(" after ")[1].split(" s ")[0]) >= 0.3


# ---- devices ----


def test_a_trainer_is_warned_of_an_unavailable_device(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The CPU serves."""
    monkeypatch.setenv("GRADD_PLUGINS", str(tmp_path))
    monkeypatch.setenv("GRADD_DEVICE", "cuda")
    model = ORTModule(Net(), strict=True)
    with caplog.at_level(logging.WARNING, logger="gradd"):
        loss_of(model(*batch())).backward()
    (said,) = [r.getMessage() for r in caplog.records if "on the CPU" in r.getMessage()]
    assert f"no plug-in at {tmp_path}/libgradd_cuda.so" in said and "gradd doctor" in said
    assert "device cpu" in str(model.gradd_explain())


def test_a_daemon_of_a_gpu_does_not_compute_on_the_cpu(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once with a code of its own, and the trainer is told why."""
    monkeypatch.setenv("GRADD_PLUGINS", str(tmp_path))
    monkeypatch.setenv("GRADD_BIN", str(conftest.BINARY))
    gpu = types.SimpleNamespace(
        uuid="GPU-0",
        device="cuda:0",
        serve=("--device", "cuda", "--require-device"),
        environment={},
    )
    with pytest.raises(devices.DeviceError, match=r"no daemon can compute on cuda:0 .*no plug-in"):
        daemons.connect(directory / gpu.uuid, gpu)
    assert daemons.started[-1].returncode == 5
    assert (directory / gpu.uuid / "daemon.log").read_text().count("no plug-in") == 1


@pytest.mark.parametrize("name", ["cuda", "nonsense"])
def test_a_daemon_of_another_device_is_named_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A trainer starts it, another one meets it."""
    monkeypatch.setenv("GRADD_DEVICE", "cpu")
    with caplog.at_level(logging.WARNING, logger="gradd"):
        loss_of(ORTModule(Net(), strict=True)(*batch())).backward()
        assert "GRADD_DEVICE" not in caplog.text
        client.close_all()
        monkeypatch.setenv("GRADD_DEVICE", name)
        for _ in range(2):
            loss_of(ORTModule(Net(), strict=True)(*batch())).backward()
    said = (
        f"GRADD_DEVICE={name}, but the daemon in {directory} computes on cpu; `gradd stop` ends it"
    )
    assert [r.getMessage() for r in caplog.records if "computes on cpu" in r.getMessage()] == [said]
    command = [str(conftest.BINARY), "ps", "--dir", str(directory)]
    assert ", device cpu, " in subprocess.check_output(command, text=True).splitlines()[0]


@pytest.mark.parametrize("name", ["abacus", "CUDA", "cuda:0"])
def test_an_unknown_device_is_refused_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("GRADD_DEVICE", name)
    with pytest.raises(errors.SessionError, match=f"does not start.*no device '{name}'"):
        client.get_client().request("release", {"runs": []})
    assert (directory / "daemon.log").read_text().count("no device") == 1


def test_the_trainers_variable_says_when_an_idle_daemon_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_IDLE_EXIT", "1")
    monkeypatch.setenv("GRADD_BIN", str(conftest.BINARY))
    client.get_client().request("release", {"runs": []})
    client.close_all()
    assert daemons.started[-1].wait(30) == 0
