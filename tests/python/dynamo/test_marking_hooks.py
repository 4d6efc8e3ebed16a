"""Hooks that ask for a gradient of the embeddings, which adapters and checkpoints bring along."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradd import ORTModule
from gradd.dynamo.marking_hooks import Embeddings, leave_out, show
from helpers.models.families import build

pytestmark = pytest.mark.usefixtures("shared_daemon")
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


class Frozen(nn.Module):
    """A frozen table, and a layer in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.layer = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.table.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, self.table(ids), use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


def statement(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _of_a_method() -> Callable:
    def make_inputs_require_grads(module: nn.Module, input: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    return make_inputs_require_grads


MARKING = {
    "a statement": statement,
    "a function of a function": _of_a_method(),
    "a lambda": lambda m, i, o: o.requires_grad_(),
}


def _compare(ours: ORTModule) -> None:
    twin = copy.deepcopy(ours.module)
    ours.module.zero_grad()
    result, expected = ours(IDS), twin(IDS)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(ours.module.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.quick
@pytest.mark.parametrize("name", MARKING)
def test_the_graph_is_whole(name: str) -> None:
    ours = ORTModule(Frozen())
    ours.module.table.register_forward_hook(MARKING[name])
    for _ in range(3):
        _compare(ours)
    stats = ours.gradd_stats()
    assert stats["breaks"] == 0 and stats["captures"] == 1 and stats["fallbacks"] == {}


def test_a_hook_that_comes_later() -> None:
    ours = ORTModule(Frozen())
    _compare(ours)
    handles = []
    for _ in range(2):  # as a second training does
        handles.append(ours.module.table.register_forward_hook(_of_a_method()))
        for _ in range(2):
            _compare(ours)
    handles[0].remove()
    _compare(ours)
    stats = ours.gradd_stats()
    assert stats["breaks"] == 0 and stats["captures"] == 1 and stats["parts_in_torch"] == {}


def test_hooks_that_each_step_adds_trace_nothing_again() -> None:
    """TRL's trainers do so, by `gradient_checkpointing_enable()` after each forward."""
    ours = ORTModule(Frozen())
    table = ours.module.table
    table.register_forward_hook(_of_a_method())
    _compare(ours)
    traced = ours._gradd_compiled.owner.compiled
    for _ in range(3):
        added = [table.register_forward_hook(_of_a_method()) for _ in range(2)]
        _compare(ours)
    assert len(table._forward_hooks) == 7
    assert ours._gradd_compiled.owner.compiled == traced
    added[-1].remove()
    scaling = table.register_forward_hook(lambda m, i, o: o.detach() * 3)
    table.register_forward_hook(_of_a_method())
    table.register_forward_hook(_of_a_method())
    keys = list(table._forward_hooks)
    _compare(ours)
    assert list(table._forward_hooks) == keys and ours._gradd_compiled.owner.compiled > traced
    scaling.remove()
    _compare(ours)
    assert ours.gradd_stats()["in_torch"] == {}


def test_hooks_that_a_call_adds_or_removes_stay_so() -> None:
    hooks = OrderedDict(enumerate([statement, statement, len, statement, statement]))
    repeated = Embeddings([hooks]).hide()
    assert list(hooks) == [0, 2, 3]
    del hooks[2]
    hooks[9] = len
    show(repeated)
    assert list(hooks) == [0, 1, 3, 4, 9]


def test_hooks_that_do_more_run() -> None:
    """A hook that thaws its module, or scales, has another code."""
    ours = ORTModule(Frozen())
    scaling = ours.module.table.register_forward_hook(lambda m, i, o: o.detach() * 3)
    _compare(ours)
    scaling.remove()
    ours.module.table.register_forward_hook(lambda m, i, o: m.requires_grad_(True) and None)
    assert not leave_out(ours.module)


def test_lora_with_checkpoints() -> None:
    net, make_batch = build("peft_lora_llama")
    batch = make_batch(2, 12)
    net.gradient_checkpointing_enable()
    net.enable_input_require_grads()
    net.train()
    twin = copy.deepcopy(net)
    ours = ORTModule(net)
    loss, expected = ours(**batch).loss, twin(**batch).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6, msg=name)
    stats = ours.gradd_stats()
    assert stats["breaks"] == 0 and stats["fallbacks"] == {}


class Recording(nn.Module):
    """Installs hooks in the first call that asks for what they record, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.found: list[torch.Tensor] = []
        self.installed = False

    def _record(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.found.append(output)

    def _install(self) -> None:
        for layer in self.layers:
            layer.register_forward_hook(self._record)
        self.installed = True

    def forward(self, x: torch.Tensor, record: bool = False) -> tuple[torch.Tensor, ...]:
        if record and not self.installed:
            self._install()
        self.found = []
        for layer in self.layers:
            x = layer(x).tanh()
        return x, *self.found


def test_a_call_that_installs_hooks_is_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its graph is broken where it does that; the next one's is not."""
    plain, model = Recording(), ORTModule(Recording())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    breaks = []
    for _ in range(4):
        for one in (plain, model):
            one.zero_grad()
            sum(value.square().sum() for value in one(x, record=True)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        breaks.append(model.gradd_stats()["breaks"])
    assert breaks[0] == breaks[-1]
    assert model.gradd_stats()["in_torch"] == {}
    assert "torch.compile fails" not in caplog.text


def test_a_hook_that_cannot_be_traced_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def keeps(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        module.kept = output  # type: ignore[assignment]

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_forward_hook(keeps)
    ORTModule(net)(torch.ones(2, 4)).sum().backward()
    assert net[0].kept.grad is not None
    line = keeps.__code__.co_firstlineno
    assert f"the module has the forward hook keeps @ {__file__}:{line}" in caplog.text
