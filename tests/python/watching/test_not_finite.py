"""The first node that makes a NaN: the finite check of DebugOptions, and detect_anomaly()."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from gradd import DebugOptions, ORTModule
from gradd.errors import NonFiniteError
from helpers.models import families
from helpers.nets import assert_same_grads

pytestmark = pytest.mark.usefixtures("shared_daemon")

CHECKED = DebugOptions(finite_check=True)


@pytest.fixture(autouse=True)
def _without_torchs_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that anomalies are detected, and the traceback of one
        yield


class Root(nn.Module):
    """A layer, a function of its results, and a layer behind."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.function(self.first(x))
        return self.last(h).sum()


def below_zero(h: torch.Tensor) -> torch.Tensor:
    return torch.log(-h.abs() - 1)


def flat_root(h: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(h * 0)  # 0, and the gradient is infinity times 0


def hidden(h: torch.Tensor) -> torch.Tensor:
    return torch.where(h > -1e9, h, below_zero(h))  # the NaN reach no result


X = torch.ones(2, 4)


@pytest.mark.quick
def test_forward_names_node_module_and_line() -> None:
    model = ORTModule(Root(below_zero), CHECKED)
    for _ in range(2):  # the first call is compared with PyTorch before
        with pytest.raises(NonFiniteError, match=r"\(Log\): output 0, element 0 of 8 is nan") as e:
            model(X)
        assert "test_not_finite.py:" in e.value.what and e.value.what.startswith("forward: node")
    assert not model.gradd_stats()["in_torch"]


def test_backward_names_node_module_and_line() -> None:
    for options, anomalies in ((CHECKED, False), (None, True)):
        model = ORTModule(Root(flat_root), options)
        with torch.autograd.set_detect_anomaly(anomalies):
            loss = model(X)
            with pytest.raises(NonFiniteError, match=r"gradient of node \d+ 'n\d+' \(Mul\)") as e:
                loss.backward()
        assert "element 0 of 8 is nan" in e.value.what and "test_not_finite.py:" in e.value.what


def test_an_anomaly_names_the_node_of_the_forward() -> None:
    """The forward passes, as in PyTorch."""
    model = ORTModule(Root(below_zero))
    with torch.autograd.detect_anomaly():
        loss = model(X)
        assert loss.isnan()
        with pytest.raises(NonFiniteError, match=r"node \d+ 'n\d+' \(Log\): it makes the") as e:
            loss.backward()
    assert "that reaches gradient of node" in e.value.what and "test_not_finite.py:" in e.value.what


@pytest.mark.parametrize("check_nan", [True, False])
def test_what_pytorch_takes_is_no_anomaly(check_nan: bool) -> None:
    """An infinite gradient, values that no gradient sees; with check_nan=False all."""
    twin = Root(hidden)
    models = [ORTModule(Root(hidden)), ORTModule(nn.Linear(4, 1)), ORTModule(Root(flat_root))]
    models[0].load_state_dict(twin.state_dict())
    with torch.autograd.set_detect_anomaly(True, check_nan):
        models[0](X).backward()
        twin(X).backward()
        assert_same_grads(models[0].module, twin)
        models[1](X).backward(torch.full((2, 1), float("inf")))
        assert models[1].weight.grad.isinf().all()
        loss = models[2](X)
        if not check_nan:
            loss.backward()
            assert models[2].first.weight.grad.isnan().all()


def test_an_infinity_that_leaves_fails_the_check() -> None:
    model = ORTModule(nn.Linear(4, 1), CHECKED)
    out = model(X)
    with pytest.raises(NonFiniteError, match="is -?inf"):
        out.backward(torch.full((2, 1), float("inf")))


def test_what_comes_from_outside_is_named() -> None:
    model = ORTModule(nn.Linear(4, 1), CHECKED)
    out = model(X)
    with pytest.raises(NonFiniteError, match="the gradient of output 0 has one when it arrives"):
        out.backward(torch.full((2, 1), float("nan")))
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="input 'weight' has one already"):
        model(X)


@pytest.mark.parametrize("name", ["llama", pytest.param("bert_mlm", marks=pytest.mark.nightly)])
def test_a_healthy_model_passes(name: str) -> None:
    """With padding, rows without a label, and masks of -inf; the values stay the same."""
    plain, make_batch = families.build(name)
    eager, data = copy.deepcopy(plain), make_batch(4, 16, 0)
    model = ORTModule(plain, CHECKED, strict=True)
    for net in (model, eager):
        with torch.autograd.set_detect_anomaly(net is model):
            for _ in range(2):
                net(**data).loss.backward()
    assert_same_grads(model.module, eager)
    assert model.gradd_stats()["padding_rows_left_out"]
