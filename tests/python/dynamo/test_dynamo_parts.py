"""Models with a part that the daemon cannot run: the rest stays there, gradients are PyTorch's."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.fallback import SelfCheckError
from helpers.nets import determinants

pytestmark = pytest.mark.usefixtures("shared_daemon")


class _Clamped(torch.autograd.Function):
    """A backward that no formula gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0) * 2


def determinant(net: Net, h: torch.Tensor) -> torch.Tensor:
    return torch.linalg.det(h[..., None, None])


def function(net: Net, h: torch.Tensor) -> torch.Tensor:
    return _Clamped.apply(h)


def branch(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h * 3


def printing(net: Net, h: torch.Tensor) -> torch.Tensor:
    print("here")
    return h


def item(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * float(h.detach().abs().max().item())


def counter(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return h * net.calls


FOREIGN = (determinant, function, branch, printing, item, counter)
CUT = (determinant, function)  # not between two graphs, but inside of one


class Net(nn.Module):
    """Two products, and something between them."""

    def __init__(self, between: Callable) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.between(self, torch.tanh(self.first(x)))))


def compare(ours: nn.Module, called: Callable, theirs: nn.Module, sizes: tuple = (4, 4, 6)) -> None:
    """Steps on both sides: results, gradients, and buffers."""
    for n in sizes:
        x = torch.randn(n, 16)
        for net in (ours, theirs):
            net.zero_grad()
        a, b = called(x), theirs(x)
        torch.testing.assert_close(a, b)
        for result in (a, b):
            result.square().sum().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, msg=name)
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("between", FOREIGN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["wrapped", "compiled"])
def test_the_rest_stays_in_the_daemon(between: Callable, how: str) -> None:
    torch.manual_seed(3)
    ours = Net(between)
    theirs = copy.deepcopy(ours)
    if how == "compiled":
        ours.compile(backend="gradd")
        compare(ours, ours, theirs)
        return
    wrapped = ORTModule(ours)
    compare(ours, wrapped, theirs)
    stats = wrapped.gradd_stats()
    parts = 1 if between is counter else 2  # in each step; a counter becomes an input
    assert stats["forwards"] >= 3 * parts
    assert bool(stats["parts_in_torch"]) is (between in CUT)
    assert between in CUT or stats["breaks"] >= 3 or between is counter


