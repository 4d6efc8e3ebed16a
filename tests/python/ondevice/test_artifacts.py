"""Artifacts: their files, losses against PyTorch's, blocks, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from gradd.train import CheckpointState, Module, Optimizer, artifacts, module, onnxblock
from helpers import ROOT
from helpers import device_models as models

pytestmark = pytest.mark.quick
FILES = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"]


def test_the_files_and_what_is_in_them(tmp_path: Path) -> None:
    trained = ["fc2.weight", "fc2.bias"]
    models.generate(
        tmp_path,
        requires_grad=trained,
        frozen_params=["fc1.weight"],
        prefix="my_",
        nominal_checkpoint=True,
        additional_output_names=["scores"],
    )
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {f"my_{name}" for name in (*FILES, "nominal_checkpoint")}
    training = onnx.load(tmp_path / "my_training_model.onnx")
    onnx.checker.check_model(training, True)
    assert [node.op_type for node in training.graph.node] == [
        *("Gemm", "Relu", "Gemm", "SoftmaxCrossEntropyLoss")
    ]
    inputs = [value.name for value in training.graph.input]
    assert inputs == ["x", "labels", "fc1.weight", "fc2.weight", "fc2.bias"]
    assert models.names(training) == ["fc1.bias"]
    loss, scores = (value.name for value in training.graph.output)
    assert scores == "scores" and "loss" in loss
    state = CheckpointState.load_checkpoint(tmp_path / "my_checkpoint")
    assert [n for n, p in state.parameters if p.requires_grad] == trained
    assert [n for n, p in state.parameters if not p.requires_grad] == ["fc1.weight"]
    module = Module(tmp_path / "my_training_model.onnx", state)
    assert [output.shape for output in module(*models.batch())] == [(), (models.ROWS, models.OUT)]


def with_gradients(training: onnx.ModelProto) -> onnx.ModelProto:
    """A training model as ONNX Runtime makes it: nodes of gradients behind the loss."""
    graph, loss = training.graph, training.graph.output[0].name
    ours = "com.microsoft"
    log_prob = graph.node[-1].output[1]
    graph.initializer.append(onnx.numpy_helper.from_array(np.ones((), np.float32), f"{loss}_grad"))
    graph.node.append(
        helper.make_node(
            "SoftmaxCrossEntropyLossGrad", [f"{loss}_grad", log_prob, "labels"], ["g"], domain=ours
        )
    )
    graph.node.append(helper.make_node("ReduceSum", ["g"], ["fc2.bias_grad"], keepdims=0))
    buffer, out = (f"fc2.bias_grad.accumulation.{part}" for part in ("buffer", "out"))
    inputs = [buffer, "fc2.bias_grad", "lazy_reset_grad"]
    graph.node.append(helper.make_node("InPlaceAccumulatorV2", inputs, [out], domain=ours))
    for name, kind in ((buffer, TensorProto.FLOAT), ("lazy_reset_grad", TensorProto.BOOL)):
        graph.input.append(helper.make_tensor_value_info(name, kind, [models.OUT]))
    graph.output.append(helper.make_tensor_value_info(out, TensorProto.BOOL, [1]))
    training.opset_import.append(helper.make_opsetid(ours, 1))
    return training


def test_training_models_of_onnx_runtime_are_taken_as_they_are(tmp_path: Path) -> None:
    models.generate(tmp_path)
    _, module = models.load(tmp_path)
    expected = module(*models.batch())
    training = onnx.load(tmp_path / "training_model.onnx")
    onnx.save(with_gradients(training), tmp_path / "training_model.onnx")
    state, module = models.load(tmp_path)
    assert module.input_names() == ["x", "labels"] and len(module.output_names()) == 1
    assert module(*models.batch()) == expected
    assert state.parameters["fc1.weight"].grad.any()


def step_of(folder: Path, *inputs: np.ndarray) -> tuple[Any, CheckpointState, Any]:
    """The outputs of one training step, the state, and the gradient of w."""
    state, module = models.load(folder)
    return module(*inputs), state, state.parameters["w"].grad


def one_weight(folder: Path, loss: Any, **arguments: Any) -> Path:
    """Artifacts of y = x * w for x[batch, 3], with a loss."""
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    values = {"w": np.array([0.5, -2, 30], np.float32)}
    made = models.model([node], {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    return models.generate(folder, made, loss=loss, **arguments)


LOSSES = {
    "mse": (onnxblock.loss.MSELoss, torch.nn.MSELoss),
    "l1": (onnxblock.loss.L1Loss, torch.nn.L1Loss),
    "bce": (onnxblock.loss.BCEWithLogitsLoss, torch.nn.BCEWithLogitsLoss),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_torchs(kind: str, reduction: str, tmp_path: Path) -> None:
    ours, theirs = LOSSES[kind]
    inputs = np.array([[1, 2, 9], [-3, 0.5, -9]], np.float32)  # logits up to 270
    target = np.array([[0, 1, 0.25], [1, 1, 0.5]], np.float32)
    folder = one_weight(tmp_path, ours(reduction=reduction))
    loss, state, grad = step_of(folder, inputs, target)
    weight = torch.tensor(state.parameters["w"].data, requires_grad=True)
    expected = theirs(reduction=reduction)(torch.tensor(inputs) * weight, torch.tensor(target))
    expected.backward()
    np.testing.assert_allclose(loss, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(grad, weight.grad, rtol=1e-5)


def test_weights_of_losses(tmp_path: Path) -> None:
    inputs = np.array([[1, 2, 0.1], [-3, 0.5, -0.2]], np.float32)
    target = np.array([[0, 1, 0.25], [1, 1, 0.5]], np.float32)
    weights = [np.array([1, 2, 3], np.float32), np.array([3, 2, 0.5], np.float32)]
    loss = onnxblock.loss.BCEWithLogitsLoss(weight=weights[0], pos_weight=weights[1])
    got, state, _ = step_of(one_weight(tmp_path, loss), inputs, target)
    other = torch.nn.BCEWithLogitsLoss(*(torch.tensor(w) for w in weights[:1]))
    other.pos_weight = torch.tensor(weights[1])
    scores = torch.tensor(inputs) * torch.tensor(state.parameters["w"].data)
    np.testing.assert_allclose(got, other(scores, torch.tensor(target)), rtol=1e-5)
    ignored = onnxblock.loss.CrossEntropyLoss(weight=weights[0], ignore_index=1)
    got, *_ = step_of(one_weight(tmp_path, ignored), inputs, np.array([2, 1]))
    other = torch.nn.CrossEntropyLoss(torch.tensor(weights[0]), ignore_index=1)
    np.testing.assert_allclose(got, other(scores, torch.tensor([2, 1])), rtol=1e-5)


def test_scores_of_each_position_have_a_label_each(tmp_path: Path) -> None:
    """The classes are the second axis, as for SoftmaxCrossEntropyLoss."""
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    values = {"w": np.array([0.5, -2, 30], np.float32).reshape(3, 1, 1)}
    shape = ["batch", 3, "rows", 2]
    made = models.model([node], {"x": shape}, {"y": shape}, values)
    folder = models.generate(tmp_path, made)
    training = onnx.load(folder / "training_model.onnx")
    dims = training.graph.input[1].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["batch", "rows", 2]
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((4, 3, 5, 2)).astype(np.float32)
    labels = rng.integers(0, 3, (4, 5, 2))
    got, *_ = step_of(folder, inputs, labels)
    scores = torch.tensor(inputs * values["w"])
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


class Distance(onnxblock.TrainingBlock):
    """A loss of several blocks: the weighted mean of two."""

    def __init__(self) -> None:
        super().__init__()
        self._mse = onnxblock.loss.MSELoss()
        self._l1 = onnxblock.loss.L1Loss()

    def build(self, output: str) -> str:
        blocks = onnxblock.blocks
        half = blocks.Constant(0.5)()
        first = blocks.Mul()(half, self._mse(output, "target"))
        return blocks.Add()(first, self._l1(output, "target"))


def test_any_graph_may_be_the_loss(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    values = {"w": np.array([0.5, -2, 30], np.float32)}
    made = models.model([node], {"x": ["n", 3]}, {"y": ["n", 3]}, values)
    block = Distance()
    block.requires_grad("w")
    with pytest.raises(RuntimeError, match="not built yet"):
        block.to_model_proto()
    with pytest.raises(RuntimeError, match="not known yet"):
        block.parameters()
    with onnxblock.base(made) as accessor:
        block("y")
        assert not accessor.has_path
    training, _ = block.to_model_proto()
    onnx.save(training, tmp_path / "training_model.onnx")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    inputs, target = (np.ones((2, 3), np.float32) * k for k in (1, 2))
    loss = Module(tmp_path / "training_model.onnx", state)(inputs, target)
    gap = values["w"] - 2
    np.testing.assert_allclose(loss, [0.5 * np.mean(gap**2) + np.mean(abs(gap))], rtol=1e-6)
    assert models.names(made) == ["w"]  # the model that was given is as it was


def test_a_model_may_be_its_own_loss(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["y"]),
        helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0),
    ]
    made = models.model(nodes, {"x": ["n"]}, {"loss": []}, {"w": np.ones(1, np.float32)})
    folder = models.generate(tmp_path, made, loss=None, optimizer=None)
    assert not (folder / "optimizer_model.onnx").exists()
    loss, _, grad = step_of(folder, np.array([1, 2, 6], np.float32))
    assert loss == 3 and grad == [3]


NORM_VALUES = {n: np.full(2, k, np.float32) for n, k in (("s", 1), ("b", 0), ("m", 0), ("v", 4))}


def with_norm(folder: Path) -> Path:
    """Artifacts of a batch norm and a dropout in training mode, for x[n, 2]."""
    norm = helper.make_node(
        "BatchNormalization", ["x", "s", "b", "m", "v"], ["n", "m2", "v2"], training_mode=1
    )
    dropout = helper.make_node("Dropout", ["n", "ratio", "mode"], ["y"])
    values = NORM_VALUES | {"ratio": np.float32(0.5), "mode": np.bool_(True)}
    made = models.model([norm, dropout], {"x": ["n", 2]}, {"y": ["n", 2]}, values)
    return models.generate(
        folder,
        made,
        requires_grad=["s", "b"],
        frozen_params=["m", "v"],
        loss=artifacts.LossType.MSELoss,
        additional_output_names=["y"],
    )


def test_dropout_and_norm_are_off_in_the_eval_model(tmp_path: Path) -> None:
    with_norm(tmp_path)
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    onnx.checker.check_model(evaluation, True)
    norm, dropout = evaluation.graph.node[:2]
    assert list(norm.output) == ["n"] and [a.i for a in norm.attribute] == [0]
    assert list(dropout.input) == ["n", "ratio", ""]
    training = onnx.load(tmp_path / "training_model.onnx")
    assert len(training.graph.node[0].output) == 3 and len(training.graph.node[1].input) == 3
    inputs = np.array([[2, 4], [6, 8]], np.float32)
    _, module = models.load(tmp_path)
    np.testing.assert_allclose(module.eval()(inputs, inputs)[1], inputs / 2, rtol=1e-4)


def test_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_norm(tmp_path)
    inputs = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)

    def draw(**arguments: int) -> list[bool]:
        _, made = models.load(tmp_path, **arguments)
        return (made(inputs, inputs)[1] == 0).ravel().tolist()

    assert draw() == draw(seed=0) != draw(seed=1)
    monkeypatch.setattr(module, "default_seed", 1)
    assert draw() == draw(seed=1)
    _, made = models.load(tmp_path)
    first, second = (made(inputs, inputs)[1] for _ in range(2))
    made.set_seed(1)
    assert ((made(inputs, inputs)[1] == 0) == (first == 0)).all()
    assert ((first == 0) != (second == 0)).any()


def test_a_step_moves_running_statistics(tmp_path: Path) -> None:
    state, module = models.load(with_norm(tmp_path))
    inputs = np.array([[2, 4], [6, 8]], np.float32)
    module(inputs, inputs)
    np.testing.assert_allclose(state.parameters["m"].data, [0.4, 0.6], rtol=1e-5)


def test_eval_models_of_onnx_runtime_ask_norms_for_three_results(tmp_path: Path) -> None:
    """Which ONNX Runtime itself refuses."""
    evaluation = onnx.load(with_norm(tmp_path) / "eval_model.onnx")
    evaluation.graph.node[0].output.extend(["m2", "v2"])
    del evaluation.graph.value_info[:]
    onnx.save(evaluation, tmp_path / "eval_model.onnx")
    _, module = models.load(tmp_path)
    inputs = np.array([[2, 4], [6, 8]], np.float32)
    np.testing.assert_allclose(module.eval()(inputs, inputs)[1], inputs / 2, rtol=1e-4)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["n"])
    exported = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(exported, True)
    (output,) = ReferenceEvaluator(exported).run(None, {"x": inputs})
    np.testing.assert_allclose(output, inputs / 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": 3}, RuntimeError, "model is a int"),
        ({"loss": "mse"}, RuntimeError, "loss is a str, expected a LossType"),
        ({"optimizer": "adam"}, TypeError, "optimizer is a str, expected an OptimType"),
        ({"frozen_params": ["fc1.bias"]}, RuntimeError, "fc1.bias: a parameter is trained or"),
        ({"requires_grad": ["fc9"]}, RuntimeError, "no initializer 'fc9'"),
        ({"ort_format": True}, RuntimeError, "no .ort files"),
        ({"custom_op_library": "x.so"}, RuntimeError, "no custom operators"),
        ({"additional_output_names": "scores"}, RuntimeError, "is a str, expected a list"),
        ({"additional_output_names": ["k"]}, LookupError, "'k' cannot be an output"),
        (
            {"additional_output_names": ["x"]},
            LookupError,
            "'x' cannot be an output: it is an input",
        ),
        ({"additional_output_names": ["fc1.bias"]}, LookupError, "an input or a parameter"),
        ({"requires_grad": []}, RuntimeError, "nothing to optimize"),
    ],
)
def test_what_is_refused(arguments: dict, error: type, words: str, tmp_path: Path) -> None:
    model = arguments.pop("model", None)
    with pytest.raises(error, match=words):
        if model is not None:
            artifacts.generate_artifacts(model)
        models.generate(tmp_path, **arguments)


def test_strings_that_are_cast_are_read_as_numbers(tmp_path: Path) -> None:
    chain = Chain(onnxblock.blocks.Cast(to=TensorProto.FLOAT), onnxblock.blocks.Linear(3, 2))
    with onnxblock.empty_base(17) as accessor:
        value = helper.make_tensor_value_info("x", TensorProto.STRING, [1, 3])
        accessor.model.graph.input.append(value)
        chain("x")
    models.generate(tmp_path, chain.to_model_proto())
    _, module = models.load(tmp_path)
    strings, numbers = np.array([["1.0", "-2", "3e2"]]), np.array([[1, -2, 300]], np.float32)
    assert module(strings, np.array([1])) == module(numbers, np.array([1]))
    assert module.eval()(strings, np.array([1])) == module(numbers, np.array([1]))
    with pytest.raises(TypeError, match="input 'x' has a string that is no float32"):
        module(np.array([["1", "2", "three"]]), np.array([1]))


def test_blocks_need_a_model() -> None:
    with pytest.raises(RuntimeError, match="inside `with onnxblock.base"):
        onnxblock.blocks.Abs()("x")
    with pytest.raises(RuntimeError, match="is None"):
        onnxblock.base(None)
    with onnxblock.empty_base(), pytest.raises(RuntimeError, match="open already"):
        onnxblock.empty_base().__enter__()
    with pytest.raises(RuntimeError, match="no custom operators"):
        onnxblock.custom_op_library("x.so").__enter__()


class Chain(onnxblock.ForwardBlock):
    """Blocks that are applied one after the other."""

    def __init__(self, *blocks: onnxblock.Block) -> None:
        super().__init__()
        self._blocks = blocks

    def build(self, name: str) -> str:
        for block in self._blocks:
            name = block(name)
        return name


BLOCKS = {
    "Abs": (onnxblock.blocks.Abs(), np.abs),
    "Neg": (onnxblock.blocks.Neg(), np.negative),
    "Log": (onnxblock.blocks.Log(), np.log),
    "Sigmoid": (onnxblock.blocks.Sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
    "Softplus": (onnxblock.blocks.Softplus(), lambda x: np.log1p(np.exp(x))),
    "Pow": (onnxblock.blocks.Pow(3.0), lambda x: x**3),
    "Clip": (onnxblock.blocks.Clip(0.5, 1.5), lambda x: np.clip(x, 0.5, 1.5)),
    "Clip above": (onnxblock.blocks.Clip(clip_max=1.5), lambda x: np.minimum(x, 1.5)),
    "ReduceMean": (onnxblock.blocks.ReduceMean(), lambda x: np.mean(x, keepdims=True)),
    "ReduceSum": (onnxblock.blocks.ReduceSum(keepdims=False), np.sum),
    "Cast": (onnxblock.blocks.Cast(to=TensorProto.INT64), lambda x: x.astype(np.int64)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes(name: str) -> None:
    block, expected = BLOCKS[name]
    chain = Chain(block)
    inputs = np.array([[0.25, 1, 2]], np.float32)
    with onnxblock.empty_base(17) as accessor:
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])
        accessor.model.graph.input.append(value)
        chain("x")
    made = chain.to_model_proto()
    (got,) = ReferenceEvaluator(made).run(None, {"x": inputs})
    np.testing.assert_allclose(got, expected(inputs), rtol=1e-5)


def test_blocks_of_two_values_and_of_new_weights() -> None:
    blocks = onnxblock.blocks
    with onnxblock.empty_base(17) as accessor:
        graph = accessor.model.graph
        graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]))
        assert blocks.InputLike("x")("other") == "other"
        with pytest.raises(LookupError, match="no input or output 'z'"):
            blocks.InputLike("z")()
        pair = ("x", "other")
        values = [kind()(*pair) for kind in (blocks.Add, blocks.Sub, blocks.Mul, blocks.Div)]
        values.append(blocks.Linear(3, 4)("x"))
        assert blocks.PassThrough()(*pair) == pair
        blocks.SequenceConstruct()(*pair)
        norm = blocks.ReduceAllL2()(*pair)
        assert [value.name for value in graph.value_info] == [norm]
        assert len(graph.node) == 7 and graph.node[-1].domain == "com.microsoft"
        del graph.node[5:]
        made = onnx.shape_inference.infer_shapes(accessor.model)
    made.graph.output.extend(v for v in made.graph.value_info if v.name in values)
    x, other = np.full((2, 3), 6, np.float32), np.full((2, 3), 2, np.float32)
    got = ReferenceEvaluator(made).run(values, {"x": x, "other": other})
    assert [value.flat[0] for value in got[:4]] == [8, 4, 12, 3]
    weight, bias = (onnx.numpy_helper.to_array(t) for t in made.graph.initializer)
    np.testing.assert_allclose(got[4], x @ weight + bias, rtol=1e-4)


def test_a_label_encoder() -> None:
    encoder = onnxblock.blocks.LabelEncoder(keys_int64s=[1, 2], values_int64s=[10, 20])
    with onnxblock.empty_base(17) as accessor:
        accessor.model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
        value = helper.make_tensor_value_info("x", TensorProto.INT64, [3])
        accessor.model.graph.input.append(value)
        encoder("x")
        attributes = {a.name: a for a in accessor.model.graph.node[0].attribute}
    assert list(attributes["values_int64s"].ints) == [10, 20]
    assert "keys_floats" not in attributes and attributes["default_int64"].i == -1


def test_optimizers_say_kind_and_constants(tmp_path: Path) -> None:
    clip = onnxblock.optim.ClipGradNorm(2.5)
    adamw = onnxblock.optim.AdamW(False, (0.5, 0.75), 0.25, 0.125, clip)
    models.generate(tmp_path, optimizer=adamw)
    _, module = models.load(tmp_path)
    read = Optimizer(tmp_path / "optimizer_model.onnx", module).constants
    assert (read.kind, read.mode, read.bias_correction) == (1, 1, False)
    assert (read.beta1, read.beta2, read.eps, read.weight_decay) == (0.5, 0.75, 0.25, 0.125)
    assert (read.max_norm, read.momentum) == (2.5, 0)
    models.generate(tmp_path, optimizer=onnxblock.optim.SGD(momentum=0.5))
    read = Optimizer(tmp_path / "optimizer_model.onnx", module).constants
    assert (read.kind, read.momentum, read.max_norm) == (2, 0.5, 0)


def test_a_checkpoint_goes_into_a_model(tmp_path: Path) -> None:
    models.generate(tmp_path)
    made = models.mlp(seed=7)
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", made)
    expected = {t.name: onnx.numpy_helper.to_array(t) for t in models.mlp().graph.initializer}
    got = {t.name: onnx.numpy_helper.to_array(t) for t in made.graph.initializer}
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in got)
    assert [value.name for value in made.graph.input] == ["x"]
    with pytest.raises(RuntimeError, match="no parameters"):
        onnxblock.save_checkpoint(None, tmp_path / "checkpoint")


def run_command(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gradd.train", "artifacts", *map(str, arguments)]
    path = {"PYTHONPATH": str(ROOT / "adapters/python")}
    return subprocess.run(command, capture_output=True, text=True, env=path, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    out = tmp_path / "files"
    options = ("--loss", "cross_entropy", "--train", "fc2.*", "--out", out)
    done = run_command(tmp_path / "model.onnx", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 parameters to train, 2 frozen; files in {out}\n"
    assert {file.name for file in out.iterdir()} == set(FILES)
    estimate = ("--estimate", "--batch", 1, 4096)
    done = run_command(tmp_path / "model.onnx", *options, *estimate)
    lines = done.stdout.splitlines()[1:]
    assert [line.split("  ")[0] for line in lines] == [
        *("parameters", "gradients", "optimizer"),
        *("activations, batch 1", "activations, batch 4096"),
    ]
    assert lines[1].split()[1:] == ["0.1", "KiB"] and lines[2].split()[1:] == ["0.2", "KiB"]
    assert float(lines[4].split()[-2]) > float(lines[3].split()[-2]) > 0
    done = run_command(tmp_path / "model.onnx", "--train", "head.*", "--out", out)
    assert done.returncode == 1
    assert done.stderr == "gradd artifacts: no initializer of floats matches 'head.*'\n"
    done = run_command(tmp_path / "none.onnx", "--train", "*")
    assert done.returncode == 1 and "none.onnx" in done.stderr


def test_a_branch_is_exported_with_what_it_reads(tmp_path: Path) -> None:
    """The weight is read in the branch alone; another node with a branch is left out."""
    info = helper.make_tensor_value_info
    branches = [
        helper.make_graph([helper.make_node(op, ["x", "w"], ["z"])], op, [], [info("z", 1, None)])
        for op in ("Mul", "Sub")
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Equal", ["n", "two"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("If", ["c"], ["q"], then_branch=branches[1], else_branch=branches[0]),
    ]
    values = {"w": np.array([0.5, -2, 30], np.float32), "two": np.array([2])}
    made = models.model(nodes, {"x": ["batch", 3]}, {n: ["batch", 3] for n in "yq"}, values)
    mse = artifacts.LossType.MSELoss
    models.generate(tmp_path, made, requires_grad=["w"], loss=mse, loss_input_names=["y"])
    _, module = models.load(tmp_path)
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    trained = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(trained, True)
    assert [node.output[0] for node in trained.graph.node] == ["n", "c", "y"]
    x = np.ones((2, 3), np.float32)
    (got,) = ReferenceEvaluator(trained).run(None, {"x": x})
    np.testing.assert_array_equal(got, x * values["w"])
    got = ReferenceEvaluator(trained).run(None, {"x": x[:1]})[0]
    np.testing.assert_array_equal(got, x[:1] - values["w"])


def test_dropout_in_a_branch_is_not_exported(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Dropout", ["y"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", 1, None)],
    )
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["y"]),
        helper.make_node("If", ["yes"], ["s"], then_branch=branch, else_branch=branch),
    ]
    values = {"w": np.ones(3, np.float32), "yes": np.array(True)}
    made = models.model(nodes, {"x": ["batch", 3]}, {n: ["batch", 3] for n in "ys"}, values)
    mse = artifacts.LossType.MSELoss
    models.generate(tmp_path, made, requires_grad=["w"], loss=mse, loss_input_names=["y"])
    _, module = models.load(tmp_path)
    with pytest.raises(RuntimeError, match="a node Dropout stands in a subgraph"):
        module.export_model_for_inferencing(tmp_path / "trained.onnx", ["s"])


@pytest.mark.parametrize("opset", [13, 22])
def test_a_hard_sigmoid_trains(opset: int, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["s"]),
        helper.make_node("HardSigmoid", ["s"], ["y"], alpha=1 / 6),
    ]
    values = {"w": np.array([0.5, -2, 30], np.float32)}
    made = models.model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    made.opset_import[0].version = opset
    models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss)
    inputs = np.array([[1, 2, 9], [-3, 0.5, -9]], np.float32)
    target = np.zeros((2, 3), np.float32)
    loss, _, grad = step_of(tmp_path, inputs, target)
    weight = torch.tensor(values["w"], requires_grad=True)
    scores = torch.nn.functional.hardsigmoid(torch.tensor(inputs) * weight)
    expected = scores.square().mean()
    expected.backward()
    np.testing.assert_allclose(loss, expected.detach(), rtol=1e-6)
    np.testing.assert_allclose(grad, weight.grad, rtol=1e-6)


def test_functions_of_a_model_are_put_in_place(tmp_path: Path) -> None:
    body = [helper.make_node("Mul", ["a", "b"], ["c"])]
    opsets = [helper.make_opsetid("", 17)]
    times = helper.make_function("own", "Times", ["a", "b"], ["c"], body, opsets)
    nodes = [helper.make_node("Times", ["x", "w"], ["y"], domain="own")]
    values = {"w": np.array([0.5, -2, 30], np.float32)}
    made = models.model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    made.functions.append(times)
    made.opset_import.append(helper.make_opsetid("own", 1))
    models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss)
    x = np.ones((1, 3), np.float32)
    loss, *_ = step_of(tmp_path, x, np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(loss, (values["w"] ** 2).mean(), rtol=1e-6)


def test_a_function_has_defaults(tmp_path: Path) -> None:
    """A call that leaves an attribute out, one that gives it, and one within another function."""
    act = helper.make_node("LeakyRelu", ["t"], ["o"])
    act.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    slope = [helper.make_attribute("slope", 0.5)]
    leaky = helper.make_function(
        "own", "Leaky", ["t"], ["o"], [act], opsets, attribute_protos=slope
    )
    outer = [helper.make_node("Leaky", ["a"], ["b"], domain="own")]
    whole = helper.make_function("own", "Whole", ["a"], ["b"], outer, opsets)
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node("Leaky", ["h"], ["i"], domain="own"),
        helper.make_node("Whole", ["i"], ["j"], domain="own"),
        helper.make_node("Leaky", ["j"], ["y"], domain="own", slope=0.25),
    ]
    values = {"w": np.array([1], np.float32)}
    made = models.model(nodes, {"x": ["batch", 1]}, {"y": ["batch", 1]}, values)
    made.functions.extend([leaky, whole])
    made.opset_import.append(helper.make_opsetid("own", 1))
    models.generate(tmp_path, made, loss=artifacts.LossType.L1Loss)
    loss, *_ = step_of(tmp_path, np.array([[-16]], np.float32), np.zeros((1, 1), np.float32))
    assert loss == 16 * 0.5 * 0.5 * 0.25


@pytest.mark.parametrize("kind", ["CrossEntropyLoss", "MSELoss"])
@pytest.mark.parametrize("what", ["a result of a node", "an initializer"])
def test_a_label_is_not_a_value_of_the_model(kind: str, what: str, tmp_path: Path) -> None:
    label = "target" if kind == "MSELoss" else "labels"
    weight, hidden = (label, "h") if what == "an initializer" else ("w", label)
    nodes = [
        helper.make_node("Mul", ["x", weight], [hidden]),
        helper.make_node("Sigmoid", [hidden], ["y"]),
    ]
    values = {weight: np.ones(3, np.float32)}
    made = models.model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    with pytest.raises(RuntimeError, match=f"the input '{label}', but '{label}' is {what}"):
        models.generate(tmp_path, made, loss=artifacts.LossType[kind])


def test_running_statistics_are_not_trained(tmp_path: Path) -> None:
    inputs, outputs = ["x", "s", "b", "m", "v"], ["y", "m2", "v2"]
    norm = helper.make_node("BatchNormalization", inputs, outputs, training_mode=1)
    made = models.model([norm], {"x": ["n", 2]}, {"y": ["n", 2]}, NORM_VALUES)
    with pytest.raises(RuntimeError, match="'m', 'v': running statistics of a BatchNormalization"):
        models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss)
    onnx.save(made, tmp_path / "norm.onnx")
    done = run_command(tmp_path / "norm.onnx", "--train", "*", "--loss", "mse", "--out", tmp_path)
    assert "2 running statistics of batch norms match" in done.stdout, done.stderr
    state, _ = models.load(tmp_path)
    assert [n for n, p in state.parameters if not p.requires_grad] == ["m", "v"]


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_may_be_inputs(ir_version: int, tmp_path: Path) -> None:
    """As all are before version 4; those that are no parameters are constants."""
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    values = {"w": np.full(3, 2, np.float32), "b": np.ones(3, np.float32)}
    made = models.model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    made.ir_version = ir_version
    made.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in values
    )
    models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss, requires_grad=["w"])
    x = np.ones((2, 3), np.float32)
    loss, _, grad = step_of(tmp_path, x, np.zeros((2, 3), np.float32))
    assert loss == 9
    np.testing.assert_allclose(grad, [2, 2, 2])


def test_bounds_of_a_clip_are_trained(tmp_path: Path) -> None:
    """Quantisation with a learnt range (PACT): torch gives the bound a gradient."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node("Clip", ["h", "lo", "hi"], ["y"]),
    ]
    values = {
        k: np.array(v, np.float32) for k, v in {"w": [1, 2, -1], "lo": -0.5, "hi": 0.7}.items()
    }
    made = models.model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, values)
    models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss, requires_grad=[*values])
    # Nothing is equal to a bound: there versions of torch differ.
    x = np.array([[0.6, 2, 3], [-0.4, -9, 0.1], [5, 0.2, -4]], np.float32)
    step_of(tmp_path, x, np.zeros_like(x))
    state, module = models.load(tmp_path)
    module(x, np.zeros_like(x))
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    y = torch.clamp(torch.tensor(x) * theirs["w"], theirs["lo"], theirs["hi"])
    y.pow(2).mean().backward()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(state.parameters[name].grad, tensor.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("trained", [["w", "weights"], ["weights"]], ids="-".join)
def test_weights_of_a_loss_are_not_trained(op: str, trained: list[str], tmp_path: Path) -> None:
    """torch has no derivative of them either."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node("LogSoftmax", ["h"], ["p"], axis=1),
        helper.make_node(op, ["p", "labels", "weights"], ["loss"]),
    ]
    values = {"w": np.ones(3, np.float32), "weights": np.array([0.3, 0.5, 1], np.float32)}
    made = models.model(nodes, {"x": ["batch", 3]}, {"loss": []}, values)
    made.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
    models.generate(tmp_path, made, loss=None, requires_grad=trained)
    x, labels = np.ones((2, 3), np.float32), np.array([0, 2])
    with pytest.raises(RuntimeError, match="needs a gradient, which"):
        step_of(tmp_path, x, labels)


def test_batch_norms_before_opset_14_train(tmp_path: Path) -> None:
    """As torch writes them: five results and no mode. Statistics and gradients are those of 17."""
    losses = []
    for opset, names in ((13, ["y", "m2", "v2", "m3", "v3"]), (17, ["y", "m2", "v2"])):
        mode = {"training_mode": 1} if opset == 17 else {}
        norm = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], names, **mode)
        made = models.model([norm], {"x": ["n", 2]}, {"y": ["n", 2]}, NORM_VALUES)
        made.opset_import[0].version = opset
        with pytest.raises(RuntimeError, match="'m', 'v': running statistics"):
            models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss)
        frozen = {"requires_grad": ["s", "b"], "frozen_params": ["m", "v"]}
        models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss, **frozen)
        state, module = models.load(tmp_path)
        x, target = np.array([[1, 4], [3, -2], [8, 0]], np.float32), np.ones((3, 2), np.float32)
        found = [module(x, target), state.parameters["s"].grad]
        found += [state.parameters[name].data for name in ("m", "v")]
        losses.append([*found, module.eval()(x, target)])
        module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
        onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), True)
    for old, new in zip(*losses):
        np.testing.assert_array_equal(old, new)
