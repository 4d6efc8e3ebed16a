"""Adapters on a base of integers: frozen weights behind DequantizeLinear."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from gradd.train import Optimizer, TrainError, artifacts
from helpers import device_models as models
from helpers.graphs import engine as E

pytestmark = pytest.mark.quick

WIDTH, LAYERS, RANK, ROWS = 64, 6, 4, 16
FORMS = {"tensor": {}, "axis": {"axis": 0}, "block": {"axis": 0, "block_size": 16}}


def scale_shape(form: str, width: int) -> tuple[int, ...]:
    return {"tensor": (), "axis": (width,), "block": (width // 16, width)}[form]


def dequantised(values: dict[str, np.ndarray], i: int) -> np.ndarray:
    """The f32 weight of a layer, by the formula."""
    w, scale, zero = (values[f"{name}{i}"] for name in ("w", "scale", "zero"))
    if scale.ndim == 1:
        scale, zero = scale[:, None], zero[:, None]
    if scale.ndim == 2 and scale.shape != w.shape and scale.shape[1] == w.shape[1]:
        scale, zero = (np.repeat(v, w.shape[0] // v.shape[0], 0) for v in (scale, zero))
    return (w.astype(np.float32) - zero.astype(np.float32)) * scale


def base(
    form: str, dtype: type, width: int = WIDTH, layers: int = LAYERS, opset: int = 21
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """h = relu(h (W + A B)) for each layer, with W of integers, and its initializers."""
    rng = np.random.default_rng(3)
    values, nodes, now = {}, [], "x"
    limits = ml_dtypes.iinfo(dtype)
    small = limits.bits < 8
    for i in range(layers):
        shape = scale_shape(form, width)
        values[f"w{i}"] = rng.integers(int(limits.min), int(limits.max) + 1, (width, width)).astype(
            dtype
        )
        unit = 60 if small else 1000
        values[f"scale{i}"] = np.asarray(rng.uniform(0.5, 2, shape) / unit, np.float32)
        middle = 0 if limits.min else 1 << (limits.bits - 1)
        around = rng.integers(-3, 4, shape) if small else rng.integers(-9, 10, shape)
        values[f"zero{i}"] = np.asarray(around + middle).astype(dtype)
        values[f"a{i}"] = rng.standard_normal((width, RANK)).astype(np.float32) / 8
        values[f"b{i}"] = rng.standard_normal((RANK, width)).astype(np.float32) / 8
        last = i == layers - 1
        operands = [f"w{i}", f"scale{i}", f"zero{i}"]
        # in front of everything that reads them, as some exporters have them
        nodes.insert(0, helper.make_node("DequantizeLinear", operands, [f"f{i}"], **FORMS[form]))
        nodes += [
            helper.make_node("MatMul", [now, f"f{i}"], [f"m{i}"]),
            helper.make_node("MatMul", [now, f"a{i}"], [f"l{i}"]),
            helper.make_node("MatMul", [f"l{i}", f"b{i}"], [f"k{i}"]),
            helper.make_node("Add", [f"m{i}", f"k{i}"], ["scores" if last else f"s{i}"]),
        ]
        if not last:
            nodes.append(helper.make_node("Relu", [f"s{i}"], [f"h{i}"]))
        now = f"h{i}"
    shapes = ({"x": ["n", width]}, {"scores": ["n", width]})
    made = models.model(nodes, *shapes, values)
    made.opset_import[0].version = opset
    made.ir_version = 10
    return made, values


def adapters(layers: int = LAYERS) -> list[str]:
    return [f"{name}{i}" for i in range(layers) for name in "ab"]


def batches(n: int, width: int = WIDTH) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(4)
    shape = (ROWS, width)
    return [
        (rng.standard_normal(shape).astype(np.float32), rng.integers(0, width, ROWS))
        for _ in range(n)
    ]


def torch_losses(
    values: dict[str, np.ndarray], layers: int, data: list, rate: float
) -> list[float]:
    """The same training in PyTorch, on f32 weights."""
    trained = {n: torch.tensor(values[n], requires_grad=True) for n in adapters(layers)}
    weights = [torch.tensor(dequantised(values, i)) for i in range(layers)]
    optimizer = torch.optim.SGD(trained.values(), lr=rate)
    losses = []
    for x, labels in data:
        h = torch.tensor(x)
        for i in range(layers):
            h = h @ weights[i] + h @ trained[f"a{i}"] @ trained[f"b{i}"]
            h = h.relu() if i < layers - 1 else h
        loss = torch.nn.functional.cross_entropy(h, torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("form", "dtype", "parameters"),
    [
        *(("tensor", np.int8, False), ("axis", np.uint8, True), ("block", np.int8, True)),
        *(("tensor", ml_dtypes.uint4, False), ("block", ml_dtypes.int4, False)),
    ],
)
def test_adapters_train_as_on_floats(
    form: str, dtype: type, parameters: bool, tmp_path: Path
) -> None:
    opset = 21 if form == "block" or ml_dtypes.iinfo(dtype).bits == 4 else 13
    made, values = base(form, dtype, opset=opset)
    frozen = [name for name in values if name not in adapters()] if parameters else None
    folder = models.generate(
        tmp_path,
        made,
        requires_grad=adapters(),
        frozen_params=frozen,
        optimizer=artifacts.OptimType.SGD,
    )
    state, module = models.load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    data, losses = batches(20), []
    for x, labels in data:
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, torch_losses(values, LAYERS, data, 0.05), rtol=1e-5)
    for name, parameter in state.parameters:
        assert parameter.data.dtype == values[name].dtype
        changed = not np.array_equal(parameter.data, values[name])
        assert changed == (name in adapters()), name
    module.eval()
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    exported = onnx.load(tmp_path / "trained.onnx")
    kept = {t.name: t.data_type for t in exported.graph.initializer}
    assert kept["w0"] == helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    if not frozen:  # constants are in the file as they were
        initial = {t.name: t.SerializeToString() for t in made.graph.initializer}
        for tensor in exported.graph.initializer:
            if tensor.name not in adapters():
                assert tensor.SerializeToString() == initial[tensor.name]
    plain = onnxruntime.SessionOptions()  # else it computes such products in other ways
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", plain)
    (scores,) = session.run(None, {"x": data[0][0]})
    logits = torch.tensor(scores)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(data[0][1]))
    assert float(module(*data[0])) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("parameters", [False, True])
def test_only_one_weight_at_a_time_is_unpacked(parameters: bool, tmp_path: Path) -> None:
    """Activations of 16 rows are little beside a weight: the arena holds two weights at most."""
    made, values = base("axis", np.int8, 256, 8)
    frozen = [name for name in values if name not in adapters(8)] if parameters else None
    models.generate(tmp_path, made, requires_grad=adapters(8), frozen_params=frozen)
    _, module = models.load(tmp_path)
    module(*batches(1, 256)[0])
    held = module.memory()
    weight = 4 * 256 * 256
    activations = 8 * 6 * 4 * ROWS * 256
    assert held["arena"] < 2 * weight + activations < 8 * weight
    assert held["constants"] < 4 * weight


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("raw", [False, True])
def test_every_integer_of_four_bits(dtype: type, raw: bool) -> None:
    """In an odd number, two in a byte of raw_data or in an entry of int32_data."""
    info = ml_dtypes.iinfo(dtype)
    w = np.arange(int(info.min), int(info.max) + 1)[:15]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["y"]),
        helper.make_node("Add", ["y", "x"], ["z"]),
    ]
    made = models.model(nodes, {"x": [15]}, {"z": [15]}, {"scale": np.float32(0.5)})
    made.opset_import[0].version = 21
    packed = helper.make_tensor("w", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [15], w)
    if raw:
        packed.raw_data = bytes(packed.int32_data)
        del packed.int32_data[:]
    made.graph.initializer.append(packed)

    def values() -> list[np.ndarray]:
        feeds = {"x": np.zeros(15, np.float32)}
        plan = E.Plan(E.Model(made.SerializeToString()), feeds)
        return list(E.Run(plan).forward(feeds).values())

    np.testing.assert_array_equal(values()[0], w / 2)
    if raw:
        made.graph.initializer[-1].raw_data += b"0"
        with pytest.raises(E.EngineError, match="'w': 9 bytes of two elements, expected 8 for 15"):
            values()
    else:
        made.graph.initializer[-1].int32_data[3] = 256
        with pytest.raises(E.EngineError, match="'w': entry 3 is 256, expected a byte"):
            values()


def test_weights_of_four_bits_are_no_parameters(tmp_path: Path) -> None:
    made, _ = base("axis", ml_dtypes.int4, 8, 1)
    with pytest.raises((RuntimeError, TrainError), match="w0"):
        models.generate(tmp_path, made, requires_grad=["a0"], frozen_params=["w0"])


def test_what_is_refused() -> None:
    made, _ = base("axis", np.int8, 8, 1)
    x = {"x": np.ones((2, 8), np.float32)}

    def planned(**changed: np.ndarray | int) -> None:
        other = onnx.ModelProto()
        other.CopyFrom(made)
        for tensor in other.graph.initializer:
            if tensor.name in changed:
                array = changed[tensor.name]
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        more = [helper.make_attribute(n, v) for n, v in changed.items() if isinstance(v, int)]
        other.graph.node[0].attribute.extend(more)
        E.Plan(E.Model(other.SerializeToString()), x)

    def refuses(words: str, **changed: np.ndarray | int) -> None:
        with pytest.raises(E.EngineError, match=words):
            planned(**changed)

    planned()
    one, three = np.ones(8, np.float32), np.ones(3, np.float32)
    scales = r"DequantizeLinear.*x is i8\[8,8\] and x_scale f32\[3\]: expected one scale"
    refuses(scales, scale0=three, zero0=np.ones(3, np.int8))
    refuses(r"x_scale f32\[8\]: expected f32\[2,8\]", scale0=one, block_size=4)
    refuses(r"x_zero_point is u8\[8\], expected i8\[8\]", zero0=np.zeros(8, np.uint8))
    refuses(r"x_zero_point is i8\[7\], expected i8\[8\]", zero0=np.zeros(7, np.int8))
    refuses("block_size is -1", block_size=-1)
    refuses("output_dtype 10 differs from x_scale's type, f32", output_dtype=10)


def test_integers_of_16_bits() -> None:
    """They have no kernel of their own, and are computed in 32 bits."""
    rng = np.random.default_rng(0)
    w = rng.integers(-(1 << 15), 1 << 15, (8, 5)).astype(np.int16)
    zero = rng.integers(-(1 << 15), 1 << 15, 5).astype(np.int16)
    scale = rng.uniform(0.01, 0.1, 5).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["y"], axis=1),
        helper.make_node("Add", ["y", "x"], ["z"]),
    ]
    values = {"w": w, "scale": scale, "zero": zero}
    made = models.model(nodes, {"x": [1]}, {"z": [8, 5]}, values)
    made.opset_import[0].version = 21
    feeds = {"x": np.zeros(1, np.float32)}
    (got,) = E.Run(E.Plan(E.Model(made.SerializeToString()), feeds)).forward(feeds).values()
    np.testing.assert_array_equal(got, (w.astype(np.int32) - zero).astype(np.float32) * scale)


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_scales_of_16_bits(half: str) -> None:
    """The result is rounded once, from f32."""
    kind = np.float16 if half == "f16" else ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    w = rng.integers(-128, 128, (40, 33)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, 33).astype(kind)
    values = {"w": w, "scale": scale}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["y"]),
        helper.make_node("Add", ["y", "x"], ["z"]),
    ]
    made = models.model(nodes, {"x": [1]}, {"z": [40, 33]}, values)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = code
    made.opset_import[0].version = 21
    feeds = {"x": np.zeros(1, kind)}
    plan = E.Plan(E.Model(made.SerializeToString()), feeds)
    (got,) = E.Run(plan).forward(feeds).values()
    expected = (w.astype(np.float32) * scale.astype(np.float32)).astype(kind)
    np.testing.assert_array_equal(got, expected)


def test_a_scale_that_is_trained_has_its_gradient(tmp_path: Path) -> None:
    made, values = base("block", np.int8, 32, 1)
    models.generate(tmp_path, made, requires_grad=["scale0"])
    state, module = models.load(tmp_path)
    x, labels = batches(1, 32)[0]
    module(x, labels)
    scale = torch.tensor(values["scale0"], requires_grad=True)
    w, zero = (torch.tensor(values[f"{name}0"]).float() for name in ("w", "zero"))
    weight = (w - zero.repeat_interleave(16, 0)) * scale.repeat_interleave(16, 0)
    lora = torch.tensor(values["a0"]) @ torch.tensor(values["b0"])
    torch.nn.functional.cross_entropy(
        torch.tensor(x) @ (weight + lora), torch.tensor(labels)
    ).backward()
    got = state.parameters["scale0"].grad
    np.testing.assert_allclose(got, scale.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_the_type_of_a_frozen_weight_is_not_trained(tmp_path: Path) -> None:
    made, _ = base("axis", np.int8, 8, 1)
    with pytest.raises((RuntimeError, TrainError), match="w0"):
        models.generate(tmp_path, made, requires_grad=["w0"])
        models.load(tmp_path)[1](*batches(1, 8)[0])
