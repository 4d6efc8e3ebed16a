"""Falls back to PyTorch if the daemon cannot run something: loudly, counted, only if allowed."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.fallback import FallbackPolicy, SelfCheckError, policy_from_environment
from gradd.memory import watch
from gradd.spec import CaptureError
from helpers.nets import Determinants, Net, assert_close, batch, loss_of

pytestmark = pytest.mark.usefixtures("daemon")


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


class Custom(Net):
    """Has a custom backward, which no graph holds."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return _Double.apply(self.first(x)).sum()


class Odd(torch.nn.Module):
    """Uses an operator that the daemon does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.linalg.det(self.w) * x).sum()


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [t for r in caplog.records if re.search("runs? in PyTorch", t := r.getMessage())]


def _in_torch(model: ORTModule) -> dict[str, int]:
    """How often calls, or parts of them, have run in PyTorch, by reason."""
    stats = model.gradd_stats()
    return dict(Counter(stats["fallbacks"]) + Counter(stats.get("parts_in_torch", {})))


@pytest.mark.quick
def test_fallback_gives_torchs_result_warns_once_and_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ORTModule(Custom())
    x, _ = batch()
    with caplog.at_level(logging.WARNING, "gradd"):
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    (message,) = _messages(caplog)
    assert "Custom" in message and "autograd_function" in message
    assert "calls a custom autograd.Function" in message and "_apply" not in message
    assert _in_torch(model) == {"autograd_function": 3}
    assert_close(model.first.bias.grad, torch.full((16,), 5.0 * len(x)))


@pytest.mark.parametrize("how", ["strict", "policy", "variable"])
def test_strict_raises(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "policy":
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    if how == "variable":
        monkeypatch.setenv("GRADD_STRICT", "1")
    model = ORTModule(Custom(), strict=how == "strict")
    for _ in range(2):
        with pytest.raises(CaptureError, match="autograd_function"):
            model(batch()[0])


def test_unsupported_operator_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Odd())
    x = torch.ones(3)
    with caplog.at_level(logging.WARNING, "gradd"):
        assert_close(model(x), torch.linalg.det(model.w) * 3)
    (message,) = _messages(caplog)
    assert "Det" in message or "det" in message
    assert sum(_in_torch(model).values()) == 1
    with pytest.raises((CaptureError, errors.UnsupportedError), match="(?i)det"):
        ORTModule(Odd(), strict=True)(x)


def test_other_calls_of_the_same_module_still_run_in_the_daemon() -> None:
    class Sometimes(Net):
        def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
            hidden = self.first(x)
            return (_Double.apply(hidden) if odd else hidden * 2).sum()

    model = ORTModule(Sometimes())
    x, _ = batch()
    model(x)
    model(x, odd=True)
    model(x)
    assert _in_torch(model) == {"autograd_function": 1}
    assert model.gradd_stats()["forwards"] >= 2


class TwoOdd(nn.Module):
    """Two kinds of operators that the daemon does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Determinants(), Determinants()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x))
        return h[:, 0, :2] * torch.multinomial(h[:, 0].softmax(-1), 2)


def test_all_operators_that_the_daemon_has_not_are_named() -> None:
    with pytest.raises(errors.UnsupportedError) as caught:
        ORTModule(TwoOdd(), strict=True)(torch.randn(2, 3, 16))
    text = str(caught.value)
    assert re.search(r"operators Det \(node \w+, a @ \S+:\d+; 2 of them\), Multinomial \(", text)
    assert "are not in the daemon" in text


def test_a_call_that_is_wrong_itself_does_not_move_the_next_one() -> None:
    """What fails in PyTorch as well says nothing about calls of its form."""
    model = ORTModule(Net())
    x, y = batch()
    with pytest.raises(RuntimeError):
        model(torch.randn(4, x.shape[1] + 1), y)
    loss_of(model(x, y)).backward()
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {} and stats["forwards"] > 0


class BySize(Net):
    """Decides by a value, but only for batches of five rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 5 and (x > 0).any():
            return self.first(x) * 2
        return self.first(x)


class Tries(Net):
    """Swallows what a wrong width raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.first(x)
        except RuntimeError:
            return x * 3


