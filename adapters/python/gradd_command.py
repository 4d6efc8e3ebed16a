"""The command `gradd` of an installed wheel: the binary, `gradd demo` and `gradd artifacts`.

It imports neither gradd nor torch, so that `gradd ps` takes milliseconds.
"""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the binary of the package, or the program in Python that is asked for."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["demo"]:
        if importlib.util.find_spec("optimum") is None:
            sys.exit("gradd: the demo trains with transformers: pip install optimum-gradd")
        demo = [sys.executable, "-m", "optimum.gradd.demo", *arguments[1:]]
        os.execv(sys.executable, demo)
    if arguments[:1] == ["artifacts"]:
        os.execv(sys.executable, [sys.executable, "-m", "gradd.train", *arguments])
    package = importlib.util.find_spec("gradd")
    folder = Path(package.origin).parent if package and package.origin else Path()
    binary = folder / "_native" / "bin" / "gradd"
    if not binary.exists():
        sys.exit(f"gradd: {binary} is missing: the package was installed without the daemon")
    os.execv(binary, ["gradd", *arguments])
