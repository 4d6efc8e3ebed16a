"""Memory of runs: the engine asks before it takes any, and the daemon's limit holds for all of it.

A backward may take memory, too: one that keeps the activations cannot put gradients in their place,
and one for fewer gradients than the forward has saved for reads zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import conftest
import numpy as np
import pytest
from onnx import TensorProto, helper

from gradd.memory.shm import Segment
from helpers.graphs import engine as E
from helpers.hostile.raw_client import F32, Raw, many, put, types

FACTORS = (0.5, 1.0, 1.5, 2.0, 2.5)
NOMEM = next(i for i in range(32) if E.LIB.gradd_status_name(i) == b"NOMEM")
MIB = 1 << 20


def branches() -> bytes:
    """loss = sum of tanh(f x) over x and the factors.

    Every branch saves a vector, and needs one for its gradient until all are added; that one takes
    the place of the saved one, if it may.
    """
    nodes = []
    for i, factor in enumerate(FACTORS):
        nodes += [
            helper.make_node("Constant", [], [f"f{i}"], value_float=factor),
            helper.make_node("Mul", ["x", f"f{i}"], [f"m{i}"]),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]),
        ]
    nodes.append(helper.make_node("Sum", [f"t{i}" for i in range(len(FACTORS))], ["s"]))
    nodes.append(helper.make_node("ReduceSum", ["s"], ["loss"], keepdims=0))
    return model(nodes, ["x"], ["loss"])


def model(nodes: list, inputs: list[str], outputs: list[str]) -> bytes:
    """Vectors of any length."""
    f32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, f32, ["N"]) for n in inputs],
        [helper.make_tensor_value_info(n, f32, None) for n in outputs],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def slope(x: np.ndarray) -> np.ndarray:
    """Of the branches."""
    return sum(f * (1 - np.tanh(f * x) ** 2) for f in map(np.float32, FACTORS))


def asked(answer: Callable[[int], int]) -> tuple[E.Device, list[int]]:
    """A device, and the bytes that its runs ask for, each answered with a status."""
    sizes: list[int] = []

    def admit(size: int) -> int:
        sizes.append(size)
        return answer(size)

    return E.Device(admit=admit), sizes


@pytest.mark.quick
def test_a_wider_arena_is_asked_for() -> None:
    feed = {"x": np.linspace(-1, 1, 3000, dtype=np.float32)}
    refuse = False
    device, sizes = asked(lambda _: NOMEM if refuse else 0)
    plan = E.Plan(E.Model(branches()), feed, ["x"], None, ["loss"], on=device)
    one = np.ones((), np.float32)
    run = E.Run(plan)
    run.forward(feed)
    assert sizes == [plan.info.arena_bytes]
    refuse = True
    with pytest.raises(E.EngineError) as caught:
        run.backward({"loss": one}, keep=True)
    assert caught.value.code == "NOMEM"
    assert len(sizes) == 2
    assert sizes[1] > plan.info.arena_bytes
    refuse = False
    kept = run.backward({"loss": one}, keep=True)["x"]  # nothing was lost
    again = run.backward({"loss": one})["x"]
    assert len(sizes) == 3  # the arena is wide now
    np.testing.assert_allclose(kept, slope(feed["x"]), rtol=1e-5)
    assert np.array_equal(kept, again)


def test_zeros_for_what_does_not_arrive_are_asked_for() -> None:
    """From the sixteenth set of gradients on one backward serves all, with zeros."""
    names = [f"y{i}" for i in range(5)]
    nodes = [helper.make_node("Tanh", [f"x{i}"], [n]) for i, n in enumerate(names)]
    inputs = [f"x{i}" for i in range(5)]
    feed = {n: np.linspace(-1, 1, 1000, dtype=np.float32) for n in inputs}
    device, sizes = asked(lambda _: 0)
    plan = E.Plan(E.Model(model(nodes, inputs, names)), feed, inputs, None, names, on=device)
    ones = np.ones(1000, np.float32)
    sets = [s for k in range(1, 6) for s in itertools.combinations(names, k)]
    seen = []
    for arrive in sets:
        run = E.Run(plan)
        run.forward(feed)
        sizes.clear()
        run.backward(dict.fromkeys(arrive, ones))
        seen.append(sum(sizes))
    assert not any(seen[:15])
    assert seen[20:] == [(5 - len(arrive)) * ones.nbytes for arrive in sets[20:]]


def test_the_limit_of_the_daemon_holds_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    n, limit = MIB, 32 * MIB  # 4 MiB a vector
    monkeypatch.setenv("GRADD_MEMORY_MIB", str(limit // MIB))
    with conftest._serving(monkeypatch, lambda: True) as server, Raw(server.directory) as s:
        s.attach()
        assert server.ps()["memory_limit"] == limit
        segment = Segment(1, 3 * 4 * MIB)
        try:
            assert s.control({"v": "segment", "id": 1, "bytes": segment.size}, [segment.fd])["ok"]
            x = np.frombuffer(segment.view, np.float32, n)
            x[:] = np.linspace(-1, 1, n)
            np.frombuffer(segment.view, np.float32, 1, 8 * MIB + 64)[:] = 1
            _backward_within_limit(s, n, limit)
            dx = np.frombuffer(segment.view, np.float32, n, 4 * MIB)
            np.testing.assert_allclose(dx[::999], slope(x[::999]), rtol=1e-5)
            del x, dx
        finally:
            segment.close()


def _backward_within_limit(s: Raw, n: int, limit: int) -> None:
    planned = s.call({
        "v": "graph.plan", "graph": put(s, branches())["graph"], "plan": 1, "in": types([F32, [n]]),
        "grad": [0], "out": [0], "gmask": [0], "bound": [],
    })  # fmt: skip
    assert planned["ok"], planned
    assert limit / 2 < planned["peak"] < limit
    forward = {
        "v": "forward", "plan": 1, "run": 1, "seed": 0, "flags": 0, "b": None,
        "in": many([1, 0, F32, [n]]), "out": many([1, 8 * MIB, F32, []]),
    }  # fmt: skip
    backward = {
        "v": "backward", "run": 1, "go": many([1, 8 * MIB + 64, F32, []], at=[0]), "b": None,
        "g": many([1, 4 * MIB, F32, [n]]),
    }  # fmt: skip
    reply = s.call(forward)
    assert reply["ok"], f"the forward alone does not fit below the limit: {reply}"
    reply = s.call({**backward, "keep": True})
    assert (reply["ok"], reply["code"], reply["session"]) == (0, "NOMEM", "alive"), reply
    assert reply["what"].startswith("backward: the run needs ")
    assert f" of {limit // MIB} MiB are in use by unreleased runs" in reply["what"]
    assert s.call({**backward, "keep": False})["ok"]  # the activations are still there
