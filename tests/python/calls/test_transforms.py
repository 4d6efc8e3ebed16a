"""Transforms of torch around a wrapped module: PyTorch computes them, by name, and nothing stays.

Every case runs with a plain module and with a wrapped one, whose next ordinary call has to be the
daemon's again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradd import ORTModule, errors
from gradd.spec import CaptureError
from helpers.nets import Net, assert_close

pytestmark = pytest.mark.usefixtures("daemon")
X = torch.linspace(-1, 1, 40).reshape(5, 8)
V = torch.linspace(-2, 1, 20).reshape(5, 4)


def _weights(m: torch.nn.Module) -> dict:
    return {name: p.detach() for name, p in m.named_parameters()}


def _loss(m: torch.nn.Module) -> Callable[[dict, torch.Tensor], torch.Tensor]:
    return lambda weights, row: functional_call(m, weights, (row[None],)).square().sum()


def _dual(m: torch.nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(X, X * 2)))


def _dual_weights(m: torch.nn.Module) -> Any:
    with forward_ad.dual_level():
        weights = {n: forward_ad.make_dual(w, w * 2) for n, w in _weights(m).items()}
        return forward_ad.unpack_dual(functional_call(m, weights, (X,)))


TRANSFORMS = {
    "vmap": lambda m: vmap(m)(torch.stack([X, X + 1])),
    "grad": lambda m: grad(_loss(m))(_weights(m), X[0]),
    "vmap of grad": lambda m: vmap(grad(_loss(m)), (None, 0))(_weights(m), X),
    "jacrev": lambda m: jacrev(lambda x: m(x))(X),
    "jacfwd": lambda m: jacfwd(lambda x: m(x))(X),
    "jvp": lambda m: jvp(m, (X,), (X * 2,)),
    "vjp": lambda m: vjp(m, X)[1](V),
    "jacobian": lambda m: torch.autograd.functional.jacobian(
        m, X, vectorize=True, strategy="forward-mode"
    ),
    "dual": _dual,
    "dual weights": _dual_weights,
}


@pytest.mark.parametrize("before", [False, True], ids=["fresh", "captured"])
@pytest.mark.parametrize("case", TRANSFORMS)
def test_a_transformed_call_runs_in_pytorch(case: str, before: bool) -> None:
    plain, model = Net(), ORTModule(Net())
    if before:
        model(X)
    expected, found = (tree_leaves(TRANSFORMS[case](m)) for m in (plain, model))
    for a, b in zip(expected, found, strict=True):
        assert_close(b, a)
    assert sum(model.gradd_stats()["fallbacks"].values()) == 1
    assert set(model.gradd_stats()["fallbacks"]) <= {"func_transform", "forward_ad"}
    model(X).sum().backward()
    plain(X).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(b.grad, a.grad)
    assert sum(model.gradd_stats()["fallbacks"].values()) == 1


@pytest.mark.parametrize(("case", "reason"), [("grad", "func_transform"), ("dual", "forward_ad")])
def test_strict_names_the_transform(case: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        TRANSFORMS[case](ORTModule(Net(), strict=True))


def _batched(m: torch.nn.Module, keep: bool = False) -> Any:
    x = X.clone().requires_grad_()
    out = m(x)
    rows = torch.eye(20).view(20, 5, 4)
    found = torch.autograd.grad(
        out, [x, *m.parameters()], rows, is_grads_batched=True, retain_graph=keep
    )
    with contextlib.nullcontext() if keep else pytest.raises((RuntimeError, errors.StaleError)):
        found += torch.autograd.grad(out.sum(), x)
    return found


def _vmap_of_backward(m: torch.nn.Module) -> Any:
    x = X.clone().requires_grad_()
    out = m(x)
    return vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(
        torch.stack([V, V * 2, V.square()])
    )


def _batches_of_batches(m: torch.nn.Module) -> Any:
    x = X.clone().requires_grad_()
    out = m(x)
    inner = vmap(lambda v: torch.autograd.grad(out, [x, *m.parameters()], v, retain_graph=True))
    return vmap(inner)(torch.linspace(0, 1, 120).reshape(2, 3, 5, 4))


def _one_of_two(m: torch.nn.Module) -> Any:
    """One gradient of the two comes in a batch, the other is the same for all."""
    x = X.clone().requires_grad_()
    a, b = m(x), m(x * 2)
    return vmap(lambda s: torch.autograd.grad((a, b), x, (V * s, V), retain_graph=True))(
        torch.arange(3.0)
    )


BACKWARDS = {
    "batched": _batched,
    "batched, kept": lambda m: _batched(m, True),
    "vmap": _vmap_of_backward,
    "batches of batches": _batches_of_batches,
    "one of two": _one_of_two,
    "jacobian": lambda m: torch.autograd.functional.jacobian(m, X, vectorize=True),
}


@pytest.mark.parametrize("case", BACKWARDS)
def test_a_batch_of_gradients_goes_through_the_daemon(case: str) -> None:
    plain, model = Net(), ORTModule(Net())
    expected, found = (tree_leaves(BACKWARDS[case](m)) for m in (plain, model))
    for a, b in zip(expected, found, strict=True):
        assert_close(b, a)
    assert model.gradd_stats()["fallbacks"] == {}
    assert_close(model(X), plain(X))


def test_a_batch_of_gradients_of_a_loss_beside_lazy_outputs() -> None:
    y = torch.arange(5) % 4
    results = []
    for model in (Net(), ORTModule(Net())):
        for _ in range(2):
            loss, scores = model(X, y)
            total = torch.stack([loss, loss * 2 + scores.square().sum()])
            weights = list(model.parameters())
            results.append(torch.autograd.grad(total, weights, torch.eye(2), is_grads_batched=True))
    for a, b in zip(results[0] + results[1], results[2] + results[3], strict=True):
        assert_close(b, a)


def _dual_gradient(m: torch.nn.Module) -> None:
    x = X.clone().requires_grad_()
    out = m(x)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(V, V))


def _derivative_of_backward(transform: Callable) -> Callable:
    def run(m: torch.nn.Module) -> None:
        x = X.clone().requires_grad_()
        out = m(x)
        transform(lambda v: torch.autograd.grad(out, x, v)[0].sum())

    return run


@pytest.mark.parametrize(
    "run",
    [
        _dual_gradient,
        _derivative_of_backward(lambda f: jvp(f, (V,), (V,))),
        _derivative_of_backward(lambda f: grad(f)(V)),
    ],
    ids=["dual", "jvp", "grad"],
)
def test_derivatives_of_a_backward_are_refused(run: Callable) -> None:
    model = ORTModule(Net())
    with pytest.raises(errors.UnsupportedError, match="derivatives of a backward"):
        run(model)
    assert_close(model(X), Net()(X))


def _exported(m: torch.nn.Module) -> Callable:
    return torch.export.export(m, (X,)).module()


@pytest.mark.parametrize(
    "record",
    [lambda m: torch.jit.trace(m, X), _exported, lambda m: make_fx(lambda x: m(x))(X)],
    ids=["jit.trace", "export", "make_fx"],
)
def test_what_records_operators_sees_them(record: Callable) -> None:
    """Else the outputs of the daemon would be constants of the record."""
    model = ORTModule(Net())
    recorded = record(model)
    assert_close(recorded(X + 1), Net()(X + 1))
    assert set(model.gradd_stats()["fallbacks"]) == {"being_traced"}
    assert_close(model(X), Net()(X))


class Around(torch.nn.Module):
    """A module that torch.compile can cut into two graphs around the wrapped one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin()).cos()


