"""gradd explain: of files, of plans in the daemon, and from Python; the three say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import BINARY, PYTHONPATH
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gradd import ORTModule, errors
from gradd.explain import Explanation, Row, explain_plan, with_sources
from gradd.session import protocol
from helpers import ROOT
from helpers.graphs import captures
from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer
from helpers.models import families
from helpers.nets import Net, batch
from helpers.sessions import session

pytestmark = pytest.mark.one_in(8)

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def command(*args: Any, code: int = 0, **env: str) -> str:
    """Output of `gradd ...`; its errors when another exit code is expected."""
    done = subprocess.run(
        [str(BINARY), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def explained(*args: Any) -> dict[str, Any]:
    return json.loads(command("explain", *args, "--json"))


def value(name: str, dims: list[int | str], kind: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def write(path: Path, nodes: list, inputs: list, outputs: list, constants: Any = ()) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """loss = mean(relu(x W) V), where an unused branch, a view and shape arithmetic hang on."""
    node = helper.make_node
    return write(
        tmp_path / "layer.onnx",
        [
            node("MatMul", ["x", "w"], ["a"], name="first"),
            node("Relu", ["a"], ["b"], name="act"),
            node("Shape", ["x"], ["s"], name="shape"),
            node("Reshape", ["b", "flat"], ["r"], name="view"),
            node("MatMul", ["r", "v"], ["c"], name="second"),
            node("MatMul", ["r", "v"], ["c2"], name="again"),
            node("Add", ["c", "c2"], ["d"], name="sum"),
            node("ReduceMean", ["d"], ["loss"], name="mean", keepdims=0),
            node("Tanh", ["c"], ["other"], name="side"),
            node("Cast", ["s"], ["shape_out"], name="cast", to=F),
        ],
        [value("x", ["batch", "seq", 6]), value("w", [6, 8]), value("v", [8, 3])],
        [value("loss", []), value("other", ["n", 3]), value("shape_out", [3])],
        [numpy_helper.from_array(np.array([-1, 8], np.int64), "flat")],
    )


# ---- files ----


@pytest.mark.quick
def test_rows_of_a_file(layer: Path) -> None:
    e = explained(layer, "x=2x5x6", "--train", "all")
    rows = {(r["phase"], r["node_name"], r["op"]): r for r in e["rows"]}
    first = rows["forward", "first", "MatMul"]
    assert first["flops"] == 2 * 10 * 6 * 8
    assert first["bytes_read"] == 4 * (2 * 5 * 6 + 6 * 8) and first["bytes_written"] == 4 * 80
    assert (first["dtype"], first["shape"]) == ("f32", [2, 5, 8])
    assert first["kernel"] == ("oneDNN f32" if e["library"].startswith("oneDNN") else "blocked f32")
    view = rows["forward", "view", "Reshape"]
    assert view["launch"] == -1 and view["kind"] == "view" and view["bytes_read"] == 0
    launches = [r["launch"] for r in e["rows"] if r["phase"] == "forward" and r["launch"] >= 0]
    assert launches == list(range(len(launches)))
    phases = [r["phase"] for r in e["rows"]]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    back = [r for r in e["rows"] if r["phase"] == "backward" and r["node_name"] == "first"]
    assert sum(r["flops"] for r in back) == 2 * 10 * 6 * 8  # x needs no gradient
    assert not {r["op"] for r in e["rows"]} & {"Tanh", "Shape", "Cast"}


@pytest.mark.quick
def test_what_became_of_every_node(layer: Path) -> None:
    everything = explained(layer, "x=2x5x6")["nodes"]
    assert everything["folded"] == {"Shape": 1, "Cast": 1}
    assert everything["merged"] == {"MatMul": 1} and everything["view"] == {"Reshape": 1}
    loss = explained(layer, "x=2x5x6", "--train", "all")["nodes"]
    assert loss["unused"] == {"Tanh": 1}
    for fates in (everything, loss):
        assert sum(sum(ops.values()) for ops in fates.values()) == 10


@pytest.mark.quick
def test_totals_are_those_of_the_plan(layer: Path) -> None:
    e = explained(layer, "x=2x5x6", "--train", "w,v", "--out", "loss")
    feed = {
        "x": np.zeros((2, 5, 6), np.float32),
        "w": np.zeros((6, 8), np.float32),
        "v": np.zeros((8, 3), np.float32),
    }
    model = E.Model(layer.read_bytes())
    info = E.Plan(model, feed, ["w", "v"], ["loss"], ["loss"], threads=e["threads"]).info
    assert e["arena_bytes"] == info.arena_bytes > 0
    assert e["saved_bytes"] == info.saved_bytes == sum(r["saved_bytes"] for r in e["rows"]) > 0
    for phase, count in (
        ("forward", info.n_launches_forward),
        ("backward", info.n_launches_backward),
    ):
        assert sum(r["launch"] >= 0 for r in e["rows"] if r["phase"] == phase) == count
    assert e["grad_bytes"] == 4 * (48 + 24) and e["output_bytes"] == 4
    assert e["input_bytes"] == 4 * (60 + 48 + 24)


def test_a_recognised_operator_says_what_it_stands_for(tmp_path: Path) -> None:
    w = Writer()
    square = w("Pow", "x", w.constant(2))
    mean = w("ReduceMean", square, w.constant([-1], np.int64), keepdims=1)
    inverse = w("Reciprocal", w("Sqrt", w("Add", mean, w.constant(1e-6))))
    y = w("Mul", "g", w("Mul", "x", inverse))
    inputs = [value("x", ["n", 16]), value("g", [16])]
    path = write(tmp_path / "norm.onnx", w.nodes, inputs, [value(y, ["n", 16])], w.constants)
    e = explained(path, "x=4x16")
    (row,) = [r for r in e["rows"] if r["launch"] >= 0]
    assert row["op"] == "RMSNormalization"
    assert row["fused"] == "Pow ReduceMean Add Sqrt Reciprocal Mul×2"
    assert e["nodes"] == {"fused": dict(Counter(n.op_type for n in w.nodes))}
    plain = explained(path, "x=4x16", "--plain")
    assert "fused" not in plain["nodes"]
    switched = command("explain", path, "x=4x16", "--json", GRADD_FUSE="Off")
    assert json.loads(switched)["rows"] == plain["rows"]
    assert {r["op"] for r in plain["rows"] if r["leftover"]} == {
        *("Pow", "ReduceMean", "Sqrt", "Reciprocal")
    }
    assert "not recognised: nothing" in command("explain", path, "x=4x16")
    assert "Pow×1: n" not in command("explain", path, "x=4x16")
    assert "Sqrt×1" in command("explain", path, "x=4x16", "--plain")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "1 input is without a size; give a number for each letter of: x=batchxseqx6"),
        (["--dim", "batch=2"], "x=batchxseqx6"),
        (["y=2x2"], "no input 'y'; those without a fixed size: x=batchxseqx6"),
        (["x=2x5x7"], "declares dimension 2 as 6, got f32[2,5,7]"),
        (["x=2x5"], "declares rank 3"),
        (["x=2x5x6", "--dim", "seq=4"], "dimension 'seq' is 4 for '--dim' and 5 for 'x'"),
        (["x=2x5x6", "--dim", "foo=4"], "no input has a dimension 'foo'|with a name: batch seq"),
        (["x=2x5x6", "--train", "u"], "no input 'u'; it has: x w v"),
        (["x=2x5x6", "--train", "w,w"], "input 'w' is named twice"),
        (["x=2x5x6", "--out", "lost"], "no output 'lost'; it has: loss other shape_out"),
        (["x=2x5x6", "--train", "w", "--grad", "y"], "no output 'y'; it has: loss other shape_out"),
        (["x=2x5x6", "--train", "w", "--out", "other", "--grad", "loss"], "not among those"),
    ],
)
def test_errors_say_what_is_needed(layer: Path, args: list[str], said: str) -> None:
    text = command("explain", layer, *args, code=1)
    assert all(part in text for part in said.split("|"))


@pytest.mark.quick
@pytest.mark.parametrize(
    "args",
    [
        ["m.onnx", "x=2xx3"],
        ["m.onnx", "x=2x"],
        ["m.onnx", "x=-1"],
        ["m.onnx", "x=1x2x3x4x5x6x7x8x9"],
        ["m.onnx", "=3"],
        ["m.onnx", "--train"],
        ["m.onnx", "--wrong"],
        ["m.onnx", "--dim", "batch"],
        ["m.onnx", "--dim", "batch=2x3"],
        ["m.onnx", "--threads", "two"],
        ["m.onnx", "x=99999999999999999999"],
    ],
)
def test_wrong_arguments_are_usage_errors(args: list[str]) -> None:
    assert "usage: gradd explain" in command("explain", *args, code=2)


_LIVE, _FILE = "gradd explain without a file", "gradd explain MODEL.onnx"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("args", "said"),
    [
        *[
            (["explain", *option], f"is for {which}, it has no effect on {_LIVE}")
            for option, which in (
                (["--plain"], _FILE),
                (["--train", "all"], f"{_FILE} and gradd estimate"),
                (["--threads", "2"], f"{_FILE} and gradd estimate"),
                (["--dim", "n=2"], f"{_FILE} and gradd estimate"),
                (["--grad", "y"], f"{_FILE} and gradd estimate"),
                (["--batch", "1"], "gradd estimate"),
            )
        ],
        *[
            (["explain", "m.onnx", *option], f"is for {which}, it has no effect on {_FILE}")
            for option, which in (
                (["--plan", "1"], _LIVE),
                (["--session", "1"], _LIVE),
                (["--list"], _LIVE),
                (["--batch", "1"], "gradd estimate"),
                (["--fits", "1"], "gradd estimate"),
            )
        ],
        *[
            (["estimate", "m.onnx", *option], f"is for {which}, it has no effect on gradd estimate")
            for option, which in (
                (["--onnx", "x.onnx"], _FILE),
                (["--gradient", "x.onnx"], _FILE),
                (["--plain"], _FILE),
                (["--list"], _LIVE),
                (["--session", "1"], _LIVE),
                (["--plan", "0"], _LIVE),
            )
        ],
        (["explain", "x=2"], "sizes are for a model file"),
        (["explain", "m.onnx", "--grad", "y"], "--grad needs --train"),
        (["explain", "m.onnx", "--gradient", "y.onnx"], "--gradient needs --train"),
    ],
)
def test_options_without_an_effect_are_refused(args: list[str], said: str) -> None:
    text = command(*args, code=2)
    assert said in text and text.count("\n") == 1


@pytest.mark.quick
def test_numbers_of_arguments(layer: Path) -> None:
    for sizes in ("0", "1,0", "x"):
        assert "--batch: expected a number from 1" in command("estimate", "--batch", sizes, code=2)
    for threads in ("1025", "many"):
        said = command("explain", layer, "x=2x5x6", "--threads", threads, code=2)
        assert f"--threads: expected a number from 0 to 1024, got '{threads}'" in said
    assert "usage:" in command("explain", "--help", GRADD_THREADS="abc")


@pytest.mark.quick
def test_nothing_is_printed_where_a_file_cannot_be_written(layer: Path, tmp_path: Path) -> None:
    args = ["explain", layer, "x=2x5x6", "--onnx", tmp_path / "none" / "x.onnx"]
    done = subprocess.run([str(BINARY), *args], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "") and "No such file" in done.stderr


@pytest.mark.quick
def test_files_that_are_none(tmp_path: Path) -> None:
    assert "No such file" in command("explain", tmp_path / "none.onnx", code=1)
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x0a\xff\xff\xff")
    assert "MODEL" in command("explain", tmp_path / "bad.onnx", code=1)
    assert "explain" in command("help") and "--train" in command("explain", "--help")


@pytest.mark.quick
def test_symbols_reach_other_inputs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "two.onnx",
        [helper.make_node("Add", ["x", "y"], ["z"])],
        [value("x", ["n", 4]), value("y", ["n", 4])],
        [value("z", ["n", 4])],
    )
    for args in (["x=3x4"], ["y=3x4"], ["--dim", "n=3"]):
        (row,) = explained(path, *args)["rows"]
        assert row["shape"] == [3, 4]
    assert "dimension 'n' is 3 for 'x' and 2 for 'y'" in command(
        "explain", path, "x=3x4", "y=2x4", code=1
    )


def test_gradient_of_a_file(layer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    asked = ("explain", layer, "x=2x5x6", "--gradient", out)
    side = (*asked, "--train", "x", "--out", "other")
    assert "arrives at one element of floats alone; --grad says" in command(*side, code=1)
    assert not out.exists()
    command(*asked, "--train", "all", "--out", "loss")
    made = onnx.load(out)
    onnx.checker.check_model(made, full_check=True)
    assert {node.domain for node in made.graph.node} == {""}
    trained = [i.name for i in made.graph.input if i.name != "x"]
    assert [o.name for o in made.graph.output] == ["loss", *(f"{n}_grad" for n in trained)]


def test_annotated_model(layer: Path, tmp_path: Path) -> None:
    model = onnx.load(layer)
    model.graph.node[0].metadata_props.add(key="mine", value="stays")
    model.graph.node[0].doc_string = "old"
    layer.write_bytes(with_sources(model.SerializeToString(), (("act", "net.act @ /a/net.py:7"),)))
    out = tmp_path / "out.onnx"
    e = json.loads(command("explain", layer, "x=2x5x6", "--train", "all", "--json", "--onnx", out))
    marked = onnx.load(out)
    onnx.checker.check_model(marked)
    notes = {n.name: {p.key: p.value for p in n.metadata_props} for n in marked.graph.node}
    assert all("gradd.fate" in n for n in notes.values()) and len(notes) == 10
    assert notes["first"]["mine"] == "stays"
    assert notes["act"]["gradd.source"] == "net.act @ /a/net.py:7"
    row = e["rows"][int(notes["first"]["gradd.row"])]
    assert row["node_name"] == "first" and notes["first"]["gradd.flops"] == str(row["flops"])
    assert notes["side"] == {"gradd.fate": "unused"}
    assert marked.graph.node[0].doc_string.startswith("gradd: run, row 0: MatMul")
    bare = onnx.load(out)
    for n in bare.graph.node:
        n.ClearField("doc_string")
        n.ClearField("metadata_props")
    for n in model.graph.node:
        n.ClearField("doc_string")
        n.ClearField("metadata_props")
    assert bare == model
    again = explained(out, "x=2x5x6", "--train", "all")
    assert [r["op"] for r in again["rows"]] == [r["op"] for r in e["rows"]]
    assert "net.act (net.py:7)" in command("explain", out, "x=2x5x6")


def test_nothing_is_lost_between_text_and_json(layer: Path) -> None:
    text = command("explain", layer, "x=2x5x6", "--train", "all")
    e = explained(layer, "x=2x5x6", "--train", "all")
    lines = text.splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith("forward:"))
    shown = [x.split()[1] for x in lines[start:] if x[:6].strip().isdigit() or x[:6] == "     -"]
    assert shown[: len(e["rows"])] == [r["op"] for r in e["rows"]]


# ---- plans of the daemon and Python ----


def test_model_and_command_line_agree(
    daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_LIVE_ROWS", "0")
    model, make = families.build("llama")
    wrapped = ORTModule(model, strict=True)
    wrapped(**make(2, 8, 0)).loss.backward()
    e = wrapped.gradd_explain()
    running = json.loads(command("explain", "--json", GRADD_DIR=str(daemon.directory)))
    mine = e.as_dict()
    assert running["rows"] == mine["rows"] and len(e.rows) > 50
    pairs = 2 * 4 * 8 * 8  # rows, heads, queries, keys; heads are 16 wide
    work = {r.op: r.flops for r in e.rows if r.op.startswith("FusedAttention")}
    assert work == {"FusedAttention": pairs * 2 * 32, "FusedAttentionGrad": pairs * 2 * 80}
    for name in ("arena_bytes", "saved_bytes", "constant_bytes", "grad_bytes", "nodes"):
        assert running[name] == mine[name]
    text = command("explain", GRADD_DIR=str(daemon.directory))
    assert not [line for line in text.splitlines() if line.endswith(" ")]
    assert f"{e}\n" == "LlamaForCausalLM\n" + text.partition(f"{running['title']}\n")[2]
    assert mine == {**running, "title": "LlamaForCausalLM"}
    assert json.loads(e.to_json()) == json.loads(json.dumps(mine))
    path = tmp_path / "marked.onnx"
    e.save_onnx(path)
    sizes = [f"{n}={x.shape[0]}x{x.shape[1]}" for n, x in make(2, 8, 0).items()]
    trained = ",".join(n for n, p in model.named_parameters())
    file = explained(path, *sizes, "--train", trained, "--out", "loss")
    assert file["rows"] == mine["rows"]
    pinned = {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}  # a trainer's, not the plan's
    large = [f"{n}=16x128" for n in make(2, 8, 0)]  # worth all threads
    assert file["threads"] == 1
    plain, inherited = (
        json.loads(command("explain", path, *large, "--json", **env)) for env in ({}, pinned)
    )
    assert plain["rows"] == inherited["rows"] and plain["threads"] == inherited["threads"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_says_what_it_multiplies(daemon: Any, dtype: torch.dtype) -> None:
    model, make = families.build("llama")
    wrapped = ORTModule(model.to(dtype), strict=True)
    wrapped(**make(2, 8, 0)).loss.backward()
    rows = wrapped.gradd_explain().rows
    (tiles,) = {r.kernel for r in rows if r.op.startswith("FusedAttention")}
    known = {torch.float32: {"tiles f32"}, torch.bfloat16: {"tiles bf16", "tiles f32 of bf16"}}
    assert tiles in known[dtype]


def test_sources_name_module_and_line(daemon: Any) -> None:
    wrapped = ORTModule(Net(), strict=True)
    wrapped(*batch())[0].backward()
    e = wrapped.gradd_explain()
    places = {r.place for r in e.rows if r.phase == "forward"}
    assert any(p.startswith("first (nets.py:") for p in places), places
    assert any(p.startswith("second (nets.py:") for p in places)
    assert all(r.source for r in e.rows if r.node >= 0)
    assert any(r.place.startswith("gradient of first (") for r in e.rows)


def test_planned_and_not_run(daemon: Any) -> None:
    wrapped = ORTModule(Net(), strict=True)
    with pytest.raises(ValueError, match="no call has run"):
        wrapped.gradd_explain()
    e = wrapped.gradd_explain(*batch(6))
    assert {r.phase for r in e.rows} == {"forward", "backward"}
    assert daemon.ps()["counters"]["forward"] == 0 and wrapped.gradd_stats()["forwards"] == 0
    assert wrapped.gradd_explain(*batch(12)).flops == pytest.approx(2 * e.flops, rel=0.2)
    with torch.no_grad():
        assert {r.phase for r in wrapped.gradd_explain(*batch(6)).rows} == {"forward"}
    wrapped(*batch(6))[0].backward()
    assert [r.op for r in wrapped.gradd_explain().rows] == [r.op for r in e.rows]


def test_plans_of_all_sessions_are_listed(daemon: Any) -> None:
    here = {"GRADD_DIR": str(daemon.directory)}
    assert "no plan lives" in command("explain", **here)
    assert json.loads(command("explain", "--json", **here)) == {"plans": []}
    wrapped = ORTModule(Net(), strict=True)
    wrapped(*batch(6))[0].backward()
    wrapped(*batch(9))[0].backward()
    plans = json.loads(command("explain", "--list", "--json", **here))["plans"]
    assert {p["pid"] for p in plans} == {os.getpid()}
    assert sum("f32[9,8]" in p["inputs"] and p["backward"] > 0 for p in plans) == 1
    other = subprocess.run(
        [sys.executable, "-c", _OTHER], env={**os.environ, "PYTHONPATH": PYTHONPATH}, timeout=60
    )
    assert other.returncode == 0
    text = command("explain", **here)
    listed, table = text.split("\n\n", 1)
    assert "f32[9,8]" in listed and "f32[9,4]" in table  # of the plan that ran last
    chosen = next(p for p in plans if "f32[6,8]" in p["inputs"] and p["backward"])
    one = command("explain", "--session", chosen["session"], "--plan", chosen["plan"], **here)
    assert f"session {chosen['session']}, plan {chosen['plan']}" in one
    assert "f32[6,4]" in one
    said = command("explain", "--plan", 10**6, code=1, **here)
    assert said.startswith("gradd explain: STALE: the daemon has no plan 1000000 (any more): ")
    assert "`gradd explain --list`" in said
    assert "save_onnx" in command("explain", "--onnx", "x.onnx", code=2, **here)
    said = command("explain", "--list", "--session", 10**6, code=1, **here)
    assert "STALE: session 1000000 has no plan (any more)" in said


_OTHER = """
import json, os, subprocess, torch
from gradd import ORTModule
model = ORTModule(torch.nn.Linear(3, 5), strict=True)
model(torch.ones(7, 3)).sum().backward()
def listed(*options):
    command = [os.environ["GRADD_BIN"], "explain", "--list", *options]
    return subprocess.check_output(command, text=True)
