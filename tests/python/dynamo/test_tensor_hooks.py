"""A hook on a tensor gets the gradient of all its readers, those before the hook among them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Net(nn.Module):
    """Two layers, and a forward in which a result of the first one gets a hook."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[torch.Tensor] = []
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.first(x))

    def keep(self, gradient: torch.Tensor) -> None:
        self.seen.append(gradient)


def _behind_a_reader(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = net.second(h).tanh()
    h.register_hook(lambda g: g * 2)
    return a.sum() + net.second(h.sin()).sum()


def _behind_all_readers(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = net.second(h).tanh()
    h.register_hook(lambda g: g * 2)
    return a.sum()


def _with_a_value_of_a_reader(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = net.second(h) * 2
    known = a.sin().detach()
    h.register_hook(lambda g: g * 2 * known)
    return a.sum() + h.sum()


def _on_what_was_written(net: Net, h: torch.Tensor) -> torch.Tensor:
    before = h + 1
    h.mul_(2)
    a = net.second(h)
    h.view(-1).register_hook(lambda g: g * 7)  # nothing reads this view
    h.register_hook(lambda g: g * 3)
    return a.sum() + net.second(before).sum()


def _on_what_is_written_later(net: Net, h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda g: g * 3)
    a = net.second(h + 1)
    a.register_hook(lambda g: g * 2)
    a.mul_(5)
    return a.sum()


def _on_one_of_several(net: Net, h: torch.Tensor) -> torch.Tensor:
    a, b = h.chunk(2, 1)
    c = net.second(torch.cat([a.sin(), b], 1))
    a.register_hook(lambda g: g * 3)
    return c.sum()


def _in_a_loop(net: Net, h: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        h = net.second(h).tanh()
        total = h.sum()
        h.register_hook(lambda g: g * 3)
    return total + net.second(h).sum()


def _on_what_no_loss_reads(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = h * 2
    a.register_hook(lambda g: g * 2)
    net.a = a
    return net.second(h).sum()


def _at_a_break(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = net.second(h).tanh()
    h.register_hook(net.keep)
    return a.sum() + h.sum()


def _retained(net: Net, h: torch.Tensor) -> torch.Tensor:
    a = net.second(h).tanh()
    h.retain_grad()
    net.h = h
    return a.sum() + net.second(h).sum()


@pytest.mark.parametrize(
    "body",
    [
        *(_behind_a_reader, _behind_all_readers, _with_a_value_of_a_reader, _on_what_was_written),
        *(
            _on_what_is_written_later,
            _on_one_of_several,
            _in_a_loop,
            _on_what_no_loss_reads,
            _at_a_break,
            _retained,
        ),
    ],
)
def test_hooks_get_the_whole_gradient(
    body: Callable[[Net, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    theirs = Net(body)
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours)
    for rows in (4, 3):
        x = torch.randn(rows, 8)
        for net in (model, theirs):
            net(x).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(ours.seen, theirs.seen)
        if body is _retained:
            torch.testing.assert_close(ours.h.grad, theirs.h.grad)
    where = "in_torch" if body not in (_at_a_break, _retained) else "breaks"
    assert model.gradd_stats()[where]
