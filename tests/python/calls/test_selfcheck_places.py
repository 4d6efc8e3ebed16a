"""The self-check looks everywhere: a wrong value of any kind is found, in every mode, and named."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.calls import graph, run
from gradd.fallback import SelfCheckError
from helpers.nets import Heads, Net, Words, assert_close, batch, loss_of
from helpers.wrapper_internals import last

pytestmark = pytest.mark.usefixtures("shared_daemon")


def spoil_outputs(monkeypatch: pytest.MonkeyPatch, change: Callable[[run.Run, list], None]) -> None:
    start = run.Run.start

    def wrong(self: run.Run) -> list[torch.Tensor]:
        tensors = start(self)
        change(self, tensors)
        return tensors

    monkeypatch.setattr(run.Run, "start", wrong)


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable) -> None:
    backward = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        names = (*self.plan.params, *self.plan.input_grads)
        grad = grads[names.index(name)] if name in names else None
        if grad is not None:
            grads[names.index(name)] = change(grad)
        return grads

    monkeypatch.setattr(run.Run, "backward", wrong)


def scale(which: str | int, factor: float = 1.01) -> Callable[[run.Run, list], None]:
    """Each output that is called so, or the user's output of that number."""

    def change(run: run.Run, tensors: list[torch.Tensor]) -> None:
        name = which if isinstance(which, str) else run.graph.user[which].name
        for output, tensor in zip(run.plan.outputs, tensors, strict=True):
            if name in output:
                tensor.mul_(factor) if tensor.is_floating_point() else tensor.add_(1)

    return change


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["loss", "other", "best"])
def test_every_output(monkeypatch: Any, name: str, grad: bool, train: bool) -> None:
    number = {"loss": 0, "other": 1, "best": 2}[name]
    spoil_outputs(monkeypatch, scale(number))
    with torch.set_grad_enabled(grad), pytest.raises(SelfCheckError, match=f"output {number} by"):
        ORTModule(Heads().train(train), strict=True)(batch()[0])


def test_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = run.Run.start
    monkeypatch.setattr(run.Run, "start", lambda self: [t[:-1] for t in start(self)])
    model = ORTModule(torch.nn.Linear(4, 3), strict=True)
    with (
        torch.no_grad(),
        pytest.raises(SelfCheckError, match=r"output 0 has shape \[4, 3\], in PyTorch \[5, 3\]"),
    ):
        model(torch.randn(5, 4))


