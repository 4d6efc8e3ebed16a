"""The symbols that a plug-in needs (tools/gpu/symbols.py), and GPU kernels before nvcc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools/gpu"))
import symbols

DAEMON = BINARY.with_name("gradd")
pytestmark = pytest.mark.quick


def _shared(folder: Path, name: str, source: str, *more: str) -> Path:
    """An object of that source, linked as it is with libm and what follows."""
    text, target = folder / f"{name}.c", folder / name
    text.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-fvisibility=hidden", str(text), "-o", str(target)]
    subprocess.run([*command, "-Wl,--no-as-needed", "-lm", *more], check=True)
    return target


OUTSIDE = '__attribute__((visibility("default")))'
GOOD = f"""
#include <math.h>
extern const char *gradd_error_message(void);
{OUTSIDE} int gradd_plugin(double x) {{
    return *gradd_error_message() + (int)fmod(x, 3);
}}
"""


def _faults(folder: Path, source: str, *more: str) -> list[str]:
    return symbols.faults(_shared(folder, "plugin.so", source, *more), DAEMON)


def test_what_the_daemon_and_the_runtime_have_may_be_taken(tmp_path: Path) -> None:
    assert _faults(tmp_path, GOOD) == []


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    source = GOOD.replace("gradd_error_message", "gradd_no_such_thing")
    (fault,) = _faults(tmp_path, source)
    assert fault == "the plug-in wants gradd_no_such_thing, which the daemon does not export"
    (fault,) = _faults(tmp_path, GOOD.replace("gradd_error_message", "cuMemCreate"))
    assert fault == "the plug-in wants cuMemCreate, which the daemon does not export"


def test_other_libraries_and_exports_are_named(tmp_path: Path) -> None:
    driver = _shared(tmp_path, "libcuda.so.1", "int cuInit(void) { return 0; }")
    assert _faults(tmp_path, GOOD, str(driver)) == [f"the plug-in needs {driver}"]
    source = f"{GOOD} {OUTSIDE} int other;"
    assert _faults(tmp_path, source) == ["the plug-in exports other"]
    source = GOOD.replace("int gradd_plugin", "int plugin")
    assert _faults(tmp_path, source) == [
        "the plug-in exports plugin",
        "the plug-in does not export gradd_plugin",
    ]


def test_a_daemon_that_knows_cuda_is_named(tmp_path: Path) -> None:
    plugin = _shared(tmp_path, "plugin.so", f"{OUTSIDE} int gradd_plugin;")
    daemon = _shared(
        tmp_path, "daemon", "extern int cudaFree(void *); int (*f)(void *) = cudaFree;"
    )
    assert symbols.faults(plugin, daemon) == ["the daemon has cudaFree"]


def test_the_daemon_knows_no_cuda(tmp_path: Path) -> None:
    plugin = _shared(tmp_path, "plugin.so", f"{OUTSIDE} int gradd_plugin;")
    assert symbols.faults(plugin, DAEMON) == []


def test_kernels_of_gpus_take_what_the_daemon_exports() -> None:
    objects = sorted((BINARY.parents[1] / "emu/kernels/cuda").rglob("*.o"))
    if not objects:
        pytest.skip("no kernels of GPUs were built for the emulation: make build/bin/tests")
    wanted = symbols.missing(*objects, dynamic=False)
    wanted = {name for name in wanted if name.startswith("gradd_")}
    assert len(wanted) > 10
    there = symbols.exported(DAEMON) | symbols.defined(*objects)
    assert sorted(wanted - there) == []
