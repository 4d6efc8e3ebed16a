"""Effects of forward() on tensors beside computing: flags, gradients, hooks; and its queries.

Whether such a call runs in the daemon or not, it leaves what PyTorch leaves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")

Result = tuple[list[Any], list[Any]]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.d = nn.Linear(6, 6), nn.Linear(6, 1)


def of(forward: Callable) -> nn.Module:
    torch.manual_seed(0)
    return type("Made", (Base,), {"forward": forward})()


def state(module: nn.Module, x: Tensor, outputs: tuple) -> list[Any]:
    """All that a forward may have changed; the values of a gradient after it."""
    found: list[Any] = [x.grad, x.requires_grad]
    for parameter in module.parameters():
        hooks = parameter._backward_hooks or {}
        found += [parameter.grad, parameter.requires_grad, len(hooks)]
    for sub in module.modules():
        found += [len(sub._forward_hooks), len(sub._backward_hooks)]
    return found + [t.grad for t in outputs if not t.is_leaf and t.retains_grad]


def one_call(module: nn.Module, base: nn.Module, x: Tensor, y: Tensor | None) -> Result:
    outputs = module(x, y)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if outputs[0].requires_grad:
        outputs[0].sum().backward()
    return list(outputs), state(base, x, outputs)


def assert_equal(ours: list[Any], theirs: list[Any], where: str) -> None:
    assert len(ours) == len(theirs), where
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            assert torch.allclose(a, b, atol=1e-6), f"{where}, {number}"
            assert a.requires_grad == b.requires_grad, f"{where}, {number}"
        else:
            assert a == b, f"{where}, {number}: {a} != {b}"


def compare(monkeypatch: pytest.MonkeyPatch, forward: Callable) -> dict[str, int]:
    """Calls of two forms, in both modes and without gradients; returns the fallbacks."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")  # the capture alone has to be right
    eager, base = of(forward), of(forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ORTModule(base)
        for step in range(7):
            x, y = torch.randn(3, 6), None if step % 2 else torch.randn(3, 1)
            for each in (eager, model):
                each.train(step < 4)
            with torch.set_grad_enabled(step != 5):
                theirs = one_call(eager, eager, x.clone(), y)
                ours = one_call(model, base, x.clone(), y)
            for a, b in zip(ours, theirs, strict=True):
                assert_equal(a, b, f"step {step}")
            if step == 2:
                eager.zero_grad()
                base.zero_grad()
    return model.gradd_stats()["fallbacks"]


def freeze_by_form(self, x, y):
    for p in self.d.parameters():
        p.requires_grad = y is not None
    h = self.d(self.l(x))
    return h if y is None else h + y


def freeze_submodule(self, x, y):
    self.d.requires_grad_(y is not None)
    return self.d(self.l(x))


def freeze_in_eval(self, x, y):
    for p in self.d.parameters():
        p.requires_grad = self.training
    return self.d(self.l(x))


def frozen_meanwhile(self, x, y):
    self.l.weight.requires_grad_(False)
    z = self.l(x)
    self.l.weight.requires_grad_(True)
    return z + self.l.bias


def by_setattr(self, x, y):
    setattr(self.l.weight, "requires_grad", y is None)  # noqa: B010
    return self.l(x)


def by_slot(self, x, y):
    for p in self.d.parameters():
        object.__setattr__(p, "requires_grad", y is None)
    return self.d(self.l(x))


def by_method_of_class(self, x, y):
    Tensor.requires_grad_(self.l.weight, y is None)
    return self.l(x)


def by_descriptor(self, x, y):
    Tensor.requires_grad.__set__(self.l.weight, y is None)
    return self.l(x)


def flag_of_an_argument(self, x, y):
    x.requires_grad_(True)
    return self.d(self.l(x))


def zero_grad(self, x, y):
    self.zero_grad()
    return self.d(self.l(x))


def no_gradient(self, x, y):
    self.l.weight.grad = None
    return self.d(self.l(x))


def gradient_of_zeros(self, x, y):
    for p in self.parameters():
        p.grad = torch.zeros_like(p)
    return self.d(self.l(x))


def optimizer(self, x, y):
    torch.optim.SGD(self.parameters(), 0.1).zero_grad()
    return self.d(self.l(x))


def clipped(self, x, y):
    nn.utils.clip_grad_norm_(self.parameters(), 1.0)
    return self.d(self.l(x))


def hook_of_a_parameter(self, x, y):
    if self.l.weight.requires_grad and torch.is_grad_enabled():
        self.l.weight.register_hook(lambda g: g * 2)
    return self.l(x)


def hook_after_accumulation(self, x, y):
    def scale(parameter):
        parameter.grad.mul_(2)

    self.l.weight.register_post_accumulate_grad_hook(scale)
    return self.l(x)


def hook_of_a_module(self, x, y):
    self.l.register_forward_hook(lambda m, i, o: o * 2)
    return self.l(x)


def backward_hook_of_a_module(self, x, y):
    self.l.register_full_backward_hook(lambda m, i, o: None)
    return self.l(x)


def retained(self, x, y):
    h = self.l(x)
    if h.requires_grad:
        h.retain_grad()
    return h.sum(), h


EFFECTS = [
    *(freeze_by_form, freeze_submodule, freeze_in_eval, frozen_meanwhile, by_setattr, by_slot),
    *(by_method_of_class, by_descriptor, flag_of_an_argument, zero_grad, no_gradient),
    *(gradient_of_zeros, optimizer, clipped, hook_of_a_parameter),
    *(hook_after_accumulation, hook_of_a_module, backward_hook_of_a_module, retained),
]


@pytest.mark.parametrize("forward", EFFECTS, ids=lambda f: f.__name__)
def test_what_a_graph_does_not_do(monkeypatch: pytest.MonkeyPatch, forward: Callable) -> None:
    compare(monkeypatch, forward)


def flags_as_they_are(self, x, y):
    self.l.weight.requires_grad_(True)
    self.l.bias.requires_grad = True
    return self.d(self.l(x))


def tensors_of_its_own(self, x, y):
    z = torch.ones(6, requires_grad=True)
    return self.d(self.l(x).detach().requires_grad_()) + z.sum()


def hook_for_a_moment(self, x, y):
    seen = []
    handle = self.l.register_forward_hook(lambda m, i, o: seen.append(o))
    z = self.d(self.l(x))
    handle.remove()
    return z + seen[0].mean()


def asks_a_result(self, x, y):
    h = self.l(x)
    return h if h.requires_grad else h * 2


def asks_for_the_graph(self, x, y):
    h = self.l(x)
    return self.d(h) if h.grad_fn is not None else self.d(h) * 3


def asks_a_leaf(self, x, y):
    h = self.l(x)
    return h * 3 if h.is_leaf else h


def asks_within_no_grad(self, x, y):
    with torch.no_grad():
        h = self.l(x)
    return self.d(x) + (h.mean() if h.requires_grad else 0)


ASKING = [asks_a_result, asks_for_the_graph, asks_a_leaf, asks_within_no_grad]
OTHERS = [tensors_of_its_own, hook_for_a_moment, asks_for_the_graph]
HELD = [flags_as_they_are, *ASKING, *OTHERS[:2]]


@pytest.mark.parametrize("forward", HELD, ids=lambda f: f.__name__)
def test_what_a_graph_holds(monkeypatch: pytest.MonkeyPatch, forward: Callable) -> None:
    fallbacks = compare(monkeypatch, forward)
    assert forward in OTHERS or fallbacks == {}


@pytest.mark.parametrize("forward", ASKING, ids=lambda f: f.__name__)
def test_answers_follow_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch, forward: Callable
) -> None:
    if forward is asks_a_result and torch.__version__ < "2.13":
        pytest.skip("this torch does not guard the flags of parameters for that")
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    eager, base = of(forward), of(forward)
    model = ORTModule(base)
    for step in range(6):
        for each in (eager, base):
            each.l.requires_grad_(step not in (2, 3))
            each.d.requires_grad_(step < 4)
        x = torch.randn(3, 6)
        with torch.set_grad_enabled(step != 1):
            ours, theirs = model(x, None), eager(x, None)
        assert_equal([ours], [theirs], f"step {step}")


