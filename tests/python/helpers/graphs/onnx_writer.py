"""Writes small models and compares their recognised plan with the plain one.

Used by the test_recognise_*.py files: a Writer collects nodes, `run` gives outputs, gradients and
the number of nodes of a plan, `compare` checks the plan with passes against the one without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from helpers.graphs import engine as E

F = TensorProto.FLOAT


class Sizes(NamedTuple):
    """Nodes of a plan."""

    forward: int
    backward: int


class Writer:
    """Collects nodes and constants of one small model."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def __call__(self, op, *inputs, outs=1, **attrs):
        """Adds a node; returns the name of its output, or a list of names if there are several."""
        out = [f"t{len(self.nodes)}" + (f"_{j}" if j else "") for j in range(outs)]
        self.nodes.append(helper.make_node(op, list(inputs), out, **attrs))
        return out[0] if outs == 1 else out

    def constant(self, value, dtype=np.float32):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def model(self, inputs, outputs, ints=()):
        """inputs: shapes by name; those named in `ints` hold 64-bit integers."""
        return E.Model(self.proto(inputs, outputs, ints))

    def proto(self, inputs, outputs, ints=(), kind=F):
        """The model's bytes."""
        graph = helper.make_graph(
            self.nodes,
            "g",
            [
                helper.make_tensor_value_info(n, TensorProto.INT64 if n in ints else kind, s)
                for n, s in inputs.items()
            ],
            [helper.make_tensor_value_info(n, kind, None) for n in outputs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.gradd", 1)]
        return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def run(model, feed, outputs, plain, threads=0, seed=0):
    """Outputs, gradients of all float inputs for fixed output gradients, and the plan's sizes."""
    floats = [n for n, v in feed.items() if np.issubdtype(v.dtype, np.floating)]
    plan = E.Plan(model, feed, floats, outputs, outputs, threads=threads, plain=plain)
    one = E.Run(plan)
    out = one.forward(feed, seed)
    rng = np.random.default_rng(3)
    seeds = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in out.items()}
    sizes = Sizes(plan.info.n_launches_forward, plan.info.n_launches_backward)
    return out, one.backward(seeds), sizes


def compare(model, feed, outputs):
    """Checks recognised against plain; returns both plans' sizes."""
    fast, plain = (run(model, feed, outputs, p) for p in (False, True))
    for name in outputs:
        np.testing.assert_allclose(fast[0][name], plain[0][name], rtol=2e-6, atol=2e-6)
    for name, want in plain[1].items():
        if want is None:
            assert fast[1][name] is None, f"{name} has a gradient with recognition alone"
            continue
        scale = max(1e-6, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(fast[1][name] / scale, want / scale, atol=5e-6)
    return fast[2], plain[2]


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def check_output(model, feed, y, seed=0, least=1e-3):
    """Output y and all gradients of the recognised plan beside the plain one's; both plans' sizes.

    A gradient is measured by its largest finite element, or by `least` if that is more.
    """
    with np.errstate(all="ignore"):
        fast, plain = (run(model, feed, [y], p, seed=seed) for p in (False, True))
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=2e-6)
    for name, want in plain[1].items():
        if want is None:
            assert fast[1][name] is None, name
            continue
        scale = max(least, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
        np.testing.assert_allclose(fast[1][name] / scale, want / scale, atol=2e-5, err_msg=name)
    return fast[2], plain[2]
