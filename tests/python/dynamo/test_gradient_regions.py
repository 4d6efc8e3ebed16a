"""Writes that change data and no history, aliases, and regions without gradients.

PyTorch is the judge; the self-check is off, so the captured graph alone has to be right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.dynamo.piece import Piece
from gradd.spec import CaptureError
from helpers.nets import assert_close, assert_same_grads
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")


@pytest.fixture(autouse=True)
def without_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


class Body(nn.Module):
    """Layers around what a case does to the activation between them."""

    def __init__(self, body: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("mean", torch.zeros(4))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * 1.0
        return self.second(self.body(self, hidden)).square().mean() + hidden.sum() * 0.1


class Bodies(nn.Module):
    """Cases side by side, each with layers of its own: one capture for all of them."""

    def __init__(self, cases: dict[str, Callable]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({n.replace(".", "_"): Body(c) for n, c in cases.items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: body(x) for name, body in self.cases.items()}


def both(net: nn.Module) -> tuple[ORTModule, nn.Module]:
    return ORTModule(copy.deepcopy(net), strict=True), net


def under(region: Callable, write: Callable) -> Callable:
    """The case that runs a write in a region."""

    def body(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with region():
            write(net, h)
        return h

    return body


WRITES = {
    "clamp": lambda n, h: h.clamp_(-0.2, 0.2),
    "round": lambda n, h: h.copy_(h.round()),
    "relu": lambda n, h: F.relu(h, inplace=True),
    "scaled by a parameter": lambda n, h: h.mul_(n.scale),
    "normed": lambda n, h: h.div_(h.norm(dim=1, keepdim=True)),
    "columns": lambda n, h: h.__setitem__((slice(None), 0), 0.0),
    "rows by a mask": lambda n, h: h.masked_fill_(h > 0.1, 0.1),
    "index_put": lambda n, h: h.index_put_((torch.tensor([0, 2]),), torch.ones(2, 4)),
    "add with alpha": lambda n, h: h.add_(h.mean(0), alpha=-1),
    "out=": lambda n, h: torch.clamp(h, -0.2, 0.2, out=h),
    "a view": lambda n, h: h[:, 1:].mul_(3),
    "a view of a view": lambda n, h: h.t()[1:][0].fill_(0.5),
    "every row": lambda n, h: [row.add_(0.5) for row in h.unbind(0)],
    "chunks": lambda n, h: [part.mul_(2) for part in h.chunk(2, 1)],
    "reshaped": lambda n, h: h.reshape(-1)[:3].zero_(),
    "twice": lambda n, h: h.mul_(2).clamp_(-0.3, 0.3),
    "lerp": lambda n, h: h.lerp_(n.mean, 0.25),
    "the product with itself": lambda n, h: h.mul_(h),
    "a foreach": lambda n, h: h.sub_(h.detach().mean()),
}


def compare(cases: dict[str, Callable], training: bool = True) -> None:
    ours, theirs = both(Bodies(cases).train(training))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 4, generator=generator)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        for model in (ours, theirs):
            model.zero_grad()
        a, b = ours(mine), theirs(other)
        for name in b:
            assert_close(a[name], b[name], name)
        sum(a.values()).backward()
        sum(b.values()).backward()
        assert_same_grads(ours.module, theirs)
        assert_close(mine.grad, other.grad, "gradient of the input")
        for (name, buffer), (_, want) in zip(ours.named_buffers(), theirs.named_buffers()):
            assert_close(buffer, want, name)
    assert ours.gradd_stats()["fallbacks"] == {}


def test_writes_without_gradients_keep_the_history() -> None:
    compare({name: under(torch.no_grad, write) for name, write in WRITES.items()})


def test_inference_mode_is_a_region_too() -> None:
    names = ("clamp", "a view", "columns", "chunks")
    compare({name: under(torch.inference_mode, WRITES[name]) for name in names})


@torch.no_grad()
def _clip(h: torch.Tensor) -> None:
    h.clamp_(-0.2, 0.2)


def _alias_sees_later_writes(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    alias = h.detach()
    h.add_(n.scale)
    return h + alias


def _toggled(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    h.mul_(0.5)
    torch.set_grad_enabled(True)
    return h.mul_(n.scale)


def _nested(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h.mul_(0.5)
        with torch.enable_grad():
            h = h * n.scale
        h.add_(1.0)
    return h


def _straight_through(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    hard = (h > 0).float()
    return hard - torch.sigmoid(h).detach() + torch.sigmoid(h)


def _made_without(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = n.first(h)
    made.mul_(n.scale)
    return made + h


def _history_by_a_view(take: Callable) -> Callable:
    """A tensor gets its history by a write to a view; what comes of it is clamped in place."""

    def body(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = n.first(h)
        sibling = made[1:]
        take(made).copy_(take(h * n.scale))
        bounded, rows = made * 3 + made, sibling * 2
        with torch.no_grad():
            bounded.clamp_(-0.1, 0.1)
            made.mul_(0.5)
        return bounded + made + rows.sum()

    return body


def _written_copy(copied: Callable) -> Callable:
    """What reshape() and the like had to copy is written; the view that it came from is read."""

    def body(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = h[..., 1:]
        made = copied(view).add_(1)
        return h + view.sum() + made.square().sum()

    return body


def _view_taken_before(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    view = h[:, :2]
    with torch.no_grad():
        h.mul_(2)
    return torch.cat([view, h[:, 2:]], 1)


def _moving_average(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        n.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - n.mean


def _buffer_out(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.add(n.mean, 1, out=n.mean)
        n.mean = F.normalize(n.mean + h.mean(0), dim=0, out=n.mean)
    return h * n.mean.clone()


CASES = {
    "a decorated helper": lambda n, h: (_clip(h), h)[1],
    "a detached alias": lambda n, h: (h.detach().mul_(2), h)[1],
    "a row of a detached alias": lambda n, h: (h.detach()[0].fill_(1), h)[1],
    "an alias of a row": lambda n, h: (h[0].detach().fill_(1), h)[1],
    "a detached alias under no_grad": under(torch.no_grad, lambda n, h: h.detach().mul_(2)),
    "the alias is read": lambda n, h: h + h.detach().mul_(2),
    "an alias sees later writes": _alias_sees_later_writes,
    "set_grad_enabled": _toggled,
    "nested regions": _nested,
    "straight through": _straight_through,
    "made without gradients": _made_without,
    "a history by a slice": _history_by_a_view(lambda t: t[:]),
    "a history by a row": _history_by_a_view(lambda t: t[2]),
    "a history by a transposed view": _history_by_a_view(lambda t: t.t()),
    "a history by a view of a view": _history_by_a_view(lambda t: t[1:][:, 1:]),
    "a copy by reshape": _written_copy(lambda t: t.reshape(-1)),
    "a copy by contiguous": _written_copy(lambda t: t.contiguous()),
    "a copy by flatten": _written_copy(lambda t: t.flatten()),
    "no copy by reshape": _written_copy(lambda t: t.reshape(t.shape).clone()),
    "a view taken before": _view_taken_before,
    "a moving average": _moving_average,
    "a buffer through out=": _buffer_out,
    "detach_": lambda n, h: h * h.clone().detach_(),
    "detach_, then written": lambda n, h: h * h.clone().detach_().mul_(2),
    "data is read": lambda n, h: h * h.data.abs(),
    "a parameter's data is read": lambda n, h: h * n.scale.data,
    "data is written": lambda n, h: (h.data.clamp_(-0.1, 0.1), h.data[:, 0].zero_(), h)[2],
    "a buffer's data is written": lambda n, h: (n.mean.data.add_(0.5), h * n.mean)[1],
    "data of a copy is written": lambda n, h: h + h.detach().clone().data.mul_(3),
    "a detached slice is assigned": lambda n, h: (
        z := h.clone(),
        z.__setitem__((slice(None), slice(1, None)), h[:, 1:].detach()),
    )[0],
}


@pytest.mark.one_in(4)
def test_aliases_and_regions() -> None:
    compare(CASES)


def test_in_eval_mode_too() -> None:
    compare({n: CASES[n] for n in ("a moving average", "a detached alias")}, training=False)


@pytest.mark.parametrize("body", [CASES["a detached alias"], under(torch.no_grad, WRITES["clamp"])])
def test_bf16(body: Callable) -> None:
    ours, eager = both(Body(body).bfloat16())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for model in (ours, eager):
        model(x).backward()
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), eager.named_parameters()):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=1e-3)


def _read_before(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    product = h * h
    h.data.clamp_(-0.1, 0.1)
    return product


def _buffer_read_before(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    product = h * n.mean
    n.mean.data.add_(0.5)
    return product


def _result_kept(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    soft = h.tanh()
    with torch.inference_mode():
        soft.mul_(0.5)
    return soft


def _read_before_what_is_cut(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    product = h * h
    h.data.i0_()  # not in the daemon
    return product


def _read_beside_data(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    product = h * h.data
    h.detach().i0_()  # not in the daemon
    return product


def _result_kept_of_what_is_cut(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    soft = h.tanh()
    with torch.inference_mode():
        soft.i0_()
    return soft


# PyTorch's backward takes values from after such a write, or refuses.
WRITTEN_BEHIND = {
    "read before": _read_before,
    "a buffer read before": _buffer_read_before,
    "a result that a backward keeps": _result_kept,
    "read before what is cut": _read_before_what_is_cut,
    "read beside .data before what is cut": _read_beside_data,
    "a result before what is cut": _result_kept_of_what_is_cut,
    "a gradient into an alias": lambda n, h: h + h.detach().mul_(n.scale),
}


@pytest.mark.parametrize("body", WRITTEN_BEHIND.values(), ids=WRITTEN_BEHIND)
def test_writes_to_what_a_backward_keeps(body: Callable) -> None:
    ours, theirs = ORTModule(Body(body)), Body(body)
    x = torch.randn(3, 4)
    for _ in range(2):
        a, b = ours(x), theirs(x)
        assert_close(a, b)
        try:
            b.backward()
        except RuntimeError:
            continue
        a.backward()
        assert_same_grads(ours.module, theirs)


class Clip(torch.autograd.Function):
    """Identity whose gradient is clamped."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