@pytest.mark.parametrize(
    ("kind", "odd", "common"),
    [(BySize, (5, 8), ((3, 8), (4, 8), (3, 8), (7, 8))), (Tries, (3, 4), ((3, 8), (6, 8)))],
)
@pytest.mark.parametrize("first", [True, False])
def test_one_odd_call_moves_no_other_size(
    kind: type,
    odd: tuple[int, int],
    common: tuple,
    first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager = kind()
    model = ORTModule(copy.deepcopy(eager))
    calls = [odd, *common] if first else [common[0], odd, *common[1:]]
    for shape in [*calls, odd, common[0]]:
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), eager(x))
    stats = model.gradd_stats()
    assert stats["forwards"] >= len(common) + 1, stats
    assert sum(stats["fallbacks"].values()) <= 2, stats


class WithoutAPlan(torch.nn.Module):
    """Its graph holds for all sizes; the daemon has no plan where a repetition is huge."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).sum()


def test_a_size_without_a_plan_moves_no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradd.calls.graph import Graph

    planned = Graph.plan

    def refuse(self: Any, client: Any, types: Any, *rest: Any, **options: Any) -> Any:
        if types[0][1][0] in (7, 8, 9, 10):
            raise errors.GraphError("no plan for that size")
        return planned(self, client, types, *rest, **options)

    monkeypatch.setattr(Graph, "plan", refuse)
    model = ORTModule(WithoutAPlan())
    for n in (5, 7, 5, 7, 6, 8, 9, 10, 5):
        model(torch.randn(n, 4)).backward()
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {"graph": 5}
    assert stats["captures"] == 1


def test_a_graph_that_never_had_a_plan_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradd.calls.graph import Graph

    asked = []

    def refuse(self: Any, client: Any, types: Any, *rest: Any, **options: Any) -> Any:
        asked.append(types)
        raise errors.GraphError("no plan at all")

    monkeypatch.setattr(Graph, "plan", refuse)
    model = ORTModule(WithoutAPlan())
    for n in range(2, 14):
        model(torch.randn(n, 4)).backward()
    assert _in_torch(model)["graph"] >= 12
    assert len(asked) <= 5


class Hidden(torch.nn.Module):
    """Keeps layers in a plain list, where neither torch nor a graph finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.blocks = [torch.nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.first(x)).sum()


def test_a_parameter_in_a_plain_list_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Hidden())
    with caplog.at_level(logging.WARNING, "gradd"):
        model(torch.ones(2, 8)).backward()
    for message in _messages(caplog):
        assert "unsupported_parameter" in message and "of shape [8" in message
    assert model.module.blocks[0].weight.grad is not None


def test_a_list_that_forward_fills_is_filled() -> None:
    class Collecting(Net):
        def forward(self, x: torch.Tensor, into: list) -> torch.Tensor:
            hidden = self.first(x)
            into.append(hidden.pow(2).mean())
            return hidden.sum()

    model = ORTModule(Collecting())
    extra: list[torch.Tensor] = []
    model(batch()[0], extra)
    assert len(extra) == 1 and extra[0].requires_grad
    assert model.gradd_stats()["fallbacks"] in ({}, {"input_mutation": 1})


def test_a_hook_of_all_modules_after_a_capture_runs() -> None:
    model = ORTModule(Net())
    x, y = batch()
    model(x, y)
    seen: list[str] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        model(x, y)
    finally:
        hook.remove()
    assert "Linear" in seen
    before = model.gradd_stats()
    model(x, y)
    after = model.gradd_stats()
    assert after["fallbacks"] == before["fallbacks"] and after["forwards"] > before["forwards"]
    assert after["captures"] == before["captures"]


def test_retry_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "1")

    class Changing(Net):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return (_Double.apply(hidden) if type(self).broken else hidden).sum()

    model = ORTModule(Changing())
    x, _ = batch()
    model(x)
    Changing.broken = False
    model(x)
    assert _in_torch(model) == {"autograd_function": 1}
    assert model.gradd_stats()["forwards"] > 0


@pytest.mark.quick
def test_policies_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_BAD_INITIALIZATION"
    )
    assert policy_from_environment() == FallbackPolicy(16 | 128)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_SOMETIMES")
    with pytest.raises(ValueError, match="FALLBACK_SOMETIMES"):
        policy_from_environment()


