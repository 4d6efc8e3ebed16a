"""Python code reads a tensor's properties beside its values: identity, class, attributes.

Each call gets the answers that PyTorch's own tensors give, be it the first one or a later one.
"""

from __future__ import annotations

import collections
import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
CLASSES = {Tensor: 2.0, nn.Parameter: 3.0}


class Net(nn.Module):
    """A layer, a loose parameter, a buffer; forward() is a function of the module and the call."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(4, 4), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("shift", torch.full((4,), 0.25))
        self.layer.weight.rate, self.shift.factor = 3.0, 5.0
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def tensor(seed: int = 0, *, like: type = Tensor, needs: bool = False, **tags: Any) -> Tensor:
    made = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    made = nn.Parameter(made) if like is nn.Parameter else made.requires_grad_(needs)
    made.__dict__.update(tags)
    return made


def close_calls(
    model: ORTModule, eager: nn.Module, args: tuple, kwargs: dict, what: str, theirs: tuple = ()
) -> None:
    """Results and gradients of one call; `theirs`: the arguments of PyTorch, if others."""
    found = []
    for module, given in ((model, args), (eager, theirs or args)):
        out = module(*given, **kwargs)
        values = {k: v for k, v in [*enumerate(given), *kwargs.items()] if torch.is_tensor(v)}
        known = {"out": out}
        if out.requires_grad:
            own = eager if module is eager else model.module
            wanted = dict(own.named_parameters()) | {str(k): v for k, v in values.items()}
            wanted = {k: v for k, v in wanted.items() if v.requires_grad}
            seed = torch.arange(1.0, 1 + out.numel()).view_as(out)
            grads = torch.autograd.grad(
                out, list(wanted.values()), seed, allow_unused=True, retain_graph=True
            )
            known = {"out": out, **dict(zip(wanted, grads, strict=True))}
        found.append(known)
    assert found[0].keys() == found[1].keys()
    for name, want in found[1].items():
        got = found[0][name]
        if want is None or not want.any():
            assert got is None or not got.any(), (what, name)
        else:
            torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{what} {n}: {m}")


def both(function: Callable, calls: list[tuple[tuple, dict]], **how: Any) -> ORTModule:
    """Runs the calls one after the other in PyTorch and in the daemon."""
    torch.manual_seed(0)
    eager = Net(function)
    model = ORTModule(copy.deepcopy(eager), **how)
    for module in (eager, model.module):  # deepcopy() drops what is written to a tensor
        module.layer.weight.rate, module.shift.factor = 3.0, 5.0
    for number, (args, kwargs) in enumerate(calls):
        close_calls(model, eager, args, kwargs, f"call {number}")
    return model


def run(function: Callable, *calls: tuple) -> ORTModule:
    return both(function, [(args, {}) for args in calls])


# ---- the order of keyword arguments ----

ORDERS = {
    "cat": lambda s, **kw: s.wide(torch.cat(list(kw.values()), -1)),
    "first": lambda s, **kw: s.layer(next(iter(kw.values()))),
    "numbers": lambda s, x, **kw: s.layer(x) * sum(i * v for i, v in enumerate(kw.values(), 1)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_keywords_keep_their_order(name: str) -> None:
    x, a, b = tensor(1), tensor(2), tensor(3)
    first: dict[str, Any] = {"a": a, "b": b}
    if name == "numbers":
        first = {"x": x, "a": 2.0, "b": 7.0}
    turned = dict(reversed(first.items()))
    model = both(ORDERS[name], [((), first), ((), turned), ((), first)])
    assert model.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("keys", [(1, True), (1, 1.0)])
def test_keys_of_dictionaries_have_a_type(keys: tuple) -> None:
    def function(s: Net, d: dict) -> Tensor:
        return s.layer(sum(v * 2.0 * k + len(str(k)) for k, v in d.items()))

    run(function, *(({key: tensor(1)},) for key in (*keys, keys[0])))


@pytest.mark.parametrize("values", [(1, True, 1.0), (math.nan, math.nan)])
def test_types_of_equal_numbers_are_distinguished(values: tuple) -> None:
    function = lambda s, x, v: s.layer(x) * math.copysign(2.0, v) + len(str(v))  # noqa: E731
    run(function, *((tensor(1), v) for v in (*values, values[0])))


# ---- which tensor it is ----

SAME = {
    "is": lambda s, x, y: s.layer(x) * (2 if y is x else 1),
    "is not": lambda s, x, y: s.layer(x) + (s.layer(y) if y is not x else 0),
    "set": lambda s, x, y: s.layer(x + y) * len({x, y}),
    "dict": lambda s, x, y: s.layer(x) * {x: 2.0, y: 3.0}[x],
    "id": lambda s, x, y: s.layer(sum({id(v): v for v in (x, y)}.values())),
    "in a list": lambda s, x, y: s.layer(x) * sum(x is v for v in [y, x]),
    "both": lambda s, x, y: s.layer(x) * y,
    "parameter": lambda s, x, y: s.layer(x) * y * (2 if y is s.scale else 1),
    "buffer": lambda s, x, y: s.layer(x) * y * (2 if y is s.shift else 1),
    "any parameter": lambda s, x, y: s.layer(x) * y * (1 + sum(y is p for p in s.parameters())),
}


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_which_arguments_are_one(name: str, needs: bool) -> None:
    x, y = tensor(1, needs=needs), tensor(2, needs=needs)
    model = run(SAME[name], (x, x), (x, y), (y, y), (y, x))
    assert model.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("own", ["scale", "shift"])
@pytest.mark.parametrize("name", ["parameter", "buffer", "any parameter", "both"])
def test_arguments_that_are_the_modules_own(name: str, own: str) -> None:
    function = SAME[name]
    given = lambda s, x, which: function(s, x, x if which is None else which)  # noqa: E731
    torch.manual_seed(0)
    eager = Net(given)
    model = ORTModule(copy.deepcopy(eager), strict=True)
    x = tensor(1)
    for which in (own, None, own):
        pairs = [(m, m.get_parameter(own) if own == "scale" else m.get_buffer(own))
                 for m in (model.module, eager)]  # fmt: skip
        ours, theirs = ((t if which else None) for _, t in pairs)
        close_calls(model, eager, (x, ours), {}, name, (x, theirs))


# ---- its class ----


def test_parameters_among_the_arguments() -> None:
    plain, other = tensor(1, needs=True), tensor(1, like=nn.Parameter)
    function = lambda s, x: s.layer(x) * (2 if isinstance(x, nn.Parameter) else 1)  # noqa: E731
    model = run(function, (other,), (plain,), (other,))
    assert model.gradd_stats()["fallbacks"] == {}


def test_parameters_of_the_module_are_parameters() -> None:
    def function(s: Net, x: Tensor) -> Tensor:
        known = [isinstance(t, nn.Parameter) for t in (s.scale, s.shift, s.layer.weight, x)]
        return s.layer(x) * (1 + known.index(False)) * (3 if s.scale.is_leaf else 1)

    model = run(function, (tensor(1),), (tensor(2),))
    assert model.gradd_stats()["fallbacks"] == {}


BY_CLASS = {
    "is": lambda s, x: s.layer(x) * (2 if type(x) is Tensor else 1),
    "==": lambda s, x: s.layer(x) * (2 if type(x) == Tensor else 1),  # noqa: E721
    "__class__": lambda s, x: s.layer(x) * (2 if x.__class__ is Tensor else 1),
    "in": lambda s, x: s.layer(x) * (2 if type(x) in (Tensor, nn.Parameter) else 1),
    "table": lambda s, x: s.layer(x) * CLASSES[type(x)],
    "get": lambda s, x: s.layer(x) * CLASSES.get(type(x), 1.0),
    "own": lambda s, x: s.layer(x) * (2 if type(s.scale) is nn.Parameter else 1),
    "module": lambda s, x: s.layer(x) * (2 if type(x).__module__.startswith("torch.nn") else 1),
    "own module": lambda s, x: s.layer(x) * len(type(s.scale).__module__),
    "module of a layer": lambda s, x: s.layer(x) * len(s.layer.__class__.__module__),
    "module of a type": lambda s, x: s.layer(x) * len(x.dtype.__class__.__module__),
}


@pytest.mark.parametrize("name", BY_CLASS)
def test_classes_of_tensors(name: str) -> None:
    model = run(BY_CLASS[name], (tensor(1),), (tensor(2, like=nn.Parameter),), (tensor(1),))
    assert model.gradd_stats()["breaks"] == 0


def test_isinstance_is_no_reason() -> None:
    function = lambda s, x: s.layer(x) * (2 if isinstance(x, (Tensor, float)) else 1)  # noqa: E731
    assert run(function, (tensor(1),)).gradd_stats()["fallbacks"] == {}


# ---- its attributes ----

TAGS = {
    "getattr": lambda s, x: s.layer(x) * getattr(x, "scale", 1.0),
    "hasattr": lambda s, x: s.layer(x) * (2 if hasattr(x, "scale") else 1),
    "vars": lambda s, x: s.layer(x) * vars(x).get("scale", 1.0),
    "nested": lambda s, x: s.layer(x) * (x.scale if "scale" in x.__dict__ else 1.0),
}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("first", [0, 1])
def test_attributes_of_arguments(name: str, first: int) -> None:
    calls = [tensor(1), tensor(1, scale=5.0), tensor(2, scale=-0.0), tensor(2, scale=0.0)]
    run(TAGS[name], *((x,) for x in (*calls[first:], *calls)))


OWN = {
    "parameter": lambda s, x: s.layer(x) * getattr(s.layer.weight, "rate", 1.0),
    "buffer": lambda s, x: s.layer(x) * s.shift * getattr(s.shift, "factor", 1.0),
    "late": lambda s, x: s.layer(x) * (2 if hasattr(s.scale, "late") else 1),
    "object": lambda s, x: s.layer(x) * getattr(s.scale, "late", collections.Counter())["a"],
}


@pytest.mark.parametrize("name", OWN)
def test_attributes_of_the_modules_own(name: str) -> None:
    if name == "late" and torch.__version__ < "2.13":
        pytest.skip("this torch does not guard that a tensor lacks an attribute")
    torch.manual_seed(0)
    eager = Net(OWN[name])
    model = ORTModule(copy.deepcopy(eager), strict=True)
    modules = (eager, model.module)
    x = tensor(1)
    for rate in (3.0, 3.0, 4.0, -4.0):
        for module in modules:
            module.layer.weight.rate = module.shift.factor = rate
            if rate == 4.0:
                module.scale.late = {"a": 2.0}
        close_calls(model, eager, (x,), {}, f"{rate}")


def writes(s: Net, x: Tensor) -> Tensor:
    s.shift.factor = s.shift.factor + 1
    return s.layer(x) * s.shift.factor


def test_attributes_that_forward_writes() -> None:
    run(writes, *[(tensor(1),)] * 3)


# ---- its memory, and where it comes from ----


def _view_or_not() -> list[Tensor]:
    leaf = tensor(1, needs=True)
    return [leaf, (leaf * 1).view(3, 4), leaf]


def _of_inference_or_not() -> list[Tensor]:
    leaf = tensor(1)
    with torch.inference_mode():
        return [leaf, leaf * 1, leaf]


def _part_or_not() -> list[Tensor]:
    return [torch.ones(3, 4), torch.ones(5, 4)[:3]]


def _negative_or_not() -> list[Tensor]:
    made = torch.ones(3, 4, dtype=torch.complex64)
    return [torch.ones(3, 4), made.mul(1j).conj().imag]


def _turned_or_not() -> list[Tensor]:
    return [torch.ones(3, 4), torch.ones(4, 3).t()]


FACTS: dict[str, tuple[Callable, Callable[[], list[Tensor]]]] = {
    "_is_view": (lambda x: 2 if x._is_view() else 1, _view_or_not),
    "is_inference": (lambda x: 2 if x.is_inference() else 1, _of_inference_or_not),
    "untyped_storage": (lambda x: x.untyped_storage().nbytes() / 24, _part_or_not),
    "length of the storage": (lambda x: len(x.untyped_storage()) / 24, _part_or_not),
    "storage of a view": (lambda x: x[:1].untyped_storage().nbytes() / 24, _part_or_not),
    "is_neg": (lambda x: 1.0 + x.is_neg(), _negative_or_not),
    "a view is_neg": (lambda x: 1.0 + x.t().is_neg(), _negative_or_not),
    "dim_order": (lambda x: 1.0 + x.dim_order()[0], _turned_or_not),
    "stride": (lambda x: 1.0 + torch.Tensor.stride(x)[0], _turned_or_not),
}


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("turned", [False, True])
def test_facts_of_an_argument(name: str, turned: bool) -> None:
    ask, make = FACTS[name]
    calls = [(x,) for x in make()]
    with torch.set_grad_enabled(name != "is_inference"):
        run(lambda s, x: s.layer(x) * ask(x), *(calls[::-1] if turned else calls), *calls)


def test_an_argument_without_values() -> None:
    storage = torch.zeros(2, dtype=torch.uint8).untyped_storage()
    eager = Net(lambda s, x: s.layer(x) * (storage[0] + 1.0))
    model = ORTModule(copy.deepcopy(eager))
    for step in range(3):
        storage[0] = step
        close_calls(model, eager, (tensor(1),), {}, str(step))


# ---- what stays as it was, as under torch.compile ----


def _output_of(number: int) -> Tensor:
    leaf = tensor(1, needs=True)
    return torch.stack([leaf, leaf]).unbind()[number]


ONE = torch.ones(3, 4)
UNSEEN: dict[str, tuple[Callable, list[Callable[[], Tensor]]]] = {
    "_base": (lambda x: x._base is None, [lambda: tensor(1), lambda: tensor(1).view(3, 4)]),
    "output_nr": (lambda x: x.output_nr == 0, [lambda: _output_of(0), lambda: _output_of(1)]),
    "nn.Buffer": (
        lambda x: isinstance(x, nn.Buffer),
        [lambda: tensor(1), lambda: nn.Buffer(tensor(1))],
    ),
}


HISTORIES: dict[str, Callable[[Net, Any], Any]] = {
    "is_leaf": lambda s, x: s.layer(x) * (2.0 if x.is_leaf else 3.0),
    "getattr": lambda s, x: s.layer(x) * (2.0 if getattr(x, "is_leaf", False) else 3.0),
    "grad_fn": lambda s, x: s.layer(x) * (2.0 if x.grad_fn is None else 3.0),
    "in a list": lambda s, x: s.layer(x[0]) * (2.0 if x[0].is_leaf else 3.0),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", HISTORIES)
def test_arguments_that_are_results_of_others(name: str, turned: bool) -> None:
    given = [tensor(1), tensor(1, needs=True), tensor(1, needs=True) * 1]
    calls = [([x],) if name == "in a list" else (x,) for x in (*given, *given[1:])]
    model = run(HISTORIES[name], *(calls[::-1] if turned else calls))
    # Dynamo has no graph for a tensor whose grad_fn is asked for and there.
    assert set(model.gradd_stats()["in_torch"]) == ({"no_graph"} if name == "grad_fn" else set())


def test_torch_compile_does_not_find_an_address_again_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An address that is a key is another one in each trace. Nothing is said of code of gradd's."""

    def function(s: Net, x: Tensor) -> Tensor:
        if x.data_ptr() not in s.seen:
            s.seen.add(x.data_ptr())
        return s.layer(x) * float(len(s.seen))

    nets = [Net(function) for _ in range(3)]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
        net.seen = set()
    model = ORTModule(nets[0])
    calls, x, seen = [model, torch.compile(nets[1], backend="eager"), nets[2]], tensor(1), []
    for _ in range(2):
        ours, compiled, plain = (call(x).detach() for call in calls)
        torch.testing.assert_close(ours, compiled)
        seen.append(torch.allclose(ours, plain))
    assert seen == [True, torch.__version__ < "2.13"] and not caplog.text
    assert model.gradd_stats()["in_torch"] == {}