class Own(Clip):
    """Has an apply of its own."""

    @classmethod
    def apply(cls, *args):
        return super().apply(*args)


_apply = Clip.apply


def _mapped(n: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(map(_apply, h.unbind(0))))


FUNCTIONS = {
    "by its class": lambda n, h: Clip.apply(h),
    "kept before": lambda n, h: _apply(h),
    "of its own": lambda n, h: Own.apply(h),
    "mapped": _mapped,
    "in a region that is left": lambda n, h: h + _apply(h.detach() * n.scale),
}


@pytest.mark.parametrize("body", FUNCTIONS.values(), ids=FUNCTIONS)
def test_custom_functions_are_noticed_however_they_are_reached(body: Callable) -> None:
    """Also by a call without gradients: its graph may serve those with gradients."""
    ours, theirs = ORTModule(Body(body)), Body(body)
    x = torch.randn(3, 4)
    for gradients in (False, True, True):
        with torch.set_grad_enabled(gradients):
            a, b = ours(x), theirs(x)
        assert_close(a, b)
        if gradients:
            a.backward(), b.backward()
            assert_same_grads(ours.module, theirs)


# ---- what PyTorch allows, though it was written behind it ----


def _then(value: torch.Tensor, *writes: torch.Tensor) -> torch.Tensor:
    """The value; the writes have happened before it is read."""
    return value.sum()


