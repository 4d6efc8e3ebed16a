"""Training steps, state and files through gradd.train, against PyTorch and against themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from gradd.train import (
    CheckpointState,
    LinearLRScheduler,
    Module,
    Optimizer,
    TrainError,
    artifacts,
    onnxblock,
)
from helpers import device_models as models

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of mlp() with AdamW, a nominal checkpoint too."""
    return models.generate(tmp_path_factory.mktemp("adamw"), nominal_checkpoint=True)


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with SGD, the first layer frozen."""
    kept = ["fc1.weight", "fc1.bias"]
    return models.generate(
        tmp_path_factory.mktemp("sgd"),
        requires_grad=["fc2.weight", "fc2.bias"],
        frozen_params=kept,
        optimizer=artifacts.OptimType.SGD,
    )


def torch_mlp(state: CheckpointState) -> torch.nn.Sequential:
    """The model in PyTorch with the state's values."""
    made = torch.nn.Sequential(
        torch.nn.Linear(models.IN, models.HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(models.HIDDEN, models.OUT),
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            layer = {"0": "fc1", "2": "fc2"}[name.split(".")[0]]
            parameter.copy_(torch.tensor(state.parameters[f"{layer}.{name[2:]}"].data))
    return made


def optimizer_of(folder: Path, module: Module) -> Optimizer:
    return Optimizer(folder / "optimizer_model.onnx", module)


def trained(folder: Path, module: Module, optimizer: Optimizer, seeds: range) -> list[np.ndarray]:
    losses = []
    for seed in seeds:
        losses.append(module(*models.batch(seed)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def test_losses_of_twenty_steps_are_torchs(folder: Path) -> None:
    state, module = models.load(folder)
    optimizer = optimizer_of(folder, module)
    optimizer.set_learning_rate(0.05)
    model = torch_mlp(state)
    # eps is 1e-6 as in the artifacts; transformers' form differs from torch's where it counts
    other = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-6)
    for seed in range(20):
        inputs, labels = models.batch(seed)
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(inputs)), torch.tensor(labels))
        other.zero_grad()
        loss.backward()
        other.step()
        got = module(inputs, labels)
        assert got.shape == () and got.dtype == np.float32
        assert got == pytest.approx(loss.item(), rel=1e-4)
        optimizer.step()
        module.lazy_reset_grad()


def test_gradients_add_up_until_they_are_reset(folder: Path) -> None:
    state, module = models.load(folder)
    assert not state.parameters["fc1.weight"].grad.any()
    model = torch_mlp(state)
    for seed in range(2):
        inputs, labels = models.batch(seed)
        module(inputs, labels)
        scores = model(torch.tensor(inputs))
        torch.nn.functional.cross_entropy(scores, torch.tensor(labels)).backward()
    expected = model[0].weight.grad.numpy()
    np.testing.assert_allclose(state.parameters["fc1.weight"].grad, expected, rtol=1e-4, atol=1e-6)
    first = models.batch(0)
    module.lazy_reset_grad()
    module(*first)
    model.zero_grad()
    scores = model(torch.tensor(first[0]))
    torch.nn.functional.cross_entropy(scores, torch.tensor(first[1])).backward()
    expected = model[0].weight.grad.numpy()
    np.testing.assert_allclose(state.parameters["fc1.weight"].grad, expected, rtol=1e-4, atol=1e-6)


def test_a_resumed_training_repeats_the_bits(folder: Path, tmp_path: Path) -> None:
    state, module = models.load(folder)
    optimizer = optimizer_of(folder, module)
    trained(folder, module, optimizer, range(3))
    CheckpointState.save_checkpoint(state, tmp_path / "kept", include_optimizer_state=True)
    expected = trained(folder, module, optimizer, range(3, 6))
    state = CheckpointState.load_checkpoint(tmp_path / "kept")
    module = Module(folder / "training_model.onnx", state)
    got = trained(folder, module, optimizer_of(folder, module), range(3, 6))
    assert got == expected
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    CheckpointState.save_checkpoint(state, tmp_path / "kept")
    assert not list(tmp_path.glob("kept?*"))


def test_frozen_parameters_stay(sgd: Path) -> None:
    state, module = models.load(sgd)
    optimizer = optimizer_of(sgd, module)
    before = {name: parameter.data for name, parameter in state.parameters}
    trained(sgd, module, optimizer, range(1))
    for name, parameter in state.parameters:
        same = np.array_equal(before[name], parameter.data)
        assert same == (not parameter.requires_grad) == name.startswith("fc1")
        assert (parameter.grad is None) == name.startswith("fc1")
    assert module.get_parameters_size() == 3 * models.HIDDEN + 3
    assert module.get_parameters_size(False) > module.get_parameters_size(True)
    assert module.get_contiguous_parameters(True).shape() == [module.get_parameters_size()]


def test_contiguous_parameters_there_and_back(sgd: Path) -> None:
    state, module = models.load(sgd)
    optimizer = optimizer_of(sgd, module)
    for only in (True, False):
        old = module.get_contiguous_parameters(trainable_only=only)
        trained(sgd, module, optimizer, range(1))
        assert not np.array_equal(old.numpy(), module.get_contiguous_parameters(only).numpy())
        module.copy_buffer_to_parameters(old, trainable_only=only)
        assert np.array_equal(old.numpy(), module.get_contiguous_parameters(only).numpy())
    joined = [state.parameters[name].data.ravel() for name in models.names(models.mlp())]
    assert np.array_equal(module.get_contiguous_parameters().numpy(), np.concatenate(joined))
    with pytest.raises(RuntimeError, match="elements"):
        module.copy_buffer_to_parameters(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="float64, expected float32"):
        module.copy_buffer_to_parameters(np.zeros(3))


def test_a_nominal_checkpoint_gets_its_values_later(folder: Path) -> None:
    _, complete = models.load(folder)
    state, module = models.load(folder, "nominal_checkpoint")
    optimizer = optimizer_of(folder, module)
    assert module.get_parameters_size() == complete.get_parameters_size()
    assert "fc1.weight" in state.parameters
    with pytest.raises(RuntimeError, match="Please load the parameter states first"):
        state.parameters["fc1.weight"]
    with pytest.raises(RuntimeError, match="Please load all the parameter states first"):
        state.parameters["fc1.weight"] = np.ones((models.HIDDEN, models.IN), np.float32)
    steps = [lambda: module(*models.batch()), optimizer.step, module.get_contiguous_parameters]
    for step in [*steps, lambda: module.eval()(*models.batch())]:
        with pytest.raises(RuntimeError, match="Please load the model parameters first."):
            step()
    module.copy_buffer_to_parameters(complete.get_contiguous_parameters(), trainable_only=False)
    assert module.train()(*models.batch()) == complete(*models.batch())


def test_export_is_what_the_module_computes(folder: Path, tmp_path: Path) -> None:
    state, module = models.load(folder)
    trained(folder, module, optimizer_of(folder, module), range(2))
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    exported = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(exported, True)
    assert [value.name for value in exported.graph.input] == ["x"]
    inputs, _ = models.batch()
    (scores,) = ReferenceEvaluator(exported).run(None, {"x": inputs})
    expected = torch_mlp(state)(torch.tensor(inputs)).detach().numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="the model has no output 'nothing'"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["nothing"])
    for names, error, words in (
        ([], RuntimeError, "0 outputs, expected one at least"),
        (["scores", "scores"], RuntimeError, "output 'scores' is named twice"),
        (["x"], RuntimeError, "'x' is an input of the model"),
        ("scores", TypeError, "expected a list of names"),
        ([None], TypeError, "expected a list of names"),
    ):
        with pytest.raises(error, match=words):
            module.export_model_for_inferencing(tmp_path / "model.onnx", names)
    with pytest.raises(RuntimeError, match="no eval model"):
        Module(
            folder / "training_model.onnx",
            CheckpointState.load_checkpoint(folder / "checkpoint"),
        ).export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])


