"""Statistics of activations in files, as onnxruntime.training.utils.hooks writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.legacy.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    inspect_activation,
)

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Net(nn.Module):
    """Two layers, and a value that is looked at between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The result, and its square."""
        x = inspect_activation("between", self.layers(x) * 2)
        y = self.last(x)
        return {"y": y, "square": y * y}


def _numbers(path: Path) -> dict[str, float]:
    pairs = re.findall(r"(\w+): (-?[\d.e-]+|nan|inf)", path.read_text().split("samples")[0])
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize("wrapped", [False, True])
def test_statistics_are_those_of_the_tensors(wrapped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(3, 4)
    folder = tmp_path / "stats"
    used = ORTModule(model) if wrapped else model
    GlobalSubscriberManager.subscribe(used, [StatisticsSubscriber(str(folder), 1, 3)])
    try:
        for _ in range(4):
            used(x)["square"].sum().backward()
    finally:
        GlobalSubscriberManager.remove()
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_2"]
    between = model.layers(x) * 2
    y = model.last(between)
    expected = {
        "Linear_2_0th_output": model.layers[0](x),
        "Tanh_3_0th_output": model.layers(x),
        "Sequential_1_0th_output": model.layers(x),
        "between": between,
        "Linear_4_0th_output": y,
        "Net_0_0th_output": y,
        "Net_0_1th_output": y * y,
    }
    step = folder / "step_1"
    order = (step / "order.txt").read_text().split()
    assert [n.removesuffix("_forward") for n in order if n.endswith("forward")] == list(expected)
    for name, tensor in expected.items():
        found = _numbers(step / f"{name}_forward")
        t = tensor.detach()
        assert found["mean"] == pytest.approx(t.mean().item(), rel=1e-3, abs=1e-6)
        assert found["std"] == pytest.approx(t.std().item(), rel=1e-3)
        assert found["min"] == pytest.approx(t.min().item(), rel=1e-3)
        assert found["max"] == pytest.approx(t.max().item(), rel=1e-3)
        assert f"pos: {int((t > 0).sum())}" in (step / f"{name}_forward").read_text()
    gradient = _numbers(step / "Linear_4_0th_output_backward")
    assert gradient["mean"] == pytest.approx((2 * y).mean().item(), rel=1e-3)
    assert (step / "Tanh_3_0th_output_forward").read_text().startswith(">>Tanh_3_0th")
    before = len(list(tmp_path.rglob("*")))
    used(x)["square"].sum().backward()
    assert len(list(tmp_path.rglob("*"))) == before
    if wrapped:
        again = ORTModule(model)
        again(x)["square"].sum().backward()
        assert used.gradd_stats()["breaks"] and not again.gradd_stats()["breaks"]


@pytest.mark.quick
def test_values_that_are_not_numbers_are_counted(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        StatisticsSubscriber(str(tmp_path))
    subscriber = StatisticsSubscriber(str(tmp_path), override_output_dir=True, run_on_cpu=True)
    odd = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -2.0], dtype=torch.bfloat16)
    subscriber.write(odd, "odd", 0, "odd forward run")
    subscriber.write(torch.tensor([3]), "one", 0, "one")
    subscriber.write(torch.zeros(0), "none", 0, "none")
    text = (tmp_path / "step_0" / "odd").read_text()
    assert "nan: 1, inf: 1" in text and "neg: 1, pos: 2, zero: 1" in text
    assert "std: 0.0" in (tmp_path / "step_0" / "one").read_text()
    assert "no elements" in (tmp_path / "step_0" / "none").read_text()
    assert (tmp_path / "step_0" / "order.txt").read_text().split() == ["odd", "one", "none"]
