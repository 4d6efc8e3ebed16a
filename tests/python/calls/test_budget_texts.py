"""Memory budgets on the command line: estimate's curve, explain's marks, wrong texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save
from test_explain import command, explained

LAYERS = 6
SIZE = 64
SHAPE = f"h0={SIZE}x{SIZE}"

pytestmark = pytest.mark.quick


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """h = h + Tanh(h W) V, six times, and a mean."""
    nodes, inputs = [], [("h0", ["rows", SIZE])]
    for i in range(LAYERS):
        inputs += [(f"w{i}", [SIZE, SIZE]), (f"v{i}", [SIZE, SIZE])]
        nodes += [
            helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"a{i}"], name=f"in{i}"),
            helper.make_node("Tanh", [f"a{i}"], [f"t{i}"], name=f"act{i}"),
            helper.make_node("MatMul", [f"t{i}", f"v{i}"], [f"b{i}"], name=f"out{i}"),
            helper.make_node("Add", [f"h{i}", f"b{i}"], [f"h{i + 1}"], name=f"sum{i}"),
        ]
    nodes.append(helper.make_node("ReduceMean", [f"h{LAYERS}"], ["loss"], keepdims=0))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs]
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "deep", values, [loss])
    path = tmp_path / "deep.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_estimate_prints_the_curve_of_one_batch(deep: Path) -> None:
    lines = command("estimate", deep, SHAPE).splitlines()
    head = next(i for i, line in enumerate(lines) if "arena of a run" in line)
    rows = [line.split() for line in lines[head + 1 : -1]]
    assert 2 < len(rows) <= 8
    assert rows[0][-2:] == ["0.0", "%"] and float(rows[-1][-2]) > 0
    several = ("estimate", deep, SHAPE, "--batch", "8,64")
    assert "arena of a run" not in command(*several)
    assert command(*several, "--curve").count("arena of a run") == 2


def test_the_curve_as_json(deep: Path) -> None:
    (one,) = json.loads(command("estimate", deep, SHAPE, "--json"))["estimates"]
    curve = one["curve"]
    assert curve[0] == {"activations": one["activations"], "recomputed": 0, "percent": 0.0}
    assert all(a["activations"] > b["activations"] for a, b in zip(curve, curve[1:], strict=False))
    assert all(a["percent"] < b["percent"] for a, b in zip(curve, curve[1:], strict=False))
    budget = ("--memory-budget", str(curve[-1]["activations"]))
    (less,) = json.loads(command("estimate", deep, SHAPE, *budget, "--json"))["estimates"]
    assert less["activations"] == curve[-1]["activations"]
    assert less["curve"] == curve  # of the graph, whatever this plan's budget is


def test_explain_marks_what_is_computed_again(deep: Path) -> None:
    whole = explained(deep, SHAPE, "--train", "all")
    assert not any(row["again"] for row in whole["rows"]) and whole["whole_bytes"] == 0
    plan = explained(deep, SHAPE, "--train", "all", "--recompute", "layers")
    assert plan["whole_bytes"] == whole["arena_bytes"] > plan["arena_bytes"]
    assert plan["recomputed_bytes"] == whole["saved_bytes"] - plan["saved_bytes"] > 0
    assert 0 < plan["recompute_ms"] < plan["model_ms"]
    marked = {"forward": [], "backward": []}
    for row in plan["rows"]:
        if row["again"]:
            marked[row["phase"]].append((row["op"], row["node_name"]))
    assert sorted(marked["forward"]) == sorted(marked["backward"]) != []
    text = command("explain", deep, SHAPE, "--train", "all", "--recompute", "layers")
    assert text.count("(computed again in backward)") == len(marked["forward"])
    assert text.count("  again act") == sum(op == "Tanh" for op, _ in marked["backward"]) > 0
    assert "more time by a model" in text


def test_texts_of_bytes(deep: Path) -> None:
    whole = explained(deep, SHAPE, "--train", "all")["arena_bytes"]
    assert whole > 128 << 10
    found = {}
    for text in ("131072", "128KiB", "128 KiB", "0.125MiB", "0.125 MiB"):
        plan = explained(deep, SHAPE, "--train", "all", "--memory-budget", text)
        found[text] = plan["arena_bytes"]
    assert len(set(found.values())) == 1 and found["128KiB"] <= 131072, found


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "2GB", "2gib", "1e30", "nan", "2 GiB x"])
def test_bad_texts_are_refused(deep: Path, text: str) -> None:
    said = command("explain", deep, SHAPE, "--train", "all", f"--memory-budget={text}", code=2)
    assert f"--memory-budget: expected bytes, as in 2GiB, 512MiB or 1048576, got '{text}'" in said


def test_what_cannot_be_met_says_so(deep: Path) -> None:
    for budget, shown in ("10", "10 bytes"), ("1KiB", "1024 bytes (1.0 KiB)"):
        said = command("explain", deep, SHAPE, "--train", "all", "--memory-budget", budget, code=1)
        assert f"NOMEM: no plan fits the memory budget of {shown}: the smallest" in said
    said = command("explain", deep, SHAPE, "--train", "all", "--recompute", "all", code=1)
    assert "--recompute 'all': expected none, layers or compromise" in said