def test_learning_rates(sgd: Path) -> None:
    _, module = models.load(sgd)
    optimizer = optimizer_of(sgd, module)
    assert optimizer.get_learning_rate() == pytest.approx(1e-3)
    optimizer.set_learning_rate(0.5)
    assert optimizer.get_learning_rate() == 0.5
    scheduler = LinearLRScheduler(optimizer, 2, 4, 0.5)
    rates = [optimizer.get_learning_rate()]
    for seed in range(5):
        trained(sgd, module, optimizer, range(seed, seed + 1))
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    assert rates == [0, 0.25, 0.5, 0.25, 0, 0]
    with pytest.raises(RuntimeError, match="learning rate of -1"):
        optimizer.set_learning_rate(-1)


@pytest.mark.parametrize("value", [-1, 0, 2**40, -0.5, 1234.0, "text", "", "häß"])
def test_properties(value: object, folder: Path, tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert len(state.properties) == 0 and "p" not in state.properties
    state.properties["p"] = "another"
    state.properties["p"] = value
    CheckpointState.save_checkpoint(state, tmp_path / "kept")
    for held in (state, CheckpointState.load_checkpoint(tmp_path / "kept")):
        assert dict(held.properties) == {"p": value}
        assert type(held.properties["p"]) is type(value)


def test_properties_and_parameters_that_are_not_there(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(KeyError, match="Property p not found"):
        state.properties["p"]
    with pytest.raises(TypeError, match="is a list, expected an int, a float or a str"):
        state.properties["p"] = [1]
    with pytest.raises(OverflowError, match="64 bits"):
        state.properties["p"] = 2**63
    with pytest.raises(OverflowError, match="'p': 1e\\+300 does not fit into f32"):
        state.properties["p"] = 1e300
    state.properties["q"] = float("inf")
    assert state.properties["q"] == float("inf") and "p" not in state.properties
    with pytest.raises(KeyError, match="Parameter p not found"):
        state.parameters["p"]
    with pytest.raises(TypeError, match="load_checkpoint"):
        CheckpointState("path")
    assert repr(state.parameters) == str(models.names(models.mlp()))
    assert repr(state.parameters["fc1.bias"]) == "Parameter(name=fc1.bias, requires_grad=True)"


def test_values_of_parameters(folder: Path) -> None:
    state, _ = models.load(folder)
    ones = np.ones((models.HIDDEN, models.IN), np.float32)
    state.parameters["fc1.weight"].data = ones
    assert np.array_equal(state.parameters["fc1.weight"].data, ones)
    state.parameters["fc1.weight"] = np.asfortranarray(ones * 2)
    held = state.parameters["fc1.weight"].data
    held[:] = 9  # a copy
    assert np.array_equal(state.parameters["fc1.weight"].data, ones * 2)
    with pytest.raises(RuntimeError, match=r"'fc1.weight' is f32\[6,4\], not f32\[2\]"):
        state.parameters["fc1.weight"] = np.ones(2, np.float32)
    with pytest.raises(RuntimeError, match="not f64"):
        state.parameters["fc1.weight"] = np.ones((models.HIDDEN, models.IN))


class OrtValue:
    """As onnxruntime's."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray) -> OrtValue:
        return cls(array)

    def numpy(self) -> np.ndarray:
        return self._array


def test_ortvalues_go_in_and_come_out(folder: Path) -> None:
    _, module = models.load(folder)
    inputs, labels = models.batch()
    got = module(OrtValue(inputs), OrtValue(labels))
    assert type(got) is OrtValue
    assert type(module(OrtValue(inputs), labels)) is np.ndarray
    module.eval()
    assert module(OrtValue(inputs), OrtValue(labels)).numpy() == got.numpy()
    module.copy_buffer_to_parameters(OrtValue(np.ones(module.get_parameters_size(), np.float32)))


def test_inputs_that_do_not_fit_are_named(folder: Path) -> None:
    _, module = models.load(folder)
    inputs, labels = models.batch()
    with pytest.raises(RuntimeError, match="'x'.*f64"):
        module(inputs.astype(np.float64), labels)
    with pytest.raises(RuntimeError, match="'x'"):
        module(inputs[:, :3], labels)
    with pytest.raises(RuntimeError, match="expected 2 inputs, got 1"):
        module(inputs)
    with pytest.raises(TypeError, match="input 'labels' is a str"):
        module(inputs, "labels")
    with pytest.raises(TypeError, match="input 'x' has the element type complex64"):
        module(inputs.astype(np.complex64), labels)
    with pytest.raises(RuntimeError, match="label|index|range"):
        module(inputs, labels + 100)
    module(inputs[::2], labels[::2])  # another batch size, and strides


def test_what_a_module_cannot_be(folder: Path, tmp_path: Path) -> None:
    state, module = models.load(folder)
    with pytest.raises(RuntimeError, match="session already"):
        Module(folder / "training_model.onnx", state)
    del module
    Module(folder / "training_model.onnx", state)
    with pytest.raises(RuntimeError, match="device 'cuda:0': gradd.train runs on the CPU"):
        Module(folder / "training_model.onnx", state, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"model\.ort: gradd reads .onnx models"):
        Module(tmp_path / "model.ort", state)
    with pytest.raises(TrainError, match="no_such_model") as failure:
        Module(tmp_path / "no_such_model.onnx", state)
    assert failure.value.code == "IO"
    (tmp_path / "text").write_text("this is no checkpoint")
    with pytest.raises(RuntimeError, match="not of kind ODTC"):
        CheckpointState.load_checkpoint(tmp_path / "text")
    with pytest.raises(RuntimeError, match="no node AdamWOptimizer"):
        _, other = models.load(folder)
        Optimizer(_empty(tmp_path), other)


def _empty(folder: Path) -> Path:
    onnx.save(models.model([], {"x": [1]}, {"x": [1]}), folder / "empty.onnx")
    return folder / "empty.onnx"


def test_what_is_trained_is_chosen_on_the_device(folder: Path) -> None:
    state, module = models.load(folder)
    optimizer = optimizer_of(folder, module)
    assert module.freeze("fc1.*") == 2
    before = state.parameters["fc1.weight"].data
    trained(folder, module, optimizer, range(2))
    assert np.array_equal(before, state.parameters["fc1.weight"].data)
    assert not state.parameters["fc1.weight"].requires_grad
    assert module.thaw("*") == 2
    trained(folder, module, optimizer, range(2))
    assert not np.array_equal(before, state.parameters["fc1.weight"].data)
    assert module.memory()["moments"] == 2 * module.memory()["parameters"]
    with pytest.raises(RuntimeError, match="other"):
        module.freeze("other*")


def test_a_prepared_step_takes_no_more(folder: Path) -> None:
    _, module = models.load(folder)
    module.prepare((64, models.IN), (64,))
    before = module.memory()
    assert before["plans"] == 1 and before["arena"] > 0 and before["gradients"] == 0
    module(*models.batch(rows=64))
    after = module.memory()
    assert (after["plans"], after["arena"]) == (1, before["arena"])
    with pytest.raises(RuntimeError, match="expected 2 inputs, got 1"):
        module.prepare((64, models.IN))
    with pytest.raises(RuntimeError, match="budget"):
        _, small = models.load(folder, memory_budget=1)
        small.prepare((64, models.IN), (64,))


def test_names_are_those_of_the_model(folder: Path) -> None:
    _, module = models.load(folder)
    training = onnx.load(folder / "training_model.onnx")
    assert module.input_names() == [value.name for value in training.graph.input][:2]
    assert module.output_names() == [value.name for value in training.graph.output]
    assert module.eval().input_names() == ["x", "labels"] and not module.training


# ---- states in files ------------------------------------------------------------------------


def test_a_state_in_a_file_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """With the bits of a training that nothing interrupts."""
    state, module = models.load(folder)
    optimizer = optimizer_of(folder, module)
    LinearLRScheduler(optimizer, 2, 10, 0.05)
    expected = trained(folder, module, optimizer, range(6))
    path, losses = tmp_path / "state", []
    for end in (2, 4, 6):
        kept = CheckpointState.open(path, folder / "checkpoint", commit_every=1)
        assert kept.step == kept.position == max(0, end - 3)  # the last one was not committed
        module = Module(folder / "training_model.onnx", kept)
        optimizer = optimizer_of(folder, module)
        if not kept.step:
            LinearLRScheduler(optimizer, 2, 10, 0.05)
        for position in range(kept.position, end):
            losses[position:] = trained(folder, module, optimizer, range(position, position + 1))
            kept.position = position + 1
        del module, optimizer, kept
    assert losses == expected


def test_a_state_in_a_file_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(TrainError, match="there is no such file") as info:
        CheckpointState.open(path)
    assert info.value.code == "IO"
    state = CheckpointState.open(path, folder / "checkpoint")
    state.properties["note"] = "kept"
    state.commit()
    with pytest.raises(TrainError, match="the file that the state is committed to"):
        CheckpointState.save_checkpoint(state, path)
    with pytest.raises(TrainError, match="in use: this program or another has it open"):
        CheckpointState.open(path)
    del state
    assert CheckpointState.open(path).properties["note"] == "kept"
    path.write_bytes(path.read_bytes()[:8000])
    with pytest.raises(TrainError, match="no state of gradd"):
        CheckpointState.open(path)
    with pytest.raises(TrainError, match="the state has no file"):
        models.load(folder)[0].commit()


@pytest.mark.parametrize("kinds", [("sgd", "adamw"), ("adamw", "sgd")], ids="-".join)
def test_another_kind_of_optimizer_starts_without_moments(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    """A checkpoint of one kind is resumed by the other as if it had no optimizer state."""
    blocks = {"sgd": onnxblock.optim.SGD(momentum=0.9), "adamw": onnxblock.optim.AdamW()}
    for kind, block in blocks.items():
        (tmp_path / kind).mkdir()
        models.generate(tmp_path / kind, optimizer=block)
    first, second = (tmp_path / kind for kind in kinds)
    state, module = models.load(first)
    trained(first, module, optimizer_of(first, module), range(3))
    losses = []
    for with_optimizer in (True, False):
        kept = tmp_path / f"kept_{with_optimizer}"
        CheckpointState.save_checkpoint(state, kept, with_optimizer)
        other = CheckpointState.load_checkpoint(kept)
        module = Module(second / "training_model.onnx", other)
        losses.append(trained(second, module, optimizer_of(second, module), range(3, 7)))
    assert losses[0] == losses[1]


def test_tensors_of_torch_are_inputs(folder: Path) -> None:
    inputs, labels = models.batch()
    _, module = models.load(folder)
    expected = module(inputs, labels)
    found = module(torch.tensor(inputs, requires_grad=True), torch.tensor(labels))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(TypeError, match="input 'x' is no array on the CPU"):
        module(torch.empty(2, 4, device="meta"), labels)


def test_a_batch_that_the_graph_fixes_is_exported(tmp_path: Path) -> None:
    """A step with another size, which would say what depends on it, cannot be planned."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "p"], ["y"]),
    ]
    values = {"w": np.ones((6, 3), np.float32), "p": np.ones((4, 3), np.float32)}
    made = models.model(nodes, {"x": ["batch", 6]}, {"y": ["batch", 3]}, values)
    models.generate(tmp_path, made, loss=artifacts.LossType.MSELoss, requires_grad=["w"])
    _, module = models.load(tmp_path)
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    (output,) = onnx.load(tmp_path / "trained.onnx").graph.output
    assert [d.dim_value or d.dim_param for d in output.type.tensor_type.shape.dim] == [4, 3]


def test_a_model_that_declares_a_fixed_size_dynamic_is_exported(tmp_path: Path) -> None:
    made = models.mlp()
    made.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "features"
    models.generate(tmp_path, made)
    _, module = models.load(tmp_path)
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    (output,) = onnx.load(tmp_path / "trained.onnx").graph.output
    dims = output.type.tensor_type.shape.dim
    assert [d.dim_value for d in dims] == [0, models.OUT]


def test_an_output_whose_type_cannot_be_found_is_named(tmp_path: Path) -> None:
    """Of a model that takes one size of each of two dimensions, and declares neither."""
    values = {"w": np.ones((4, 3), np.float32), "c": np.ones((5, 3), np.float32)}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
        onnx.helper.make_node("Add", ["h", "c"], ["scores"]),
    ]
    shapes = {"x": ["n", "a", "b"]}, {"scores": ["n", 5, 3]}
    models.generate(tmp_path, models.model(nodes, *shapes, values))
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    del evaluation.graph.value_info[:]  # which has what the model declared
    onnx.save(evaluation, tmp_path / "eval_model.onnx")
    _, module = models.load(tmp_path)
    with pytest.raises(TrainError, match=r"'scores' is not known: .*\[2,2,2\] and f32\[4,3\]"):
        module.export_model_for_inferencing(tmp_path / "no.onnx", ["scores"])
