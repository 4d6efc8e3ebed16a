"""The surroundings of a call: other uses of torch.compile, threads, copies, exchanged memory."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return net, copy.deepcopy(net)


X = torch.linspace(-1, 1, 24).reshape(3, 8)


def ran(wrapped: ORTModule) -> int:
    return wrapped.gradd_stats()["forwards"]


def test_inside_of_an_outer_compile() -> None:
    net, twin = pair()
    wrapped = ORTModule(net)
    outer = torch.compile(lambda x: wrapped(x) * 2, backend="eager")
    torch.testing.assert_close(outer(X), twin(X) * 2)
    assert ran(wrapped) > 0 and wrapped.gradd_stats()["fallbacks"] == {}


def test_after_a_reset() -> None:
    net, twin = pair()
    wrapped = ORTModule(net, strict=True)
    wrapped(X)
    before = ran(wrapped)
    torch.compiler.reset()
    torch.testing.assert_close(wrapped(X), twin(X))
    assert ran(wrapped) > before


def test_a_call_that_reaches_no_graph_is_said_and_counted() -> None:
    net, twin = pair()
    wrapped = ORTModule(net)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(wrapped(X), twin(X))
    assert sum(wrapped.gradd_stats()["fallbacks"].values()) == 1
    strict = ORTModule(pair()[0], strict=True)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(Exception, match="without a graph"),
    ):
        strict(X)


def test_a_copy_runs_by_itself() -> None:
    net, twin = pair()
    wrapped = ORTModule(net)
    wrapped(X)
    other = copy.deepcopy(wrapped)
    torch.testing.assert_close(other(X), twin(X))
    assert ran(other) > 0


@pytest.mark.parametrize("one", [True, False])
def test_threads(one: bool) -> None:
    net, twin = pair()
    wrapped = ORTModule(net)
    failed: list[str] = []

    def work() -> None:
        try:
            model = wrapped if one else ORTModule(copy.deepcopy(twin))
            for n in range(2, 6):
                x = torch.full((n, 8), 0.1 * n)
                result = model(x)
                torch.testing.assert_close(result, twin(x))
                result.sum().backward()
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_backward_within_a_compiled_function(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo does not trace the daemon's backward, which would break graphs in each call."""
    net, twin = pair()
    sides = []
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        sides.append(step)
    step = torch.compile(sides[0], backend="gradd")
    for _ in range(3):
        torch.testing.assert_close(step(X), sides[1](X))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert "fails at a function" not in caplog.text
    assert "is not a buffer" not in caplog.text


def test_gradients_within_a_forward() -> None:
    class Forces(nn.Module):
        def __init__(self, energy: nn.Module) -> None:
            super().__init__()
            self.energy = energy

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            energy = self.energy(x).sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
            return energy, force

    net, twin = (Forces(one) for one in pair())
    wrapped = ORTModule(net)
    for _ in range(3):
        for model in (wrapped, twin):
            model.zero_grad()
            x = X.clone().requires_grad_()
            energy, force = model(x)
            (energy.sum() + force.square().sum()).backward()
            model.result = [energy, force, x.grad]
        for a, b in zip(wrapped.result, twin.result, strict=True):
            torch.testing.assert_close(a, b)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    in_torch = {} if torch.__version__ >= "2.13" else {"untraced_function": 3}
    assert wrapped.gradd_stats()["parts_in_torch"] == in_torch


@pytest.mark.parametrize("one", [True, False])
def test_threads_whose_first_calls_overlap(one: bool) -> None:
    """While one thread compiles, the others wait: each call is in the daemon, without a break."""
    nets = [ORTModule(pair()[0], strict=True) for _ in range(1 if one else 3)]
    kinds: list[str] = []
    begin = threading.Barrier(3)

    def work(i: int) -> None:
        begin.wait()
        for _ in range(20):
            kinds.append(type(nets[i % len(nets)](torch.randn(2 + i, 8)).grad_fn).__name__)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == ["DaemonFunctionBackward"] * 60
    for net in nets:
        stats = net.gradd_stats()
        assert (stats["breaks"], stats["fallbacks"], stats["parts_in_torch"]) == (0, {}, {})


def test_a_wrapper_in_a_wrapped_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), ORTModule(pair()[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.first(x))).sum()

    outer = ORTModule(Outer())
    outer(X).backward()
    assert ran(outer) > 0 and ran(outer.module.inner) > 0
    assert outer.module.first.weight.grad is not None


def test_memory_and_layers_that_are_exchanged() -> None:
    net, twin = pair()
    wrapped = ORTModule(net, strict=True)
    wrapped(X)
    net.load_state_dict({k: v.clone() for k, v in twin.state_dict().items()}, assign=True)
    torch.testing.assert_close(wrapped(X), twin(X))
    for side in (net, twin):
        side[0].weight.data = torch.full((16, 8), 0.3)
    torch.testing.assert_close(wrapped(X), twin(X))
    net[2] = nn.Linear(16, 7)
    torch.testing.assert_close(wrapped(X), net(X))
    assert wrapped(X).shape == (3, 7)


