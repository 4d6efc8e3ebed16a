"""Facts about a graph in the reply to graph.put: random, half, reach, types.

The rows of the operators are the only list there is. Reach is compared with what torch finds
(`requires_grad`) and with the plan's own paths, over random graphs of operators that pass a
gradient, stop it, or make it zero.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BINARY, Daemon
from onnx import TensorProto, helper

from gradd import ORTModule
from gradd.session import protocol
from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer
from helpers.hostile.graphs import N, graph
from helpers.sessions import session

SHAPE = (3, 4)
INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def _to_int(w: Writer, x: str) -> str:
    return w("Cast", w("Cast", x, to=INT), to=FLOAT)


def _top(w: Writer, x: str, which: int) -> str:
    found = w("TopK", x, w.constant([4], np.int64), outs=2, axis=-1)
    return found[0] if which == 0 else w("Cast", found[1], to=FLOAT)


def _picked(w: Writer, x: str, y: str) -> str:
    index = w("TopK", y, w.constant([4], np.int64), outs=2, axis=-1)[1]
    return w("GatherElements", x, index, axis=-1)


UNARY = {
    "relu": (lambda w, x: w("Relu", x), torch.relu),
    "tanh": (lambda w, x: w("Tanh", x), torch.tanh),
    "floor": (lambda w, x: w("Floor", x), torch.floor),
    "sign": (lambda w, x: w("Sign", x), torch.sign),
    "detach": (lambda w, x: w("StopGradient", x, domain="com.gradd"), lambda x: x.detach()),
    "to int and back": (_to_int, lambda x: x.long().float()),
    "to double and back": (
        lambda w, x: w("Cast", w("Cast", x, to=TensorProto.DOUBLE), to=FLOAT),
        lambda x: x.double().float(),
    ),
    "top values": (lambda w, x: _top(w, x, 0), lambda x: x.topk(4)[0]),
    "top places": (lambda w, x: _top(w, x, 1), lambda x: x.topk(4)[1].float()),
    "largest": (
        lambda w, x: w("Cast", w("ArgMax", x, axis=-1, keepdims=1), to=FLOAT),
        lambda x: x.argmax(-1, keepdim=True).float(),
    ),
    "noise": (lambda w, x: w("RandomNormalLike", x), torch.randn_like),
    "is nan": (lambda w, x: w("Cast", w("IsNaN", x), to=FLOAT), lambda x: x.isnan().float()),
}
BINARY_OPS = {
    "add": (lambda w, x, y: w("Add", x, y), torch.add),
    "mul": (lambda w, x, y: w("Mul", x, y), torch.mul),
    "where": (
        lambda w, x, y: w("Where", w("Greater", x, y), x, w.constant(0.0)),
        lambda x, y: torch.where(x > y, x, 0.0),
    ),
    "picked": (_picked, lambda x, y: torch.gather(x.expand(SHAPE), -1, y.expand(SHAPE).topk(4)[1])),
}


def _widened(w: Writer, x: str) -> str:
    return w("Expand", x, w.constant(SHAPE, np.int64))


class _Net:
    """One random graph, as nodes and as a function of torch."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = [f"x{i}" for i in range(3)]
        w, self.random = Writer(), False
        names, self.steps = list(self.inputs), []
        for _ in range(10):
            two = rng.random() < 0.4
            kind = str(rng.choice(list(BINARY_OPS if two else UNARY)))
            args = [int(i) for i in rng.integers(0, len(names), 2 if two else 1)]
            emit, run = (BINARY_OPS if two else UNARY)[kind]
            names.append(_widened(w, emit(w, *[names[i] for i in args])))
            self.steps.append((run, args))
            self.random = self.random or kind == "noise"
        last = _widened(w, w("Add", names[-1], names[-2]))
        self.steps.append((torch.add, [len(names) - 1, len(names) - 2]))
        self.outputs = [last, names[6]]
        self.model = w.model(dict.fromkeys(self.inputs, SHAPE), self.outputs)

    def in_torch(self, needed: str) -> list[bool]:
        """Whether the outputs require a gradient if this input does."""
        values = [torch.randn(SHAPE, requires_grad=n == needed) for n in self.inputs]
        for run, args in self.steps:
            values.append(run(*[values[i] for i in args]).expand(SHAPE))
        return [values[-1].requires_grad, values[6].requires_grad]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(40))
def test_reach_is_what_torch_finds_and_holds_all_paths_of_the_plan(seed: int) -> None:
    net = _Net(seed)
    assert net.model.random == any(kind is torch.randn_like for kind, _ in net.steps)
    assert not net.model.half
    for name in net.inputs:
        found = [name in net.model.reach(j) for j in range(2)]
        assert found == net.in_torch(name), (seed, name)
    feed = {n: np.ones(SHAPE, np.float32) for n in net.inputs}
    for j, output in enumerate(net.outputs):
        plan = E.Plan(net.model, feed, net.inputs, [output], [output], threads=1)
        has = {n for i, n in enumerate(net.inputs) if plan.info.has_grad[i]}
        assert has <= net.model.reach(j), (seed, output)


