"""The replaced forward: signature, copies, pickles, and giving the original back. No daemon."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn

from optimum.gradd import attach


class Net(nn.Module):
    """At module level, so that pickle finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, **extra: Any) -> torch.Tensor:
        """The forward's own documentation."""
        return self.inner(x) * scale


class Route:
    """Counts calls and passes them on, as a bridge in fallback does."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self.forward = attach.original_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.forward(*args, **kwargs)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.ones(2, 3)


@pytest.mark.quick
def test_calls_are_routed_and_given_back(net: Net) -> None:
    expected = net(X, scale=2.0)
    route = Route(net)
    attach.attach(net, route)
    attach.attach(net, route)  # idempotent: a second train() or auto_find_batch_size
    assert torch.equal(net(X, scale=2.0), expected) and route.calls == 1
    assert attach.is_attached(net)
    attach.detach(net)
    attach.detach(net)
    assert torch.equal(net(X, scale=2.0), expected) and route.calls == 1
    assert "forward" not in vars(net) and not attach.is_attached(net)


@pytest.mark.quick
def test_signature_and_documentation_stay(net: Net) -> None:
    signature, doc = inspect.signature(net.forward), net.forward.__doc__
    attach.attach(net, Route(net))
    assert inspect.signature(net.forward) == signature
    assert net.forward.__doc__ == doc and net.forward.__name__ == "forward"


@pytest.mark.quick
def test_copies_are_plain_modules_of_their_own(net: Net) -> None:
    route = Route(net)
    attach.attach(net, route)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            twin.inner.weight.zero_()
            twin.inner.bias.fill_(7.0)
        assert torch.equal(twin(X), torch.full((2, 3), 7.0))
        assert not attach.is_attached(twin)
        attach.attach(twin, Route(twin))  # and can be attached themselves
        assert torch.equal(twin(X), torch.full((2, 3), 7.0))
    assert route.calls == 0
    assert not torch.equal(net(X), torch.full((2, 3), 7.0))


@pytest.mark.quick
def test_a_forward_that_was_replaced_before_is_kept(net: Net) -> None:
    plain = net.forward

    def theirs(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return plain(x, scale) + 1

    net.forward = theirs
    expected = net(X)
    route = Route(net)
    attach.attach(net, route)
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]
    assert torch.equal(net(X), expected) and route.calls == 1
    attach.detach(net)
    assert net.forward is theirs


@pytest.mark.quick
def test_a_later_wrapper_passes_through_after_detach(net: Net) -> None:
    expected = net(X)
    route = Route(net)
    attach.attach(net, route)
    ours = net.forward

    @functools.wraps(ours)
    def autocast_like(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    net.forward = autocast_like
    assert attach.is_replaced(net)
    attach.attach(net, route)  # must not wrap a second time
    assert net.forward is autocast_like
    net(X)
    assert route.calls == 1
    attach.detach(net)
    assert net.forward is autocast_like
    assert torch.equal(net(X), expected) and route.calls == 1


def _wrapped(forward: Any, tells: bool) -> Any:
    """Around a forward, as accelerate's autocast is; some wrappers do not tell what they wrap."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) + 1

    if tells:
        wrapper.__wrapped__ = forward
    return wrapper


@pytest.mark.quick
@pytest.mark.parametrize("tells", [True, False])
def test_a_second_route_under_a_wrapper_does_not_call_itself(net: Net, tells: bool) -> None:
    """The wrapper stays when the first trainer detaches; the second one takes the module again."""
    expected = net(X) + 1
    attach.attach(net, Route(net))
    net.forward = _wrapped(net.forward, tells)
    attach.detach(net)
    route = Route(net)
    attach.attach(net, route)
    assert torch.equal(net(X), expected) and route.calls == 1
    if tells:
        assert attach.original_forward(net).__func__ is Net.forward


@pytest.mark.quick
def test_a_module_that_calls_itself_is_routed_once() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            return self(self.inner(x), again=False) if again else x * 2

    net = Twice()
    expected = net(X)
    route = Route(net)
    attach.attach(net, route)
    assert torch.equal(net(X), expected) and route.calls == 1
    assert torch.equal(net(X), expected) and route.calls == 2, "the next call is routed again"


@pytest.mark.quick
def test_attached_module_can_be_collected() -> None:
    import gc
    import weakref

    net = Net()
    attach.attach(net, lambda *a, **k: None)
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None


def test_a_copy_keeps_a_forward_of_its_own_that_was_there_before(net: Net) -> None:
    """accelerate puts one on the instance; a copy made in training must not run the original."""
    net.forward = types.MethodType(lambda self, x: self.inner(x) + 1, net)
    before = net.forward
    attach.attach(net, Route(net))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net.inner.weight.zero_()
        net.inner.bias.zero_()
    assert torch.equal(net(X), torch.ones(2, 3))
    assert not torch.equal(twin(X), torch.ones(2, 3))
    attach.detach(net)
    assert net.forward == before
