"""Self-checks run forward() with stand-ins: the module gets its own parameters back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Twice(nn.Module):
    """A child under two names and in a list, a tied weight, a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4), self.first])
        self.layers[1].weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_buffer("again", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every one of them."""
        x = self.second(self.first(x).tanh()) * self.scale
        for layer in self.layers:
            x = layer(x).tanh() + self.again
        return x


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.quick
@pytest.mark.parametrize("grad", [True, False])
def test_parameters_are_the_same_objects(grad: bool) -> None:
    module = Twice()
    before = {name: id(t) for name, t in named(module).items()}
    model = ORTModule(module, strict=True)
    with torch.set_grad_enabled(grad):
        model(torch.randn(2, 4))
    assert model.gradd_stats()["self_checks"] == 1
    assert {name: id(t) for name, t in named(module).items()} == before


def test_training_goes_on() -> None:
    torch.manual_seed(2)
    theirs = Twice()
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    for rows in (3, 1, 3, 5, 2):
        x = torch.randn(rows, 4)
        for called, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            called(x).square().sum().backward()
            optimizer.step()
    for (name, p), q in zip(named(ours).items(), named(theirs).values(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


ONE = [2.0]


class Asks(nn.Module):
    """Does what it does by the types and identities of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, q: object, k: object, scale: object = None) -> torch.Tensor:
        """Twice for itself, three times for a size, five times for the list that it knows."""
        x = q[0] if isinstance(q, list | tuple) else q
        factor = 2.0 if k is q else 1.0
        factor *= 3.0 if isinstance(k, torch.Size) else 1.0
        return self.fc(x) * factor * (5.0 if scale is ONE else 1.0)


@pytest.mark.quick
@pytest.mark.parametrize("form", ["one list", "two lists", "a size", "sizes", "a known list"])
def test_arguments_are_what_they_were(form: str) -> None:
    if form == "two lists" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13, TorchDynamo cannot tell whether two lists are one")
    x = torch.randn(3, 4)
    one = [x]
    args = {
        "one list": (one, one),
        "two lists": (one, [x]),
        "a size": (x, x.shape),
        "sizes": ((x, x.shape), x.shape),
        "a known list": (x, x, ONE),
    }[form]
    module = Asks()
    expected = module(*args)
    model = ORTModule(module, strict=True)
    torch.testing.assert_close(model(*args), expected)
    assert model.gradd_stats()["self_checks"] == 1
