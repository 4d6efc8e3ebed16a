"""Attributes that forward() reads or writes: adapters that are merged, settings, results."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from gradd import ORTModule
from gradd.dynamo import compiled_graph
from gradd.spec import CaptureError
from helpers.models import families
from helpers.nets import assert_close, assert_same_grads
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _lora() -> tuple[ORTModule, nn.Module, dict[str, torch.Tensor]]:
    module, make = families.build("peft_lora_llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    return ORTModule(module, strict=True), eager, make(2, 8, 0)


def _scale(model: Any) -> None:
    for sub in model.modules():
        if hasattr(sub, "set_scale"):
            sub.set_scale("default", 3.0)


def _second_adapter(model: Any) -> None:
    for sub in model.modules():
        if hasattr(sub, "lora_A"):
            sub.set_adapter(["other"])


CHANGES = [lambda m: m.merge_adapter(), _scale, _second_adapter]


@pytest.mark.parametrize("train", every_run((True,), [False, True]))
@pytest.mark.parametrize(
    "change", every_run(CHANGES[:1], CHANGES), ids=["merge", "scale", "choose"]
)
def test_adapters_may_change_between_calls(change: Any, train: bool) -> None:
    ours, eager, batch = _lora()
    for model in (ours.module, eager):
        torch.manual_seed(7)
        config = copy.deepcopy(model.peft_config["default"])
        model.add_adapter("other", config)
        for name, parameter in model.named_parameters():
            if "other" in name:
                parameter.data.normal_(0.0, 0.05)
        model.train(train)
    with torch.no_grad():
        before = eager(**batch).logits
        assert_close(ours(**batch).logits, before)
        for model in (ours.module, eager):
            change(model)
        after = eager(**batch).logits
        assert_close(ours(**batch).logits, after)
    same = torch.allclose(before, after, atol=1e-4)
    assert same == (change is CHANGES[0]), "the change must show, but for a merge"


def test_a_setting_that_a_call_fills_in_is_filled_in_by_every_call() -> None:
    model, make = families.build("bert_cls")
    wrapped, config = ORTModule(model, strict=True), model.config
    config.problem_type = None
    for _ in range(2):
        wrapped(**make(2, 5, 0)).loss.backward()
        assert config.problem_type == "single_label_classification"
        config.problem_type = None
    assert wrapped.gradd_stats()["captures"] == 1


class _Bag(dict):
    """A result of the user's own class."""


class _Row(list):
    """Another one."""


def _tagged(y: torch.Tensor) -> torch.Tensor:
    y.tag = "t"
    return y


def _with(value: Any) -> Any:
    value.tag = 1
    return value


_RESULTS: dict[str, Any] = {
    "a tensor": _tagged,
    "a nested one": lambda y: {"a": [y, (_tagged(y * 2),)]},
    "a detached one": lambda y: _tagged(y.detach()),
    "a view": lambda y: (y, _tagged(y[:, :2])),
    "by its dictionary": lambda y: (y.__dict__.update(tag=1), y)[1],
    "a dictionary": lambda y: _with(_Bag(a=y)),
    "a list": lambda y: _with(_Row([y])),
    "a ModelOutput": lambda y: _with(BaseModelOutput(last_hidden_state=y)),
    "a factory": lambda y: collections.defaultdict(int, a=y),
    "another tensor": lambda y: (_tagged(y) * 2, y.view(-1)),
    "for a while": lambda y: (delattr(_tagged(y), "tag"), y)[1],
    "plain containers": lambda y: [_Bag(a=y), _Row([y]), BaseModelOutput(last_hidden_state=y)],
}


def _visible(value: Any) -> Any:
    """Classes and attributes of a result."""
    own = sorted(getattr(value, "__dict__", {}))
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, own)
    factory = getattr(value, "default_factory", None)
    inner = list(value.values()) if isinstance(value, dict) else value
    return (type(value), own, factory, [_visible(v) for v in inner])


