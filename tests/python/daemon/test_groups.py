"""Gradients that leave a backward in groups, while the daemon computes the rest."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.memory.devices import HOST, HostWords
from gradd.session import client as clients
from gradd.session import in_groups, timeline
from helpers import sessions

pytestmark = pytest.mark.fake
LAYERS = 6
WIDE = 768  # layers that take some milliseconds each


class Stack(nn.Module):
    """Layers whose gradients are final one after the other, the last first."""

    def __init__(self, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.unused = nn.Linear(width, width)
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _layer(width: int) -> int:
    """Bytes of groups of which each has the gradients of one layer of that width."""
    return 4 * width * width + 1


def _batch(rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _in_layers(in_groups_of: Any) -> tuple[ORTModule, torch.Tensor]:
    """A model after two steps with a group per layer, and its batch."""
    in_groups_of(_layer(32))
    model, x = ORTModule(Stack(), strict=True), _batch(8, 32)
    for _ in range(2):
        model(x).backward()
    return model, x


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _assert_same(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), number


@pytest.fixture
def in_groups_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the size of the groups of the modules that are wrapped from now on; 0 = none."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    return lambda size: monkeypatch.setenv("GRADD_GROUP_BYTES", str(size))


def _order(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Layers in the order in which their gradients are accumulated in the last of three steps."""
    found: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.append(name.split(".")[1]))
    for _ in range(3):
        found.clear()
        model.zero_grad()
        model(x).backward()
    return found


def test_the_same_bits_in_order_of_layers(daemon: object, in_groups_of: Any) -> None:
    x = _batch(8, 32)
    in_groups_of(0)
    together = ORTModule(Stack(), strict=True)
    _order(together, x)
    assert sessions.session().timeline is None
    in_groups_of(_layer(32))
    grouped = ORTModule(Stack(), strict=True)
    order = _order(grouped, x)
    assert order == sorted(order, reverse=True) and len(set(order)) == LAYERS
    _assert_same(_gradients(grouped), _gradients(together))
    words = sessions.session().timeline.words
    assert words.read(HostWords.GROUPS) & 0xFFFF == LAYERS


