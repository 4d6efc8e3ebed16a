"""tests/check_layers.py and check_operands.py: their findings in a small tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import check_layers
import check_operands

ENGINE = ("graph", "plan", "device", "exec")
ABOVE = ("cli", "daemon", "explain", "verbs", "wire", "session", "host")


def tree(root: Path, files: dict[str, str]) -> Path:
    """A tree of these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("shm/a.c", '"kernels/contract/adam.h"'),
        ("shm/a.c", "<zmq.h>"),
        ("kernels/cpu/a.c", '"server/api/gradd.h"'),
        ("kernels/cuda/a.cu", '"kernels/cpu/map.h"'),
        ("kernels/cpu/a.c", '"kernels/ops/norm/norm.h"'),
        ("kernels/contract/a.h", '"kernels/describe/gemm.h"'),
        ("kernels/math/a.h", '"kernels/rules/infer.h"'),
        *[(f"server/{e}/a.c", f'"server/{o}/a.h"') for e in ENGINE for o in ABOVE],
        ("server/graph/passes/a.c", '"server/verbs/worker.h"'),
        ("server/plan/a.c", '"server/exec/run.h"'),
        ("server/wire/a.h", '"server/verbs/commands.h"'),
        ("server/wire/a.c", '"server/session/session.h"'),
        ("server/wire/a.c", '"server/api/gradd.h"'),
        ("server/verbs/a.c", '"server/daemon/daemon.h"'),
        ("server/explain/a.c", '"server/cli/admin.h"'),
        ("server/daemon/a.c", '"server/cli/admin.h"'),
        *[(f"server/{name}/a.c", "<zmq.h>") for name in ("graph", "exec", "explain")],
        ("server/explain/a.c", "<msgpack.h>"),
        ("server/verbs/a.c", '"kernels/cpu/adamw.h"'),
        ("server/exec/a.c", "<dnnl.h>"),
        ("server/exec/a.c", '"../plan/plan.h"'),
        ("server/exec/a.c", '"tests/test.h"'),
    ],
)
def test_an_include_upwards_is_found(tmp_path: Path, file: str, include: str) -> None:
    text = f"#include <stdio.h>\n#include {include}\n"
    (line,) = check_layers.problems(tree(tmp_path, {file: text}))
    assert line.startswith(f"{file}:2: #include {include}: ")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("server/plan/a.c", '"server/graph/graph.h"'),
        ("server/verbs/a.c", '"server/wire/wire.h"'),
        ("server/wire/wire.h", "<msgpack.h>"),
        ("server/daemon/a.c", '"server/verbs/commands.h"'),
        ("server/exec/a.c", '"kernels/contract/adam.h"'),
        ("kernels/ops/norm/a.c", '"kernels/cpu/map.h"'),
        ("kernels/contract/a.c", '"op_list.inc"'),
    ],
)
def test_an_include_downwards_is_fine(tmp_path: Path, file: str, include: str) -> None:
    assert check_layers.problems(tree(tmp_path, {file: f"#include {include}\n"})) == []


@pytest.mark.quick
def test_a_circle_of_folders_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = {**check_layers.ROOMS, "server/wire": "shm server/verbs"}
    monkeypatch.setattr(check_layers, "ROOMS", rooms)
    assert list(check_layers.bad_rows()) == [
        "ROOMS: server/wire names server/verbs, which is not above it"
    ]


@pytest.mark.quick
def test_a_folder_that_is_not_listed_is_found(tmp_path: Path) -> None:
    assert check_layers.problems(tree(tmp_path, {"server/new/a.c": ""})) == [
        "server/new/a.c: its folder is not a row of ROOMS"
    ]


@pytest.mark.quick
def test_a_type_that_is_defined_twice_is_found(tmp_path: Path) -> None:
    header = "typedef struct span_s {\n    int n;\n} span_t;\n"
    files = {"shm/a.h": header, "kernels/math/b.h": "typedef int span_t;\n"}
    assert check_layers.problems(tree(tmp_path, files)) == [
        "type span_t is defined 2 times: kernels/math/b.h, shm/a.h"
    ]


@pytest.mark.quick
def test_private_types_may_share_a_name_once(tmp_path: Path) -> None:
    line = "typedef enum job_e { ONE } job_t;\n"
    assert not check_layers.problems(tree(tmp_path, {"shm/a.c": line, "shm/b.c": line}))
    (problem,) = check_layers.problems(tree(tmp_path, {"tests/c.c": line}))
    assert problem.startswith("type job_t is defined 3 times")


@pytest.mark.quick
def test_the_server_names_no_device(tmp_path: Path) -> None:
    table = "const gradd_backend_t gradd_backend_cpu;\n"
    files = {"kernels/cpu/backend.c": table, "server/exec/a.c": "x = &gradd_backend_cpu;\n"}
    assert check_layers.problems(tree(tmp_path, files)) == [
        "server/exec/a.c: names a device's table, gradd_backend_cpu"
    ]


@pytest.mark.quick
def test_the_client_does_not_know_the_trainers(tmp_path: Path) -> None:
    files = {"adapters/python/a.py": "from optimum.gradd import demo\n"}
    assert check_layers.problems(tree(tmp_path, files)) == [
        "adapters/python/a.py: imports optimum.gradd, which is above it"
    ]


@pytest.mark.quick
def test_memory_alone_knows_gpus(tmp_path: Path) -> None:
    line = "x = torch.cuda.current_stream()\n"
    files = {f"adapters/python/gradd/{name}.py": line for name in ("memory/a", "calls/b")}
    assert check_layers.problems(tree(tmp_path, files)) == [
        "adapters/python/gradd/calls/b.py: names torch.cuda: "
        "only adapters/python/gradd/memory knows kinds of GPUs"
    ]


HEADER = "enum { GRADD_ROPE_X, GRADD_ROPE_COS, GRADD_ROPE_SIN };\n"
KERNEL = "kernels/ops/attention/rope.c"


def family(root: Path, kernel: str) -> list[str]:
    """The problems of a tree of one family's header and kernel."""
    tree(root, {"kernels/describe/rope.h": HEADER, KERNEL: kernel})
    return check_operands.problems(root)


@pytest.mark.quick
def test_an_operand_by_its_number_is_found(tmp_path: Path) -> None:
    lines = "x = r->in[GRADD_ROPE_X];\ny = r->out[0].data;\ncos = r->in[1];\n"
    assert family(tmp_path, lines) == [
        f"{KERNEL}:3: ->in[1]: name the operand as kernels/describe/rope.h does"
    ]


@pytest.mark.quick
def test_a_second_list_of_operands_is_found(tmp_path: Path) -> None:
    assert family(tmp_path, "enum { FIRST, COS, SIN };\n") == [
        f"{KERNEL}: lists COS, SIN of rope.h again"
    ]
    assert family(tmp_path, "enum { AT_COS = 1, AT_SIN = 2 };\n")
    assert family(tmp_path, "enum { COS = 1, TAN };\n") == []
