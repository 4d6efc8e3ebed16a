"""Every case of every operator with one of its sizes zero: refused or computed, never a crash.

A division by a size is a signal that ends the daemon with all its sessions.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import helper, numpy_helper
from test_vs_onnx import DTYPES, Case, cases

from helpers.graphs import engine as E

pytestmark = pytest.mark.slow


def emptied(case: Case, size: int) -> tuple[bytes, dict[str, np.ndarray]]:
    """The case with all axes of one size at zero: floats are inputs, all else is known."""
    feed, known, names = {}, [], []
    for i, (array, view) in enumerate(zip(case.inputs, case.meta["in"], strict=True)):
        names.append("" if array is None else f"x{i}")
        if array is None:
            continue
        dtype = DTYPES[view["dtype"]][0]
        if np.dtype(dtype).kind in "iub":
            known.append(numpy_helper.from_array(np.array(array), f"x{i}"))
        else:
            feed[f"x{i}"] = np.ones([0 if n == size else n for n in array.shape], dtype)
    outs = [f"y{j}" if view else "" for j, view in enumerate(case.meta["out"])]
    attrs = {a["name"]: a["value"] for a in case.meta["attrs"]}
    node = helper.make_node(case.meta["op"], names, outs, domain=case.meta["domain"], **attrs)
    kinds = [v["dtype"] for n, v in zip(names, case.meta["in"], strict=True) if n in feed]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "case",
        [value(n, DTYPES[k][1], None) for n, k in zip(feed, kinds, strict=True)],
        [value(n, DTYPES[v["dtype"]][1], None) for n, v in zip(outs, case.meta["out"]) if v],
        known,
    )
    domain = case.meta["domain"]
    opsets = [helper.make_opsetid("", 20 if domain else case.meta["opset"])]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=opsets).SerializeToString(), feed


def run(onnx: bytes, feed: dict[str, np.ndarray]) -> str:
    """What becomes of one forward and one backward from its first output."""
    try:
        model = E.Model(onnx)
        out = model.outputs[:1]
        plan = E.Plan(model, feed, list(feed), out, out)
        step = E.Run(plan)
        result = step.forward(feed)
        step.backward({n: np.ones_like(v) for n, v in result.items()})
    except E.EngineError:
        return "refused"
    return "computed"


def test_sizes_of_zero() -> None:
    done: Counter[str] = Counter()
    for case in cases():
        if any(kind in str([case.meta["in"], case.meta["out"]]) for kind in ("f16", "i8", "u8")):
            continue  # types that tests do not pass to the engine
        sizes = {n for x in case.inputs if x is not None for n in x.shape if n > 0}
        for size in sorted(sizes):
            done[run(*emptied(case, size))] += 1
    assert done["computed"] > 200, done