def _rows() -> list[dict[str, Any]]:
    text = subprocess.check_output([str(BINARY), "--list-ops", "--json"], text=True)
    return json.loads(text)


@pytest.mark.quick
def test_every_random_operator_makes_its_graph_random() -> None:
    """By family: a new operator beside these is random because its row says so."""
    made = {
        "Dropout": N("Dropout", ["x"], ["y"]),
        "RandomNormal": N("RandomNormal", [], ["y"], shape=[2, 3]),
        "RandomNormalLike": N("RandomNormalLike", ["x"], ["y"]),
        "RandomUniform": N("RandomUniform", [], ["y"], shape=[2, 3]),
        "RandomUniformLike": N("RandomUniformLike", ["x"], ["y"]),
        "Bernoulli": N("Bernoulli", ["x"], ["y"]),
    }
    families = {r["family"] for r in _rows() if r["name"] in made}
    rows = {r["name"] for r in _rows() if r["family"] in families and r["from_model"]}
    assert rows <= set(made), "a new random operator: give it a graph here"
    for name, node in made.items():
        assert E.Model(graph([node]).SerializeToString()).random, name
    assert not E.Model(graph([N("Relu", ["x"], ["y"])]).SerializeToString()).random


@pytest.mark.quick
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_is_seen_in_every_place_where_it_can_come_from(kind: int) -> None:
    def half(nodes: list, inits: dict | None = None, dtype: int = FLOAT) -> bool:
        info = helper.make_tensor_value_info("x", dtype, [2, 3])
        found = E.Model(graph(nodes, inits, [info]).SerializeToString()).half
        assert found in (0, kind)
        return bool(found)

    there = [N("Cast", ["x"], ["h"], to=kind), N("Cast", ["h"], ["y"], to=FLOAT)]
    table = helper.make_tensor("t", kind, [1], b"\0\0", raw=True)
    assert half(there)
    assert half([N("Relu", ["x"], ["y"])], dtype=kind)
    assert half([N("Add", ["x", "t"], ["y"])], {"t": table})
    assert half([N("RandomNormalLike", ["x"], ["r"], dtype=kind), N("Relu", ["x"], ["y"])])
    assert half([N("ConstantOfShape", ["s"], ["c"], value=table), N("Relu", ["x"], ["y"])],
                {"s": np.array([2], np.int64)})  # fmt: skip
    assert not half([N("Relu", ["x"], ["y"])])


@pytest.mark.quick
def test_of_both_halves_the_coarser_counts() -> None:
    nodes = [N("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
             N("Cast", ["h"], ["b"], to=TensorProto.BFLOAT16),
             N("Cast", ["b"], ["y"], to=FLOAT)]  # fmt: skip
    assert E.Model(graph(nodes).SerializeToString()).half == TensorProto.BFLOAT16


@pytest.mark.quick
def test_the_reply_names_inputs_types_and_sizes(daemon: Daemon) -> None:
    w = Writer()
    y = w("Mul", w("Add", "a", "b"), w("Cast", w("Greater", "b", "c"), to=FLOAT))
    shapes = {"a": ["N", 4], "b": ["N", 4], "c": [None, 4], "i": ["M"]}
    info = session().put_graph(w.proto(shapes, [y, "a"], ints=("i",)))
    assert info.reach == {y: {"a", "b"}, "a": {"a"}}
    assert (info.random, info.half) == (False, 0)
    assert info.types["a"] == (1, ("N", 4))
    assert info.types["c"] == (1, (None, 4))
    assert info.types["i"] == (7, ("M",))
    assert info.types[y] == (1, None)
    assert isinstance(info, protocol.GraphInfo)


class _Flat(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.round(self.a(x)) + self.b(x), torch.sign(self.b(x)), (self.b(x) > 0).float()


def test_behind_a_step_the_gradient_is_zero_and_not_missing(shared_daemon: Daemon) -> None:
    module, x = _Flat(), torch.randn(3, 4)
    want = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    one = ORTModule(module, strict=True)
    first, second, third = one(x)
    assert [t.requires_grad for t in (first, second, third)] == [True, True, False]
    first.sum().backward()
    assert torch.equal(module.a.weight.grad, want["a.weight"])
    assert module.b.weight.grad.abs().sum() > 0
    one.zero_grad()
    first, second, _ = one(x)
    second.sum().backward()
    assert module.a.weight.grad is None  # no path from this output at all
    assert torch.equal(module.b.weight.grad, want["b.weight"])


def test_masks_differ_from_step_to_step(shared_daemon: Daemon) -> None:
    """A random operator missing from the list gave every step the same numbers."""

    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * torch.bernoulli(torch.full_like(x, 0.5))

    one = ORTModule(Noise(), strict=True)
    x = torch.randn(64, 4)
    masks = [one(x) == 0 for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
