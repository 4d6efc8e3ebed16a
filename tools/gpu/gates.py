"""What the compiler said of GPU kernels: `make cuda` stops where one has become slow by accident.

    python tools/gpu/gates.py OBJECT.o ...

Beside each object lies what ptxas printed (OBJECT.ptxas). No kernel may spill registers or keep an
array on its stack, but those in ALLOWED. With cuobjdump at hand, the kernels in WIDE must move 16
bytes at once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

# Part of a kernel's name -> bytes that it may keep on its stack or spill: libm's functions in f64.
ALLOWED = {"f_expdJd": 16}
WIDE = ("gpu_map_flat",)  # all kernels of that name
HEAD = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def frames(text: str) -> list[tuple[str, str, int, int]]:
    """Kernel, architecture, bytes on the stack and bytes spilled, of what ptxas printed."""
    found = []
    at = None
    for line in text.splitlines():
        if head := HEAD.search(line):
            at = head.groups()
        elif at and (frame := FRAME.search(line)):
            stack, stores, loads = map(int, frame.groups())
            found.append((*at, stack, stores + loads))
            at = None
    return found


def disassembler() -> str | None:
    """cuobjdump of the path, or of the Python package beside this interpreter."""
    packaged = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/cuobjdump")
    return shutil.which("cuobjdump") or next(map(str, packaged), None)


def narrow(tool: str, file: Path) -> list[str]:
    """Kernels of WIDE that load less than 16 bytes at once."""
    text = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True)
    bad = []
    for part in text.stdout.split("Function : ")[1:]:
        name = part.split(None, 1)[0]
        if any(word in name for word in WIDE) and "LDG.E.128" not in part:
            bad.append(name)
    return bad


def main() -> int:
    """Prints what is wrong, and how many kernels there are."""
    kernels, wrong = 0, []
    tool = disassembler()
    for file in map(Path, sys.argv[1:]):
        for name, arch, stack, spilled in frames(file.with_suffix(".ptxas").read_text()):
            kernels += 1
            allowed = max((n for part, n in ALLOWED.items() if part in name), default=0)
            if spilled > allowed:
                wrong.append(f"{name} ({arch}) spills {spilled} bytes")
            if stack > allowed:
                wrong.append(f"{name} ({arch}) keeps {stack} bytes on its stack")
        if tool:
            wrong += [f"{name} has no access of 16 bytes" for name in narrow(tool, file)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    wide = (
        "16 bytes at once where wanted" if tool else "width of accesses not looked at: no cuobjdump"
    )
    print(f"  GATES   {kernels} kernels, {len(wrong)} faults; {wide}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
