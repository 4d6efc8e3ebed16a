"""Buffers are results: what forward() does to one in PyTorch, the graph does too, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from nets import assert_close
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from gradd import ORTModule, export
from gradd.export import CaptureError, capturing, observe

pytestmark = pytest.mark.usefixtures("shared_daemon")


@pytest.fixture(autouse=True)
def without_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


class Holder(nn.Module):
    """A layer and buffers that a case changes, read afterwards."""

    def __init__(self, change: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("c", torch.full((4,), 2.0))
        self.register_buffer("n", torch.tensor(0))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.change(self, h)
        return h * self.b + self.n


def _power(s: Holder, h: torch.Tensor) -> None:
    """A step of the power iteration as spectral_norm takes it."""
    with torch.no_grad():
        s.b = F.normalize(torch.mv(s.layer.weight, s.c), dim=0, out=s.b)
        s.c = F.normalize(torch.mv(s.layer.weight.t(), s.b), dim=0, out=s.c)


def quietly(change: Callable) -> Callable:
    def run(s: Holder, h: torch.Tensor) -> None:
        with torch.no_grad():
            change(s, h)

    return run


def _swapped(s: Holder, h: torch.Tensor) -> None:
    s.b, s.c = s.c, s.b


CHANGES = {
    "swapped": _swapped,
    "in place": lambda s, h: s.b.add_(0.5),
    "average": quietly(lambda s, h: s.b.mul_(0.9).add_(h.mean(0), alpha=0.1)),
    "out": quietly(lambda s, h: torch.add(s.b, 0.5, out=s.b)),
    "out of itself": quietly(lambda s, h: torch.mv(s.layer.weight, s.c, out=s.b)),
    "division": quietly(lambda s, h: torch.div(s.c, 3.0, out=s.b)),
    "power iteration": _power,
    "copied": quietly(lambda s, h: s.b.copy_(0.9 * s.b + 0.1)),
    "assigned": lambda s, h: setattr(s, "b", s.b + 0.5),
    "an element": lambda s, h: s.b.__setitem__(0, s.b[0] + 1),
    "a slice": lambda s, h: s.b[1:3].add_(1),
    "through data": lambda s, h: s.b.data.add_(0.5),
    "through detach": lambda s, h: s.b.detach().mul_(0.5),
    "a view": lambda s, h: s.b.view(2, 2)[0].mul_(2.0),
    "a counter": lambda s, h: s.n.add_(1),
    "lerp": quietly(lambda s, h: s.b.lerp_(h.mean(0), 0.1)),
    "not read": quietly(lambda s, h: s.c.mul_(0.5)),
    "exchanged": quietly(lambda s, h: (old := s.b.clone(), s.b.copy_(s.c), s.c.copy_(old))),
}


def train(eager: nn.Module, steps: int = 3) -> None:
    """Steps through the daemon and in PyTorch; results and buffers agree after each."""
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for seed in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        a, b = ours(x), eager(x)
        for one, other in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
            assert_close(one, other)
        for (name, mine), (_, theirs) in zip(ours.named_buffers(), eager.named_buffers()):
            assert_close(mine.float(), theirs.float(), name)
    assert ours.gradd_stats()["fallbacks"] == {}


class Holders(nn.Module):
    """One per change, nested: the tracer treats buffers of the root in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(Holder(change) for change in CHANGES.values())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [holder(x) for holder in self.all]


def test_changes_of_nested_modules() -> None:
    train(Holders())


@pytest.mark.parametrize("name", ["out", "power iteration", "through detach"])
def test_changes_of_the_root(name: str) -> None:
    train(Holder(CHANGES[name]))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.tensor(1.0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.n.add_(1.0)
        return weight * self.n


def test_parametrizations() -> None:
    torch.manual_seed(0)
    counted = nn.Linear(4, 4)
    parametrize.register_parametrization(counted, "weight", Counting())
    train(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), counted))


def test_a_change_that_the_graph_has_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the eager forward beside the capture shows it."""

    def lossy(*args: object) -> observe.Observation:
        seen = original(*args)
        kept = seen.buffers["c"]
        seen.buffers["c"] = observe.BufferSeen(kept.before, kept.before + 1, False)
        return seen

    original = observe.observe
    monkeypatch.setattr(capturing.observe, "observe", lossy)
    with pytest.raises(CaptureError, match="changes the buffer 'c'") as error:
        export.capture(Holder(CHANGES["out"]), (torch.randn(3, 4),), {})
    assert error.value.reason == "attribute_written"


WRITTEN = {
    "in place": quietly(lambda s, h: s.layer.weight.mul_(0.5)),
    "through data": lambda s, h: s.layer.weight.data.mul_(0.5),
    "a row": quietly(lambda s, h: s.layer.weight[0].mul_(0.5)),
    "embedding": lambda s, h: F.embedding(torch.tensor([1]), s.layer.weight, max_norm=0.01),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_a_capture_does_not_write_parameters(write: Callable) -> None:
    """The call runs again in PyTorch, so the observed forward must not count."""
    eager = Holder(write)
    model = ORTModule(copy.deepcopy(eager))
    for seed in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        assert_close(model(x), eager(x))
        assert_close(model.layer.weight, eager.layer.weight)
    assert sum(model.gradd_stats()["fallbacks"].values()) == 2


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.l, self.name = nn.Linear(4, 4), name
        self.register_buffer(name, torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = getattr(self, self.name)
        buffer.mul_(0.9).add_(x.mean(0))
        return self.l(x) * buffer


@pytest.mark.parametrize("name", ["code", "graph"])
def test_a_name_that_the_exporter_needs_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"unsupported_parameter: .*'{name}', and torch.fx"):
        export.capture(Named(name), (torch.randn(2, 4),), {})


SAVED: dict[str, Callable[[nn.Module], float]] = {
    "how many": lambda m: float(len(m.state_dict())),
    "which": lambda m: 1.0 + ("b" in m.state_dict()),
    "of a layer": lambda m: 1.0 + len(m.layer.state_dict()),
    "the set itself": lambda m: 1.0 + len(m._non_persistent_buffers_set),
}


@pytest.mark.parametrize("name", SAVED)
def test_which_buffers_are_saved_may_change(name: str) -> None:
    class Counts(Holder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * SAVED[name](self)

    eager, x = Counts(lambda *_: None), torch.ones(2, 4)
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    nets = (ours.module, eager)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: None,
        lambda m: m._non_persistent_buffers_set.add("b"),
        lambda m: m.layer.register_buffer("more", torch.ones(1), persistent=False),
        lambda m: m.layer._non_persistent_buffers_set.clear(),
        lambda m: setattr(m, "_non_persistent_buffers_set", {"c", "n"}),
    ]
    for change in changes:
        for net in nets:
            change(net)
        assert_close(ours(x), eager(x), name)
        assert_close(ours(x), eager(x), name)