def test_a_call_that_computes_nothing_is_no_fallback() -> None:
    x = torch.ones(2, 3)
    for module in (nn.Identity(), nn.Dropout(0.5).eval()):
        model = ORTModule(module, strict=True)
        for _ in range(2):
            assert torch.equal(model(x), x)
        assert model.gradd_stats()["in_torch"] == {}
    disabled = ORTModule(nn.Identity())
    disabled.forward = torch.compiler.disable(lambda x: x.add_(1))
    disabled(x)
    assert disabled.gradd_stats()["in_torch"] == {"no_graph": 1}


def test_policy_that_does_not_cover_the_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA")
    with pytest.raises(CaptureError):
        ORTModule(Custom())(batch()[0])


def test_the_policy_of_a_forced_forward_allows_what_any_call_meets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(Custom())
    model(batch()[0])
    assert model.gradd_stats()["parts_in_torch"] == {"autograd_function": 1}
    monkeypatch.setenv("GRADD_DIR", f"{tmp_path}/none")
    monkeypatch.setenv("GRADD_BIN", f"{tmp_path}/missing")
    with pytest.raises(errors.SessionError):
        ORTModule(Net())


def test_no_daemon_raises_unless_the_policy_allows_torch(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_DIR", f"{tmp_path}/none")
    monkeypatch.setenv("GRADD_BIN", f"{tmp_path}/missing")
    with pytest.raises(errors.SessionError, match="binary was not found"):
        ORTModule(Net())
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_BAD_INITIALIZATION")
    model = ORTModule(Net())
    loss_of(model(*batch())).backward()
    assert model.gradd_stats()["fallbacks"] == {"session": 1}


def test_an_unfit_directory_is_an_io_error_and_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("GRADD_DIR", str(tmp_path))
    with pytest.raises(errors.IoError, match="^GRADD_E_IO: .*: chmod 700 "):
        ORTModule(Net())
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_BAD_INITIALIZATION")
    model = ORTModule(Net())
    loss_of(model(*batch())).backward()
    assert model.gradd_stats()["fallbacks"] == {"session": 1}


def test_gradd_disable_is_plain_torch(monkeypatch: pytest.MonkeyPatch, daemon: object) -> None:
    monkeypatch.setenv("GRADD_DISABLE", "1")
    model = ORTModule(Net())
    loss, scores = model(*batch())
    loss.backward()
    assert type(scores) is torch.Tensor
    assert daemon.ps()["sessions"] == []
    with pytest.raises(errors.UnsupportedError, match="GRADD_DISABLE is set"):
        model.gradd_explain()


def test_self_check_finds_a_wrong_gradient_and_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gradd.calls import run

    backward = run.Run.backward

    def wrong(self: run.Run, *args: object) -> list:
        grads = backward(self, *args)
        grads[self.plan.params.index("second.bias")].mul_(1.01)
        return grads

    monkeypatch.setattr(run.Run, "backward", lambda self, go, keep, *more: wrong(self, go, keep))
    with pytest.raises(SelfCheckError, match=r"second\.bias"):
        ORTModule(Net(), strict=True)(*batch())
    model = ORTModule(Net())
    with caplog.at_level(logging.WARNING, "gradd"):
        model(*batch())
    (message,) = _messages(caplog)
    assert "self_check" in message and "second.bias" in message
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    unchecked = ORTModule(Net(), strict=True)
    unchecked(*batch())
    assert unchecked.gradd_stats()["self_checks"] == 0


def test_self_check_disturbs_nothing() -> None:
    net = Net(dropout=0.4)
    model = ORTModule(net, strict=True)
    calls: list[int] = []
    for parameter in net.parameters():
        parameter.register_hook(lambda g: calls.append(1))
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
    after_one_draw = torch.get_rng_state()
    torch.set_rng_state(state)
    loss = loss_of(model(*batch()))
    assert model.gradd_stats()["self_checks"] == 1
    assert torch.equal(torch.get_rng_state(), after_one_draw), "one seed is drawn, nothing else"
    assert drawn is not None and calls == []
    assert all(p.grad.eq(1).all() for p in net.parameters())
    loss.backward()
    assert len(calls) == 4


def test_without_dropout_torchs_random_stream_is_untouched() -> None:
    model = ORTModule(Net(), strict=True)
    state = torch.get_rng_state()
    for _ in range(2):
        loss_of(model(*batch())).backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("disabled", [False, True])
def test_hooks_of_the_root_run_in_pytorch(
    disabled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Old weight_norm computes the weight in a hook; without it the weight would never change."""
    if disabled:
        monkeypatch.setenv("GRADD_DISABLE", "1")
    taps: list[int] = []
    grads = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        with pytest.warns(FutureWarning):
            net = torch.nn.utils.weight_norm(torch.nn.Linear(8, 4))
        net.register_forward_hook(lambda *_: taps.append(1))
        net.register_full_backward_hook(lambda *_: taps.append(2))
        model = wrap(net)
        for _ in range(2):
            model.zero_grad()
            model(batch()[0]).pow(2).sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.01 * p.grad
        grads.append({name: p.grad for name, p in net.named_parameters()})
    assert taps == [1, 2] * 4
    assert set(grads[0]) == set(grads[1]) == {"bias", "weight_g", "weight_v"}
    for name, grad in grads[0].items():
        assert_close(grads[1][name], grad, name)


class Named(torch.nn.Parameter):
    """A class that differs from nn.Parameter by name only."""


class Tagged(torch.Tensor):
    """A class that torch's functions give to their results."""


class Doubling(torch.nn.Parameter):
    """A class with a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


class WithBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) + self.shift).square()


def _set(module: WithBuffer, place: str, kind: type) -> None:
    for name, old in (("weight", module.first.weight), ("bias", module.first.bias)):
        if place == name:
            new = old.detach().clone().as_subclass(torch.Tensor)
            as_parameter = issubclass(kind, torch.nn.Parameter)
            new = kind(new) if as_parameter else torch.nn.Parameter(new.as_subclass(kind))
            setattr(module.first, name, new)
    if place == "buffer":
        module.shift = module.shift.clone().as_subclass(kind)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("place", "kind", "named"),
    [
        ("weight", Named, False),
        ("bias", Named, False),
        ("weight", Doubling, True),
        ("bias", Tagged, True),
        ("buffer", Tagged, True),
    ],
)
def test_classes_of_tensors(place: str, kind: type, named: bool, after: bool) -> None:
    """Those that torch takes for plain ones run in the daemon, others in PyTorch by name."""
    plain, module = WithBuffer(), WithBuffer()
    _set(plain, place, kind)
    if not after:
        _set(module, place, kind)
    model = ORTModule(module)
    x = batch()[0]
    if after:
        model(x)
        _set(module, place, kind)
    forwards = model.gradd_stats()["forwards"]
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(x).sum().backward()
        assert type(model(x)) is type(plain(x))
        assert_close(model(x), plain(x))
        for a, b in zip(plain.first.parameters(), model.first.parameters(), strict=True):
            assert_close(a.grad, b.grad)
    stats = model.gradd_stats()
    assert (set(stats["fallbacks"]) == {"tensor_subclass"}) is named
    assert (stats["forwards"] == forwards) is named
    _set(module, place, torch.nn.Parameter if place != "buffer" else torch.Tensor)
    before = model.gradd_stats()["forwards"]
    model(x)
    assert model.gradd_stats()["forwards"] > before


@pytest.mark.parametrize("kind", [Named, torch.nn.Parameter, Tagged])
def test_classes_of_arguments(kind: type) -> None:
    model, plain = ORTModule(WithBuffer()), WithBuffer()
    x = batch()[0].requires_grad_(kind is not Tagged)
    given = x.detach().as_subclass(Tagged) if kind is Tagged else kind(x.detach())
    out, expected = model(given), plain(given)
    assert type(out) is type(expected)
    assert_close(out, expected)
    assert model.gradd_stats()["fallbacks"] == ({"tensor_subclass": 1} if kind is Tagged else {})
    model(x.detach())
    assert sum(model.gradd_stats()["fallbacks"].values()) == (kind is Tagged)
    with pytest.raises(CaptureError, match=r"tensor_subclass.*'0' is a .*Tagged"):
        ORTModule(WithBuffer(), strict=True)(x.detach().as_subclass(Tagged))


def test_writes_to_a_named_parameter_are_watched(daemon) -> None:
    net = Net()
    net.first.weight = Named(net.first.weight.detach().clone())
    model = ORTModule(net, strict=True)
    loss_of(model(*batch())).backward()
    before = watch.accesses.count
    net.first.weight.data  # noqa: B018
    assert watch.accesses.count != before
