"""export_gradient_graph(): ONNX's own evaluator gets PyTorch's loss and gradients from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import nn

from gradd import ORTModule
from gradd.errors import IoError, TensorError, UnsupportedError
from gradd.legacy.gradient_graph import export_gradient_graph
from gradd.spec import CaptureError

pytestmark = pytest.mark.one_in(2)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gradient.onnx"


def loaded(file: Path) -> onnx.ModelProto:
    """The file, in which every operator is ONNX's own."""
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    return model


def run(file: Path, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """What the file computes, by name."""
    graph = loaded(file).graph
    feed = {"input": x, "labels": y, **dict(model.named_parameters())}
    given = {i.name: feed[i.name].detach().numpy() for i in graph.input}
    results = ReferenceEvaluator(onnx.load(str(file))).run(None, given)
    return {o.name: torch.from_numpy(r) for o, r in zip(graph.output, results, strict=True)}


def check(file: Path, model: nn.Module, loss_fn: Loss, x: torch.Tensor, y: torch.Tensor) -> None:
    """The file's results are PyTorch's."""
    got = run(file, model, x, y)
    output = model(x)
    loss = loss_fn(output, y)
    loss.backward()
    torch.testing.assert_close(got.pop("output"), output.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.pop("loss"), loss.detach(), rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(got.pop(f"{name}_grad"), p.grad, rtol=1e-4, atol=1e-6)
    assert not got


class Encoder(nn.Module):
    """Embedding, attention, norms and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids)).mean(1))


class Moves(nn.Module):
    """What is cut, picked, padded and put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layer(x)
        parts = [a[:, ::2].exp(), a.flip(1).log_softmax(1), a[torch.tensor([0, 0, 2])].T[:, :3].T]
        parts[2] = F.pad(parts[2], (2, 3), mode="reflect")[:, :4].repeat(2, 1)[:5]
        return torch.cat([*parts, torch.log1p(a.square()), torch.expm1(a), F.mish(a)], 1)


def image_net(*layers: nn.Module) -> nn.Module:
    """A convolution in front, a linear layer behind."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(5))


IMAGES = (torch.Size([2, 3, 10, 10]), 5)
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1),
        (torch.Size([5, 6]), 3),
    ),
    "pools": (
        lambda: image_net(nn.MaxPool2d(3, 2, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(3)),
        nn.CrossEntropyLoss(),
        IMAGES,
    ),
    "norms": (
        lambda: image_net(nn.BatchNorm2d(4), nn.SiLU(), nn.GroupNorm(2, 4)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        IMAGES,
    ),
    "upwards": (
        lambda: image_net(nn.ConvTranspose2d(4, 2, 3, 2, 1), nn.ELU(), nn.Upsample(scale_factor=2)),
        nn.CrossEntropyLoss(),
        IMAGES,
    ),
    "encoder": (Encoder, nn.CrossEntropyLoss(), (torch.Size([2, 7]), 4)),
    "moves": (Moves, lambda out, y: (out * (y + 1).reshape(-1, 1)).sum(), (torch.Size([5, 6]), 3)),
    "probabilities": (
        lambda: nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0)),
        lambda out, y: F.binary_cross_entropy(out, y.to(out.dtype)),
        (torch.Size([5, 6]), 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pytorchs(daemon: object, file: Path, name: str) -> None:
    make, loss_fn, (shape, classes) = CASES[name]
    torch.manual_seed(3)
    model = make()
    whole = isinstance(model, Encoder)
    x = torch.randint(0, 11, shape) if whole else torch.randn(shape)
    y = torch.randint(0, classes, shape[:1])
    model(x)  # lazy layers
    export_gradient_graph(model, loss_fn, x, y, file)
    check(file, model, loss_fn, x, y)


@pytest.mark.quick
def test_what_is_trained_and_what_is_read(daemon: object, file: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[0].weight.requires_grad_(False)
    x, y = torch.randn(5, 6), torch.randn(5, 2)
    scale = torch.rand(2)

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (scale * (output - labels)).abs().mean()

    export_gradient_graph(ORTModule(model), loss_fn, x, y, str(file), 23)
    graph = loaded(file).graph
    names = ["input", "labels", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert [i.name for i in graph.input] == names
    assert [o.name for o in graph.output] == ["output", "loss", *(f"{n}_grad" for n in names[3:])]
    check(file, model, loss_fn, x, y)


def test_a_dropout_and_its_gradient_have_one_mask(daemon: object, file: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64, bias=False), nn.Dropout(0.25))
    x, y = torch.ones(1, 6), torch.ones(1, 64)

    def total(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output * labels).sum()

    export_gradient_graph(model, total, x, y, file)
    got = run(file, model, x, y)
    kept = got["output"][0] != 0
    assert 30 < kept.sum() < 64
    torch.testing.assert_close(got["0.weight_grad"][:, 0], kept / 0.75)
    export_gradient_graph(model.eval(), total, x, y, file)
    assert bool((run(file, model, x, y)["0.weight_grad"] == 1).all())


def test_two_outputs_have_numbers(daemon: object, file: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y, y.tanh()

    model, x = Two(), torch.randn(4, 3)
    export_gradient_graph(
        model, lambda out, y: (out[1] - y).square().sum(), x, torch.ones(4, 2), file
    )
    names = [o.name for o in loaded(file).graph.output]
    assert names == ["output_0", "output_1", "loss", "layer.weight_grad", "layer.bias_grad"]


class Recurrent(nn.Module):
    """A layer over time, which ONNX has, but not its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Broken(nn.Module):
    """More than one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y.exp()


REFUSED: list[tuple[type[nn.Module], Loss, type[Exception], str]] = [
    (
        Recurrent,
        lambda o, y: o.sum() + y.sum(),
        UnsupportedError,
        r"node \d+ .* com.gradd::Recurrence is no .*layer @ .*graph.py:\d+\)$",
    ),
    (Broken, lambda o, y: o.sum() + y.sum(), CaptureError, "3 graphs of this call, expected one"),
    (nn.Tanh, lambda o, y: o.sum() + y.sum(), ValueError, "depends on no parameter"),
]


@pytest.mark.parametrize(("make", "loss_fn", "error", "says"), REFUSED)
def test_refused_by_name(
    daemon: object,
    file: Path,
    make: type[nn.Module],
    loss_fn: Loss,
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        export_gradient_graph(make(), loss_fn, torch.randn(2, 5, 4), torch.ones(2), file)
    assert not file.exists()


@pytest.mark.quick
def test_wrong_arguments(daemon: object, file: Path, tmp_path: Path) -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(2, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match="opset_version=12: graphs have opset 23"):
        export_gradient_graph(model, F.mse_loss, x, y, file, 12)
    with pytest.raises(TypeError, match="example_labels must be a tensor, got list"):
        export_gradient_graph(model, F.mse_loss, x, [1, 2], file)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"'loss' is f32\[2,3\]: a gradient of 1 arrives at one"):
        export_gradient_graph(model, lambda o, y: o - y, x, y, file)
    with pytest.raises(IoError, match="No such file or directory"):
        export_gradient_graph(model, F.mse_loss, x, y, tmp_path / "none" / "x.onnx")
