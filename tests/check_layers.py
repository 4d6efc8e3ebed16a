"""Fails when a folder of C includes one that it must not know, or a type's name is ambiguous.

ROOMS lists the folders from the lowest to the highest, each with those that it may include. A row
may name only rows above it, so the table has no circle and neither have the folders. Shared memory
knows no transport and no matrix library; the engine (graph, plan, device, exec) knows nothing of
the daemon; the engine asks a device through its table alone, so nothing of `server/` includes a
device's folder or names its table. Includes are written from the repository root.

In Python the folder `memory` alone knows what a GPU is: no other module calls a driver, or names
torch's module of a kind of GPU.

A type that a header defines has a name of its own among all C sources; one inside a source file
may share its name with one other.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "kernels/contract kernels/math kernels/rules kernels/describe"
ENGINE = "server/api server/graph server/device server/plan server/exec"
ROOMS = {
    "shm": "",
    "platform": "shm",
    "kernels/contract": "shm",
    "kernels/math": "shm kernels/contract",
    "kernels/rules": "shm kernels/contract kernels/math",
    "kernels/describe": "shm kernels/contract kernels/math kernels/rules",
    "kernels/cases": "shm kernels/contract kernels/math",
    "kernels/cpu": f"shm platform {KERNELS}",
    "kernels/ops": f"shm {KERNELS} kernels/cpu",
    "kernels/cuda": f"shm {KERNELS}",
    "server/api": "shm kernels/contract",
    "server/graph": f"shm platform {KERNELS} server/api",
    "server/device": "shm kernels/contract server/api",
    "server/plan": f"shm platform {KERNELS} server/api server/graph server/device",
    "server/exec": f"shm platform {KERNELS} server/api server/device server/plan",
    "server/host": "shm server/api",
    "server/wire": "shm",
    "server/session": "shm server/host",
    "server/explain": "shm server/api server/graph",
    "server/verbs": "shm server/api server/device server/exec server/host server/wire"
    " server/session server/explain",
    "server/daemon": "shm platform server/device server/host server/wire server/session"
    " server/verbs",
    "server/owner": "shm server/host server/wire server/session",
    "server/users": "shm server/host server/wire",
    "server/web": "shm server/host server/wire",
    "train": "shm platform kernels/contract kernels/math server/api server/graph server/device"
    " server/plan server/exec",
    "train/files": "shm platform server/api server/graph train",
    "train/web": "shm platform train",
    "train/java": "shm train",
    "server/cli": "shm kernels/contract kernels/cases server/api server/host server/wire"
    " server/session server/explain server/daemon server/owner server/users server/web",
}
# The libraries that a folder may use, by the beginning of a header's name.
LIBRARIES = {
    "zmq": "server/wire server/verbs server/daemon server/cli",
    "msgpack": "server/wire server/verbs server/daemon server/web server/cli",
    "dnnl": "kernels/cpu kernels/ops",
    "cuda": "kernels/cuda",
    "cublas": "kernels/cuda",
    "protobuf-c": "server/graph server/explain train train/files",
    "microhttpd": "server/web",
}
# Made by the build, or by tests/emu in the place of CUDA's own.
OUTSIDE = re.compile(r"\w+_list\.inc|web_page\.\w+\.inc|emu\.h")
SOURCES = {".c", ".h", ".inc", ".cu", ".cuh", ".cc"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
TYPE = re.compile(
    r"^(?:typedef\b[^;{}()]*?\b(\w+_t)(?:\[\w+\])?;"  # typedef struct x_s x_t;
    r"|typedef\b[^;{}()]*\{[^}\n]*\}[ ]*(\w+_t);"  # on one line
    r"|\}[ ]*(\w+_t);)",  # the last line of one
    re.MULTILINE,
)
PRODUCT = ("shm", "platform", "kernels", "server", "train")
ELSEWHERE = ("tests", "benchmarks", "tools")  # may include everything
MEMORY = "adapters/python/gradd/memory"
OF_GPUS = re.compile(r"\btorch\.(?:cuda|emu)\b|\bgradd\.memory\.driver\b|\bimport driver\b|libcuda")
# An option of ONNX Runtime that had the best device by default.
NAMES_CUDA = "adapters/python/gradd/legacy/options.py"
MOST_PRIVATE = 2  # source files that may each have a private type of one name


def sources(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    """Every C source below some folders."""
    for folder in folders:
        yield from (p for p in sorted((root / folder).rglob("*")) if p.suffix in SOURCES)


def room(path: str) -> str:
    """The row of ROOMS that a file belongs to: its first two folders, or the first."""
    parts = path.split("/")[:-1]
    return next((r for r in ("/".join(parts[:2]), "".join(parts[:1])) if r in ROOMS), "")


def bad_rows() -> Iterator[str]:
    """Rows of ROOMS that name something that is not above them: the beginning of a circle."""
    above: set[str] = set()
    for name, allowed in ROOMS.items():
        for other in allowed.split():
            if other not in above:
                yield f"ROOMS: {name} names {other}, which is not above it"
        above.add(name)


def bad_includes(root: Path) -> Iterator[str]:
    """Includes that ROOMS and LIBRARIES do not allow."""
    for path in sources(root, PRODUCT):
        name = str(path.relative_to(root))
        own = room(name)
        if not own:
            yield f"{name}: its folder is not a row of ROOMS"
            continue
        text = path.read_text(encoding="utf-8")
        for include in INCLUDE.finditer(text):
            why = refusal(own, include[1], include[2])
            if why:
                line = text.count("\n", 0, include.start()) + 1
                yield f"{name}:{line}: {include[0].strip()}: {why}"


def refusal(own: str, mark: str, header: str) -> str:
    """Why a file of a folder must not include a header; "" if it may."""
    library = next((name for name in LIBRARIES if header.startswith(name)), "")
    if library:
        fine = own in LIBRARIES[library].split()
        return "" if fine else f"{library} is used by {LIBRARIES[library]} alone"
    if mark == "<" or OUTSIDE.fullmatch(header):
        return ""
    other = room(header)
    if not other:
        return "not a path of the product from the repository root"
    fine = other == own or other in ROOMS[own].split()
    return "" if fine else f"{own} may include {ROOMS[own] or 'nothing'}"


def bad_devices(root: Path) -> Iterator[str]:
    """Names of a device's table within the server."""
    names = [p.parent.name for p in sorted(root.glob("kernels/*/backend.c"))]
    table = re.compile(rf"\bgradd_backend_(?:{'|'.join(names)})\b")
    for path in sources(root, ("server",)) if names else ():
        if found := table.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}: names a device's table, {found[0]}"


