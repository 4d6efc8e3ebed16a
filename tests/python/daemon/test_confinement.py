"""What owner and worker of a daemon have given up, and how it is lifted."""

from __future__ import annotations

import json
import subprocess

import conftest
import pytest
from conftest import BINARY, Daemon

_ALL = "seccomp, no new privileges, not dumpable, no core"


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def _score(pid: int) -> int:
    with open(f"/proc/{pid}/oom_score_adj") as file:
        return int(file.read())


def _doctor(daemon: Daemon) -> str:
    command = [str(BINARY), "doctor", "--dir", str(daemon.directory)]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=60).stdout


def test_a_daemon_on_the_cpu(daemon: Daemon) -> None:
    said = daemon.ps()
    for pid, text in (
        (said["pid"], said["owner_confined"]),
        (said["worker"], said["confined"]),
    ):
        status = _status(pid)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert text.endswith(_ALL)
        with open(f"/proc/{pid}/limits") as limits:
            assert next(line for line in limits if "core" in line).split()[4:6] == ["0", "0"]
    assert _score(said["worker"]) == min(_score(said["pid"]) + 200, 1000)
    told = _doctor(daemon)
    assert f"daemon {said['pid']}: owner: {said['owner_confined']}; worker:" in told
    command = [str(BINARY), "doctor", "--json", "--dir", str(daemon.directory)]
    found = json.loads(subprocess.check_output(command, text=True, timeout=60))
    assert found["daemons"][0]["worker"] == said["confined"]
    assert found["confinement"].endswith(_ALL)


def test_it_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DEBUGGABLE", "1")
    with conftest._serving(monkeypatch, lambda: True) as server:
        said = server.ps()
        assert said["confined"] == said["owner_confined"] == "nothing"
        for pid in (said["pid"], said["worker"]):
            assert _status(pid)["Seccomp"] == _status(conftest.os.getpid())["Seccomp"]