def test_a_tied_weight_is_in_the_last_group(daemon: object, in_groups_of: Any) -> None:
    x = _batch(8, 32)
    in_groups_of(_layer(32))
    model = ORTModule(Stack(tied=True), strict=True)
    order = _order(model, x)
    assert order[-1] == "0" and order.count("0") == 2  # its weight, which is the last layer's too
    eager = Stack(tied=True)
    eager(x).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_rest_is_computed_meanwhile(
    daemon: Any, in_groups_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks of the first group run before the request is answered; each group comes once."""
    model, x = _in_layers(in_groups_of)
    events: list[str] = []
    real = in_groups.wait

    def wait(client: Any, pending: Any, group: int) -> None:
        real(client, pending, group)
        events.append(f"group {group}")
        if group + 1 == pending.groups:
            assert pending.is_over

    monkeypatch.setattr(in_groups, "wait", wait)
    for name, p in model.named_parameters():
        if name.endswith("weight"):
            p.register_hook(lambda grad, name=name: events.append(name.split(".")[1]))
    model.zero_grad()
    model(x).backward()
    expected = [[f"group {i}", str(LAYERS - 1 - i)] for i in range(LAYERS)]
    assert events == [event for pair in expected for event in pair]


class Slowly:
    """Layers wide enough for a daemon to be killed while it computes those of a later group."""

    def __init__(self, in_groups_of: Any, grouped: bool = True) -> None:
        in_groups_of(_layer(WIDE) if grouped else 0)
        self.model = ORTModule(Stack(WIDE), strict=True)
        self.x = _batch(1024, WIDE)
        for _ in range(2):
            self.model.zero_grad()
            self.model(self.x).backward()
        self.model.zero_grad()

    def in_group(self, group: int, action: Callable[[], object]) -> None:
        """Once, when the gradients of a group are accumulated: after its hook has changed one."""
        weight = self.model.layers[LAYERS - 1 - group].weight

        def hook(p: torch.Tensor) -> None:
            handle.remove()
            p.grad.mul_(2)
            action()

        handle = weight.register_post_accumulate_grad_hook(hook)

    def step(self) -> list[torch.Tensor | None]:
        """The gradients of a step."""
        self.model(self.x).backward()
        return _gradients(self.model)


def _done() -> int:
    client = sessions.session()
    return client.timeline.words.read(HostWords.GROUPS) & 0xFFFF


@pytest.mark.parametrize("kills", [(0,), (2,), (0, 1, 3)])
def test_kills_between_groups_cost_no_bit(
    daemon: Any, in_groups_of: Any, kills: tuple[int, ...]
) -> None:
    """What a hook has changed stays: the next daemon does not write there."""
    expected = Slowly(in_groups_of, grouped=False)
    trainer = Slowly(in_groups_of)
    done: list[int] = []

    def kill() -> None:
        daemon.kill(sessions.session().daemon_pid)
        done.append(_done())

    for one in (expected, trainer):
        for group in kills:
            one.in_group(group, kill if one is trainer else lambda: None)
    _assert_same(trainer.step(), expected.step())
    assert sessions.session().recoveries == len(kills)
    assert all(group < n for group, n in zip(kills, done, strict=True)), done
    assert done[0] < LAYERS, done  # the later ones may come too late on a busy machine


def test_a_repeated_backward_would_write_again(
    daemon: Any, in_groups_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above proves: without the field `skip` the changes of hooks are lost."""
    expected = Slowly(in_groups_of, grouped=False)
    trainer = Slowly(in_groups_of)
    real = clients.Timeline.envelope
    monkeypatch.setattr(
        clients.Timeline,
        "envelope",
        lambda self, pending: {k: v for k, v in real(self, pending).items() if k != "skip"},
    )
    expected.in_group(0, lambda: None)
    trainer.in_group(0, lambda: daemon.kill(sessions.session().daemon_pid))
    found, right = trainer.step(), expected.step()
    last = 2 * (LAYERS - 1)
    torch.testing.assert_close(2 * found[last], right[last])
    assert torch.equal(found[0], right[0])


@pytest.mark.parametrize("known", [False, True])
def test_parameters_that_a_hook_has_changed_are_not_repeated(
    daemon: Any, in_groups_of: Any, known: bool
) -> None:
    """Also if another thread has heard of the failure before the backward asks for its group."""
    trainer = Slowly(in_groups_of)
    weight = trainer.model.layers[LAYERS - 1].weight

    def change() -> None:
        with torch.no_grad():
            weight.add_(1)
        daemon.kill(sessions.session().daemon_pid)
        while known and sessions.session().timeline.pending:
            sessions.session().look_after_pending()

    trainer.in_group(0, change)
    with pytest.raises(errors.StaleError, match="the parameters have changed since"):
        trainer.step()
    trainer.model.zero_grad()
    trainer.step()


def test_a_hook_may_change_the_parameters_of_its_group(daemon: Any, in_groups_of: Any) -> None:
    """An optimizer that steps in hooks: no later operator reads what it changes."""
    x = _batch(64, 32)
    values = []
    for size in (0, _layer(32)):
        in_groups_of(size)
        model = ORTModule(Stack(), strict=True)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(_step if size else lambda p: None)
        for _ in range(4):
            model(x).backward()
            if not size:
                for p in model.parameters():
                    if p.grad is not None:
                        _step(p)
        values.append([p.detach().clone() for p in model.parameters()])
    _assert_same(*values)


@torch.no_grad()
def _step(p: torch.Tensor) -> None:
    p.sub_(p.grad, alpha=0.5)
    p.grad = None


@pytest.mark.parametrize(
    ("fields", "kind", "match"),
    [
        ({"groups": [4096] * 12}, errors.LimitError, "'groups': 4096, the last one is 4095"),
        ({"groups": [0]}, errors.TensorError, "the plan has 12 gradients, got 1"),
        ({"groups": [-1] * 12}, errors.GraddError, "groups"),
        ({"skip": LAYERS + 1}, errors.TensorError, "'skip': 7 of 6 groups"),
        ({"skip": 1, "groups": None}, errors.TensorError, "'skip' without 'groups'"),
        ({"turn": None}, errors.SessionError, "needs a turn"),
        ({"turn": 1 << 46}, errors.SessionError, "needs a turn"),
    ],
)
def test_what_a_daemon_refuses(
    daemon: Any,
    in_groups_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    kind: type[Exception],
    match: str,
) -> None:
    """It is raised where the gradients are waited for; the next step works."""
    model, x = _in_layers(in_groups_of)
    real = clients.Timeline.envelope

    def envelope(self: Any, pending: Any) -> dict[str, Any]:
        self.words.write(HostWords.READY, 1 << 46)
        sent = {**real(self, pending), **fields}
        return {key: value for key, value in sent.items() if value is not None}

    with monkeypatch.context() as patch:
        patch.setattr(clients.Timeline, "envelope", envelope)
        with pytest.raises(kind, match=match):
            model(x).backward()
    model.zero_grad()
    model(x).backward()
    assert model.layers[0].weight.grad.isfinite().all()


def test_some_gradients_alone(daemon: Any, in_groups_of: Any) -> None:
    """Steps whose gradients are not asked for do not run; the next request ends the backward."""
    in_groups_of(_layer(32))
    model, eager = ORTModule(Stack(), strict=True), Stack()
    x = _batch(8, 32)
    for _ in range(2):
        model(x).backward()
    for wanted in (LAYERS - 1, 0, 3):
        (found,) = torch.autograd.grad(model(x), [model.layers[wanted].weight])
        (right,) = torch.autograd.grad(eager(x), [eager.layers[wanted].weight])
        torch.testing.assert_close(found, right)
    client = sessions.session()
    with client.lock:
        client.catch_up()
    assert client.unreleased_runs() == []


def test_kept_graphs_and_gradients_of_inputs(daemon: Any, in_groups_of: Any) -> None:
    results = []
    for size in (0, _layer(32)):
        in_groups_of(size)
        model = ORTModule(Stack(), strict=True)
        for _ in range(3):
            model.zero_grad()
            x = _batch(8, 32).requires_grad_()
            other = _batch(8, 32, 2).requires_grad_()
            one, two = model(x), model(other)
            one.backward(retain_graph=True)
            two.backward()
            one.backward()
        results.append([*_gradients(model), x.grad, other.grad])
    _assert_same(*results)
    with pytest.raises(RuntimeError, match="second time"):
        two.backward()


def test_dropped_steps_keep_nothing(daemon: Any, in_groups_of: Any) -> None:
    model, x = _in_layers(in_groups_of)
    sessions.session().flush()
    before = model.gradd_stats()["slots"]
    for _ in range(20):
        torch.autograd.grad(model(x), [model.layers[-1].weight])
        model.zero_grad()
        model(x).backward()
    assert model.gradd_stats()["slots"] <= before + 1


def test_a_daemon_that_has_hung_up_must_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its backward is repeated: what it has left on a GPU may still raise the word."""
    old = subprocess.Popen(["sleep", "60"])
    line = timeline.Timeline(HOST, [])
    line.settle_done(old.pid)
    line.pending.append(timeline.Pending("backward", {}, lambda reply: None, groups=2))
    monkeypatch.setattr(timeline, "_END_SECONDS", 0.05)
    with pytest.raises(errors.SessionError, match=f"daemon {old.pid} has hung up"):
        line.settle_done(1)
    monkeypatch.setattr(timeline, "_END_SECONDS", 30)
    threading.Timer(0.1, old.kill).start()
    line.settle_done(1)
    assert old.poll() is not None and not line.pending
    line.close()
