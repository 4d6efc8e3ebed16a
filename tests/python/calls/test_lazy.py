"""Outputs that only the loss needs are computed when they are read, and are then right."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gradd import ORTModule, errors, optim
from gradd.calls.lazy import LazyTensor
from helpers.nets import Net, assert_close, assert_same_grads, batch, loss_of, pair

pytestmark = pytest.mark.usefixtures("daemon")


@pytest.mark.quick
def test_metadata_is_known_without_computing() -> None:
    ours, theirs = pair()
    x, y = batch(7)
    scores, expected = ours(x, y)[1], theirs(x, y)[1]
    assert isinstance(scores, LazyTensor) and isinstance(scores, torch.Tensor)
    assert scores.shape == expected.shape and scores.size(-1) == 4 and len(scores) == 7
    assert scores.dtype is torch.float32 and scores.device == x.device and scores.ndim == 2
    assert scores.is_cpu == x.is_cpu and scores.get_device() == x.get_device()
    assert scores.requires_grad and not scores.is_leaf and scores.is_floating_point()
    assert scores.float() is scores and scores.to(torch.float32) is scores
    assert not scores.gradd_is_computed


@pytest.mark.quick
def test_training_steps_do_not_compute_unread_outputs() -> None:
    ours, _ = pair()
    x, y = batch()
    for _ in range(3):
        loss, scores = ours(x, y)
        loss.backward()
        assert not scores.gradd_is_computed
    forwards = ours.gradd_stats()["forwards"]
    assert forwards == 3 + ours.gradd_stats()["self_check_forwards"]
    assert ours.gradd_stats()["repeated_forwards"] == 0
    scores.detach()
    assert scores.gradd_is_computed
    stats = ours.gradd_stats()
    assert stats["forwards"] == forwards + 1 and stats["repeated_forwards"] == 1


def _metric(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores.argmax(-1)
    return loss


def _outside(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The recipe for a weighted loss: targets are given, and the loss in the graph is not used."""
    target = torch.zeros(len(scores), dtype=torch.int64)
    return nn.functional.cross_entropy(scores, target, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))


def _forwards(daemon: object, model: nn.Module) -> int:
    """Forwards of the daemon, without those of self-checks."""
    return daemon.ps()["counters"]["forward"] - model.gradd_stats()["self_check_forwards"]


@pytest.mark.quick
@pytest.mark.parametrize(("use", "first"), [(_metric, 2), (_outside, 3)])
def test_an_output_that_every_step_uses_costs_no_second_forward(
    daemon: object, use: Callable[..., torch.Tensor], first: int
) -> None:
    ours, theirs = pair()
    counts = []
    for step in range(4):
        before = _forwards(daemon, ours)
        for model in (ours, theirs):
            model.zero_grad()
            use(*model(*batch(5, seed=step))).backward()
        assert_same_grads(ours, theirs)
        counts.append(_forwards(daemon, ours) - before)
    assert counts == [first, 1, 1, 1]
    stats = ours.gradd_stats()
    assert stats["forwards"] - stats["self_check_forwards"] == sum(counts)
    assert stats["repeated_forwards"] == first - 1
    assert stats["captures"] == 1