@pytest.mark.parametrize("between", CUT, ids=lambda f: f.__name__)
def test_a_cut_is_said_once_and_refused_in_strict_mode(
    between: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradd"):
        wrapped = ORTModule(Net(between))
        for _ in range(3):
            wrapped(torch.randn(4, 16))
    texts = [r.getMessage() for r in caplog.records if "run in PyTorch" in r.getMessage()]
    assert len(texts) == 1 and re.search("in the daemon|the daemon's share", texts[0])
    assert "test_dynamo_parts.py" in texts[0] and "parts in the daemon" not in texts[0]
    with pytest.raises(Exception, match=r"not in the daemon|autograd_function"):
        ORTModule(Net(between), strict=True)(torch.randn(4, 16))


def test_a_kill_between_parts_costs_no_bit(shared_daemon: Any) -> None:
    """The daemon dies between the forward and the backward of a model that is cut."""
    torch.manual_seed(3)
    net = Net(function)
    twin = copy.deepcopy(net)
    results = []
    for model, killed in ((net, False), (twin, True)):
        wrapped = ORTModule(model)
        torch.manual_seed(4)
        x = torch.randn(4, 16)
        for _ in range(2):
            model.zero_grad()
            loss = wrapped(x).square().sum()
            if killed:
                shared_daemon.kill()
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def strided(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Depends on how the sum lies in memory: as what it was made of, column by column."""
    turned = (h.t() + h.t()).sin()
    return _Clamped.apply(turned.as_strided((h.shape[0], 32), (32, 1)))


def test_memory_is_laid_out_as_in_pytorch() -> None:
    torch.manual_seed(3)
    ours = Net(strided)
    theirs = copy.deepcopy(ours)
    compare(ours, ORTModule(ours), theirs)


def test_an_option_that_there_is_not() -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend="gradd", options={"speed": 11})
    with pytest.raises(Exception, match="has no option 'speed'"):
        compiled(torch.randn(2, 3))


def test_settings_of_the_process_stay() -> None:
    before = torch._dynamo.config.get_config_copy()
    ORTModule(nn.Linear(3, 3))(torch.randn(2, 3))
    assert torch._dynamo.config.get_config_copy() == before


def test_a_method_of_a_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo does not compare."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.middle(self.linear(x))

    net = Odd()
    wrapped = ORTModule(net, strict=True)
    x = torch.randn(2, 3)
    torch.testing.assert_close(wrapped(x), net.linear(x) * 2)
    monkeypatch.setattr(Odd, "middle", lambda self, x: x * 5)
    torch.testing.assert_close(wrapped(x), net.linear(x) * 5)


def test_a_hook_is_put_on_and_taken_off() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    wrapped = ORTModule(net)
    x = torch.randn(2, 3)
    plain = net(x)
    torch.testing.assert_close(wrapped(x), plain)
    handle = net[0].register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(wrapped(x), net(x))
    handle.remove()
    torch.testing.assert_close(wrapped(x), plain)


def test_no_forward_is_lost_behind_an_error() -> None:
    """An error of the user's comes through; what has run before is not run again."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if x.shape[0] == 3:
                raise KeyError("three")
            return self.linear(x)

    net = Fails()
    wrapped = ORTModule(net)
    wrapped(torch.randn(2, 3))
    with pytest.raises(KeyError, match="three"):
        wrapped(torch.randn(3, 3))
    assert net.calls == 2


def test_a_write_to_an_argument_that_is_another_one() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.mul_(2)
            return self.linear(a + b)

    net = Writes()
    twin = copy.deepcopy(net)
    wrapped = ORTModule(net)
    for same in (False, True, False):
        sides = []
        for model in (wrapped, twin):
            a = torch.arange(8.0).reshape(2, 4)
            b = a if same else a.clone()
            sides.append((model(a, b), a))
        for x, y in zip(*sides, strict=True):
            torch.testing.assert_close(x, y)


def test_a_failed_check_names_the_users_class(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.tanh
    wrapped = ORTModule(Net(lambda net, h: plain(h)), strict=True)
    monkeypatch.setattr("gradd.check.selfcheck._Check._compare", lambda *_: "differs: is odd")
    with pytest.raises(SelfCheckError, match="training step of Net differs: is odd"):
        wrapped(torch.randn(4, 16))


# ---- functions that Dynamo cannot trace ----

_LOCK = threading.Lock()


def behind_a_lock(x: torch.Tensor) -> torch.Tensor:
    with _LOCK:
        y = torch.tanh(x)
        print("", end="")
        return y * 2


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(behind_a_lock(self.a(x)))


def test_a_function_beside_graphs_that_runs_in_pytorch_is_said(caplog: Any) -> None:
    module, x = Locked(), torch.randn(2, 4)
    expected = module(x)
    model = ORTModule(module)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    stats = model.gradd_stats()
    assert stats["captures"] == 2 and stats["parts_in_torch"] == {"graph_break": 3}
    told = [r.getMessage() for r in caplog.records if "behind_a_lock @" in r.getMessage()]
    assert len(told) == 1 and "context manager" in told[0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)


class Scaled(Layers):
    """Writes in place to what it has made itself, beside an operator that is cut out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clamped = _Clamped.apply(self.first(x))
        h = self.second(clamped)
        h *= 2.0
        rows = h.reshape(-1, 2, 16)[:, 1:]
        rows *= clamped.reshape(-1, 2, 16)[:, :1]
        h += clamped
        return h.reshape(x.shape[0] * 2, -1).tanh()


class Merged(Layers):
    """A piece whose only input has an axis of a product of sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _Clamped.apply(self.first(x).reshape(-1, 32))
        return self.second(h).tanh()


class Strided(Layers):
    """A view and a write to it that each would be fine without the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = torch.zeros(32, 32)
        square.as_strided((32,), (33,)).add_(1.5)
        return (self.second(self.first(x)) @ square).tanh()


class Constant(Layers):
    """Constants that stand alone at the beginning of a piece, one of them empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _Clamped.apply(self.first(x))
        kept = torch.tensor([], dtype=h.dtype)
        return self.second(torch.cat([kept, h], -2)).tanh() * torch.tensor([0.5])


@pytest.mark.parametrize("kind", [Scaled, Merged, Strided, Constant])
def test_only_what_the_daemon_lacks_is_cut(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    ours = kind()
    theirs = copy.deepcopy(ours)
    with caplog.at_level(logging.WARNING, "gradd"):
        wrapped = ORTModule(ours)
        for rows in (4, 6, 9):
            x = torch.randn(rows, 3, 16)
            for net in (ours, theirs):
                net.zero_grad()
            a, b = wrapped(x), theirs(x)
            torch.testing.assert_close(a, b)
            for result in (a, b):
                result.square().sum().backward()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
    stats = wrapped.gradd_stats()
    assert stats["fallbacks"] == {} and stats["forwards"] >= 4
    (said,) = [r.getMessage() for r in caplog.records if "parts of a graph" in r.getMessage()]
    assert not any(
        f"{name}: " in said or f"{name} (" in said for name in ("linear", "tanh", "imul", "tensor")
    )


def test_one_of_several_results_beside_a_batch_norm() -> None:
    """All of the graph is decomposed, and a result that nothing reads has taken a name before."""

    class Beside(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = self.first(x)
            torch.topk(h, 2, 0)
            return self.norm(h), h.max(1)[0], h.topk(2)[0]

    ours = Beside()
    theirs = copy.deepcopy(ours)
    wrapped = ORTModule(ours)
    x = torch.randn(5, 16)
    for mine, other in zip(wrapped(x), theirs(x), strict=True):
        torch.testing.assert_close(mine, other)
    assert wrapped.gradd_stats()["in_torch"] == {}


def test_an_operator_with_several_results_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Middle(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.second(h) * torch.linalg.qr(h)[1]

    net = Middle()
    x = torch.randn(4, 16)
    with caplog.at_level(logging.WARNING, "gradd"):
        torch.testing.assert_close(ORTModule(net)(x), net(x))
    (said,) = [r.getMessage() for r in caplog.records if "parts of a graph" in r.getMessage()]
    assert (
        "linalg_qr: unsupported_operator: no translation to ONNX for" in said
        and "aten.linalg_qr.default" in said
    )


def test_what_a_translation_refuses_is_named_with_its_line(caplog: Any) -> None:
    class Middle(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rrelu(self.first(x), training=True)

    with caplog.at_level(logging.WARNING, "gradd"):
        ORTModule(Middle())(torch.randn(4, 16))
    (said,) = [r.getMessage() for r in caplog.records if "parts of a graph" in r.getMessage()]
    assert re.search(rf"rrelu: .* @ {re.escape(__file__)}:\d+: aten.rrelu.* random slopes", said)


class _ByOperator(nn.InstanceNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.weight, self.bias, self.running_mean, self.running_var
        return torch.instance_norm(x, *known, self.training, self.momentum, self.eps, False)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, _ByOperator])
def test_running_statistics_of_instances_are_written(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.InstanceNorm1d]
) -> None:
    """torch's operator does not say in its schema that it writes; no self-check helps."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    norm = kind(4, affine=True, track_running_stats=True)
    layers = nn.Linear(16, 16), norm, nn.Linear(16, 16)
    theirs = nn.Sequential(nn.Unflatten(0, (-1, 4)), *layers, nn.Flatten(0, 1))
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours)
    compare(ours, model, theirs, (8, 12))
    for net in (model, theirs):
        net.eval()
    compare(ours, model, theirs, (8,))
    assert model.gradd_stats()["in_torch"] == {}


def test_a_norm_that_nothing_reads_moves_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over data for the statistics alone; torch's schema does not say that it writes."""

    class Unread(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fixed = nn.BatchNorm1d(32), nn.BatchNorm1d(32, affine=False).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            self.norm(h)
            self.fixed(h)
            return self.second(h)

    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    theirs = Unread()
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours)
    for _ in range(2):
        x = torch.randn(8, 16)
        model(x).sum().backward(), theirs(x).sum().backward()
    for name, moved in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), moved)
    assert theirs.norm.num_batches_tracked == 2 and model.gradd_stats()["in_torch"] == {}


def test_a_tensor_goes_into_a_piece_by_two_names() -> None:
    """broadcast_tensors() returns the tensor that it gets: its gradient comes once."""

    class Both(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            _, same = torch.broadcast_tensors(h * 2, h)
            return self.second(determinants(h) / (1 + same * same) + h)

    torch.manual_seed(0)
    theirs = Both()
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours)
    compare(ours, model, theirs, (4, 6))
    assert model.gradd_stats()["in_torch"] == {"unsupported": 2}