@pytest.mark.parametrize("name", _RESULTS)
def test_attributes_of_a_result(name: str) -> None:
    """They are there, if need be because PyTorch runs the call."""
    make = _RESULTS[name]

    class Returns(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return make(super().forward(x))

    eager = Returns(4, 4)
    ours, x = ORTModule(copy.deepcopy(eager)), torch.ones(2, 4)
    for _ in range(2):
        assert _visible(ours(x)) == _visible(eager(x))


class Chooser(nn.Module):
    """Reads a container, as an adapter does that lists which of its parts are active."""

    def __init__(self, active: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts.items()
        return sum(part(x) * len(name) for name, part in parts if name in self.active)


FILL = {list: "extend", set: "update", dict.fromkeys: "update"}


@pytest.mark.parametrize("kind", FILL)
def test_an_equal_container_assigned_anew(kind: Any) -> None:
    """PEFT's set_adapter() in every step; what changes in the new one is noticed as ever."""
    eager = Chooser(kind("ab"))
    model = ORTModule(copy.deepcopy(eager), strict=True)
    x = torch.ones(3, 4)
    for _ in range(6):
        eager.active = model.module.active = kind("ab")
        assert_close(model(x), eager(x))
    assert model.gradd_stats()["graphs"] == 1
    for names in ("bc", "ab", "c", "bc", "ab"):
        eager.active = model.module.active = kind(names)
        assert_close(model(x), eager(x))
    for module in (eager, model.module):  # the new one in place
        module.active.clear()
        getattr(module.active, FILL[kind])(kind("a"))
    assert_close(model(x), eager(x))


class Derived(nn.Module):
    """Keeps a weight that it derives, and for which call: numbers that no graph reads."""

    def __init__(self, form: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.lin, self.form = nn.Linear(4, 4), form
        self.weight: Any = None
        self.known: Any = None
        self.count = 0

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        known = self.form(number, self.count)
        torch._dynamo.graph_break()
        if self.known != known:
            self.known = known
            self.weight = nn.functional.normalize(self.lin.weight.detach(), dim=1)
            self.count += 1
        return x @ self.weight.T + self.lin(x)


FORMS: dict[str, Callable[[int, int], Any]] = {
    "two numbers": lambda v, n: (v, n),
    "a list": lambda v, n: [n, [v]],
    "a dictionary": lambda v, n: {"version": v, "count": n},
    "one within another": lambda v, n: {"count": n, "of": {"version": (v, n)}},
}


@pytest.mark.parametrize("name", FORMS)
def test_numbers_of_before_a_break_are_kept(name: str) -> None:
    eager = Derived(FORMS[name])
    model = ORTModule(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, model)]
    for step in range(5):
        x = torch.full((3 + step % 2, 4), 0.5 + step)
        losses = [m(x, 5 + 2 * step).square().mean() for m in (eager, model)]
        assert_close(losses[1], losses[0])
        assert repr(model.module.known) == repr(eager.known)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert model.module.count == eager.count


def test_a_weight_is_derived_anew_for_each_version_of_another() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.known, self.count = nn.Linear(4, 4), None, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            known = self.lin.weight._version, id(self.lin.weight)
            if known != self.known:
                self.known = known
                self.weight = nn.functional.normalize(self.lin.weight.detach(), dim=1)
                self.count += 1
            return x @ self.weight.T + self.lin(x)

    eager = Normed()
    model = ORTModule(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, model)]
    for step in range(5):
        losses = [m(torch.full((3, 4), 0.5 + step)).square().mean() for m in (eager, model)]
        assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert model.module.count == eager.count == 5


class Averaged(nn.Module):
    """Averages with a momentum that follows a schedule, in buffers and in a result."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.momentum = nn.Linear(4, 4, dtype=dtype), 0.9
        for name in ("product", "quotient", "sum", "between", "raised", "lowered"):
            self.register_buffer(name, torch.ones(4, dtype=dtype))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.no_grad():
            self.product.mul_(self.momentum).add_(y.mean(0), alpha=1 - self.momentum)
            self.quotient.div_(self.momentum)
            self.sum.sub_(self.momentum).add_(self.momentum * 2)
            self.between.lerp_(y[0], 1 - self.momentum)
            self.count.mul_(len(x))
            self.raised.addcmul_(y[0].abs(), y[1].abs(), value=self.momentum).pow_(self.momentum)
            self.lowered.addcdiv_(y[0], y[1].abs() + 1, value=self.momentum)
        return torch.lerp(y, y.square() + self.between, self.momentum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_momentum_may_change_between_calls(dtype: torch.dtype) -> None:
    eager = Averaged(dtype)
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for momentum, rows in ((0.9, 3), (0.8, 4), (0.37, 5)):
        x = torch.randn(rows, 4, dtype=dtype)
        results = []
        for model, inner in ((ours, ours.module), (eager, eager)):
            inner.momentum = momentum
            model.zero_grad()
            y = model(x)
            y.sum().backward()
            results.append([y, *inner.buffers(), *(p.grad for p in inner.parameters())])
        torch.testing.assert_close(*results)  # within a step of bf16


NUMBERS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "where": lambda x, s: torch.where(x > 0, x, s) + torch.where(x > 0, s, 0.25),
    "full": lambda x, s: x * torch.full((4,), s, dtype=x.dtype) + torch.full_like(x, s),
    "threshold": lambda x, s: nn.functional.threshold(x, s, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "addmm": lambda x, s: torch.addmm(x, x, x.T @ x, beta=s, alpha=1 - s),
    "baddbmm": lambda x, s: torch.baddbmm(x[None], x[None], (x.T @ x)[None], beta=s),
    "leaky_relu": lambda x, s: nn.functional.leaky_relu(x, s),
    "elu": lambda x, s: nn.functional.elu(x * 100, s) + nn.functional.elu(x, -s),
    "shrink": lambda x, s: nn.functional.hardshrink(x, s) + nn.functional.softshrink(x, s / 3),
    "hardtanh": lambda x, s: nn.functional.hardtanh(x, -s, s),
    "scatter": lambda x, s: x.scatter(0, torch.zeros(1, 4, dtype=torch.int64), s),
    "powers": lambda x, s: x.abs() ** s + s**x,
    "in place": lambda x, s: (x + 0).abs().pow_(s).addcmul_(x, x, value=s),
    "a part in place": lambda x, s: (t := x * 1, t[:, 1:].mul_(s), t[0].fill_(s), t)[-1],
}


class Scheduled(nn.Linear):
    """All of them with one number, which follows a schedule."""

    at = 0.9

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)
        return {name: function(y, self.at) for name, function in NUMBERS.items()}


@pytest.mark.parametrize(
    "dtype", every_run((torch.bfloat16,), [torch.float32, torch.float64, torch.bfloat16])
)
def test_numbers_of_operators_may_change_between_calls(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = Scheduled(4, 4, dtype=dtype)
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for at in (0.9, 0.8, 0.37):
        x = torch.randn(3, 4, dtype=dtype)
        results = []
        for model, inner in ((ours, ours.module), (eager, eager)):
            inner.at = at
            model.zero_grad()
            named = model(x)
            sum(y.float().square().mean() for y in named.values()).backward()
            results.append([*named.values(), inner.weight.grad, inner.bias.grad])
        step = torch.finfo(dtype).eps
        for ours_, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours_, theirs, rtol=8 * step, atol=8 * step)
    assert ours.gradd_stats()["graphs"] == 2


def test_a_number_that_has_to_be_a_constant_is_named() -> None:
    class Normed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).norm(p=self.p, dim=1)

    model = ORTModule(Normed(4, 4), strict=True)
    x = torch.ones(2, 4)
    model.module.p = 1.25
    model(x)
    model.module.p = 2.5
    with pytest.raises(CaptureError, match="norm.*ord has to be a constant"):
        model(x)


class Codebook(nn.Module):
    """The moving average of a VQ-VAE, through .data: of choices, and of detached values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(6, 4)
        self.register_buffer("mean", torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.lin(x)
        chosen = torch.cdist(z, self.mean.clone()).argmin(1)
        chosen = nn.functional.one_hot(chosen, 5).type_as(z)
        self.mean.data.mul_(0.9).add_(chosen.T @ z.detach(), alpha=0.1)
        return z.square().sum() + self.mean.detach().sum()


def test_values_without_a_gradient_are_written_to_data() -> None:
    eager = Codebook()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for _ in range(2):
        x = torch.randn(7, 6)
        for model in (eager, ours):
            model(x).backward()
        inner = ours.module
        assert_close(inner.mean, eager.mean)
        assert_close(inner.lin.weight.grad, eager.lin.weight.grad)


def test_a_write_to_a_parameter_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    class Target(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5).add_(1.0)
            return super().forward(x)

    ORTModule(Target(4, 4).requires_grad_(False))(torch.ones(2, 4))
    assert "writes to the parameter 'weight'" in caplog.text
    assert "mul_'" not in caplog.text


def test_writes_to_parameters_are_cut_out_without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target network that follows, as in BYOL, DQN and MoCo."""

    class Following(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.online = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
            self.target = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
                for new, old in pairs:
                    old.mul_(0.9).add_(new, alpha=0.1)
                wanted = self.target(x)
            return (self.online(x) - wanted).square().sum()

    made = []
    inner = compiled_graph._translated
    monkeypatch.setattr(
        compiled_graph, "_translated", lambda *args: (made.append(args), inner(*args))[1]
    )
    eager = Following()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(7, 6)
        for model in (eager, ours):
            model.zero_grad()
            model(x).backward()
        assert_same_grads(ours, eager)
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(a, b)
    assert ours.gradd_stats()["in_torch"].keys() == {"input_mutation"}
    assert len(made) <= 2


def test_a_size_by_a_ratio_that_changes() -> None:
    """As in a masked autoencoder: attention computes further sizes of it."""

    class Kept(nn.Module):
        ratio = 0.5

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x[:, : int(x.shape[1] * self.ratio)]
            return self.attention(kept, kept, kept)[0]

    eager = Kept()
    ours, x = ORTModule(copy.deepcopy(eager), strict=True), torch.randn(2, 12, 4)
    for ratio in (0.5, 0.75, 0.25, 0.6):
        eager.ratio = ours.module.ratio = ratio
        assert_close(ours(x), eager(x))
    assert ours.gradd_stats()["graphs"] <= 3
