"""Checks the compiler's notes on GPU kernels: `make cuda` stops if one became slow by accident.

    python tools/gpu/gates.py OBJECT.o ...

Beside each object lies what ptxas printed (OBJECT.ptxas). Kernels of HOT may neither spill
registers nor keep anything on their stack; others a few bytes, or what KNOWN says. With cuobjdump
at hand, the kernels of WIDE must have one of the loads that it names.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

# By a kernel's mangled name. Packs of 4 and 8 are f32 and the halves; f64 is on no hot path.
HOT = re.compile(
    r"gpu_map_(flat|wide)ILi[48]E(?!\d+f_(sin|cos|a?tan|lgamma|digamma|trigamma))|(?<!ga)mma|"
    r"rope|4turn|turn_packs|square_blocks|6update|"
    r"(softmax|finish)_rows\w*EE(f|\d+gradd_)|norm_(rows|grad)I\w*(f|gradd_bf16_s|gradd_f16_s)"
)
WIDE = {
    r"gpu_map_flatILi[248]E(?!\d+f_to)|part_sumsILi4": ("LDG.E.128", "LDG.E.64"),
    r"turn_packsILi8E": ("LDG.E.128",),
    r"turn_packsILi2E": ("LDG.E R",),
}
FEW = (32, 256)  # bytes on the stack, and spilled
KNOWN = {
    r"f_(sin|cos|tan|digamma|trigamma)|draw": 40,  # libm's sine of large numbers
    r"order_(slices|together)": 1536,  # swaps as PyTorch's sort makes them where ties count
    r"constant|non_zero": 72,  # the last step of NonZero: coordinates of an element
}
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
    """Kernels of WIDE that load less at once."""
    text = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True)
    bad = []
    for part in text.stdout.split("Function : ")[1:]:
        name = part.split(None, 1)[0]
        for kernel, loads in WIDE.items():
            if re.search(kernel, name) and not any(load in part for load in loads):
                bad.append(name)
    return bad


def allowed(name: str) -> tuple[int, int]:
    """Bytes on the stack and bytes spilled that a kernel may have."""
    if HOT.search(name):
        return 0, 0
    known = max((n for part, n in KNOWN.items() if re.search(part, name)), default=0)
    return max(FEW[0], known), FEW[1]


def main() -> int:
    """Prints what is wrong, and how many kernels there are."""
    kernels, wrong = 0, []
    tool = disassembler()
    for file in map(Path, sys.argv[1:]):
        any_wide = False  # few files have one, and to disassemble them all takes minutes
        for name, arch, stack, spilled in frames(file.with_suffix(".ptxas").read_text()):
            kernels += 1
            any_wide |= any(re.search(kernel, name) for kernel in WIDE)
            most_stack, most_spilled = allowed(name)
            if spilled > most_spilled:
                wrong.append(f"{name} ({arch}) spills {spilled} bytes")
            if stack > most_stack:
                wrong.append(f"{name} ({arch}) keeps {stack} bytes on its stack")
        if tool and any_wide:
            wrong += [f"{name} has no load as wide as it should" for name in narrow(tool, file)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    wide = "wide loads where wanted" if tool else "width of accesses not looked at: no cuobjdump"
    print(f"  GATES   {kernels} kernels, {len(wrong)} faults; {wide}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
