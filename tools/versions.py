"""The Python part of `make check` under other versions of Python, torch and transformers.

Each environment is made in build/versions, runs the README's example and the quick Python tests,
and is removed: they take some GB each. README.md keeps a row per environment. The daemon is the
one of the build folder. Called by `make versions`; ONLY="2.14-3.13" runs one of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "versions"
GIGABYTES = 9  # of an environment, and of what is downloaded for it
# What torch and transformers choose themselves; for the rest the pins of constraints.txt hold.
FREE = ("torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "sympy")
# For the build, for formatting, and for tests of `make nightly`.
NOT_NEEDED = r"onednn|clang-format|ruff|trl|sentence-transformers|lightning"
BEGIN, END = "<!-- versions -->", "<!-- end of versions -->"
HEAD = """| Python | torch | transformers | the example | quick tests |
|---|---|---|---|---|"""


class Environment(NamedTuple):
    """Versions that are taken together; "" = the newest.

    Attributes:
        torch: The first two numbers.
        python: The first two numbers.
        transformers: The first two numbers.
    """

    torch: str
    python: str
    transformers: str = ""

    @property
    def name(self) -> str:
        """As ONLY= takes it, and its folder has it."""
        return f"{self.torch}-{self.python}"


ENVIRONMENTS = (
    Environment("2.11", "3.11", "5.17"),
    Environment("2.13", "3.11"),
    Environment("2.14", "3.11"),
    Environment("2.14", "3.12"),
    Environment("2.14", "3.13"),
)


class Row(NamedTuple):
    """What came of one; versions are complete."""

    python: str
    torch: str
    transformers: str
    example: str
    tests: str

    @property
    def key(self) -> str:
        """The name of its environment."""
        return f"{_two(self.torch)}-{_two(self.python)}"

    @property
    def is_good(self) -> bool:
        """Whether everything passes."""
        return self.example == "passes" and self.tests.endswith(" 0 failed")


def _two(version: str) -> str:
    return ".".join(version.split(".")[:2])


def interpreter(version: str) -> Path | None:
    """An interpreter by its version: on the PATH, else one that pyenv has installed."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(name), *sorted(pyenv.glob(f"{version}*/bin/{name}"), reverse=True)]
    for path in found:
        if path is None:
            continue
        code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([str(path), "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == version:  # a shim of pyenv may be there without its version
            return Path(path)
    return None


def missing(environments: Sequence[Environment]) -> list[str]:
    """Names of interpreters that this machine does not have."""
    wanted = dict.fromkeys(one.python for one in environments)
    return [f"python{version}" for version in wanted if interpreter(version) is None]


def example() -> str:
    """The script of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(# try\.py.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]


def constraints() -> str:
    """Pins that hold in every environment."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join([line for line in lines if line.partition("==")[0] not in FREE]) + "\n"


def requirements() -> list[str]:
    """What the product and its quick tests need, by name; torch is not among them."""
    lines = []
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines += (ROOT / file).read_text().splitlines()
    names = (line.partition("#")[0].partition(";")[0].strip() for line in lines)
    return [n for n in names if n and n not in FREE and not re.match(NOT_NEEDED, n)]


def make(one: Environment, folder: Path) -> Path:
    """Makes an environment; returns its interpreter."""
    subprocess.run([str(interpreter(one.python)), "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += ["--no-cache-dir", "--progress-bar", "off"]
    pins = folder / "constraints.txt"
    pins.write_text(constraints())
    newest = f"transformers=={one.transformers}.*" if one.transformers else "transformers"
    for packages in ([f"torch=={one.torch}.*"], ["-c", str(pins), newest, *requirements()]):
        with open(folder / "pip.log", "a") as log:
            done = subprocess.run([*pip, *packages], stdout=log, stderr=log)
        if done.returncode:
            text = (folder / "pip.log").read_text()
            errors = [line for line in text.splitlines() if line.startswith("ERROR")]
            raise RuntimeError("\n".join([f"pip could not install {packages[0]}", *errors]))
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    folders = [str(ROOT / "adapters" / name) for name in ("python", "optimum")]
    hook = "import gradd_aliases"  # serves old names
    Path(site.stdout.strip(), "gradd-source.pth").write_text("\n".join([*folders, hook, ""]))
    return python


def versions_of(python: Path) -> tuple[str, str, str]:
    """Python's own version, torch's and transformers', as installed."""
    code = """import platform
from importlib.metadata import version
print(platform.python_version(), version("torch"), version("transformers"))"""
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    own, torch, transformers = said.stdout.split()
    return own, torch.partition("+")[0], transformers


def run_example(python: Path, environ: dict[str, str]) -> str:
    """Whether the README's script trains without a call in PyTorch."""
    with tempfile.TemporaryDirectory(prefix="gradd-versions-") as folder:
        script = Path(folder) / "try.py"
        script.write_text(example())
        own = environ | {"GRADD_DIR": f"{folder}/daemon"}
        done = subprocess.run(
            [str(python), str(script)], env=own, stdout=subprocess.PIPE, text=True
        )
        subprocess.run([environ["GRADD_BIN"], "stop", "--dir", f"{folder}/daemon"], env=own)
    print(done.stdout, end="")
    return "passes" if done.returncode == 0 and done.stdout.endswith(" {}\n") else "fails"


def run_tests(python: Path, environ: dict[str, str], build: Path) -> str:
    """Runs the quick Python tests; returns their last line."""
    command = [str(python), "tests/run_all.py", "--quick", "--python", "--build", str(build)]
    run = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in run.stdout or ():
        print(line, end="", flush=True)
        last = line.strip() or last
    return last if run.wait() in (0, 1) and last.endswith(" failed") else "they broke off"


def try_one(one: Environment, build: Path) -> Row:
    """Makes an environment, runs everything there, and removes it."""
    folder = PLACE / one.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {
        "GRADD_BIN": str(build / "bin" / "gradd"),
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / "adapters" / name) for name in ("python", "optimum")
        ),
    }
    try:
        python = make(one, folder)
        found = versions_of(python)
        print(f"== Python {found[0]}, torch {found[1]}, transformers {found[2]}", flush=True)
        return Row(*found, run_example(python, environ), run_tests(python, environ, build))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rows(page: str) -> dict[str, Row]:
    """Those that the table of a page has, by environment."""
    found = re.search(f"{BEGIN}(.*?){END}", page, re.DOTALL)
    lines = re.findall(r"^\| (\d.*) \|$", found[1] if found else "", re.MULTILINE)
    return {row.key: row for row in (Row(*line.split(" | ")) for line in lines)}


def with_rows(page: str, known: dict[str, Row]) -> str:
    """The page with another table."""
    order = [one.name for one in ENVIRONMENTS if one.name in known]
    lines = [f"| {' | '.join(known[name])} |" for name in order]
    table = "\n".join([BEGIN, HEAD, *lines, END])
    return re.sub(f"{BEGIN}.*?{END}", lambda _: table, page, flags=re.DOTALL)


def main() -> int:
    """Runs the environments one after the other; the README has each one's row when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--only", nargs="*", default=[], help="of torch and Python, as 2.14-3.13")
    args = parser.parse_args()
    names = [one.name for one in ENVIRONMENTS]
    if unknown := sorted(set(args.only) - set(names)):
        print(f"no environment {', '.join(unknown)}; there are {', '.join(names)}")
        return 2
    chosen = [one for one in ENVIRONMENTS if one.name in (args.only or names)]
    if absent := missing(chosen):
        print(f"not found, on the PATH or among pyenv's: {', '.join(absent)}")
        return 2
    good = True
    for one in chosen:
        if shutil.disk_usage(ROOT).free < GIGABYTES << 30:
            print(f"an environment takes up to {GIGABYTES} GB, and there is less free")
            return 2
        row = try_one(one, (ROOT / args.build).resolve())
        good = good and row.is_good
        page = ROOT / "README.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(with_rows(text, rows(text) | {one.name: row}), encoding="utf-8")
        print(f"== {one.name}: the example {row.example}, {row.tests}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
