"""Calls, or parts of them, that no graph can hold run in PyTorch, with the effects of PyTorch."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from gradd import ORTModule
from gradd.dynamo import cache
from gradd.dynamo.traces import Frames
from gradd.graph.translation import translate
from helpers.graphs.captures import Lambda
from helpers.nets import assert_close, assert_same_grads

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.linspace(-1, 2, 12).reshape(3, 4)


def _module(forward: Callable) -> nn.Module:
    torch.manual_seed(0)
    module = Lambda(forward, lin=nn.Linear(4, 4), count=torch.zeros(()))
    module.calls, module.outs, module.options = 1, {"all": []}, SimpleNamespace(scale=1.0)
    module.draws, module.numbers = random.Random(1), np.random.default_rng(2)
    return module


def compare(forward: Callable, *args: Any, calls: int = 3) -> ORTModule:
    """Results, gradients, and what a forward leaves behind."""
    theirs = _module(forward)
    ours = ORTModule(_module(forward))
    for _ in range(calls):
        found = []
        for model, inner in ((ours, ours.module), (theirs, theirs)):
            random.seed(3), np.random.seed(4), torch.manual_seed(5)
            model.zero_grad()
            given = copy.deepcopy(args)
            result = model(*given)
            tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            if tensors:
                sum(t.sum() for t in tensors).backward()
            left = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
            drawn = [random.random(), np.random.rand(), inner.calls, inner.options.scale]
            others = [x for x in pytree.tree_leaves(result) if not isinstance(x, torch.Tensor)]
            found.append((tensors, left, [*drawn, *others], [*inner.buffers()]))
        (mine, own, numbers, buffers), (right, given, expected, wanted) = found
        assert numbers == expected
        for a, b in zip([*mine, *own, *buffers], [*right, *given, *wanted], strict=True):
            assert_close(a, b)
        if right:
            assert_same_grads(ours.module, theirs)
    return ours


def _count(self, x):
    self.calls += 1
    return self.lin(x).mean() * self.calls


def _stash(self, x):
    self.features = self.lin(x)
    return self.features.mean()


def _stash_below(self, x):
    self.lin.features = self.lin(x)
    return self.lin.features.mean()


def _collect(self, x):
    self.outs["all"].append(self.lin(x).detach())
    return self.lin(x).mean() * len(self.outs["all"])


def _options(self, x):
    self.options.scale *= 2
    return self.lin(x).mean() * self.options.scale


def _size(self, x):
    self.size = x.shape[0]
    return self.lin(x).mean() * self.size


def _table(self, x):
    if not hasattr(self, "table"):
        self.table = torch.arange(4.0)
    return (self.lin(x) * self.table).mean()


def _coin(self, x):
    h = self.lin(x)
    return (self.lin(h) if random.random() < 0.5 else h).mean()


def _rebound(self, x):
    self.count = self.count + x.mean()
    return (self.lin(x) * self.count).mean()


WRITES = (_count, _stash, _stash_below, _collect, _options, _size, _table, _rebound)
DRAWS = {
    "python": lambda self, x: self.lin(x).mean() * random.random(),
    "numpy": lambda self, x: self.lin(x).mean() * float(np.random.rand()),
    "own numpy": lambda self, x: self.lin(x).mean() * float(self.numbers.random()),
    "a coin": _coin,
}


@pytest.mark.parametrize("forward", WRITES, ids=lambda f: f.__name__.strip("_"))
def test_attributes_that_forward_writes(forward: Callable) -> None:
    compare(forward, X)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_that_are_not_torchs(name: str) -> None:
    compare(DRAWS[name], X)


def _in_doubles(self, x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    table, steps = torch.tensor([1.5, 0.25, 3.0, 1.0]), torch.arange(4) * 0.1
    torch.set_default_dtype(before)
    return self.lin(x) * table.sum() + steps, torch.tensor(0.5)


def _in_bf16(self, x):
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    h = self.lin(x)
    torch.set_autocast_enabled("cpu", False)
    return h, self.lin(h.float())


def _left_in_bf16(self, x):
    torch.set_autocast_enabled("cpu", True)
    h = self.lin(x)
    torch._dynamo.graph_break()
    h = self.lin(h)
    torch.set_autocast_enabled("cpu", False)
    return self.lin(h.float())


@pytest.mark.parametrize("forward", [_in_doubles, _in_bf16, _left_in_bf16])
def test_settings_that_forward_changes(forward: Callable) -> None:
    """They count for the operators behind them, in the order of the forward."""
    found = compare(forward, X)
    torch.clear_autocast_cache()  # it has the parameters, as nothing leaves autocast
    assert found.gradd_stats()["in_torch"].keys() == {"unsupported_operator"}


def _cond(self, x):
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: -y, (self.lin(x),)).mean()


def _by_hand(self, x):
    h = self.lin(x)
    h.register_hook(lambda g: g * 0.1)
    return h.mean()


def _gradient_inside(self, x):
    w = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((self.lin(w) * w).sum(), w)
    return self.lin(grad.detach()).mean()


def _hidden(self, x):
    try:
        return _Doubled.apply(self.lin(x)).mean()
    except Exception:
        return self.lin(x).mean()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


PARTS: dict[str, Callable] = {
    "svd": lambda self, x: torch.linalg.svd(self.lin(x))[1].sum(),
    "several": lambda self, x: (
        sum(torch.linalg.svd(self.lin(x) + i)[1].sum() for i in range(2))
        + torch.linalg.eigvals(x @ x.T).abs().sum()
    ),
    "bucketize": lambda self, x: self.lin(x) + torch.bucketize(x, x[:, 0].sort()[0]),
    "repeat": lambda self, x: self.lin(x).repeat_interleave(
        torch.tensor([1, 2, 3]), 0, output_size=6
    ),
    "diagonal": lambda self, x: self.lin(x).clone().fill_diagonal_(0.0),
    "view of a diagonal": lambda self, x: torch.diagonal(self.lin(x)).add_(-1).pow(2).sum(),
    "hardshrink": lambda self, x: nn.functional.hardshrink(self.lin(x).relu_()).sum(),
    "masked_select": lambda self, x: self.lin(x).masked_select(x > 0),
    "nonzero": lambda self, x: self.lin(x)[x[:, 0].nonzero()[:, 0]],
    "a function in a try": _hidden,
    "cond": _cond,
    "a hook on a tensor": _by_hand,
    "a gradient inside": _gradient_inside,
    "branch": lambda self, x: self.lin(x).mean() if x.sum() > 0 else self.lin(-x).mean(),
    "written argument": lambda self, x: self.lin(x.add_(1)).mean(),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_forward(name: str) -> None:
    compare(PARTS[name], X)


def test_each_refusal_has_its_own_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators are tried one after the other: an unexpected error is none of an earlier one."""
    translated = translate._translated

    def failing(program: Any, registry: Any) -> Any:
        operators = {str(n.target) for n in program.graph_module.graph.nodes}
        for name in ("erf", "atan"):
            if f"aten.{name}.default" in operators:
                raise RuntimeError(f"no {name} today")
        return translated(program, registry)

    monkeypatch.setattr(translate, "_translated", failing)
    monkeypatch.setattr(cache, "_captures", OrderedDict())
    ORTModule(_module(lambda self, x: self.lin(x).erf().atan()))(X)
    assert "erf today" in caplog.text and "atan today" in caplog.text