plans = json.loads(listed("--json"))["plans"]
assert len({p["pid"] for p in plans}) == 2 and len({p["session"] for p in plans}) == 2, plans
for session in {p["session"] for p in plans}:
    some = [p for p in plans if p["session"] == session]
    assert json.loads(listed("--json", "--session", str(session)))["plans"] == some
    assert len(listed("--session", str(session)).splitlines()) == 1 + len(some) + 1
"""


def test_pages_join_and_plans_go(daemon: Any) -> None:
    wrapped = ORTModule(Net(), strict=True)
    wrapped(*batch())[0].backward()
    client = wrapped._gradd_compiled.client

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        return client.request("explain", {"proto": protocol.PROTOCOL[1], **fields})

    whole = ask({})
    rows: list = []
    assert {*Row.__dataclass_fields__} == {*whole["rows"][0]} - {"backward", "dims"} | {
        *("phase", "shape")
    }
    while len(rows) < whole["n_rows"]:
        page = ask({"from": len(rows), "rows": 3, "plan": whole["plan"]})
        assert 0 < len(page["rows"]) <= 3 and "plans" not in page or not rows
        rows += page["rows"]
    assert rows == whole["rows"]
    assert ask({"from": 10**9, "plan": whole["plan"]})["rows"] == []
    for wrong in ({"plan": "a"}, {"from": -1}, {"rows": []}, {"form": 1}, {"bytes": "all"}):
        with pytest.raises(errors.TensorError):
            ask(wrong)
    for wrong in ("", "tex", "text\0", "xml", "x" * 10000):
        with pytest.raises(errors.UnsupportedError, match="field 'form': expected text, json or"):
            ask({"form": wrong})
    wrapped._gradd_compiled.close()
    client.flush()
    with pytest.raises(errors.StaleError):
        ask({"plan": whole["plan"]})


def test_pieces_of_a_text_join(daemon: Any) -> None:
    wrapped = ORTModule(Net(), strict=True)
    wrapped(*batch())[0].backward()
    client = wrapped._gradd_compiled.client

    def ask(form: str, **fields: Any) -> dict[str, Any]:
        return client.request("explain", {"proto": protocol.PROTOCOL[1], "form": form, **fields})

    for form in ("text", "json", "notes"):
        whole = ask(form)
        size = whole["n_bytes"]
        assert len(whole["text"]) == size and "rows" not in whole and whole["plans"]
        pieces = [ask(form, **{"from": at, "bytes": 1000}) for at in range(0, size, 1000)]
        assert b"".join(p["text"] for p in pieces) == whole["text"]
        assert {len(p["text"]) for p in pieces[:-1]} <= {1000}
        assert ["plans" in p for p in pieces] == [True] + [False] * (len(pieces) - 1)
        for at in (size, size + 1, 2**64 - 1):
            assert ask(form, **{"from": at})["text"] == b""
        assert ask(form, bytes=0)["text"] == b""
        assert ask(form, bytes=2**64 - 1)["text"] == whole["text"]
    assert len(json.loads(ask("notes")["text"])) == sum(
        sum(ops.values()) for ops in json.loads(ask("json")["text"])["nodes"].values()
    )


def test_help_and_docs_name_every_column(layer: Path) -> None:
    (row, *_) = explained(layer, "x=2x5x6")["rows"]
    said = command("explain", "--help").partition("of each row")[2]
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert [n.split()[0].strip(",") for n in said.splitlines()[1:]] == [
        n for n in row if n != "shape"
    ]
    section = page.partition("### explain")[2].partition("\n### ")[0]
    assert not [n for n in {*row} - {"phase", "shape"} if f"`{n}`" not in section]


@pytest.mark.quick
def test_no_daemon(tmp_path: Path) -> None:
    place = tmp_path / "none"
    assert f"no daemon runs in {place}; " in command("explain", "--dir", place, code=3)


def test_errors_name_module_and_line(daemon: Any) -> None:
    model, make = families.build("llama")
    wrapped = ORTModule(model, strict=True)
    wrapped(**make(2, 8, 0))
    with pytest.raises(errors.IndexOutOfRangeError) as caught:
        wrapped(**{**make(2, 8, 0), "input_ids": torch.full((2, 8), families.VOCAB)})
    assert "(from model.embed_tokens, modeling_llama.py:" in str(caught.value)


def test_every_node_of_a_capture_has_a_source() -> None:
    model, make = families.build("gpt2")
    cap = captures.capture(model, (), make(2, 8, 0)).cap
    names = {n.name for n in onnx.load_model_from_string(cap.onnx).graph.node}
    known = dict(cap.sources)
    assert set(known) == names
    unknown = [n for n, s in known.items() if " @ " not in s]
    assert not unknown


def test_a_bare_layer_has_no_line(daemon: Any) -> None:
    wrapped = ORTModule(nn.Embedding(4, 2), strict=True)
    wrapped(torch.zeros(3, dtype=torch.long))
    with pytest.raises(errors.IndexOutOfRangeError, match=r"\(from module\)$"):
        wrapped(torch.full((3,), 4))


def test_wrapped_module_prints(daemon: Any) -> None:
    wrapped = ORTModule(nn.Linear(4, 2), strict=True)
    e = wrapped.gradd_explain(torch.ones(3, 4))
    assert isinstance(e, Explanation) and "not recognised: nothing" in str(e)
    assert e.leftovers == [] and sum(e.counts().values()) == sum(
        r.launch >= 0 for r in e.rows if r.phase == "forward"
    )


@pytest.mark.quick
def test_a_source_commands_no_terminal(layer: Path) -> None:
    model = onnx.load(layer)
    for node in model.graph.node:
        entry = node.metadata_props.add()
        entry.key, entry.value = "gradd.source", f"{node.name}\n\x1b]0;title\x07 @ /a/b.py:1"
    onnx.save(model, layer)
    text = command("explain", layer, "x=2x5x6", "--train", "all")
    assert "first??]0;title? (b.py:1)" in text and "\x1b" not in text


def test_a_text_of_many_pieces(daemon: Any) -> None:
    """A chain so long that all texts are longer than one reply may carry."""
    count = 3000
    nodes = [
        helper.make_node("Mul", [f"v{i}", "w"], [f"v{i + 1}"], name=f"{i}{'n' * 300}")
        for i in range(count)
    ]
    graph = helper.make_graph(
        nodes, "g", [value("v0", [4]), value("w", [4])], [value(f"v{count}", [4])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    client = session()
    info = client.put_graph(model.SerializeToString())
    types = [(F, (4,)), (F, (4,))]
    plan = client.plan(protocol.plan_fields(info.id, types, [], [], [f"v{count}"], []))
    e = explain_plan(client, SimpleNamespace(info=plan))
    here = {"GRADD_DIR": str(daemon.directory)}
    text, data = command("explain", **here), command("explain", "--json", **here)
    assert min(len(text), len(data)) > 1 << 20
    assert f"{e}\n" == text.partition("\n\n")[2] or f"{e}\n" == text
    assert e.as_dict() == json.loads(data) and len(e.rows) == count


# ---- rows that are left out ----


def half_padded() -> dict[str, torch.Tensor]:
    """64 rows, of which 32 are real and 8 of these labelled."""
    _, make = families.build("llama")
    batch = make(2, 32, 3)
    batch["attention_mask"] = (torch.arange(32) < 16).long().expand(2, -1).contiguous()
    batch["labels"] = batch["input_ids"].masked_fill(torch.arange(32) % 4 != 1, -100)
    batch["labels"][:, 16:] = -100
    return batch


def test_rows_over_live_rows_are_marked(daemon: Any) -> None:
    model, batch = ORTModule(families.build("llama")[0], strict=True), half_padded()
    planned = model.gradd_explain(**batch)
    assert (planned.batch_rows, planned.label_rows, planned.real_rows) == (64, 8, 32)
    of = {live: [r for r in planned.rows if r.live == live] for live in ("", "labelled", "real")}
    for live, size in (("labelled", 8), ("real", 32)):
        assert {r.phase for r in of[live]} == {"forward", "backward"}
        made = [r.shape for r in of[live] if len(r.shape) == 3 and r.op != "ScatterRows"]
        assert {shape[:2] for shape in made if shape[1:] != (32, 3)} == {(1, size)}  # no ranges
    layers = {"FusedAttention", "RMSNormalization", "FusedMatMul"}
    assert {r.op for r in of["real"]} >= layers
    assert not any(r.op in layers for r in of[""])
    assert {r.op for r in of["labelled"]} >= {"GatherRows", "FusedMatMul"}
    text = str(planned)
    assert "of 64 rows of a batch places for 8 labelled and 32 real ones" in text
    assert "(labelled rows)" in text and "(real rows)" in text
    model(**batch).loss.backward()
    ran = model.gradd_explain()
    assert [r.live for r in ran.rows] == [r.live for r in planned.rows]
    assert ran.as_dict()["real_rows"] == 32


def test_a_batch_that_needs_all_rows_has_no_marks(daemon: Any) -> None:
    model, batch = ORTModule(families.build("llama")[0], strict=True), half_padded()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"] = batch["input_ids"]
    said = model.gradd_explain(**batch)
    assert (said.batch_rows, said.label_rows, said.real_rows) == (0, 0, 0)
    assert {r.live for r in said.rows} == {""} and "rows of a batch" not in str(said)


def test_notes_name_the_rows(daemon: Any, tmp_path: Path) -> None:
    model = ORTModule(families.build("llama")[0], strict=True)
    model.gradd_explain(**half_padded()).save_onnx(tmp_path / "m.onnx")
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    found = {p.value for n in nodes for p in n.metadata_props if p.key == "gradd.live"}
    assert found == {"labelled", "real", ""}