def test_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(Heads().eval(), strict=True)
    with torch.inference_mode():
        model(batch()[0])
        made_here = ORTModule(Heads().eval(), strict=True)
        for _ in range(2):
            made_here(batch()[0])
    assert model.gradd_stats()["self_checks"] == made_here.gradd_stats()["self_checks"] == 1
    spoil_outputs(monkeypatch, scale(1))
    with torch.inference_mode(), pytest.raises(SelfCheckError, match="first call without grad"):
        ORTModule(Heads().eval(), strict=True)(batch()[0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("buffer", ["mean", "calls"])
def test_every_buffer(monkeypatch: pytest.MonkeyPatch, buffer: str, grad: bool) -> None:
    def change(run: run.Run, tensors: list[torch.Tensor]) -> None:
        names = [spec.fqn for spec in run.graph.changed]
        values = tensors[len(tensors) - len(names) :]
        value = values[names.index(buffer)]
        value.mul_(1.01) if value.is_floating_point() else value.add_(1)

    model = ORTModule(Heads(), strict=True)
    kept = {n: b.clone() for n, b in model.named_buffers()}
    spoil_outputs(monkeypatch, change)
    with torch.set_grad_enabled(grad), pytest.raises(SelfCheckError, match=f"buffer {buffer}"):
        model(batch()[0])
    assert all(torch.equal(kept[n], b) for n, b in model.named_buffers())


def test_a_buffer_that_only_pytorch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph.Graph.__init__

    def blind(self: graph.Graph, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.changed, self.changed_entries = [], []

    monkeypatch.setattr(graph.Graph, "__init__", blind)
    with pytest.raises(SelfCheckError, match=r"(buffer|for) mean\b"):
        ORTModule(Heads(), strict=True)(batch()[0])


@pytest.mark.parametrize("name", ["body.weight", "head.bias", "other.weight", "other.bias"])
def test_every_parameter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of the loss and of the output beside it."""
    spoil_gradients(monkeypatch, name, lambda g: g * 1.01)
    with pytest.raises(SelfCheckError, match=f"the gradient of {name} by"):
        ORTModule(Heads(), strict=True)(batch()[0])


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_inputs(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    net = Net().requires_grad_(not frozen)
    good = ORTModule(copy.deepcopy(net), strict=True)
    good(batch()[0].requires_grad_()).sum().backward()
    assert good.gradd_stats()["self_checks"] == 1
    name = last(good)[0].cap.inputs[0].name
    spoil_gradients(monkeypatch, name, lambda g: g * 1.01)
    with pytest.raises(SelfCheckError, match=f"the gradient of input {name} by"):
        ORTModule(net, strict=True)(batch()[0].requires_grad_())


@pytest.mark.parametrize("lost", ["all", "one"])
def test_a_parameter_that_the_graph_believes_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    reach = graph.Graph.differentiable

    def blind(self: graph.Graph, params: tuple, input_grads: tuple) -> tuple:
        if lost == "all":
            return [False] * len(self.user), (), ()
        params = tuple(i for i in params if self.bound[i] != "first.weight")
        return reach(self, params, input_grads)

    monkeypatch.setattr(graph.Graph, "differentiable", blind)
    with pytest.raises(SelfCheckError, match=r"the daemon has no gradient for \w+\.\w+"):
        ORTModule(Net(), strict=True)(*batch())


def test_a_parameter_without_elements_has_no_gradient_to_miss() -> None:
    """As MobileBERT's head has where hidden size and embedding size are equal."""

    class Joined(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, 8))
            self.rows = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :8] @ torch.cat([self.nothing, self.rows]).t()

    net = Joined()
    ORTModule(net, strict=True)(torch.randn(4, 8)).sum().backward()
    assert net.rows.grad is not None and net.nothing.grad is None


def test_unfreezing_makes_a_plan_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, "first.weight", lambda g: g * 1.01)
    net = Net()
    net.first.requires_grad_(False)
    model = ORTModule(net, strict=True)
    for _ in range(2):
        loss_of(model(*batch())).backward()
    net.first.requires_grad_(True)
    with pytest.raises(SelfCheckError, match=r"first\.weight"):
        model(*batch())
    net.first.requires_grad_(False)
    loss_of(model(*batch())).backward()
    assert model.gradd_stats()["captures"] == 1, "and the other kind goes on"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_equal_nans_and_infinities_are_equal(value: float) -> None:
    class Odd(Net):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = super().forward(x)
            return hidden.sum(), torch.where(x > 0, hidden.sum(), value)

    model = ORTModule(Odd(), strict=True)
    model(batch()[0])[0].backward()
    assert model.gradd_stats()["self_checks"] == 1


@pytest.mark.parametrize(("value", "where"), [(float("nan"), 0), (float("inf"), 1)])
def test_a_nan_on_one_side_is_found(monkeypatch: Any, value: float, where: int) -> None:
    spoil_outputs(monkeypatch, lambda run, tensors: tensors[-1].reshape(-1)[where].fill_(value))
    with pytest.raises(SelfCheckError, match="output 0 by inf"):
        ORTModule(Net(), strict=True)(batch()[0])


@pytest.mark.parametrize("first", ["no_label", "empty"])
def test_a_first_batch_without_content_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    ids = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(0))
    bare = (ids, torch.full_like(ids, -100)) if first == "no_label" else (ids[:0], ids[:0])
    model, eager = ORTModule(Words()), Words()
    assert_close(model(*bare)[1], eager(*bare)[1])
    for _ in range(2):
        model.zero_grad()
        loss_of(model(ids, ids)).backward()
    loss_of(eager(ids, ids)).backward()
    assert_close(model.out.weight.grad, eager.out.weight.grad)
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {} and stats["self_checks"] >= 2
    spoil_gradients(monkeypatch, "out.bias", lambda g: g * 1.01)
    model = ORTModule(Words(), strict=True)
    with pytest.raises(SelfCheckError, match=r"out\.bias"):
        for call in (bare, (ids, ids)):
            model(*call)


def test_a_failure_counts_for_its_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backward = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        if self.call.in_types[0][1][0] == 6:
            grads[0].mul_(1.01)
        return grads

    monkeypatch.setattr(run.Run, "backward", wrong)
    model = ORTModule(Net())
    with caplog.at_level(logging.WARNING, "gradd"):
        for size in (6, 6, 5, 5, 6, 7):
            loss_of(model(*batch(size))).backward()
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {"self_check": 3} and stats["captures"] == 1
    assert stats["self_checks"] == 2 and stats["self_check_failures"] == 1
    said = [r for r in caplog.records if "runs in PyTorch" in r.getMessage()]
    assert len(said) == 1 and "first.weight" in said[0].getMessage()