COMPILED = {
    "itself": lambda m: m,
    "in a module": Around,
    "in a function": lambda m: lambda x: m(x * 2).relu() + 1,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_around_a_wrapped_module(case: str, backend: str) -> None:
    torch._dynamo.reset()
    plain, model = Net(), ORTModule(Net())
    compiled = torch.compile(COMPILED[case](model), backend=backend)
    expected = COMPILED[case](plain)
    for rows in (5, 5, 4):
        x = X[:rows]
        for m, run in ((plain, expected), (model, compiled)):
            m.zero_grad()
            run(x).square().sum().backward()
        assert_close(compiled(x), expected(x))
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(b.grad, a.grad)
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {} and stats["captures"] == 1 and stats["forwards"] >= 6


def test_compile_in_place() -> None:
    torch._dynamo.reset()
    model = ORTModule(Net())
    model.compile(backend="eager")
    assert_close(model(X), Net()(X))
    assert model.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("case", [c for c in COMPILED if c != "itself"])
def test_a_graph_that_may_not_be_cut_is_an_error(case: str) -> None:
    torch._dynamo.reset()
    model = ORTModule(Net())
    run = torch.compile(COMPILED[case](model), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="an ORTModule runs in the daemon"):
        run(X)
    assert_close(model(X), Net()(X))


class _Doubling(TorchDispatchMode):
    """Sees every operator, and changes what one of them computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.relu.default else out


@pytest.mark.parametrize("before", [False, True])
def test_a_dispatch_mode_sees_every_operator(before: bool) -> None:
    net = Net(dropout=0.0)
    model, modes = ORTModule(net), []
    if before:
        model(X)
    outs = []
    for called in (model, net):
        modes.append(_Doubling())
        with modes[-1]:
            outs.append(called(X))
    assert_close(*outs)
    assert modes[0].seen == modes[1].seen > 0
    assert_close(model(X), net(X))
    assert model.gradd_stats()["fallbacks"] == {"being_traced": 1}


def test_other_weights_for_one_call_say_nothing_about_the_next() -> None:
    plain, model = Net(), ORTModule(Net())
    for _ in range(2):
        weights = {name: w * 2 for name, w in _weights(plain).items()}
        assert_close(functional_call(model, weights, (X,)), functional_call(plain, weights, (X,)))
    for _ in range(3):
        assert_close(model(X), plain(X))
    assert model.gradd_stats()["fallbacks"] in ({}, {"unsupported_parameter": 2})
    assert model.gradd_stats()["forwards"] >= 3


CODE = {
    "call": lambda m: lambda x: m(x),
    "forward": lambda m: lambda x: m.forward(x),
    "in a list": lambda m: lambda x: [part(x) for part in [m]][0],
}


@pytest.mark.parametrize("case", CODE)
def test_compiled_code_does_not_go_around_the_daemon(case: str) -> None:
    plain, model = Net(), ORTModule(Net(), strict=True)
    torch._dynamo.reset()
    run = torch.compile(CODE[case](model), backend="eager")
    for _ in range(2):
        assert_close(run(X), plain(X))
    assert model.gradd_stats()["forwards"] >= 2