RESULTS: dict[str, Callable] = {
    "nothing": lambda self, x: None,
    "no tensor": lambda self, x: (3, []),
    "structure": lambda self, x: {"a": (x, self.lin(x), None), "b": [3, "text"], "c": {"d": True}},
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_any_form(name: str) -> None:
    theirs, ours = _module(RESULTS[name]), ORTModule(_module(RESULTS[name]))
    for _ in range(2):
        a, b = ours(X), theirs(X)
        found, form = pytree.tree_flatten(a)
        expected, wanted = pytree.tree_flatten(b)
        assert form == wanted
        for x, y in zip(found, expected, strict=True):
            assert torch.allclose(x, y) if isinstance(y, torch.Tensor) else x == y


def _appended(given, y):
    given["rows"].append(y)


CHANGES: dict[str, Callable] = {
    "append": _appended,
    "pop": lambda given, y: given.pop("x"),
    "update": lambda given, y: given.update(x=y),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers_of_arguments_that_forward_changes(name: str) -> None:
    def forward(self, given):
        y = self.lin(given["x"])
        CHANGES[name](given, y)
        return y.mean()

    ours, theirs = ORTModule(_module(forward)), _module(forward)
    for _ in range(2):
        sides = [{"x": X, "rows": [X]}, {"x": X, "rows": [X]}]
        assert_close(ours(sides[0]), theirs(sides[1]))
        assert sides[0].keys() == sides[1].keys()
        for a, b in zip(*map(pytree.tree_leaves, sides), strict=True):
            assert_close(a, b)


def test_unknown_types() -> None:
    class Odd:
        scale = 2.0

    compare(lambda self, x, odd: self.lin(x).mean() * odd.scale, X, Odd())


@pytest.mark.parametrize("trained", [True, False])
def test_a_tensor_in_place_of_a_parameter(trained: bool) -> None:
    net = _module(lambda self, x: self.lin(x).sum())
    outer = Lambda(lambda self, x: self.net(x), net=ORTModule(copy.deepcopy(net)))
    for factor in (2.0, 3.0):
        others = {n: (p * factor).detach() for n, p in net.lin.named_parameters()}
        sides = []
        for model, start in ((outer, "net.module.lin"), (net, "lin")):
            given = {f"{start}.{n}": v.clone().requires_grad_(trained) for n, v in others.items()}
            result = functional_call(model, given, (X,))
            if trained:
                result.backward()
            sides.append([result, *(v.grad for v in given.values() if trained)])
        for a, b in zip(*sides, strict=True):
            assert_close(a, b)


class _Unrolled(nn.Module):
    """As many operators as rows: each number of rows is a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        state = h[0]
        for t in range(1, len(h)):
            state = torch.tanh(state + h[t])
        return state.sum()


def test_graphs_that_change_in_every_call() -> None:
    model = ORTModule(_Unrolled())
    for rows in range(3, 8):
        x = torch.randn(rows, 4)
        assert_close(model(x), model.module(x))


def test_a_module_that_is_changed_before_every_step() -> None:
    """The loss of a trainer that puts the model into it anew."""
    model = ORTModule(Lambda(lambda self, x: self.model(x).square().mean(), model=nn.Linear(4, 4)))
    for _ in range(4):
        model.module.model = model.model = copy.deepcopy(model.module.model)
        model.zero_grad()
        model(X).backward()
        expected = torch.autograd.grad(model.module(X), model.module.model.weight)[0]
        assert_close(model.module.model.weight.grad, expected)


def _early_exit(self, x):
    for _ in range(3):
        x = self.lin(x)
        if x.mean() > 0.3:
            break
    return x.mean()


def test_a_call_without_a_graph_is_soon_traced_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """A break within a loop: Dynamo runs all of it in PyTorch."""
    ours = ORTModule(_module(_early_exit))
    for _ in range(6):
        ours(X).backward()
    caplog.set_level("INFO", "gradd")
    counts = []
    for _ in range(3):  # a thread that an earlier test has left may trace beside it, not forever
        traced = Frames.now()
        for _ in range(3):
            ours(X).backward()
        counts.append(Frames.now().total - traced.total)
    assert 0 in counts
    assert sum(ours.gradd_stats()["fallbacks"].values()) == 15
    (said,) = [r.getMessage() for r in caplog.records if "without a graph" in r.getMessage()]
    assert "0.0 ms" not in said
    # Dynamo's sentence to its end, and the line of the branch.
    lines, first = inspect.getsourcelines(_early_exit)
    at = first + next(i for i, text in enumerate(lines) if "0.3" in text)
    assert "(e.g. `if" in said
    assert f"{__file__}:{at}" in said or torch.__version__ < "2.13"


PLANNED = {
    "a type without a kernel": lambda h: h * (10 * h > 3).sort(1)[0],
    "a type of the cast": lambda h: h * (10 * h).to(torch.uint32).to(h.dtype),
    "several at once": lambda h: (h + (h > 0).sort(1)[0]) * (9 * h).to(torch.uint64).to(h.dtype),
}


@pytest.mark.parametrize("middle", PLANNED.values(), ids=PLANNED)
def test_what_a_plan_refuses_is_cut_out(middle: Callable) -> None:
    """The refusal comes with types, sizes and gradients; what is around it stays in the daemon."""
    ours = compare(lambda self, x: self.lin(middle(self.lin(x).relu())).mean(), X)
    stats = ours.gradd_stats()
    assert not stats["fallbacks"] and stats["parts_in_torch"]
    assert stats["captures"] >= 2


def test_a_cut_attribute_is_named_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    compare(lambda self, x: torch.linalg.eigvals(self.lin(x[:, :3].T @ x)[:3, :3]).real, X, calls=1)
    said = [r.getMessage() for r in caplog.records if "parts of a graph" in r.getMessage()]
    assert said and ".real: unsupported_operator" in said[0]
    assert ".real computes with torch.complex64" in said[0] and "getattr" not in said[0]


def _mean_of_neighbours(self: Any, x: torch.Tensor) -> torch.Tensor:
    to = (self.lin(x) > 0).sum(1)
    sums = torch.zeros(5, 4).index_add_(0, to, self.lin(x))
    return sums / torch.bincount(to, minlength=5).clamp(min=1)[:, None]


def _solved(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(self.lin(x) @ x.T + torch.eye(3), x)


def _raising_in_a_trace(self: Any, x: torch.Tensor) -> torch.Tensor:
    _counted.count += 1
    return self.lin(x) * _counted(2)


@functools.lru_cache
def _counted(n: int) -> float:
    return float(n)


_counted.count = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_mean_of_neighbours, r"in PyTorch: bincount: "),
        (_solved, r"ONNX for \S+ @ \S+: aten._linalg_solve_ex.default\. The cost"),
        (_raising_in_a_trace, r"\(raised exception AttributeError\(.*?\); TORCH_LOGS"),
    ],
)
def test_a_message_names_what_the_user_has_called(
    forward: Callable, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And no assertion that torch has put beside it, nor what Dynamo says of its own handlers."""
    if forward is _raising_in_a_trace and torch.__version__[:4] != "2.13":
        pytest.skip("this torch traces it, or has other words")
    compare(forward, X)
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    "forward, given, error, says",
    [
        (lambda self, x: self.lin(x[:, :3]), X, RuntimeError, "shapes cannot be multiplied"),
        (lambda self, x: self.lin(x)[7], X, IndexError, "index 7 is out of bounds"),
        (lambda self, x: self.lin(x), X.double(), RuntimeError, "same dtype"),
        (lambda self, x: self.lin(x), X.to("meta"), RuntimeError, "device meta"),
    ],
)
def test_what_does_not_fit_raises_without_words_before(
    forward: Callable, given: torch.Tensor, error: type, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ORTModule(_module(forward))
    with pytest.raises(error, match=says):
        model(given)
    said = [r.getMessage() for r in caplog.records]
    assert not [text for text in said if "WON'T CONVERT" in text or "in PyTorch" in text]


def test_an_int_of_more_than_64_bits_ends_a_slice_in_pytorch() -> None:
    ours = ORTModule(_module(lambda self, x, n: self.lin(x)[:, :n]))
    for n in (3, 2, 10**20, 4, -(10**20)):
        assert_close(ours(X, n), ours.module(X, n))
    assert ours.gradd_stats()["in_torch"] == {"unsupported_input_type": 2}


def test_dynamos_failure_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(_module(lambda self, x, ratio: self.lin(x) * float(ratio)))
    for ratio in ("0.5", "0.25", "0.75"):
        model(X, Decimal(ratio))
    said = [r.getMessage() for r in caplog.records if "WON'T CONVERT" in r.getMessage()]
    assert len(said) == len(set(said)) and not [text for text in said if "frontend.py" in text]


def test_a_property_behind_a_lock_is_named_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scaled(nn.Linear):
        scale = 2.0

        @functools.cached_property
        def factor(self) -> torch.Tensor:
            return torch.full((4,), self.scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    model = ORTModule(Scaled(4, 4))
    x = torch.ones(2, 4)
    model(x)
    model.module.scale = 3.0
    for kept in (None, None, torch.ones(4)):
        model.module.__dict__.pop("factor", None)
        if kept is not None:
            model.module.__dict__["factor"] = kept
        model(x)
    said = [r.getMessage() for r in caplog.records if "no graph has" in r.getMessage()]
    assert all(text.count("RLock") == text.count("forward @") for text in said)
