"""Bad input at run time: indices, labels, ratios, values that are not finite, journals, memory.

Here the graph is good and was compiled; what is in the client's memory, or the order of requests,
is not. See raw_client.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from helpers.hostile.graphs import N, graph, info
from helpers.hostile.raw_client import (
    F32,
    GO,
    I64,
    IDS,
    JOURNAL,
    ROWS,
    TABLE,
    Raw,
    Row,
    many,
    put,
    tensor,
    types,
)

CODES = {np.dtype(np.float32): F32, np.dtype(np.int64): I64, np.dtype(np.bool_): 9}
INPUTS = 128 << 10  # where the inputs of other graphs lie, 4 KiB each
RESULT = 512 << 10


def run_graph(s: Raw, model: Any, feed: list[np.ndarray], flags: int = 0) -> dict[str, Any]:
    """graph.put, graph.plan and forward; the answer of forward, after everything was given back."""
    graph_id = put(s, model)["graph"]
    plan, run = next(s.fresh), next(s.fresh)
    given = types(*([CODES[a.dtype], list(a.shape)] for a in feed))
    planned = s.call({
        "v": "graph.plan", "graph": graph_id, "plan": plan, "in": given, "out": [0],
    })  # fmt: skip
    assert planned["ok"], planned
    inputs = []
    for i, array in enumerate(feed):
        offset = INPUTS + 4096 * i
        s.at(offset, array.shape, array.dtype)[...] = array
        inputs.append(tensor(offset, array.shape, CODES[array.dtype]))
    result = tensor(RESULT, planned["out"]["dims"][0], planned["out"]["dtypes"][0])
    reply = s.call({
        "v": "forward", "plan": plan, "run": run, "seed": 1, "flags": flags, "b": None,
        "in": many(*inputs), "out": many(result),
    })  # fmt: skip
    s.call({"v": "release", "runs": [run]})
    s.call({"v": "plan.drop", "plan": plan})
    return reply


def runs(name: str, code: str, parts: str, feed: list[Any], *nodes: Any, flags: int = 0) -> Row:
    """A graph with inputs i0, i1... that fails when it runs."""
    arrays = [np.asarray(a) for a in feed]
    kinds = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64, np.bool_: TensorProto.BOOL}
    inputs = [info(f"i{k}", a.shape, kinds[a.dtype.type]) for k, a in enumerate(arrays)]
    return Row(
        f"run: {name}",
        code,
        tuple(parts.split("|")),
        lambda s: run_graph(s, graph(nodes, inputs=inputs), arrays, flags),
    )


def f(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


GRID = np.ones((4, 2), np.float32)


def two(kind: str, **attributes: Any) -> Any:
    return N(kind, ["i0", "i1"], ["y"], name="n", **attributes)


def three(kind: str, **attributes: Any) -> Any:
    return N(kind, ["i0", "i1", "i2"], ["y"], name="n", **attributes)


# Clip keeps the compiler from seeing that the indices are known... they are inputs: nothing is.
INDICES = [
    runs("Gather beyond", "INDEX",
        "node 0 'n' (Gather)|index 4 is out of range for size 4, at position 1", [GRID, i(1, 4)],
        two("Gather")),
    runs("Gather below", "INDEX",
        "node 0 'n' (Gather)|index -5 is out of range for size 4, at position 0", [GRID, i(-5, 0)],
        two("Gather")),
    runs("Gather 2^62", "INDEX", "index 4611686018427387904 is out of range for size 4", [GRID, i(1
        << 62)], two("Gather")),
    runs("Gather -2^63", "INDEX", "index -9223372036854775808 is out of range for size 4", [GRID,
        i(-(1 << 63))], two("Gather")),
    runs("Gather on axis 1", "INDEX", "index 2 is out of range for size 2, at position 2", [GRID,
        i(0, 1, 2)], two("Gather", axis=1)),
    runs("Gather from nothing", "INDEX", "index 0 is out of range for size 0", [np.ones((0, 2),
        np.float32), i(0)], two("Gather")),
    runs("GatherElements", "INDEX",
        "node 0 'n' (GatherElements)|index 4 is out of range for size 4, at position 1", [GRID,
        i([0, 4])], two("GatherElements")),
    runs("GatherND", "INDEX",
        "node 0 'n' (GatherND)|index 2 is out of range for size 2, at position 3", [GRID, i([0, 1],
        [3, 2])], two("GatherND")),
    runs("ScatterND", "INDEX",
        "node 0 'n' (ScatterND)|index 4 is out of range for size 4, at position 0", [GRID, i([4]),
        np.ones((1, 2), np.float32)], three("ScatterND")),
    runs("ScatterElements", "INDEX",
        "node 0 'n' (ScatterElements)|index -5 is out of range for size 4", [GRID, i([-5, 0]),
        np.ones((1, 2), np.float32)], three("ScatterElements", axis=0)),
    runs("label beyond", "INDEX",
        "node 0 'n' (SoftmaxCrossEntropyLoss)|label 2 is out of range for 2 classes, at row 3",
        [GRID, i(0, 1, 1, 2)], two("SoftmaxCrossEntropyLoss")),
    runs("label below", "INDEX", "label -7 is out of range for 2 classes, at row 0", [GRID, i(-7, 1,
        1, 0)], two("SoftmaxCrossEntropyLoss", ignore_index=-100)),
    runs("label of NLL", "INDEX",
        "node 0 'n' (NegativeLogLikelihoodLoss)|label 99 is out of range for 2 classes, at row 2",
        [GRID, i(0, 1, 99, 0)], two("NegativeLogLikelihoodLoss")),
    runs("division by zero", "INDEX", "node 0 'n' (Div)|division by zero, element 1", [i(1, 2),
        i(1, 0)], two("Div")),
    runs("remainder by zero", "INDEX", "node 0 'n' (Mod)|division by zero, element 0", [i(1, 2),
        i(0, 1)], two("Mod")),
    runs("a ratio of 1.5", "INDEX", "node 0 'n' (Dropout): the ratio is 1.5",
         [GRID, np.float32(1.5), np.bool_(True)], three("Dropout")),
    runs("a ratio below zero", "INDEX", "node 0 'n' (Dropout): the ratio is -0.1",
         [GRID, np.float32(-0.1), np.bool_(True)], three("Dropout")),
    runs("a ratio that is NaN", "INDEX", "node 0 'n' (Dropout): the ratio is", [GRID,
        np.float32("nan"), np.bool_(True)],
         three("Dropout")),
]  # fmt: skip

FINITE = [
    runs("NaN in the input", "NONFINITE", "node 0 'n' (Mul)|output 0, element 2 of 3 is nan",
         [f(1, 2, float("nan")), f(1, 1, 1)], two("Mul"), flags=2),
    runs("an overflow", "NONFINITE", "node 0 'n' (Mul)|element 1 of 2 is inf", [f(1, 3e38), f(1,
        3e38)], two("Mul"), flags=2),
    runs("a logarithm below zero", "NONFINITE", "node 1 'log' (Log)|element 0 of 2 is", [f(-1, 1),
        f(0, 0)],
         N("Add", ["i0", "i1"], ["a"], name="sum"), N("Log", ["a"], ["b"], name="log"),
         N("Relu", ["b"], ["y"], name="late"), flags=2),
    runs("zero by zero", "NONFINITE", "node 0 'n' (Div)|nan", [f(0), f(0)], two("Div"), flags=2),
]  # fmt: skip

# ---- order of requests, used-up things, limits ----


def then(*steps: Callable[[Raw], Any]) -> Callable[[Raw], dict[str, Any]]:
    """Runs all; the answer of the last but one is the row's, the last one tidies up."""

    def send(s: Raw) -> dict[str, Any]:
        answers = [step(s) for step in steps]
        return answers[-2]

    return send


