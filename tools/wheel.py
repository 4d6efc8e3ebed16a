"""Builds the wheels `gradd`, `gradd-train` and `optimum-gradd` into dist/.

    tools/wheel.py build/wheel .venv [--plugin build/lib/libgradd_cuda.so]

The first folder has native/bin/gradd, native/lib/libgradd.so and train/libgradd_train.so
(mk/wheel.mk links them); the libraries that these need, and that not every machine has, are added
beside them. The tag of a wheel is that of the newest symbol version of glibc that a file in it
needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Libraries of every machine that manylinux wheels run on (PEP 600), and the GPU's own.
SYSTEM = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|ld-linux[^.]*"
    r"|linux-vdso|libcublasLt)\.so"
)
# Where the licences of bundled libraries are: below the packages of Python, or of the system.
LICENCES = {
    "libzmq": ("pyzmq-*.dist-info/licenses/licenses/LICENSE.zeromq.txt",),
    "libsodium": ("pyzmq-*.dist-info/licenses/licenses/LICENSE.libsodium.txt",),
    "libdnnl": (
        "onednn_cpu_gomp-*.dist-info/LICENSE.txt",
        "../../../share/doc/onednn/LICENSE",
        "../../../share/doc/onednn/THIRD-PARTY-PROGRAMS",
    ),
    "libgomp": ("/usr/share/doc/libgomp1/copyright",),
}
LINKED = {  # statically
    "libprotobuf-c": ("/usr/share/doc/libprotobuf-c-dev/copyright",),
    "libmsgpackc": (
        "/usr/share/doc/libmsgpack-dev/copyright",
        "/usr/share/doc/libmsgpack-c-dev/copyright",
    ),
}


def stem(library: str) -> str:
    """The name of a library without version: "libzmq" of "libzmq-2f02442c.so.5.2.5"."""
    name = library.split(".so")[0]
    return name.split("-")[0] if name.startswith(("libzmq", "libsodium")) else name


def needed(binary: Path, site: Path) -> Iterator[tuple[str, str]]:
    """Names and paths of the libraries that a binary loads ("not found" for a missing one)."""
    folders = f"{site / 'pyzmq.libs'}:{site.parents[1]}"
    environ = os.environ | {"LD_LIBRARY_PATH": folders}
    text = subprocess.run(
        ["ldd", binary], check=True, capture_output=True, text=True, env=environ
    ).stdout
    for name, path in re.findall(r"(\S+) => (not found|\S+)", text):
        if not SYSTEM.match(name):
            yield name, path


def bundle(folder: Path, site: Path) -> list[str]:
    """Copies libraries into `folder`/lib; their names."""
    lib = folder / "lib"
    for old in set(lib.iterdir()) - {lib / "libgradd.so"}:
        old.unlink()
    found = {}
    for binary in (folder / "bin" / "gradd", lib / "libgradd.so"):
        found.update(needed(binary, site))
    for name, path in found.items():
        if path == "not found":
            raise SystemExit(f"wheel: the daemon needs {name}, which is not found")
        shutil.copy(path, lib / name)
    return sorted(found)


def licences(
    names: Iterable[str], site: Path, folder: Path, linked: Iterable[str] = tuple(LINKED)
) -> None:
    """Copies the licences of libraries into `folder`, one or more files for each."""
    tables = LICENCES | LINKED
    for name in sorted({*map(stem, names), *linked}):
        files = [file for pattern in tables[name] for file in _matching(site, pattern)]
        if not files:
            raise SystemExit(f"wheel: no licence of {name} in {', '.join(tables[name])}")
        for number, file in enumerate(files):  # some have one name
            shutil.copy(file, folder / f"{name}-{number}-{file.name.removesuffix('.txt')}.txt")


def _matching(site: Path, pattern: str) -> list[Path]:
    if pattern.startswith("/"):
        return [p for p in [Path(pattern)] if p.exists()]
    return sorted(site.glob(pattern))


def tag(files: Iterable[Path]) -> str:
    """The platform of a wheel with these binaries."""
    newest = (2, 17)
    for file in files:
        command = ["readelf", "--version-info", "--wide", file]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.findall(r"GLIBC_(\d+)\.(\d+)", text)
        newest = max([newest, *((int(a), int(b)) for a, b in found)])
    return f"manylinux_{newest[0]}_{newest[1]}_{os.uname().machine}"


def build(project: Path, out: Path, platform: str = "any") -> None:
    """Runs the project's build back end, which is in this environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", out, project]
    subprocess.run(command, check=True, env=os.environ | {"GRADD_WHEEL_PLATFORM": platform})


def staged(name: str, folder: Path) -> Path:
    """A copy of adapters/`name`, without what Python has left there."""
    to = folder / name
    shutil.rmtree(to, ignore_errors=True)
    unwanted = shutil.ignore_patterns("__pycache__", "*.dist-info", "_native")
    shutil.copytree(ROOT / "adapters" / name, to, ignore=unwanted)
    shutil.copy(ROOT / "LICENSE", to)
    return to


# What gradd-train has of adapters/python.
OF_TRAIN = ("gradd/train", "gradd_aliases", "gradd_aliases.pth")


def staged_train(folder: Path, native: Path, site: Path) -> tuple[Path, list[Path]]:
    """The project gradd-train with its library, which is in `native`, and its binaries."""
    source, project = staged("python", folder), staged("train", folder)
    for name in OF_TRAIN:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source / name, project / name)
    shutil.copy(source / "hatch_build.py", project)
    inside = project / "gradd" / "train" / "_native"
    inside.mkdir()
    library = Path(shutil.copy(native / "libgradd_train.so", inside))
    (project / "licences").mkdir()
    names = []
    for name, path in needed(library, site):
        shutil.copy(path, inside)
        names.append(name)
    licences(names, site, project / "licences", linked=())
    return project, sorted(inside.iterdir())


def _wheels(folder: Path) -> list[Path]:
    return sorted({*folder.glob("gradd*.whl"), *folder.glob("optimum_gradd*.whl")})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--plugin", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    site = next(options.venv.glob("lib/python*/site-packages"))
    native = options.folder / "native"
    names = bundle(native, site)
    if options.plugin:
        shutil.copy(options.plugin, native / "lib")
    project = staged("python", options.folder)
    inside = project / "gradd" / "_native"
    shutil.copytree(native, inside)
    binaries = [inside / "bin" / "gradd", *sorted((inside / "lib").iterdir())]
    subprocess.run(["strip", "--strip-debug", *binaries], check=True)
    (project / "licences").mkdir()
    licences(names, site, project / "licences")
    for old in _wheels(options.out):
        old.unlink()
    build(project, options.out, tag(binaries))
    train, of_train = staged_train(options.folder / "of-train", options.folder / "train", site)
    build(train, options.out, tag(of_train))
    build(staged("optimum", options.folder), options.out)
    for wheel in _wheels(options.out):
        print(f"{wheel}  {wheel.stat().st_size / 2**20:.1f} MiB")
    if not options.plugin:
        print("without the CUDA plug-in, which was not built (make cuda)")


if __name__ == "__main__":
    main()
