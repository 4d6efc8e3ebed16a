"""Operators at edges, where a formula's derivative may differ from the intended one.

Rows that a mask hides as a whole, scores that leave one key alone, variances of zero, activations
far out: per operator a list of operands, in float64. Kernels and their gradient rules, and the
expansions that the plain plan has in their place, give the values and gradients of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from helpers.graphs import engine as E

pytestmark = pytest.mark.quick

INF = float("inf")
KINDS = {np.dtype(np.float64): TensorProto.DOUBLE, np.dtype(np.bool_): TensorProto.BOOL}


@dataclass
class Edge:
    """One call: the ONNX operator with its operands, and what torch has in its place."""

    op: str
    what: str
    feed: dict[str, Any]
    torch: Callable[..., torch.Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(shape)


def qkv(heads: int = 2, kv_heads: int = 2, n: int = 3, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "q": numbers(2, heads, n, 4, seed=1, scale=scale),
        "k": numbers(2, kv_heads, n, 4, seed=2, scale=scale),
        "v": numbers(2, kv_heads, n, 4, seed=3),
    }


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask=None, **named) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **named)


def grouped(*operands: torch.Tensor) -> torch.Tensor:
    return sdpa(*operands, enable_gqa=True)


HIDDEN = np.array([[0, 0, 0], [1, 0, 1], [0, 0, 1]], np.bool_)
BIAS = np.array([[-INF, -INF, -INF], [0.5, -INF, 2], [-1e300, -1e300, 0]])
LATER = np.array([[0.5, INF, 1e300], [-1.0, 0.25, INF], [0.0, -INF, 1.0]])
FAR = np.array([0.0, -0.0, 1e-300, 40, -40, 1e3, -1e3, 1e100, -1e100, 5.5, -5.5])
ROWS = np.stack([np.zeros(6), np.full(6, 3.0), 1e3 + numbers(6), 1e-9 * numbers(6), numbers(6)])


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lower = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        return sdpa(q, k, v, mask & lower)
    return sdpa(q, k, v, mask.masked_fill(~lower, -INF))


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = 0.5 * torch.tanh(q @ k.transpose(-1, -2) / 2 / 0.5)
    return scores.softmax(-1) @ v


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (6,), w, b)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (6,), w, 1e-5)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def norm_operands(names: str) -> dict[str, np.ndarray]:
    return {n: ROWS if n == "x" else numbers(6, seed=i) for i, n in enumerate(names)}


EDGES = [
    Edge("Attention", "a row of a boolean mask hides all", {**qkv(), "mask": HIDDEN}, sdpa),
    Edge("Attention", "a row of -inf", {**qkv(), "mask": BIAS}, sdpa),
    Edge("Attention", "hidden by mask and order", {**qkv(), "mask": HIDDEN}, causal,
         {"is_causal": 1}),
    Edge("Attention", "hidden by bias and order", {**qkv(), "mask": BIAS}, causal,
         {"is_causal": 1}),
    Edge("Attention", "infinite bias of a later key", {**qkv(), "mask": LATER}, causal,
         {"is_causal": 1}),
    Edge("Attention", "one key has all", qkv(scale=1e3), sdpa),
    Edge("Attention", "shared heads, one key has all", qkv(4, 2, scale=1e3), grouped),
    Edge("Attention", "scores beyond the cap", qkv(scale=30), capped, {"softcap": 0.5}),
    Edge("LayerNormalization", "rows without variance", norm_operands("xwb"), layer_norm),
    Edge("RMSNormalization", "rows of zeros and large ones", norm_operands("xw"), rms_norm),
    Edge("Gelu", "far out", {"x": FAR}, F.gelu),
    Edge("Gelu", "far out, by tanh", {"x": FAR}, gelu_tanh, {"approximate": "tanh"}),
    Edge("Swish", "far out", {"x": FAR}, F.silu),
]  # fmt: skip


def by_torch(edge: Edge, dy: np.ndarray | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Result and gradients; dy None = of the result alone."""
    given = {n: torch.tensor(x) for n, x in edge.feed.items()}
    floats = {n: x.requires_grad_() for n, x in given.items() if x.is_floating_point()}
    y = edge.torch(*given.values())
    if dy is None:
        return y.detach().numpy(), {}
    grads = torch.autograd.grad(y, list(floats.values()), torch.tensor(dy))
    return y.detach().numpy(), {n: g.numpy() for n, g in zip(floats, grads, strict=True)}


def by_plan(edge: Edge, dy: np.ndarray, plain: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    value = helper.make_tensor_value_info
    node = helper.make_node(edge.op, list(edge.feed), ["y"], **edge.attrs)
    inputs = [value(n, KINDS[x.dtype], x.shape) for n, x in edge.feed.items()]
    graph = helper.make_graph([node], "edge", inputs, [value("y", TensorProto.DOUBLE, None)])
    opset = helper.make_opsetid("", 24 if edge.op == "Swish" else 23)
    model = E.Model(helper.make_model(graph, opset_imports=[opset]).SerializeToString())
    floats = [n for n, x in edge.feed.items() if x.dtype == np.float64]
    run = E.Run(E.Plan(model, edge.feed, floats, ["y"], ["y"], plain=plain))
    return run.forward(edge.feed)["y"], run.backward({"y": dy})


def name_of(edge: Edge) -> str:
    return f"{edge.op}-{edge.what}"


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "expansion"])
@pytest.mark.parametrize("edge", EDGES, ids=name_of)
def test_edge(edge: Edge, plain: bool) -> None:
    dy = numbers(*by_torch(edge, None)[0].shape, seed=7)
    y, grads = by_plan(edge, dy, plain)
    want_y, want = by_torch(edge, dy)
    np.testing.assert_allclose(y, want_y, rtol=1e-9, atol=1e-12)
    assert np.isfinite(y).all()
    for name, g in want.items():
        scale = max(1.0, float(np.abs(g).max()))
        np.testing.assert_allclose(grads[name] / scale, g / scale, atol=1e-9, err_msg=name)