def test_the_self_check_finds_a_comparison_with_a_global_tensor() -> None:
    model = run(lambda s, x: s.layer(x) * (2.0 if x is ONE else 1.0), (ONE,), (ONE.clone(),))
    assert model.gradd_stats()["fallbacks"] == {"self_check": 2}


@pytest.mark.parametrize("name", UNSEEN)
def test_torch_compile_does_not_see_it_either(name: str) -> None:
    ask, makers = UNSEEN[name]
    nets = [Net(lambda s, x: s.layer(x) * (2.0 if ask(x) else 1.0)) for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    calls = [ORTModule(nets[0]), torch.compile(nets[1], backend="eager"), nets[2]]
    seen = []
    for make in makers:
        ours, compiled, plain = (call(make()).detach() for call in calls)
        torch.testing.assert_close(ours, compiled)
        seen.append(torch.allclose(ours, plain))
    assert seen == [True, False]


# ---- what is the same for each call, but not while it is captured ----

ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "has_torch_function": lambda x: has_torch_function((x,)),
    "modes of functions": lambda x: len(torch.overrides._get_current_function_mode_stack()),
    "a backend": lambda x: torch.backends.mkldnn.enabled,
    "filters of warnings": lambda x: len(warnings.filters),
    "its class by name": lambda x: type(x).__name__ == "Tensor",
    "its class as text": lambda x: len(str(type(x))),
    "its bases": lambda x: len(type(x).__mro__),
    "its dictionary": lambda x: len(x.__dict__),
    "an attribute of a stand-in": lambda x: hasattr(x, "fake_mode"),
    "the class of a stand-in": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "an f-string": lambda x: len(f"{x}"),
    "a type as text": lambda x: len(f"{x.dtype} {x.device}"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_while_a_call_is_captured(name: str) -> None:
    def function(s: Net, x: Tensor) -> Tensor:
        y = s.layer(x)
        return y * (1.0 + float(ANSWERS[name](y)))

    run(function, (tensor(1),), (tensor(1),))


@pytest.mark.nightly
def test_code_between_graphs_sees_the_mode_that_looks_for_operators() -> None:
    def function(s: Net, x: Tensor) -> Tensor:
        y = s.layer(x)
        return y * (1.0 + torch._C._len_torch_dispatch_stack())  # breaks the graph

    model, found = ORTModule(Net(function)), []
    for _ in range(4):
        out, plain = model(tensor(1)), model.module.layer(tensor(1))
        found.append(round((out.sum() / plain.sum()).item(), 3))
        out.sum().backward()
    assert (found[0], found[-1]) == (2, 1), found


# ---- its layout ----


@pytest.mark.parametrize("first", [0, 1])
def test_sparse_arguments_run_in_pytorch(first: int) -> None:
    x = tensor(1)
    calls = [x, x.to_sparse(), x, x.to_sparse_csr()]
    run(lambda s, t: s.layer(t), *((t,) for t in calls[first:]))


def without_gradient(net: Net, x: Tensor) -> Tensor:
    h = net.layer(x)
    scale = 2.0 if h.grad is None else 3.0
    scale += 4.0 if (h * 2).grad is None else 5.0
    return h * scale + (x.grad is None)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_values_of_a_forward_have_no_gradient() -> None:
    calls: list[tuple[tuple, dict]] = [((tensor(k, needs=k > 1),), {}) for k in range(4)]
    assert not both(without_gradient, calls).gradd_stats()["in_torch"]
