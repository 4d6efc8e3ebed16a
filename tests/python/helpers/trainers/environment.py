"""The environment of packages that long tests train with; they are large, so it is made once.

It lies under build/, beside the packages of the tests, which it sees.
"""

from __future__ import annotations

import fcntl
import functools
import site
import subprocess
import venv
from pathlib import Path

from helpers import BUILD, ROOT

_NEEDS = ROOT / "requirements-trainers.txt"


def _install(folder: Path, python: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    lines = (f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages())
    (packages / "tests.pth").write_text("".join(lines))
    command = [str(python), "-m", "pip", "install", "-q", "-r", str(_NEEDS)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], check=True)


@functools.cache
def interpreter() -> str:
    """The interpreter of an environment that has the packages, and sees those of this one."""
    folder = BUILD / "trainers"
    python, done = folder / "bin" / "python", folder / "done"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that test makes it
        if not done.exists() or done.read_text() != _NEEDS.read_text():
            _install(folder, python)
            done.write_text(_NEEDS.read_text())
    return str(python)
