"""Reads that leave no trace in the bytecode of forward(): seen when they change, or refused."""

from __future__ import annotations

import copy
import weakref

import outside_encoded
import outside_facts
import outside_handed
import outside_hidden
import outside_lists
import outside_memory
import outside_more
import outside_patterns
import outside_weak
import pytest
import torch
from nets import step_agrees
from outside_rows import follow
from selection import one_in

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
_LISTS = (
    outside_handed.CALLED,
    outside_encoded.COMPARED,
    outside_encoded.ENCODED,
    outside_memory.ARRAYS,
    outside_memory.BUFFERS,
    outside_lists.LISTS,
    outside_weak.BEHIND,
    outside_more.MORE,
    outside_hidden.HIDDEN,
    outside_facts.FACTS,
)
ROWS = {
    **outside_patterns.ENDS,
    **outside_patterns.PATTERNS,
    **outside_patterns.STRANGERS,
    **{f"{row.read} {i}": row for i, row in enumerate(row for rows in _LISTS for row in rows)},
}


@pytest.mark.parametrize("name", one_in(3, ROWS))
def test_a_change_is_seen_or_its_reading_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    follow(ROWS[name])


class Listed(torch.nn.Module):
    """Makes a tensor of a list with a parameter, which gets no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 3)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * torch.tensor([self.scale, x.sum(), 1.0]) * self.scale


def test_a_parameter_in_a_list_has_the_gradient_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    eager = Listed()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    for _ in range(2):
        step_agrees(ours, eager, x)
    assert ours.gradd_stats()["fallbacks"] == {"data_dependent_control_flow": 2}


class Child(torch.nn.Module):
    def __init__(self, parent: torch.nn.Module) -> None:
        super().__init__()
        self.lin, self.parent = torch.nn.Linear(4, 3), weakref.ref(parent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.parent().scale


class Parent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.scale = Child(self), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


def test_the_module_behind_a_weak_reference_of_its_own() -> None:
    eager = Parent()
    ours = ORTModule(eager, strict=True)
    for scale in (2.0, 3.0):
        ours.scale = scale
        step_agrees(ours, eager, torch.randn(2, 4))
    assert ours.gradd_stats()["captures"] == 2


class Indexed(torch.nn.Module):
    """Indices by tensors are no values that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        i = x[:, 0].argsort()
        return self.lin(x)[i, i.flip(0)]


def test_tensors_as_indices_are_no_list_of_values() -> None:
    eager = Indexed()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for rows in (([0.0], [1.0]), ([1.0], [0.0])):
        step_agrees(ours, eager, torch.tensor(rows).expand(2, 4).contiguous())
