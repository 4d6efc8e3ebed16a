"""The trial before a capture undoes what forward() writes to its module, all of it or nothing."""

from __future__ import annotations

import outside_undone
import pytest
import state_undone
import torch
from selection import one_in
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
DEEDS = outside_undone.named(
    state_undone.CONTAINERS,
    state_undone.REPLACED,
    state_undone.OF_USERS,
    state_undone.MEMORY,
)


@pytest.mark.parametrize("name", one_in(2, DEEDS))
def test_a_trial_leaves_the_module_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    outside_undone.follow(DEEDS[name])


class Notes:
    """An object of outside."""

    def __init__(self) -> None:
        self.calls, self.seen, self.total = 0, [0], torch.zeros(3)


class Fails(nn.Module):
    """Writes, and raises then: at every call, at the second one, or without gradients only."""

    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.notes, self.table = nn.Linear(4, 3), Notes(), {"calls": 0}
        self.rows, self.when = nn.ModuleList(), when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.calls += 1
        self.notes.seen[0] += 1
        self.notes.seen.append(len(self.notes.seen))
        self.notes.total.add_(1)
        self.table["calls"] += 1
        assert len(self.table) == 1
        self.rows.append(nn.Identity())
        if self.when == "always" or self.when == "second" and self.notes.calls == 2:
            raise ValueError(self.when)
        if self.when == "without" and not torch.is_grad_enabled():
            raise ValueError(self.when)
        return self.lin(x) * self.table["calls"]


def _steps(net: nn.Module, plain: Fails, grad: bool) -> list:
    found = []
    for _ in range(4):
        with torch.set_grad_enabled(grad):
            try:
                result = net(torch.ones(2, 4)).sum().item()
            except ValueError as error:
                result = str(error)
        notes = plain.notes
        state = (notes.calls, list(notes.seen), notes.total.tolist(), dict(plain.table))
        found.append((result, *state, len(plain.rows)))
    return found


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("when", ["always", "second", "without", "never"])
def test_a_forward_that_raises_has_run_once(when: str, grad: bool) -> None:
    plain, other = Fails(when), Fails(when)
    expected, found = _steps(plain, plain, grad), _steps(ORTModule(other), other, grad)
    for ours, eager in zip(found, expected, strict=True):
        assert ours[1:] == eager[1:]
        assert ours[0] == (eager[0] if isinstance(eager[0], str) else pytest.approx(eager[0]))


class Late(nn.Module):
    """Begins to write when captures exist."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.mid, self.late, self.done = nn.Linear(4, 3), nn.Linear(3, 3), False, False
        self.table, self.scales = {"n": 0.0}, nn.ParameterList([torch.ones(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            self.table["n"] += 1
            x = x * (len(self.table) + sum(self.table.values()))
            if not self.done:
                self.done = True
                self.mid = nn.Sequential(self.mid, nn.Tanh())
                self.scales.append(nn.Parameter(torch.ones(3) * 2))
        return self.mid(self.lin(x)) * self.scales[-1]


def test_writes_of_later_calls_are_undone() -> None:
    plain, other = Late(), Late()
    net, x = ORTModule(other), torch.linspace(-1, 1, 8).view(2, 4)
    for number in range(10):
        plain.late = other.late = number in (3, 4, 6, 9)
        expected, found = plain(x), net(x)
        torch.testing.assert_close(found, expected, msg=f"call {number}")
        assert other.table == plain.table and type(other.mid) is type(plain.mid)
        assert len(other.scales) == len(plain.scales)
        expected.sum().backward()
        found.sum().backward()
    assert net.gradd_stats()["captures"] >= 2