def ask(verb: str, **changes: Any) -> Callable[[Raw], dict[str, Any]]:
    return lambda s: s.ask(verb, **changes)


def inference(s: Raw) -> dict[str, Any]:
    """Backward of a plan that was made for inference."""
    assert s.ask("graph.plan", plan=50, gmask=[])["ok"]
    assert s.ask("forward", plan=50)["ok"]
    reply = s.ask("backward")
    s.ask("release")
    s.ask("plan.drop", plan=50)
    return reply


def too_many(verb: str, key: str, limit: int, last: Callable[[Raw], Any]) -> Callable[[Raw], dict]:
    def send(s: Raw) -> dict[str, Any]:
        reply: dict[str, Any] = {"ok": 1}
        n = 0
        while reply["ok"] and n <= limit:
            n += 1
            reply = s.ask(verb, **{key: 5000 + n})
        last(s)
        return reply

    return send


def unbind_all(s: Raw) -> None:
    for k in range(1025):
        s.ask("unbind", bind=5000 + k)


def release_all(s: Raw) -> None:
    s.ask("release", runs=list(range(5000, 6030)))


def wrong_index(where: int, value: int) -> Callable[[Raw], dict[str, Any]]:
    def send(s: Raw) -> dict[str, Any]:
        s.at(IDS, (ROWS,), np.int64)[where] = value
        return s.ask("forward")

    return send


def nan_in_backward(s: Raw) -> dict[str, Any]:
    """The gradient that arrives is NaN; the check was asked for in forward."""
    assert s.ask("forward", flags=2)["ok"]
    s.at(GO, ())[...] = np.nan
    reply = s.ask("backward")
    s.ask("release")
    return reply


def unsegment(s: Raw) -> dict[str, Any]:
    return s.control({"v": "unsegment", "id": 1})


def giant(s: Raw) -> dict[str, Any]:
    """Four TiB of activations: a plan is possible, a run is not."""
    nodes = [N("Expand", ["i0", "c"], ["e"], name="grow"), N("Exp", ["e"], ["f"]),
             N("ReduceSum", ["f"], ["y"], keepdims=0)]  # fmt: skip
    model = graph(nodes, {"c": np.array([1 << 40])}, inputs=[info("i0", [1])])
    return run_graph(s, model, [f(1)])