def _last(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """PyTorch refuses the backward of z, which no test here calls."""
    (z * z).add_(1)
    z.add_(1)
    return y.sum()


ALLOWED: dict[str, Callable] = {
    "relu_": lambda n, h: (h + 0).relu_(),
    "sigmoid_": lambda n, h: h.sigmoid_(),
    "product not needed": lambda n, h: h * _last(n.first(h), n.first(h) + 1),
    "after layer_norm": lambda n, h: F.layer_norm(h, (4,)).add_(1).square(),
    "transposed": lambda n, h: h * (lambda y: _then(y.t() @ n.mean.expand(3, 4), y.add_(1)))(h + 0),
    "saved copy": lambda n, h: h * (lambda y: _then(y.clone().exp(), y.add_(1)))(h + 0),
}


def test_what_pytorch_differentiates_runs_in_the_daemon() -> None:
    compare(ALLOWED)


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)


class EnabledInside(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.l(x) * 2


class EnabledRound(_Linear):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * 2


class SetInside(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(True):
            return self.l(x) * 2


class EnabledInDisabled(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.enable_grad():
            return self.l(x) * 2


class NotInference(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.l(x) * 2


class EnabledAndDetached(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (self.l(x) * 2).detach()


class Disabled(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.l(x)
        return self.l(x) + y


SWITCHING = [EnabledInside, EnabledRound, SetInside, EnabledInDisabled, NotInference]
KEEPING = [EnabledAndDetached, Disabled]


@pytest.mark.parametrize("order", every_run(["with first"], ["with first", "without first"]))
@pytest.mark.parametrize("kind", SWITCHING + KEEPING)
def test_gradients_that_forward_switches_on(kind: type, order: str) -> None:
    """A result has a history where it has one in PyTorch, whichever mode came first."""
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad]
    if order == "without first":
        modes = modes[1:] + modes[:1]
    model, eager = ORTModule(kind(), strict=kind in KEEPING), kind()
    x = torch.randn(2, 4)
    for mode in modes:
        with mode():
            ours, theirs = model(x), eager(x)
        assert ours.requires_grad == theirs.requires_grad, mode
        torch.testing.assert_close(ours, theirs)
    assert model.gradd_stats()["captures"] > 0


class EnabledInPart(_Linear):
    """Results of both kinds, in one graph."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.l(x).tanh()
        with torch.enable_grad():
            on = self.l(h).exp()
        return h, on, self.l(on).square()


class NotInferenceInPart(_Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False):
            on = self.l(x).exp()
        return on, self.l(x.cos()).square()


class Distributed(_Linear):
    """torch.distributions computes `probs` with gradients, whatever the mode around it is."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.distributions.Categorical(logits=self.l(x))
        return drawn.logits, drawn.probs, drawn.entropy(), self.l(x.cos()).square()


@pytest.mark.parametrize("where", ["checked", "in PyTorch"])
@pytest.mark.parametrize("kind", [EnabledInPart, NotInferenceInPart, Distributed])
def test_gradients_of_a_part_of_a_graph(
    kind: type, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what forward() computes with gradients has a history, and only that gets a gradient."""
    if where == "checked":
        monkeypatch.setenv("GRADD_SELF_CHECK", "first")
    else:
        error = CaptureError("unsupported", "as if for its sizes")
        monkeypatch.setattr(Piece, "_prepare", Mock(side_effect=error))
    x = torch.randn(3, 4)
    found = []
    for m in (kind(), ORTModule(kind(), strict=where == "checked")):
        seen = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
            m.zero_grad()
            with mode():
                results = m(x)
            seen += [torch.tensor([r.requires_grad, r.is_inference()]) for r in results]
            seen += [r.detach().clone() for r in results]
            if any(r.requires_grad for r in results):
                sum(r.sum() for r in results if r.requires_grad).backward()
            seen += [p.grad for p in m.parameters()]
        found.append(seen)
    torch.testing.assert_close(found[1], found[0])


def test_second_derivatives_of_a_part_of_a_graph() -> None:
    """PyTorch, which repeats such a graph, records gradients for the same results."""
    found = []
    for m in (EnabledInPart(), ORTModule(EnabledInPart())):
        with torch.no_grad():
            _, on, _ = m(torch.ones(3, 4))
        first = torch.autograd.grad(on.sum(), list(m.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), m.parameters()))
    torch.testing.assert_close(found[1], found[0])


class OffForGood(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return self.l(x)


class OnForGood(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        torch.set_grad_enabled(True)
        return self.l(y)


class OffUntilLater(_Linear):
    """The mode is set in one graph, and counts in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        y = self.l(x)
        torch._dynamo.graph_break()
        y = self.l(y)
        torch.set_grad_enabled(True)
        y = self.head(y)
        torch._dynamo.graph_break()
        return self.head(y)


@pytest.mark.parametrize("backend", ["", "gradd"])
@pytest.mark.parametrize("kind", [OffForGood, OnForGood, OffUntilLater])
def test_a_grad_mode_that_forward_leaves(kind: type, backend: str) -> None:
    """torch.set_grad_enabled() as a call counts for what comes after it, in forward() or behind."""
    torch.compiler.reset()
    ours = torch.compile(kind(), backend=backend) if backend else ORTModule(kind())
    found = []
    for m in (kind(), ours):
        seen = []
        for on in (True, False, True, False):
            m.zero_grad()
            with torch.set_grad_enabled(on):
                y = m(torch.ones(2, 4))
                seen += [torch.is_grad_enabled(), y.requires_grad]
            if y.requires_grad:
                y.sum().backward()
            seen += [y.detach(), *(p.grad for p in m.parameters())]
        found.append(seen)
    torch.testing.assert_close(found[1], found[0])


def test_gradients_switched_on_in_inference_mode() -> None:
    model, eager = ORTModule(_Plain(), strict=True), _Plain()
    x = torch.randn(2, 4)
    for m in (model, eager):
        with torch.inference_mode(), torch.enable_grad():
            y = m(x)
        assert not y.requires_grad and y.is_inference()


class _Plain(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)
