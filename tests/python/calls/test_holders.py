"""Parameters and buffers whose memory is also held outside of torch."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.memory import holders
from gradd.optim import FusedAdam
from helpers.nets import assert_close
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")

N = 12


def _array() -> tuple[torch.Tensor, Any]:
    owner = np.linspace(0.5, 1.5, N, dtype=np.float32)
    return torch.from_numpy(owner), owner


def _slice() -> tuple[torch.Tensor, Any]:
    owner = np.linspace(0.5, 1.5, N + 2, dtype=np.float32)
    return torch.from_numpy(owner[1:-1]), owner[1:-1]


def _as_tensor() -> tuple[torch.Tensor, Any]:
    owner = np.linspace(0.5, 1.5, N, dtype=np.float32)
    return torch.as_tensor(owner), owner


def _dlpack() -> tuple[torch.Tensor, Any]:
    owner = np.linspace(0.5, 1.5, N, dtype=np.float32)
    return torch.from_dlpack(owner), owner


def _bytearray() -> tuple[torch.Tensor, Any]:
    memory = bytearray(np.linspace(0.5, 1.5, N, dtype=np.float32).tobytes())
    return torch.frombuffer(memory, dtype=torch.float32), np.frombuffer(memory, np.float32)


def _map() -> tuple[torch.Tensor, Any]:
    memory = mmap.mmap(-1, 4 * N)
    view = np.frombuffer(memory, np.float32)
    view[:] = np.linspace(0.5, 1.5, N, dtype=np.float32)
    return torch.frombuffer(memory, dtype=torch.float32), view


def _file() -> tuple[torch.Tensor, Any]:
    with tempfile.NamedTemporaryFile() as file:
        owner = np.memmap(file.name, np.float32, "w+", shape=(N,))
    owner[:] = np.linspace(0.5, 1.5, N, dtype=np.float32)
    return torch.from_numpy(owner), owner


def _taken_later() -> tuple[torch.Tensor, Any]:
    tensor = torch.from_numpy(np.linspace(0.5, 1.5, N, dtype=np.float32))
    return tensor, tensor.numpy()


HELD = [_array, _slice, _as_tensor, _dlpack, _bytearray, _map, _file, _taken_later]


class Table(nn.Module):
    """A weight in given memory, as a parameter or buffer."""

    def __init__(self, memory: torch.Tensor, buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("table", memory)
        else:
            self.table = nn.Parameter(memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.table.view(4, 3)).square().sum()


PLACES = [(make, buffer) for make in HELD for buffer in (False, True)]
ALWAYS = [*PLACES[::2], (_array, True), (_file, True)]


@pytest.mark.parametrize("place", every_run(ALWAYS, PLACES))
def test_writes_pass_in_both_directions(place: tuple[Callable, bool]) -> None:
    make, buffer = place
    (ours, a), (theirs, b) = make(), make()
    model, eager = ORTModule(Table(ours, buffer), strict=True), Table(theirs, buffer)
    x = torch.randn(4, 4)
    for step in range(3):
        for m, owner in ((model, a), (eager, b)):
            m.zero_grad()
            loss = m(x)
            loss.backward()
            owner *= 1.5  # the owner writes
            with torch.no_grad():
                m.table.mul_(1.25).add_(m.linear.weight.grad.sum())  # torch writes
        assert_close(model(x), eager(x))
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert_close(p.grad, q.grad)
        assert np.allclose(a, b, rtol=1e-5), f"step {step}: the owner does not see torch's writes"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, FusedAdam])
def test_an_optimizer_reaches_the_owner(optimizer: type) -> None:
    memory, owner = _array()
    before = owner.copy()
    model = ORTModule(Table(memory, False), strict=True)
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 4)).backward()
        steps.step()
        assert np.array_equal(owner, model.table.detach().numpy())
        assert not np.allclose(owner, before)
        owner += 1
        before = owner.copy()


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: ORTModule(m, strict=True)])
def test_fused_adam_leaves_held_parameters_in_their_place(wrap: Callable) -> None:
    """A state dict that is alive follows the training, as it does with torch's optimizers."""
    models = [Table(torch.ones(N), False) for _ in range(2)]
    states = [dict(m.state_dict()) for m in models]
    ours, theirs = wrap(models[0]), models[1]
    a = FusedAdam(ours.parameters(), lr=0.1, eps=1e-8, adam_w_mode=2, weight_decay=0.01)
    b = torch.optim.AdamW(theirs.parameters(), lr=0.1, eps=1e-8, weight_decay=0.01)
    for k in range(4):
        x = torch.randn(4, 4)
        for m, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            m(x).backward()
            optimizer.step()
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)
            assert torch.equal(value, ours.get_parameter(name)), name
        del value
        if k == 1:
            states = [{"table": s["table"]} for s in states]  # the others are alone now
    assert a.copied_params == 3 + 3 + 1 + 1


def _saved(**options: Any) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.pt"
        torch.save(torch.ones(N), path)
        return torch.load(path, **options)


ALONE: dict[str, Callable[[], torch.Tensor]] = {
    "torch": lambda: torch.ones(N),
    "loaded": _saved,
    "mapped": lambda: _saved(mmap=True),
    "array": lambda: torch.from_numpy(np.ones(N, np.float32)),
    "bytes": lambda: torch.frombuffer(bytes(4 * N), dtype=torch.float32),
    "bytearray": lambda: torch.frombuffer(bytearray(4 * N), dtype=torch.float32),
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("kind", ALONE)
def test_memory_without_other_holders_moves(kind: str) -> None:
    model = ORTModule(Table(ALONE[kind](), False), strict=True)
    model(torch.randn(4, 4)).backward()
    assert model.gradd_stats()["mirrored"] == 0


def test_memory_moves_when_its_owner_is_gone() -> None:
    memory, owner = _array()
    model = ORTModule(Table(memory, False), strict=True)
    del memory
    model(torch.randn(4, 4)).backward()
    assert model.gradd_stats()["mirrored"] == 1
    del owner
    model(torch.randn(4, 4)).backward()
    assert model.gradd_stats()["mirrored"] == 0


def test_another_structure_of_storages_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_layout", lambda: None)
    assert holders.is_foreign(torch.from_numpy(np.ones(N)))
    assert holders.is_foreign(_saved())
    assert not holders.is_foreign(torch.ones(N))


def test_the_structure_of_storages_is_known() -> None:
    assert holders._layout() is not None
