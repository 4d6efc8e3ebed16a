"""Training through QuantizeLinear and DequantizeLinear: as PyTorch's fake quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from gradd.train import TrainError
from helpers import device_models as models
from helpers.graphs import engine as E

pytestmark = pytest.mark.quick

WIDTH, OUT, ROWS = 6, 4, 5
RANGES = {"i8": (-128, 127), "u8": (0, 255)}
TYPES = {"i8": np.int8, "u8": np.uint8}


def network(kind: str, per_channel: bool, between: str = "") -> onnx.ModelProto:
    """scores = relu(fake(x w1)) fake(w2), where fake is a pair; `between` stands in the first."""
    rng = np.random.default_rng(3)
    zero = 0 if kind == "i8" else 128
    n = (OUT,) if per_channel else ()
    values = {
        "w1": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "w2": rng.standard_normal((WIDTH, OUT)).astype(np.float32),
        "s1": np.array(2**-6, np.float32),  # powers of two: PyTorch multiplies by the inverse
        "z1": np.array(zero, TYPES[kind]),
        "s2": np.full(n, 2**-7, np.float32),
        "z2": np.full(n, zero, TYPES[kind]),
    }
    read = "t" if between else "q1"
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("QuantizeLinear", ["h", "s1", "z1"], ["q1"]),
        *([helper.make_node(between, ["q1"], ["t"])] if between else []),
        helper.make_node("DequantizeLinear", [read, "s1", "z1"], ["d1"]),
        helper.make_node("Relu", ["d1"], ["r"]),
        helper.make_node("QuantizeLinear", ["w2", "s2", "z2"], ["q2"], axis=1),
        helper.make_node("DequantizeLinear", ["q2", "s2", "z2"], ["d2"], axis=1),
        helper.make_node("MatMul", ["r", "d2"], ["scores"]),
    ]
    return models.model(nodes, {"x": ["n", WIDTH]}, {"scores": ["n", OUT]}, values)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Some of what the network quantises is out of range."""
    rng = np.random.default_rng(4)
    return rng.standard_normal((ROWS, WIDTH)).astype(np.float32), rng.integers(0, OUT, ROWS)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_gradients_are_those_of_fake_quantisation(
    kind: str, per_channel: bool, tmp_path: Path
) -> None:
    """Loss and gradients: within range they pass, beyond it they are zero."""
    made = network(kind, per_channel)
    models.generate(tmp_path, made, requires_grad=["w1", "w2"], frozen_params=["s1", "s2"])
    state, module = models.load(tmp_path)
    x, y = batch()
    loss = float(module(x, y))
    low, high = RANGES[kind]
    zero = 0 if kind == "i8" else 128
    w1, w2 = (
        torch.tensor(dict(state.parameters)[n].data, requires_grad=True) for n in ("w1", "w2")
    )
    fake = torch.fake_quantize_per_tensor_affine
    h = fake(torch.tensor(x) @ w1, 2**-6, zero, low, high)
    if per_channel:
        scale, zeros = torch.full((OUT,), 2**-7), torch.full((OUT,), zero, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(w2, scale, zeros, 1, low, high)
    else:
        weight = fake(w2, 2**-7, zero, low, high)
    want = torch.nn.functional.cross_entropy(torch.relu(h) @ weight, torch.tensor(y))
    want.backward()
    assert abs(loss - want.item()) <= 1e-6 * abs(want.item())
    for name, tensor in (("w1", w1), ("w2", w2)):
        got = dict(state.parameters)[name].grad
        assert np.abs(got - tensor.grad.numpy()).max() <= 1e-6, name
    assert (w2.grad == 0).any() and (w2.grad != 0).any()


def test_scales_are_trained(tmp_path: Path) -> None:
    """The gradient of a learnt step size: round(x / s) - x / s in range, else the bound."""
    made = network("i8", per_channel=False)
    models.generate(tmp_path, made, requires_grad=["w1", "w2", "s2"], frozen_params=["s1"])
    state, module = models.load(tmp_path)
    x, y = batch()
    module(x, y)
    parameters = dict(state.parameters)
    w1, w2, s2 = (torch.tensor(parameters[n].data) for n in ("w1", "w2", "s2"))
    h = torch.relu(torch.fake_quantize_per_tensor_affine(torch.tensor(x) @ w1, 2**-6, 0, -128, 127))
    weight = torch.fake_quantize_per_tensor_affine(w2, s2.item(), 0, -128, 127)
    weight.requires_grad_()
    torch.nn.functional.cross_entropy(h @ weight, torch.tensor(y)).backward()
    exact = w2 / s2
    slope = torch.where(
        (exact.round() >= -128) & (exact.round() <= 127),
        exact.round() - exact,
        exact.round().clamp(-128, 127),
    )
    want = (weight.grad * slope).sum().item()
    assert abs(float(parameters["s2"].grad) - want) <= 1e-5 * abs(want)


@pytest.mark.parametrize("between", ["Identity", "Neg"])
def test_only_a_dequantize_reads_the_integers(between: str, tmp_path: Path) -> None:
    """Gradients would end there without a word."""
    made = network("i8", False, between)
    models.generate(tmp_path, made, requires_grad=["w1", "w2"], frozen_params=["s1", "s2"])
    _, module = models.load(tmp_path)
    with pytest.raises(TrainError, match=f"{between}.*QuantizeLinear"):
        module(*batch())


@pytest.mark.parametrize("dtype", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4])
@pytest.mark.parametrize("moved", [False, True])
def test_zero_points_of_four_bits_are_refused(moved: bool, dtype: int) -> None:
    """They say that the integers have four bits: with eight the results would be others."""
    made = network("i8", False)
    for tensor in made.graph.initializer:
        if tensor.name == "z1":
            tensor.CopyFrom(helper.make_tensor("z1", dtype, [1], [0]))
            del tensor.dims[:]
    if moved:
        made.graph.node.insert(0, helper.make_node("Identity", ["z1"], ["same"]))
        next(n for n in made.graph.node if n.op_type == "QuantizeLinear").input[2] = "same"
    made.opset_import[0].version = 21
    with pytest.raises(E.EngineError, match="QuantizeLinear.*int4 or uint4"):
        E.Model(made.SerializeToString())


def test_an_exported_model_quantises_as_onnxruntime(tmp_path: Path) -> None:
    """The pairs stay in the exported model; both engines give the same scores."""
    onnxruntime = pytest.importorskip("onnxruntime")
    made = network("u8", True)
    models.generate(tmp_path, made, requires_grad=["w1", "w2"], frozen_params=["s1", "s2"])
    _, module = models.load(tmp_path)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["scores"])
    x, y = batch()
    loss = float(module(x, y))
    options = onnxruntime.SessionOptions()  # it would compute in integers
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options)
    (theirs,) = session.run(["scores"], {"x": x})
    assert {n.op_type for n in onnx.load(path).graph.node} >= {"QuantizeLinear", "DequantizeLinear"}
    want = torch.nn.functional.cross_entropy(torch.tensor(theirs), torch.tensor(y)).item()
    assert abs(loss - want) <= 1e-5 * abs(want)