def test_lazy_logits_go_into_another_wrapped_module() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.linear(x)
            return (h - y).square().mean(), h

    net, twin = Headed(), pair()[1]
    first, second = ORTModule(net), ORTModule(pair()[0])
    loss, logits = first(X, X * 2)
    result = second(logits)
    torch.testing.assert_close(result, twin(net.linear(X)))
    (loss + result.sum()).backward()
    expected = torch.autograd.grad(
        (net.linear(X) - X * 2).square().mean() + twin(net.linear(X)).sum(), net.linear.weight
    )[0]
    torch.testing.assert_close(net.linear.weight.grad, expected)


@pytest.mark.parametrize("how", ["wrapped", "compiled"])
def test_no_daemon_is_said_and_counted(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADD_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GRADD_AUTOSTART", "0")
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_BAD_INITIALIZATION")
    monkeypatch.setattr("gradd.session.daemon.RESTART_SECONDS", 0.2)
    net, twin = pair()
    called = ORTModule(net) if how == "wrapped" else torch.compile(net, backend="gradd")
    with caplog.at_level("WARNING", "gradd"):
        for _ in range(2):
            torch.testing.assert_close(called(X), twin(X))
    assert sum("no daemon" in r.getMessage() for r in caplog.records) == 1
    if how == "wrapped":
        assert called.gradd_stats()["fallbacks"] == {"session": 2}


class _Drawing(torch.nn.Module):
    """Noise between two products."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.how == "seed":
            torch.manual_seed(7)
            noise = torch.randn(6)
        elif self.how == "state":
            before = torch.get_rng_state()
            torch.manual_seed(7)
            noise = torch.nn.functional.dropout(hidden.detach(), 0.5)
            torch.set_rng_state(before)
        else:
            noise = hidden.detach() * random.random()
        return self.second(hidden * noise)


@pytest.mark.parametrize("how", ["seed", "state", "python"])
def test_a_forward_that_seeds_has_the_numbers_of_pytorch(how: str) -> None:
    theirs = _Drawing(how)
    ours = ORTModule(copy.deepcopy(theirs))
    x = torch.randn(4, 6)
    for step in range(3):
        found = []
        for model in (ours, theirs):
            random.seed(step)
            model.zero_grad()
            result = model(x)
            result.square().sum().backward()
            found.append([result.detach(), model.first.weight.grad.clone()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if how != "python":
        assert ours.gradd_stats()["fallbacks"] == {"python_random": 3}, "and that is said"


class _Later(torch.nn.Module):
    """Seeds and draws from some call on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.seeds = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.seeds:
            torch.manual_seed(7)
            hidden = torch.nn.functional.dropout(hidden, 0.5)
        return self.second(hidden)


def test_a_forward_that_begins_to_seed_has_the_numbers_of_pytorch() -> None:
    """Calls before have not noted the generator's state: none of their graphs drew."""
    theirs = _Later()
    ours = ORTModule(copy.deepcopy(theirs))
    x = torch.randn(4, 6)
    for step in range(5):
        ours.seeds = theirs.seeds = step > 1
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert ours.gradd_stats()["fallbacks"] == {"python_random": 3}


def test_a_forward_that_begins_to_draw_runs_in_the_daemon() -> None:
    torch.manual_seed(0)
    net = ORTModule(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)), strict=True).eval()
    for _ in range(2):
        net(torch.ones(2, 6))
    net.train()
    found = [int((net(torch.ones(2, 6)) == 0).sum()) for _ in range(3)]
    assert all(30 < zeros < 98 for zeros in found) and len({*found}) > 1, found
    assert ran(net) >= 5 and net.gradd_stats()["in_torch"] == {}


class _Attending(torch.nn.Module):
    """Has an attention that is no submodule; and one more, later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.hidden = [nn.MultiheadAttention(8, 2, batch_first=True).eval()]
        self.late: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for layer in (*self.hidden, *filter(None, [self.late])):
            h = layer(h, h, h)[0]
        return h


@pytest.mark.parametrize("place", ["list", "late"])
def test_attention_is_not_fused_wherever_it_is(place: str) -> None:
    """Torch's own operator for attention in eval mode is in no daemon."""
    theirs = _Attending().eval()
    if place == "late":
        theirs.hidden = []
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x = torch.randn(2, 3, 8)
    if place == "late":
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
        torch.manual_seed(1)
        theirs.late = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        ours.late = copy.deepcopy(theirs.late)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()
    assert ours.gradd_stats()["in_torch"] == {}


def _checkpoint(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(net, x, use_reentrant=False)


def _reentrant(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(net, x, use_reentrant=True)


def _nested(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_checkpoint, net, x, use_reentrant=False)


def _saved_elsewhere(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net(x)


def _real_alone(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The hooks refuse fake tensors."""

    def pack(saved: torch.Tensor) -> torch.Tensor:
        assert type(saved) in (torch.Tensor, nn.Parameter)
        return saved.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        return net(x)


def _without_hooks(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("here is no place for them"):
        return net(x)


HOOKS = (_checkpoint, _reentrant, _nested, _saved_elsewhere, _real_alone, _without_hooks)


@pytest.mark.parametrize("around", HOOKS)
def test_hooks_of_saved_tensors_around_the_first_call(around: Any) -> None:
    layers = (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    twin = nn.Sequential(*layers, nn.Softmax(-1))
    wrapped = ORTModule(copy.deepcopy(twin), strict=True)
    for rows in (3, 3, 5):
        results = []
        for net in (wrapped, twin):
            net.zero_grad()
            x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8).requires_grad_()
            y = around(net, x)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in net.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert wrapped.gradd_stats()["in_torch"] == {}
