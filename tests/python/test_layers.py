"""tests/check_layers.sh on a small tree: what it allows, and what it finds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "check_layers.sh"


def check(root: Path, file: str, line: str) -> subprocess.CompletedProcess:
    """The script's word on a tree of this one file."""
    for path in ("tests/check_layers.sh", file):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPT, root / "tests" / "check_layers.sh")
    (root / file).write_text(f"#include <stdio.h>\n{line}\n")
    command = ["sh", str(root / "tests" / "check_layers.sh")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("shm/a.c", '"kernels/describe/adam.h"'),
        ("kernels/a.c", '"server/api/gradd.h"'),
        *[
            (f"server/{engine}/a.c", f'"server/{other}/a.h"')
            for engine in ("graph", "plan", "exec", "api")
            for other in ("cli", "daemon", "explain", "verbs", "wire")
        ],
        ("server/graph/passes/a.c", '"server/verbs/worker.h"'),
        ("server/wire/a.h", '"server/verbs/commands.h"'),
        ("server/wire/a.c", '"server/daemon/session.h"'),
        ("server/wire/a.c", '"server/api/gradd.h"'),
        *[(f"server/{name}/a.c", "<zmq.h>") for name in ("graph", "exec", "explain")],
        ("server/explain/a.c", "<msgpack.h>"),
        ("server/verbs/a.c", '"kernels/cpu/adamw.h"'),
    ],
)
def test_an_include_upwards_is_found(tmp_path: Path, file: str, include: str) -> None:
    done = check(tmp_path, file, f"#include {include}")
    assert done.returncode == 1 and f"{file}:2:#include {include}" in done.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("server/plan/a.c", '"server/graph/graph.h"'),
        ("server/verbs/a.c", '"server/wire/wire.h"'),
        ("server/wire/wire.h", "<msgpack.h>"),
        ("server/daemon/a.c", '"server/verbs/commands.h"'),
        ("server/exec/a.c", '"kernels/describe/adam.h"'),
    ],
)
def test_an_include_downwards_is_fine(tmp_path: Path, file: str, include: str) -> None:
    done = check(tmp_path, file, f"#include {include}")
    assert (done.returncode, done.stdout) == (0, "")
