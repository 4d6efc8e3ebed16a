"""The units for systemd: what they start, and the exit codes by which they decide."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradd.session import daemon as daemons
from helpers import BUILD, ROOT
from helpers.waiting import until

UNITS = ROOT / "tools" / "systemd"
GRADD = BUILD / "bin" / "gradd"


class Unit:
    """A unit file, for a user of a name."""

    def __init__(self, name: str, user: str = "ana") -> None:
        text = (UNITS / name).read_text().replace("%i", user)
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment]
        parser.read_string(text)
        self.service = parser["Service"]
        self.text = text

    def command(self, *more: str) -> list[str]:
        """ExecStart, with the binary of this build."""
        program, *words = shlex.split(self.service["ExecStart"])
        assert Path(program).name == "gradd"
        return [str(GRADD), *words, *more]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory, as a login has it."""
    (tmp_path / "run").mkdir(mode=0o700)
    yield tmp_path / "run"


def test_each_unit_starts_a_command_that_there_is() -> None:
    names = sorted(path.name for path in UNITS.iterdir())
    assert names == ["gradd-users.service", "gradd-web.service", "gradd.service", "gradd@.service"]
    for name in names:
        command = Unit(name).command("--help")
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told.startswith(f"usage: gradd {command[1]} ")
        for option in (word for word in command[2:-1] if word.startswith("--")):
            assert f"  {option} " in told


def test_a_daemon_of_the_unit_is_the_one_that_clients_find(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = Unit("gradd.service")
    monkeypatch.delenv("GRADD_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    process = subprocess.Popen(unit.command(), stderr=subprocess.DEVNULL)
    try:

        def listens() -> bool:
            sock = daemons.try_connect(daemons.directory())
            if sock is not None:
                sock.close()
            return sock is not None

        until(listens, "no client finds the daemon")
        prevented = unit.service["RestartPreventExitStatus"].split()
        second = subprocess.run(unit.command(), capture_output=True, timeout=60)
        assert second.returncode == daemons._EXIT_ALREADY and str(second.returncode) in prevented
        wrong = subprocess.run(unit.command("--wrong"), capture_output=True, timeout=60)
        assert wrong.returncode == daemons._EXIT_USAGE and str(wrong.returncode) in prevented
        assert str(daemons._EXIT_DEVICE) in prevented
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


def test_the_unit_of_the_system_serves_the_directory_that_it_makes() -> None:
    service = Unit("gradd@.service").service
    assert service["User"] == "ana" and service["RuntimeDirectoryMode"] == "0700"
    assert service["Environment"] == f"GRADD_DIR=/run/{service['RuntimeDirectory']}"
    page = (ROOT / "docs" / "operating.md").read_text()
    assert service["Environment"] in page


def test_the_unit_of_users_serves_the_directory_of_the_page() -> None:
    """tests/python/users runs supervisors with its capabilities."""
    service = Unit("gradd-users.service").service
    words = shlex.split(service["ExecStart"])
    page = (ROOT / "docs" / "operating.md").read_text()
    assert f"GRADD_DIR={words[words.index('--dir') + 1]}" in page
    assert "User" not in service, "it needs root"
    assert set(service["RestartPreventExitStatus"].split()) == {
        str(daemons._EXIT_USAGE),
        str(daemons._EXIT_ALREADY),
    }


def test_what_a_page_says_about_units_is_there() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    for name in re.findall(r"tools/systemd/([\w@.-]+)", page):
        assert (UNITS / name).exists(), name
    assert page.count("tools/systemd/") >= 4


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_systemd_understands_them(tmp_path: Path) -> None:
    for path in UNITS.iterdir():
        copy = tmp_path / path.name.replace("@", "@ana")
        program = re.compile(r"ExecStart=\S+")
        copy.write_text(program.sub(f"ExecStart={GRADD}", path.read_text()))
        command = ["systemd-analyze", "verify", "--man=no", str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        assert str(copy.name) not in done.stderr, done.stderr
