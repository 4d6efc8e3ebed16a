"""Versions and package lists that are written in more than one place must agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers import BUILD, ROOT

pytestmark = pytest.mark.quick


def read(path: str) -> str:
    """Text of a file named from the repository root."""
    return (ROOT / path).read_text(encoding="utf-8")


def project_version(path: str) -> str:
    """The version line of a pyproject file."""
    match = re.search(r'^version = "(.+)"$', read(path), re.M)
    assert match, path
    return match[1]


def test_one_version_everywhere() -> None:
    """Both distributions, the changelog and the binary say the same."""
    version = project_version("adapters/python/pyproject.toml")
    assert project_version("adapters/optimum/pyproject.toml") == version
    assert f'"gradd=={version}"' in read("adapters/optimum/pyproject.toml")
    assert re.search(rf"^## {re.escape(version)}\b", read("CHANGELOG.md"), re.M)
    binary = os.environ.get("GRADD_BIN", str(BUILD / "bin" / "gradd"))
    said = subprocess.run([binary, "version"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert version in said.stdout


def test_every_requirement_is_pinned() -> None:
    """A package without a pin would differ from machine to machine."""
    pins = set(re.findall(r"^([\w.-]+)==", read("constraints.txt"), re.M))
    for path in ("requirements.txt", "requirements-dev.txt"):
        lines = [line.split("#")[0].split(";")[0].strip() for line in read(path).splitlines()]
        assert {line for line in lines if line} <= pins, path


def test_optimum_stays_a_namespace_package() -> None:
    """An optimum/__init__.py of ours would hide every other distribution's optimum."""
    assert not (ROOT / "adapters" / "optimum" / "optimum" / "__init__.py").exists()


def test_the_container_takes_what_make_wheel_builds() -> None:
    """It cannot be built where there is no registry of images: its names are compared."""
    lines = [line.split(maxsplit=1) for line in read("Containerfile").splitlines() if line]
    steps = {word: rest for word, rest in lines if word != "#"}
    copied, to = steps["COPY"].split()
    assert copied == f"{re.findall(r'(?m)^DIST +[?]= (.+)$', read('mk/wheel.mk'))[0]}/*.whl"
    first = next(rest for word, rest in lines if word == "RUN")
    assert first == f"pip install --no-cache-dir {to}*.whl && rm -r {to.rstrip('/')}"
    major, minor = map(int, re.findall(r"^python:(\d+)[.](\d+)-slim$", steps["FROM"])[0])
    assert f"{major}.{minor}" in read("README.md").split("<!-- versions -->")[1]
    (command,) = json.loads(steps["ENTRYPOINT"])
    assert f'{command} = "gradd_command:main"' in read("adapters/python/pyproject.toml")
    (verb,) = json.loads(steps["CMD"])
    assert f'== ["{verb}"]' in read("adapters/python/gradd_command.py")


def test_a_checkout_finds_its_own_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GRADD_BIN: the binary that `make` has built beside the package."""
    from gradd.session import daemon

    for name in ("GRADD_BIN", "GRADD_BUILD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(daemon.find_binary()) == ROOT / "build" / "bin" / "gradd"
