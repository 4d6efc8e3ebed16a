"""Tensors that a forward reads, changes or exchanges beside its arguments: as in PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Net(nn.Module):
    """A layer, multiplied by what a function makes of the tensors of the module."""

    def __init__(self, deed: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.deed = nn.Linear(4, 3), deed
        self.held = [nn.Linear(3, 3)]  # no submodule
        self.register_buffer("kept", torch.arange(3.0))
        self.numbers = np.array([3.0, 1.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.deed(self, x)

    def state(self) -> list[Any]:
        """All tensors, and their gradients."""
        tensors = [*self.parameters(), *self.held[0].parameters(), self.kept]
        pairs = [(t.tolist(), None if t.grad is None else t.grad.tolist()) for t in tensors]
        return [*pairs, self.numbers.tolist()]


def _data_of_a_parameter(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.held[0].bias.data.add_(1)
    return net.held[0].bias.detach().sum()


def _detached_parameter(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.held[0].bias.detach().add_(1)
        net.held[0].weight[0].mul_(2)
    return net.held[0](net.lin(x)).sum().detach()


def _vector_to_parameters(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(net.held[0].parameters())
        nn.utils.vector_to_parameters(vector * 0.9, net.held[0].parameters())
    return net.held[0](net.lin(x)).sum().detach()


def _resized_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    part = net.kept[:2]
    part.resize_(3).add_(1.0)
    return net.kept.sum()


def _filled_array(net: Net, x: torch.Tensor) -> float:
    net.numbers.fill(net.numbers[0] + 1)
    return float(net.numbers[0])


def _added_array(net: Net, x: torch.Tensor) -> float:
    np.add(net.numbers, 1, net.numbers)
    return net.numbers[:2].sum() + np.sqrt(4)


def _added_array_alone(net: Net, x: torch.Tensor) -> float:
    np.add(net.numbers, 1, net.numbers)
    return 2.0


def _two_constants_of_numpy(net: Net, x: torch.Tensor) -> float:
    net.numbers *= 0.5
    net.numbers -= 1
    return 2.0


def _compared_with_a_number_of_numpy(net: Net, x: torch.Tensor) -> float:
    net.numbers -= 0.7
    return 2.0 if np.float32(net.numbers[0]) > np.float32(1) else 1.0


def _shuffled_array(net: Net, x: torch.Tensor) -> float:
    np.random.shuffle(net.numbers)
    return net.numbers[0]


def _deleted_gradient(net: Net, x: torch.Tensor) -> float:
    del net.lin.weight.grad
    return 2.0


DEEDS = {
    f.__name__[1:].replace("_", " "): f
    for f in (
        *(_data_of_a_parameter, _detached_parameter, _vector_to_parameters, _resized_view),
        *(_filled_array, _added_array, _added_array_alone, _two_constants_of_numpy),
        *(_compared_with_a_number_of_numpy, _shuffled_array, _deleted_gradient),
    )
}


def _steps(net: Net, called: Callable, prepare: Callable[[Net, int], Any], n: int) -> list[Any]:
    found = []
    np.random.seed(0)
    for step in range(n):
        net.zero_grad()
        prepare(net, step)
        result = called(torch.ones(2, 4))
        result.sum().backward()
        found.append((result.tolist(), net.state()))
    return found


def compare(
    net: Net, prepare: Callable[[Net, int], Any] = lambda net, step: None, n: int = 4
) -> Any:
    """Some steps of training as in PyTorch; counts of gradd."""
    twin = copy.deepcopy(net)
    wrapped = ORTModule(net)
    assert _steps(net, wrapped, prepare, n) == _approximately(_steps(twin, twin, prepare, n))
    return wrapped.gradd_stats()


def _approximately(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_approximately, value))
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("name", DEEDS)
def test_what_a_forward_does_to_tensors(name: str) -> None:
    compare(Net(DEEDS[name]))


def test_a_number_of_numpy_is_a_constant_of_its_type() -> None:
    net = Net(lambda net, x: 2.0 if net.factor > np.float32(1) else 1.0)
    net.factor = np.float32(2)
    stats = compare(net, lambda net, i: setattr(net, "factor", np.float32(2 - 0.7 * i)))
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}


@pytest.mark.parametrize("check", ["0", "first"])
def test_a_buffer_that_wants_a_gradient_at_times(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    stats = compare(
        Net(lambda net, x: net.kept),
        lambda net, step: net.kept.requires_grad_(step in (1, 2)),
    )
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}


def _counts(net: Net, x: torch.Tensor) -> float:
    net.step += 1
    return 1.0 / net.step


NUMBERS: dict[str, tuple[Callable, Callable[[Any, int], Any]]] = {
    "of the module": (lambda net, x: net.step, lambda net, i: setattr(net, "step", i)),
    "compared": (lambda net, x: 1 + (net.step < 99), lambda net, i: setattr(net, "step", i)),
    "of a submodule": (lambda net, x: net.lin.k, lambda net, i: setattr(net.lin, "k", i)),
    "counted by the forward": (_counts, lambda net, i: None),
    "annealed": (lambda net, x: net.tau, lambda net, i: setattr(net, "tau", 0.9**i)),
    "warm-up": (lambda net, x: min(1.0, net.step / 5), lambda net, i: setattr(net, "step", i)),
    "cosine": (
        lambda net, x: 0.5 * (1 + math.cos(math.pi * net.step / 20)) + net.tau**2,
        lambda net, i: (setattr(net, "step", i), setattr(net, "tau", 0.9**i)),
    ),
    "limited": (
        lambda net, x: max(0.3, net.tau / 2) * min(3, net.step // 2),
        lambda net, i: (setattr(net, "step", i), setattr(net, "tau", 0.9**i)),
    ),
    "in a dictionary": (lambda net, x: net.table["a"], lambda net, i: net.table.update(a=0.9**i)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_in_every_call(name: str) -> None:
    read, change = NUMBERS[name]
    net = Net(read)
    net.step, net.lin.k, net.tau, net.table = 0, 0, 1.0, {"a": 1.0}
    stats = compare(net, change, 12)
    assert stats["graphs"] <= 3 and stats["fallbacks"] == {} and stats["parts_in_torch"] == {}


@pytest.mark.parametrize("first", [nn.LazyLinear, lambda n: nn.Linear(3, n)])
def test_lazy_modules_get_their_sizes_in_pytorch(first: Callable) -> None:
    net = nn.Sequential(first(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    wrapped = ORTModule(net)
    for _ in range(3):
        wrapped(torch.ones(2, 3)).sum().backward()
    stats = wrapped.gradd_stats()
    assert stats["fallbacks"] == {"unsupported_parameter": 1} and stats["forwards"] >= 2


READ: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "item": lambda net, x: int((x > 0).sum()),
    "and used": lambda net, x: net.lin(x)[:1] * (x.argmax().item() + 1),
    "size": lambda net, x: torch.nonzero(net.kept).shape[0],
    "float": lambda net, x: x.sum().item(),
    "list": lambda net, x: net.lin(x) * sum(net.kept.long().tolist()),
    "list of a result": lambda net, x: net.lin(x) * net.lin(x).argmax(0).tolist()[1],
}


@pytest.mark.parametrize("name", READ)
def test_values_of_tensors_as_numbers_of_a_graph(name: str) -> None:
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**settings):
        compare(Net(READ[name]))


BATCHED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda net, x: torch.vmap(lambda v: (v * v).sum())(x).sum(),
    "of a gradient": lambda net, x: torch.vmap(torch.func.grad(lambda v: net.lin(v).tanh().sum()))(
        x
    ).sum(),
    "of a vmap": lambda net, x: torch.vmap(torch.vmap(lambda v: v.exp() * 2))(net.lin(x)),
    "two": lambda net, x: torch.vmap(net.lin)(
        torch.vmap(lambda v: v.flip(0))(net.lin(x).tanh()[:, :1] * x)
    ).sigmoid(),
}


@pytest.mark.parametrize("name", BATCHED)
def test_functions_of_batches_are_cut_out(name: str) -> None:
    stats = compare(Net(BATCHED[name]))
    assert stats["fallbacks"] == {} and stats["parts_in_torch"].keys() == {"func_transform"}
    assert stats["forwards"] >= 4


DERIVED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda net, x: torch.func.grad(lambda v: (v * v).sum())(x).sum(),
    "jvp": lambda net, x: torch.func.jvp(lambda v: v * v, (x,), (x,))[1].sum(),
    "vjp": lambda net, x: torch.func.vjp(net.lin, x)[1](torch.ones(len(x), 3))[0].sum(),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_functions_run_in_pytorch(name: str) -> None:
    assert compare(Net(DERIVED[name]))["fallbacks"] == {"func_transform": 4}