READS = {
    "detach": lambda t: t.detach(),
    "numpy": lambda t: torch.from_numpy(t.detach().numpy().copy()),
    "argmax": lambda t: t.argmax(-1),
    "arithmetic": lambda t: (t * 2 + 1).detach(),
    "reflected": lambda t: (1 - t).detach(),
    "index": lambda t: t[1:, 0].detach(),
    "softmax": lambda t: torch.softmax(t, -1).detach(),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "clone": lambda t: t.clone().detach(),
    "cat": lambda t: torch.cat([t, t]).detach(),
    "view": lambda t: t.view(-1).detach(),
    "item": lambda t: torch.tensor(t[0, 0].item()),
    "data": lambda t: t.data,
    "iterate": lambda t: torch.stack([row.detach() for row in t]),
    "double": lambda t: t.double().detach(),
    "copy": lambda t: t.to(torch.float32, copy=True).detach(),
    "integers": lambda t: t.long().detach() * 0 + t.detach(),
    "array": lambda t: torch.from_numpy(numpy.array(t.detach())),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_gives_the_value(read: str) -> None:
    ours, theirs = pair()
    x, y = batch()
    mine, expected = ours(x, y)[1], theirs(x, y)[1]
    assert_close(READS[read](mine).double(), READS[read](expected).double(), read)


def test_pickle_copy_save_and_data_ptr() -> None:
    ours, theirs = pair()
    x, y = batch()
    expected = theirs(x, y)[1]
    scores = ours(x, y)[1]
    assert_close(pickle.loads(pickle.dumps(scores.detach())), expected)
    assert_close(copy.deepcopy(ours(x, y)[1].detach()), expected)
    file = io.BytesIO()
    torch.save(ours(x, y)[1].detach(), file)
    file.seek(0)
    assert_close(torch.load(file), expected)
    assert scores.data_ptr() == scores.data_ptr() != 0


def test_value_is_fetched_once() -> None:
    ours, _ = pair()
    scores = ours(*batch())[1]
    first = scores.detach()
    requests = ours._gradd_compiled.client.requests
    assert scores.detach().data_ptr() == first.data_ptr()
    assert ours._gradd_compiled.client.requests == requests


def test_the_read_is_of_the_same_dropout_mask() -> None:
    """The value belongs to the loss that was returned, not to another draw."""
    model = ORTModule(Net(dropout=0.5, width=64), strict=True)
    for step in range(3):
        x, y = batch(8, seed=step)
        loss, scores = model(x, y)
        again = -torch.log_softmax(scores.detach(), -1).gather(1, y[:, None]).mean()
        assert_close(loss, again, "loss of the values that were read")


def test_a_loss_outside_that_uses_a_lazy_output_has_the_right_gradients() -> None:
    ours, theirs = pair()
    x, y = batch()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for model in (ours, theirs):
        _, scores = model(x, y)
        nn.functional.cross_entropy(scores, y, weight=weights).backward()
    assert_same_grads(ours, theirs)


def test_both_losses_together() -> None:
    ours, theirs = pair()
    x, y = batch()
    for model in (ours, theirs):
        loss, scores = model(x, y)
        (loss + (scores**2).mean()).backward()
    assert_same_grads(ours, theirs)


class _Square(torch.autograd.Function):
    """A user's own function: it takes its input without any torch function being called."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + 0)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_gradient_through_a_users_autograd_function() -> None:
    ours, theirs = pair()
    x, y = batch()
    for model in (ours, theirs):
        _Square.apply(model(x, y)[1]).backward()
    assert_same_grads(ours, theirs)


def _divide(scores: torch.Tensor) -> None:
    scores.div_(2.0)


def _assign(scores: torch.Tensor) -> None:
    scores[:, 0] = 0.5


def _read_then_assign(scores: torch.Tensor) -> None:
    scores.detach()
    scores[1:] *= 3.0


@pytest.mark.parametrize("change", [_divide, _assign, _read_then_assign])
def test_a_lazy_output_that_is_changed_in_place(change: Callable[[torch.Tensor], None]) -> None:
    ours, theirs = pair()
    x, y = batch()
    values = []
    for model in (ours, theirs):
        _, scores = model(x, y)
        change(scores)
        loss = scores.pow(2).sum()
        loss.backward()
        values += [scores.detach(), loss]
    assert_close(values[0], values[2], "changed scores")
    assert_close(values[1], values[3], "loss")
    assert_same_grads(ours, theirs)


def test_gradient_for_a_lazy_output() -> None:
    ours, theirs = pair()
    x, y = batch()
    grads = []
    for model in (ours, theirs):
        _, scores = model(x, y)
        grads += torch.autograd.grad(scores.pow(3).sum(), scores)
    assert_close(*grads)


def _step_without_reads(model: ORTModule, optimizer: torch.optim.Optimizer) -> None:
    """Outputs that are held at the first step are computed, and none from here on."""
    loss, scores = model(*batch())
    loss.backward()
    optimizer.step()
    assert not scores.gradd_is_computed


@pytest.mark.quick
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, optim.FusedAdam])
def test_a_metric_after_the_step_of_a_loop(kind: type[torch.optim.Optimizer]) -> None:
    """As many loops are written: the first step computes it ahead, the others with the loss."""
    ours, theirs = pair()
    optimizers = [kind(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for seed in range(4):
        metrics = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss, scores = model(*batch(seed=seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.append(scores.float().detach())
        assert_close(*metrics)
    assert ours.gradd_stats()["repeated_forwards"] == 1


@pytest.mark.parametrize("gather", [lambda s: s, lambda s: s.float(), lambda s: (s,)])
def test_outputs_that_a_loop_keeps(gather: Callable[[torch.Tensor], Any]) -> None:
    ours, eager = pair()
    kept: list[list[Any]] = [[], []]
    for model, found in zip((ours, eager), kept, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for seed in range(5):
            loss, scores = model(*batch(seed=seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(gather(scores))
    assert_close(*(torch.cat(pytree.tree_leaves(one)) for one in kept))
    assert ours.gradd_stats()["repeated_forwards"] == 2


def test_only_the_first_step_computes_ahead() -> None:
    ours, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for _ in range(3):
        loss, scores = ours(*batch())
        loss.backward()
        other.step()  # not of this model
        optimizer.step()
    assert ours.gradd_stats()["repeated_forwards"] == 1 and not scores.gradd_is_computed


def test_a_step_computes_no_released_output() -> None:
    ours, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters())
    for _ in range(3):
        ours(*batch())[0].backward()
        optimizer.step()
    assert ours.gradd_stats()["repeated_forwards"] == 0


def test_printing_never_fails() -> None:
    ours, theirs = pair()
    x, y = batch()
    scores, expected = ours(x, y)[1], theirs(x, y)[1]
    assert repr(scores.detach()) == repr(expected.detach())
    ours, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters())
    _step_without_reads(ours, optimizer)
    loss, scores = ours(x, y)
    loss.backward()
    optimizer.step()
    assert "not computed" in repr(scores) and "6, 4" in f"{[scores]}"


@pytest.mark.quick
@pytest.mark.parametrize("fused", [True, False])
def test_read_after_the_parameters_changed_is_a_named_error(fused: bool) -> None:
    ours, _ = pair()
    optimizer = torch.optim.AdamW(ours.parameters(), fused=fused)
    _step_without_reads(ours, optimizer)
    loss, scores = ours(*batch())
    loss.backward()
    optimizer.step()
    with pytest.raises(errors.StaleError, match="optimizer.step"):
        scores.detach()
    loss, scores = ours(*batch())  # one earlier request is enough
    loss.backward()
    optimizer.step()
    assert scores.detach().shape == (6, 4)


def test_read_before_the_change_stays_readable() -> None:
    ours, _ = pair()
    loss, scores = ours(*batch())
    value = scores.detach().clone()
    loss.backward()
    with torch.no_grad():
        ours.first.weight.zero_()
    assert torch.equal(scores.detach(), value)


def test_outputs_are_real_without_a_loss_in_eval_and_when_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, _ = pair()
    x, y = batch()
    assert type(ours(x)) is torch.Tensor
    ours.eval()
    assert type(ours(x, y)[1]) is torch.Tensor
    with torch.no_grad():
        ours.train()
        assert type(ours(x, y)[1]) is torch.Tensor
    monkeypatch.setenv("GRADD_LAZY", "0")
    real, theirs = pair()
    for model in (real, theirs):
        loss, scores = model(x, y)
        assert type(scores) is torch.Tensor
        (loss + scores.mean()).backward()
    assert_same_grads(real, theirs)


def test_unread_outputs_hold_no_run(daemon: object) -> None:
    ours, _ = pair()
    kept = []
    for step in range(5):
        loss, scores = ours(*batch(4, seed=step))
        loss.backward()
        kept.append(scores)
    loss_of(ours(*batch()))
    (session,) = daemon.ps()["sessions"]
    assert session["runs"] <= 2


CASTS = {
    "double": lambda t: t.double(),
    "to": lambda t: t.to(torch.float64),
    "device": lambda t: t.to(device=t.device, dtype=torch.float64),
    "twice": lambda t: t.double().float().to(str(t.device), torch.float64),
}


@pytest.mark.quick
@pytest.mark.parametrize("way", CASTS)
def test_a_conversion_computes_nothing_and_hands_gradients_on(way: str) -> None:
    ours, theirs = pair()
    x, y = batch()
    mine, expected = (CASTS[way](model(x, y)[1]) for model in (ours, theirs))
    assert isinstance(mine, LazyTensor) and not mine.gradd_is_computed
    assert mine.dtype is torch.float64 and mine.shape == expected.shape and mine.requires_grad
    assert ours.gradd_stats()["repeated_forwards"] == 0
    for scores in (mine, expected):
        scores.pow(2).sum().backward()
    assert_same_grads(ours, theirs)


def test_a_conversion_and_its_source_are_two_tensors() -> None:
    """One of them may be changed in place; neither read costs another forward."""
    for change_source in (True, False):
        ours, theirs = pair()
        x, y = batch()
        values = []
        for model in (ours, theirs):
            _, scores = model(x, y)
            wide = scores.double()
            (scores if change_source else wide).mul_(3.0)
            (wide.sum() + scores.double().pow(2).sum()).backward()
            values += [wide.detach(), scores.detach()]
        assert_close(values[0], values[2], "converted")
        assert_close(values[1], values[3], "source")
        assert_same_grads(ours, theirs)
        assert ours.gradd_stats()["repeated_forwards"] == 2, "the read, and the gradient"


def test_a_conversion_outlives_its_source_and_goes_stale_with_it() -> None:
    ours, theirs = pair()
    x, y = batch()
    wide, expected = ours(x, y)[1].double(), theirs(x, y)[1].double()
    assert_close(wide.detach(), expected)
    ours, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters())
    _step_without_reads(ours, optimizer)
    loss, scores = ours(x, y)
    wide = scores.double()
    loss.backward()
    optimizer.step()
    assert "not computed" in repr(wide)
    with pytest.raises(errors.StaleError, match=r"optimizer\.step"):
        wide.sum()


def test_a_conversion_without_gradients() -> None:
    ours, theirs = pair()
    x, y = batch()
    _, scores = ours(x, y)
    with torch.no_grad():
        wide = scores.double()
    assert not wide.requires_grad
    assert_close(wide * 2, theirs(x, y)[1].double() * 2)


@pytest.mark.parametrize("ask", ["hook", "retain"])
def test_a_gradient_that_would_pass_through_another_output(ask: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, y), "logits": logits}

    model = ORTModule(Both(), strict=True)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    model(x, y)["loss"].backward()
    out = model(x, y)
    if ask == "hook":
        out["logits"].register_hook(lambda g: g if g is None else g * 5)
    else:
        out["logits"].retain_grad()
    with pytest.raises(errors.UnsupportedError, match=r"(logits|output_1).*retain_grad"):
        out["loss"].backward()
    out = model(x, y)
    out["logits"].register_hook(lambda g: g * 5)
    model.zero_grad()
    out["logits"].sum().backward()  # the loss has no part in it
    want = 5 * x.sum(0)
    assert torch.allclose(model.layer.weight.grad, want.expand(3, 4), rtol=1e-5, atol=1e-5)


class Chain(nn.Module):
    """Two results of which the second is made of the first, and one that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.alone = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple:
        hidden = torch.tanh(self.first(x))
        return hidden, self.second(hidden), self.alone(x)


@pytest.mark.parametrize("wait", ["hook", "retain_grad"])
def test_a_hook_on_what_another_result_is_made_of(wait: str) -> None:
    """In PyTorch it sees what comes through the other one: right, or an error."""
    theirs = Chain()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x = torch.randn(3, 8)
    for pick in ((0,), (2,), (0, 2), (1,), (0, 1)):
        seen: list = []
        for model in (ours, theirs):
            model.zero_grad()
            outputs = model(x)
            if wait == "hook":
                outputs[0].register_hook(lambda g, seen=seen: seen.append(g))
            else:
                outputs[0].retain_grad()
            total = sum(outputs[i].square().sum() for i in pick)
            if model is ours and 1 in pick:
                with pytest.raises(errors.UnsupportedError, match="another one depends"):
                    total.backward()
                continue
            total.backward()
            if wait == "retain_grad":
                seen.append(outputs[0].grad)
        if 1 not in pick:
            seen = [g for g in seen if g is not None]  # nothing arrives there
            assert len(seen) == (2 if 0 in pick else 0)
            assert not seen or torch.allclose(*seen)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-6)
