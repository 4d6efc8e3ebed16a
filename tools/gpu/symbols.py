"""Checks the symbols that a plug-in needs: `make cuda` stops if the daemon cannot load it.

    python tools/gpu/symbols.py PLUGIN.so DAEMON

The plug-in may need what the daemon exports (gradd_*), libcublasLt and the C and C++ runtime,
nothing else: no libcuda, which is found at run time. It exports its entry alone. The daemon knows
no CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIBRARY = re.compile(
    r"lib(cublasLt|c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so(\.\d+)*|ld-linux[\w-]*\.so\.\d+"
)
CUDA = re.compile(r"(__)?(cuda[A-Z_]|cublas|cu[A-Z]|nv[A-Z]|nvrtc)\w*|lib(cu|nv)[\w-]*\.so[\w.]*")
ENTRY = "gradd_plugin"


def _lines(*command: str | Path) -> list[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def defined(*files: Path, dynamic: bool = False) -> set[str]:
    """Symbols that they have."""
    how = ["-D"] if dynamic else []
    lines = _lines("nm", *how, "--defined-only", *files)
    return {words[-1] for line in lines if len(words := line.split()) == 3}


def exported(file: Path) -> set[str]:
    """The dynamic symbols that it defines."""
    return defined(file, dynamic=True)


def missing(*files: Path, dynamic: bool = True) -> set[str]:
    """Symbols that they want from elsewhere, without those that a versioned library has promised.

    What is weak may be absent.
    """
    how = ["-D"] if dynamic else []
    found = set()
    for line in _lines("nm", *how, "--undefined-only", *files):
        words = line.split()
        if len(words) == 2 and words[0] == "U" and "@" not in words[1]:
            found.add(words[1])
    return found


def needed(file: Path) -> list[str]:
    """Names of the libraries that it is loaded with."""
    pattern = re.compile(r"\(NEEDED\).*\[(.*)\]")
    return [m[1] for line in _lines("readelf", "-d", file) if (m := pattern.search(line))]


def faults(plugin: Path, daemon: Path) -> list[str]:
    """What is wrong with the two, a sentence each."""
    found = [
        f"the plug-in wants {name}, which the daemon does not export"
        for name in sorted(missing(plugin) - exported(daemon))
    ]
    found += [
        f"the plug-in needs {library}"
        for library in needed(plugin)
        if not LIBRARY.fullmatch(library)
    ]
    found += [f"the plug-in exports {name}" for name in sorted(exported(plugin) - {ENTRY})]
    if ENTRY not in exported(plugin):
        found.append(f"the plug-in does not export {ENTRY}")
    names = {line.split()[-1].split("@")[0] for line in _lines("nm", "-D", daemon)}
    names |= {line.split()[-1].split("@")[0] for line in _lines("nm", daemon) if line}
    found += [f"the daemon has {name}" for name in sorted(names) if CUDA.fullmatch(name)]
    found += [f"the daemon needs {name}" for name in needed(daemon) if CUDA.fullmatch(name)]
    return found


def main() -> int:
    """Prints what is wrong."""
    plugin, daemon = map(Path, sys.argv[1:])
    wrong = faults(plugin, daemon)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"  SYMBOLS {len(missing(plugin))} of the daemon's, {len(wrong)} faults")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