def bad_types(root: Path) -> Iterator[str]:
    """Names that stand for more types than a reader can keep apart."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in sources(root, (*PRODUCT, *ELSEWHERE)):
        for found in TYPE.finditer(path.read_text(encoding="utf-8")):
            places[found[1] or found[2] or found[3]].add(str(path.relative_to(root)))
    for name, files in sorted(places.items()):
        public = any(file.endswith(".h") for file in files)
        if len(files) > (1 if public else MOST_PRIVATE):
            yield f"type {name} is defined {len(files)} times: {', '.join(sorted(files))}"


def bad_imports(root: Path) -> Iterator[str]:
    """Modules of adapters/python that import from adapters/optimum."""
    line = re.compile(r"^\s*(?:from|import) +optimum\.gradd\b", re.MULTILINE)
    for path in sorted((root / "adapters/python").rglob("*.py")):
        if line.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}: imports optimum.gradd, which is above it"


def bad_gpus(root: Path) -> Iterator[str]:
    """Python modules beside MEMORY that know a kind of GPU."""
    for path in sorted((root / "adapters").rglob("*.py")):
        name = str(path.relative_to(root))
        if name.startswith(f"{MEMORY}/") or name == NAMES_CUDA:
            continue
        if found := OF_GPUS.search(path.read_text(encoding="utf-8")):
            yield f"{name}: names {found[0]}: only {MEMORY} knows kinds of GPUs"


def problems(root: Path) -> list[str]:
    """All of them, as lines to print."""
    checks = (bad_includes, bad_devices, bad_types, bad_imports, bad_gpus)
    return [*bad_rows(), *(line for check in checks for line in check(root))]


def main() -> int:
    """Prints every problem; returns the exit status."""
    found = problems(ROOT)
    print("\n".join(found) if found else f"layers: {len(ROOMS)} folders, no circle")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