# ---- `x.requires_grad = True` for a value that forward() has computed ----

X = torch.linspace(-1, 1, 18).view(3, 6)


class Net(nn.Module):
    """Has its forward from outside."""

    def __init__(self, body: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(6, 6), nn.Linear(6, 2), body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def a_view(net: Net, x: torch.Tensor) -> Any:
    h = x[:, None]
    h.requires_grad = True
    return net.b(net.a(h).tanh())


def written_before(net: Net, x: torch.Tensor) -> Any:
    h = torch.zeros(3, 6)
    h[:, 1] = x[:, 2] * 3
    h.requires_grad = True
    return net.a(h).tanh()


def asked(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.a(h) * (3 if h.requires_grad and h.is_leaf else 5)


def frozen(net: Net, x: torch.Tensor) -> Any:
    h = net.a(x).detach()
    h.requires_grad = h.requires_grad  # as it is
    return net.b(h)


def twice(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    h.requires_grad = True
    return net.b(h)


def returned(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.b(net.a(h).tanh()), h


def returned_view(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return net.b(net.a(h).tanh()), h.view(6, 3)


def hooked(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    h.register_hook(lambda gradient: gradient * 2)
    return net.b(net.a(h).tanh()), h


def hooked_inside(net: Net, x: torch.Tensor) -> Any:
    return hooked(net, x)[0]


def only_of_it(net: Net, x: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad = True
    return h.exp()


def by_method(net: Net, x: torch.Tensor) -> Any:
    h = (x * 2).requires_grad_()
    return net.b(net.a(h).tanh())


WHOLE = [a_view, written_before, asked, twice]


@pytest.mark.quick
@pytest.mark.parametrize(
    "body",
    [*WHOLE, by_method, frozen, returned, returned_view, hooked, hooked_inside, only_of_it],
    ids=lambda f: f.__name__,
)
def test_as_in_pytorch(body: Callable) -> None:
    net = Net(body)
    ours, twin = ORTModule(net, strict=body in WHOLE), copy.deepcopy(net)
    for step in range(2):
        results = []
        for model in (ours, twin):
            found = model(X + step)
            first, *more = found if isinstance(found, tuple) else (found,)
            for other in more:
                other.retain_grad()
            first.square().sum().backward()
            results.append([first, *more, *(x.grad for x in more)])
            results[-1] += [x.requires_grad for x in (first, *more)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    if body in WHOLE:
        stats = ours.gradd_stats()
        assert (stats["captures"], stats["breaks"], stats["in_torch"]) == (1, 0, {})


def a_copy(h: torch.Tensor) -> Any:
    return h, (h.detach().clone().requires_grad_() * 2).sum().detach()


def an_alias(h: torch.Tensor) -> Any:
    return h, (h.detach().requires_grad_() * 2).sum().detach()


def beside_a_write(h: torch.Tensor) -> Any:
    inner = (h.detach().clone().requires_grad_() * 2).sum()
    h.view(-1)[1:3].mul_(2)
    return h, inner.detach()


def two_of_them(h: torch.Tensor) -> Any:
    first, second = (h.detach().clone().requires_grad_() for _ in "ab")
    return h, (first * second.requires_grad_()).detach()


@pytest.mark.quick
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inside", [a_copy, an_alias, beside_a_write, two_of_them])
def test_the_method_for_values_inside(inside: Callable, grad: bool) -> None:
    def body(net: Net, x: torch.Tensor) -> Any:
        return inside(net.a(x))

    net = Net(body)
    twin, ours = copy.deepcopy(net), ORTModule(net)
    with torch.set_grad_enabled(grad):
        results = [model(X) for model in (ours, twin)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    if grad:
        for first, _ in results:
            first.square().sum().backward()
        torch.testing.assert_close(net.a.weight.grad, twin.a.weight.grad)
    if torch.__version__ >= "2.13":  # before, Dynamo breaks the graph there
        stats = ours.gradd_stats()
        assert (stats["graphs"], stats["breaks"]) == (1, 0)
        cut = {"unsupported_operator"} if inside is an_alias else set()  # of what leaves the graph
        assert stats["in_torch"].keys() == cut


@pytest.mark.quick
def test_what_has_a_history_stays_as_it_is() -> None:
    def body(net: Net, x: torch.Tensor) -> Any:
        h = net.a(x)
        h.requires_grad = True
        return h

    with pytest.raises(RuntimeError, match="of leaf variables"):
        ORTModule(Net(body))(X)


@pytest.mark.quick
def test_asking_for_hidden_states_breaks_no_graph() -> None:
    """transformers installs hooks for them in the first such call."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    net = LlamaModel(config)
    whole = torch.__version__ >= "2.13"  # before, Dynamo reads no ContextVar, as the hooks do
    ours, twin = ORTModule(net, strict=whole), copy.deepcopy(net)
    ids = torch.arange(6).view(2, 3)
    for asks in (True, True, False, True):
        results = [
            model(ids, output_hidden_states=asks, use_cache=False).hidden_states
            for model in (ours, twin)
        ]
        torch.testing.assert_close(*results)
        for states in filter(None, results):
            sum(x.sin().sum() for x in states).backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    stats = ours.gradd_stats()
    if whole:
        assert (stats["breaks"], stats["in_torch"]) == (0, {})
        assert ours._gradd_compiled.owner.compiled == 2  # with and without
    else:
        assert "graph_break" in stats["in_torch"]
