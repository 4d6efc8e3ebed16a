"""`x.requires_grad = True` for a value that forward() has computed; hooks that collect results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = [pytest.mark.usefixtures("shared_daemon"), pytest.mark.quick]
X = torch.linspace(-1, 1, 18).view(3, 6)


class Net(nn.Module):
    def __init__(self, body: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(6, 6), nn.Linear(6, 2), body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def a_view(net: Net, x: torch.Tensor) -> Any:
    h = x[:, None]
    h.requires_grad = True
    return net.b(net.a(h).tanh())


def written_before(net: Net, x: torch.Tensor) -> Any:
    h = torch.zeros(3, 6)
    h[:, 1] = x[:, 2] * 3
    h.requires_grad = True
    return net.a(h).tanh()


def asked(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.a(h) * (3 if h.requires_grad and h.is_leaf else 5)


def frozen(net: Net, x: torch.Tensor) -> Any:
    h = net.a(x).detach()
    h.requires_grad = h.requires_grad  # as it is
    return net.b(h)


def twice(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    h.requires_grad = True
    return net.b(h)


def returned(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.b(net.a(h).tanh()), h


def returned_view(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.b(net.a(h).tanh()), h.view(6, 3)


def only_of_it(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return h.exp()


WHOLE = [a_view, written_before, asked, twice]


@pytest.mark.parametrize(
    "body", [*WHOLE, frozen, returned, returned_view, only_of_it], ids=lambda f: f.__name__
)
def test_as_in_pytorch(body: Callable) -> None:
    net = Net(body)
    ours, twin = ORTModule(net, strict=body in WHOLE), copy.deepcopy(net)
    for step in range(2):
        results = []
        for model in (ours, twin):
            found = model(X + step)
            first, *more = found if isinstance(found, tuple) else (found,)
            for other in more:
                other.retain_grad()
            first.square().sum().backward()
            results.append([first, *more, *(x.grad for x in more)])
            results[-1] += [x.requires_grad for x in (first, *more)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    if body in WHOLE:
        stats = ours.gradd_stats()
        assert (stats["captures"], stats["breaks"], stats["in_torch"]) == (1, 0, {})


def test_what_has_a_history_stays_as_it_is() -> None:
    def body(net: Net, x: torch.Tensor) -> Any:
        h = net.a(x)
        h.requires_grad = True
        return h

    with pytest.raises(RuntimeError, match="of leaf variables"):
        ORTModule(Net(body))(X)


def test_asking_for_hidden_states_breaks_no_graph() -> None:
    """transformers installs hooks for them in the first such call."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    net = LlamaModel(config)
    ours, twin = ORTModule(net, strict=True), copy.deepcopy(net)
    ids = torch.arange(6).view(2, 3)
    for asks in (True, True, False, True):
        results = [
            model(ids, output_hidden_states=asks, use_cache=False).hidden_states
            for model in (ours, twin)
        ]
        torch.testing.assert_close(*results)
        for states in filter(None, results):
            sum(x.sin().sum() for x in states).backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    stats = ours.gradd_stats()
    assert (stats["breaks"], stats["in_torch"]) == (0, {})
    assert ours._gradd_compiled.owner.compiled == 2  # with and without