ORDER = [
    Row("order: backward twice", "STALE", ("run 1 is not known", "used it up"),
        then(ask("forward"), ask("backward"), ask("backward"), ask("release"))),
    Row("order: backward after release", "STALE", ("run 1 is not known: it was released",),
        then(ask("forward"), ask("release"), ask("backward"), ask("release"))),
    Row("order: backward of inference", "STALE", ("made for inference: it has no backward",),
        inference),
    Row("order: plan.drop with a run", "STALE", ("plan 1 has 1 unreleased runs",),
        then(ask("forward"), ask("plan.drop", plan=1), ask("release"))),
    Row("order: graph.plan over a run", "STALE", ("plan 1 exists and has 1 unreleased runs",),
        then(ask("forward"), ask("graph.plan"), ask("release"))),
    Row("order: unsegment while bound", "STALE", ("unsegment: segment 1 is in use",), unsegment),
    Row("order: unsegment during a run", "STALE", ("segment 1 is in use",),
        then(ask("forward"), unsegment, ask("release"))),
    Row("limit: 1025 bindings", "LIMIT", ("this session has 1024 bindings, the limit",),
        too_many("bind", "bind", 1024, unbind_all), cpu_ms=600),
    Row("limit: 1025 runs", "LIMIT", ("this session has 1024 unreleased runs, the limit",),
        too_many("forward", "run", 1024, release_all), cpu_ms=600),
    Row("memory: 4 TiB of activations", "NOMEM", ("the run needs", "MiB of activations"), giant),
    Row("index: a token beyond the table", "INDEX", ("node 0 'lookup' (Gather)",
        "index 10 is out of range for size 10, at position 1"), wrong_index(1, TABLE)),
    Row("index: a token far below", "INDEX", ("node 0 'lookup' (Gather)",
        "index -11 is out of range for size 10, at position 0"),
        wrong_index(0, -TABLE - 1)),
    Row("index: 50257", "INDEX", ("node 0 'lookup' (Gather)",
        "index 50257 is out of range for size 10"), wrong_index(0, 50257)),
    Row("finite: NaN arrives in backward", "NONFINITE", ("gradient of node", "is nan"),
        nan_in_backward),
]  # fmt: skip

# ---- the journal of the optimizer's step ----


def with_journal(head: bytes, **changes: Any) -> Callable[[Raw], dict[str, Any]]:
    """A step whose journal begins with these bytes."""

    def send(s: Raw) -> dict[str, Any]:
        s.at(JOURNAL, (len(head),), np.uint8)[:] = np.frombuffer(head, np.uint8)
        return s.ask("step", **changes)

    return send


MAGIC = 0x4C4E524A44524731
LONG = 0x324E524A << 32  # plus the elements of a chunk


def foreign(s: Raw) -> dict[str, Any]:
    """The journal of a step that was begun with other parameters."""
    head = struct.pack("<4Q", MAGIC, 0, 0, 12345)  # sealed for chunk 0 of step 0 by another request
    return with_journal(head)(s)


JOURNALS = [
    Row("journal: not zeroed", "SHM", ("the region given as journal is not one",),
        with_journal(b"\xff" * 64)),
    Row("journal: text", "SHM", ("the region given as journal is not one",),
        with_journal(b"hello, world...!" * 4)),
    Row("journal: of another request", "STALE", ("step 0 was begun with other parameters",),
        foreign),
    Row("journal: of the future", "STALE", ("the journal is at step 1000, the request says 0",),
        with_journal(struct.pack("<2Q", MAGIC, 1000 << 24))),
    Row("journal: chunk beyond the parameters", "STALE", ("step 0 was begun with other",),
        with_journal(struct.pack("<4Q", MAGIC, 77, 0, 1))),
    Row("journal: chunks of no elements", "SHM", ("step: journal: expected chunks of a multiple of "
        "131072 elements, at most 16777216, got 0",), with_journal(struct.pack("<Q", LONG))),
    Row("journal: chunks of 131073 elements", "SHM", ("step: journal: expected chunks", "131073"),
        with_journal(struct.pack("<Q", LONG | 131073))),
    Row("journal: chunks of 4 Gi elements", "SHM", ("step: journal: expected chunks", "4294836224"),
        with_journal(struct.pack("<Q", LONG | (1 << 32) - (128 << 10)))),
    Row("journal: chunks that it has no room for", "TENSOR", ("step: journal: expected 201330688 "
        "bytes for chunks of 16777216 elements, got 1576960",),
        with_journal(struct.pack("<Q", LONG | 16 << 20))),
]  # fmt: skip

TABLES = {
    "indices and ratios": INDICES,
    "values that are not finite": FINITE,
    "order and limits": ORDER,
    "journals": JOURNALS,
}
