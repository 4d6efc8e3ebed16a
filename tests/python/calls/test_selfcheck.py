"""The comparison of a first step with PyTorch: activation checkpoints, eval mode, its own failures.

test_fallback.py has the wrong gradient that it must find, test_bf16_selfcheck.py the same in bf16.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradd import ORTModule
from gradd.calls import run
from gradd.check.reference import Reference
from gradd.errors import NonFiniteError
from gradd.fallback import SelfCheckError
from helpers.models import families
from helpers.nets import Net, assert_close, assert_same_grads, batch, loss_of
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")

GPT2_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.mark.parametrize("reentrant", every_run((False,), [False, True]))
@pytest.mark.parametrize(
    ("name", "over", "dtype"),
    [
        pytest.param("llama", {}, torch.float32, marks=pytest.mark.nightly),
        pytest.param("llama", {}, torch.bfloat16, marks=pytest.mark.nightly),
        ("gpt2", GPT2_DROPOUT, torch.float32),
    ],
)
def test_activation_checkpoints(
    name: str, over: dict[str, Any], dtype: torch.dtype, reentrant: bool
) -> None:
    module, make = families.build(name, **over)
    module = module.to(dtype)
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    eager = copy.deepcopy(module)
    model = ORTModule(module, strict=True)
    for seed in range(2):
        ours, theirs = (m(**make(2, 8, seed)).loss for m in (model, eager))
        ours.backward()
        theirs.backward()
        if not over:
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)
    assert model.gradd_stats()["self_checks"] == 1
    assert model.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_an_input_with_a_gradient(reentrant: bool) -> None:
    class Part(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.first, x, use_reentrant=reentrant).square().mean()

    model = ORTModule(Part(), strict=True)
    eager = Part()
    x = batch()[0].requires_grad_()
    for m in (model, eager):
        m(x).backward()
    assert_same_grads(model.module, eager)
    assert model.gradd_stats()["self_checks"] == 1


def test_gradients_of_others_stay_as_they_are() -> None:
    """A tensor that is no part of the module takes part in PyTorch's side of the comparison."""

    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() + self.outside[0].detach().sum() * 0

    net = Scaled()
    outside = torch.ones(3, requires_grad=True)
    outside.grad = torch.ones(3)
    net.outside = [outside]
    kept = outside.grad
    ORTModule(net, strict=True)(batch()[0]).backward()
    assert outside.grad is kept and kept.eq(1).all()


def test_training_in_eval_mode_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuning under eval(): dropout is off, gradients flow."""
    backward = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        grads[self.plan.params.index("second.bias")].mul_(1.01)
        return grads

    good = ORTModule(Net(dropout=0.3).eval(), strict=True)
    with torch.no_grad():
        good(*batch())
    assert good.gradd_stats()["self_checks"] == 1
    loss_of(good(*batch())).backward()
    assert good.gradd_stats()["self_checks"] == 2
    monkeypatch.setattr(run.Run, "backward", wrong)
    with pytest.raises(SelfCheckError, match=r"second\.bias"):
        ORTModule(Net(dropout=0.3).eval(), strict=True)(*batch())


def test_every_kind_of_plan_is_compared_once() -> None:
    model = ORTModule(Net(), strict=True)
    x = batch()[0].requires_grad_()
    for trains, checks in ((False, 1), (True, 2), (False, 2), (True, 2)):
        model.requires_grad_(trains)
        model(x).sum().backward()
        assert model.gradd_stats()["self_checks"] == checks


def test_a_failure_in_pytorch_falls_back_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("not without randomness")

    monkeypatch.setattr(Reference, "run", broken)
    monkeypatch.setattr(Reference, "run_forward", broken)
    with pytest.raises(SelfCheckError, match="RuntimeError: not without randomness"):
        ORTModule(Net(), strict=True)(*batch())
    model, eager = ORTModule(Net()), Net()
    ours, theirs = (loss_of(m(*batch())) for m in (model, eager))
    assert_close(ours, theirs)
    assert model.gradd_stats()["fallbacks"] == {"self_check": 1}


class ByRows(nn.Module):
    """Centres the rows if there is more than one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        if x.shape[0] > 1:
            hidden = hidden - hidden.mean(0)
        return self.outer(hidden.square()).squeeze()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("sizes", [(4, 1, 6, 1), (1, 4)])
def test_the_last_batch_may_have_one_row(sizes: tuple[int, ...], train: bool) -> None:
    eager = ByRows().train(train)
    model = ORTModule(copy.deepcopy(eager), strict=True)
    for size in sizes:
        model.zero_grad()
        eager.zero_grad()
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
        with torch.set_grad_enabled(train):
            ours, theirs = model(x), eager(x)
        assert_close(ours, theirs)
        if train:
            ours.sum().backward()
            theirs.sum().backward()
            assert_same_grads(model.module, eager)
    assert model.gradd_stats()["captures"] == 2


def _argument(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = net(x)
    x.mul_(2)
    return y


def _hidden(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = net(x)
    y = h.exp() @ h.T
    with torch.no_grad():
        h.mul_(2)
    return y


def _part(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = net(x) * x
    x[:, 0].zero_()
    return y


@pytest.mark.parametrize("write", [_argument, _hidden, _part])
def test_what_pytorch_refuses_to_differentiate(write: Any, caplog: Any) -> None:
    """`forward()` writes to what it has read: that is no difference, but PyTorch's own error."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return write(self.net, x)

    for model in (Writes(), ORTModule(Writes())):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(torch.randn(3, 4)).sum().backward()
    assert "cannot be compared: in PyTorch it raises RuntimeError: one of the" in caplog.text
    assert "differs from PyTorch" not in caplog.text


def test_an_anomaly_is_found_in_the_users_backward(capfd) -> None:
    """Not in the backward of the check, whose values differ nowhere."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.fc(x) * 0 - 1).sqrt().sum()

    model = ORTModule(Root(), strict=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = model(torch.ones(2, 4))
        assert "Error detected in" not in capfd.readouterr().err
        with pytest.raises(NonFiniteError, match=r"\(Sqrt\)"):
            loss.backward()
    assert model.gradd_stats()["self_checks"] == 1
