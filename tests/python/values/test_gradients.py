"""Gradients through the daemon are where PyTorch would have put them, in every way users use."""

from __future__ import annotations

import copy
import gc
import os
import socket

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.calls.function import DaemonFunction
from gradd.session import client
from gradd.spec import CaptureError
from helpers.nets import Net, assert_close, assert_same_grads, batch, loss_of, pair

pytestmark = [pytest.mark.one_in(2), pytest.mark.usefixtures("daemon"), pytest.mark.fake]


@pytest.mark.quick
def test_loss_and_gradients_agree_for_several_batch_sizes() -> None:
    ours, theirs = pair()
    for size in (6, 13, 1, 2, 1):
        x, y = batch(size, seed=size)
        a, b = loss_of(ours(x, y)), loss_of(theirs(x, y))
        assert_close(a, b, "loss")
        a.backward()
        b.backward()
        assert_same_grads(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()
    stats = ours.gradd_stats()
    assert stats["captures"] == 2, "one for a single row, one for any other number of rows"
    assert stats["fallbacks"] == {}


@pytest.mark.quick
def test_gradient_is_the_shared_memory_itself() -> None:
    ours, _ = pair()
    loss_of(ours(*batch())).backward()
    for name, parameter in ours.named_parameters():
        assert client.find(parameter.grad) is not None, f"{name}.grad was copied"
        assert parameter.grad._base is None
        assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * 4


def test_accumulation_over_micro_batches() -> None:
    ours, theirs = pair()
    for step in range(3):
        for model in (ours, theirs):
            (loss_of(model(*batch(5, seed=step))) / 3).backward()
    assert_same_grads(ours, theirs)
    assert ours.gradd_stats()["slots"] == 2, "one slot is .grad, another takes what is added"


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_both_ways(to_none: bool) -> None:
    ours, theirs = pair()
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad(set_to_none=to_none)
            loss_of(model(*batch(5, seed=step))).backward()
        assert_same_grads(ours, theirs)
    assert ours.gradd_stats()["slots"] == (1 if to_none else 2)


def test_a_gradient_that_the_user_keeps_is_not_overwritten() -> None:
    ours, theirs = pair()
    kept = []
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        loss_of(ours(*batch(5, seed=step))).backward()
        loss_of(theirs(*batch(5, seed=step))).backward()
        kept.append((ours.first.weight.grad, theirs.first.weight.grad.clone()))
    for step, (mine, expected) in enumerate(kept):
        assert_close(mine, expected, f"kept gradient of step {step}")


def test_autograd_grad_leaves_grad_alone() -> None:
    ours, theirs = pair()
    x, y = batch()
    mine = torch.autograd.grad(loss_of(ours(x, y)), list(ours.parameters()))
    expected = torch.autograd.grad(loss_of(theirs(x, y)), list(theirs.parameters()))
    again = torch.autograd.grad(loss_of(ours(*batch(6, seed=9))), [ours.first.weight])
    for a, b in zip(mine, expected, strict=True):
        assert_close(a, b)
    assert again[0].data_ptr() != mine[0].data_ptr()
    assert all(p.grad is None for p in ours.parameters())


def test_two_forwards_then_backward_in_either_order() -> None:
    for reverse in (False, True):
        ours, theirs = pair()
        for model in (ours, theirs):
            losses = [loss_of(model(*batch(4, seed=s))) for s in (1, 2)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
        assert_same_grads(ours, theirs)


def test_sum_of_two_losses_in_one_backward() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        first, second = (loss_of(model(*batch(4, seed=s))) for s in (1, 2))
        (first * 2 + second).backward()
    assert_same_grads(ours, theirs)


def test_retain_graph() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        loss = loss_of(model(*batch()))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_grads(ours, theirs)


@pytest.mark.quick
def test_second_backward_without_retain_graph_is_torchs_error() -> None:
    ours, _ = pair()
    loss = loss_of(ours(*batch()))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def loose_pair(dropout: float = 0.0) -> tuple[ORTModule, nn.Module]:
    """As pair(), of which PyTorch may run something."""
    theirs = Net(dropout=dropout)
    return ORTModule(copy.deepcopy(theirs)), theirs


@pytest.mark.parametrize("of_parameters", [False, True])
def test_a_gradient_penalty_is_that_of_torch(of_parameters: bool) -> None:
    """The input may depend on a parameter: that path counts once."""
    ours, theirs = loose_pair()
    inputs = []
    for model in (ours, theirs):
        x = batch()[0].requires_grad_()
        given = x * model.first.weight.sum() if of_parameters else x
        scores = model(given).tanh().sum()
        (grad,) = torch.autograd.grad(scores, given, create_graph=True)
        (grad.square().sum() + scores).backward()
        inputs.append(x.grad)
    assert_close(inputs[0], inputs[1], "input gradient")
    assert_same_grads(ours, theirs)
    assert ours.gradd_stats()["in_torch"] == {"create_graph": 1}


def test_a_product_with_a_hessian_is_that_of_torch() -> None:
    found = []
    for model in loose_pair():
        parameters = list(model.parameters())
        loss = loss_of(model(*batch()))
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sum() for g in grads), parameters))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("why", ["random numbers", "written to"])
def test_create_graph_is_refused_by_name(why: str) -> None:
    ours, _ = loose_pair(dropout=0.5 if why == "random numbers" else 0.0)
    x, y = batch()
    given = x.requires_grad_() * 2.0
    loss = loss_of(ours(given, y))
    if why == "written to":
        with torch.no_grad():
            given.zero_()
    with pytest.raises(errors.UnsupportedError, match=f"create_graph.*{why}"):
        torch.autograd.grad(loss, [ours.first.weight], create_graph=True)


def test_create_graph_is_an_error_where_nothing_may_run_in_torch() -> None:
    ours, _ = pair()
    with pytest.raises(CaptureError, match="create_graph"):
        torch.autograd.grad(loss_of(ours(*batch())), [ours.first.weight], create_graph=True)


def test_tensor_hooks_see_and_change_gradients() -> None:
    ours, theirs = pair()
    seen: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for side, model in (("ours", ours), ("theirs", theirs)):
        model.first.weight.register_hook(lambda g, side=side: seen[side].append(g.clone()))
        model.second.weight.register_hook(lambda g: g * 3)
        loss_of(model(*batch())).backward()
    assert len(seen["ours"]) == 1
    assert_close(seen["ours"][0], seen["theirs"][0], "gradient in the hook")
    assert_same_grads(ours, theirs)


def test_post_accumulate_hooks_run_once_per_backward() -> None:
    ours, theirs = pair()
    calls: list[str] = []
    for side, model in (("ours", ours), ("theirs", theirs)):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, side=side: calls.append(side))
        for step in range(2):
            loss_of(model(*batch(4, seed=step))).backward()
    assert calls.count("ours") == calls.count("theirs") == 8
    assert_same_grads(ours, theirs)


def test_optimizer_in_backward_hook() -> None:
    """Parameters may change as soon as their gradient is there; the next forward sees it."""
    ours, theirs = pair()
    for model in (ours, theirs):

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            loss_of(model(*batch(4, seed=step))).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, "parameters")


def test_input_gradients() -> None:
    ours, theirs = pair()
    x, y = batch()
    mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss_of(ours(mine, y)).backward()
    loss_of(theirs(expected, y)).backward()
    assert_close(mine.grad, expected.grad, "input gradient")
    assert_same_grads(ours, theirs)


def test_gradient_flows_into_what_came_before() -> None:
    """The module in the middle of a graph: its input has a history."""
    ours, theirs = pair()
    x, y = batch()
    results = []
    for model in (ours, theirs):
        scale = torch.ones(8, requires_grad=True)
        loss_of(model(x * scale, y)).backward()
        results.append(scale.grad)
    assert_close(results[0], results[1])


def test_loss_outside_of_the_graph() -> None:
    ours, theirs = pair()
    x, y = batch()
    for model in (ours, theirs):
        scores = model(x)
        assert type(scores) is torch.Tensor, "without a loss in the graph outputs are real"
        nn.functional.cross_entropy(scores * 2, y).backward()
    assert_same_grads(ours, theirs)


class TwoHeads(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return {"left": self.left(hidden), "right": self.right(hidden), "mask": x > 0}


@pytest.mark.parametrize("used", [("left",), ("right",), ("left", "right")])
def test_outputs_without_gradient_and_unused_parameters(used: tuple[str, ...]) -> None:
    ours, theirs = pair(TwoHeads())
    x, _ = batch()
    for model in (ours, theirs):
        outputs = model(x)
        assert outputs["mask"].dtype is torch.bool and not outputs["mask"].requires_grad
        sum((outputs[name] ** 2).sum() for name in used).backward()
    assert ours.unused.weight.grad is None
    for name, parameter in ours.named_parameters():
        expected = dict(theirs.named_parameters())[name].grad
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert_close(parameter.grad, expected, name)


def test_frozen_parameters_and_unfreezing_without_a_new_capture() -> None:
    ours, theirs = pair()
    for frozen in (True, False, True):
        for model in (ours, theirs):
            model.first.requires_grad_(not frozen)
            model.zero_grad()
            loss_of(model(*batch())).backward()
        assert (ours.first.weight.grad is None) is frozen
        assert_same_grads(ours, theirs)
    assert ours.gradd_stats()["captures"] == 1


def test_everything_frozen_gives_no_graph() -> None:
    ours, theirs = pair()
    ours.requires_grad_(False)
    theirs.requires_grad_(False)
    loss = loss_of(ours(*batch()))
    assert not loss.requires_grad
    assert_close(loss, loss_of(theirs(*batch())))


@pytest.mark.quick
def test_in_place_change_of_a_parameter_before_backward_is_torchs_error() -> None:
    ours, _ = pair()
    loss = loss_of(ours(*batch()))
    with torch.no_grad():
        ours.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_grad_eval_and_train_give_the_same_values_as_torch() -> None:
    ours, theirs = pair()
    x, y = batch()
    with torch.no_grad():
        a, b = ours(x, y), theirs(x, y)
    assert_close(a[0], b[0])
    assert_close(a[1], b[1])
    ours.eval()
    theirs.eval()
    a, b = ours(x, y), theirs(x, y)
    assert type(a[1]) is torch.Tensor, "in eval mode outputs are real"
    assert_close(a[1], b[1])
    a[0].backward()
    b[0].backward()
    assert_same_grads(ours, theirs)
    with torch.inference_mode():
        assert_close(ours(x), theirs(x))


def test_forward_without_backward_leaks_no_run(daemon: object) -> None:
    ours, _ = pair()
    for step in range(20):
        loss_of(ours(*batch(4, seed=step)))
    ours(*batch())
    (session,) = daemon.ps()["sessions"]
    assert session["runs"] <= 2


def test_losses_kept_in_a_list_keep_their_values() -> None:
    ours, theirs = pair()
    mine, expected = [], []
    for step in range(10):
        a, b = loss_of(ours(*batch(4, seed=step))), loss_of(theirs(*batch(4, seed=step)))
        a.backward()
        mine.append(a.detach())
        expected.append(b.detach())
    assert_close(torch.stack(mine), torch.stack(expected))


def test_backward_in_another_thread() -> None:
    import threading

    ours, theirs = pair()
    loss = loss_of(ours(*batch()))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    loss_of(theirs(*batch())).backward()
    assert_same_grads(ours, theirs)


def test_grad_fn_is_ours_and_shows_up_once() -> None:
    ours, _ = pair()
    loss, scores = ours(*batch())
    assert loss.grad_fn.name() == DaemonFunction._backward_cls.__name__
    assert scores.grad_fn is loss.grad_fn


def _ddp_worker(rank: int, port: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    _train_in_ddp(rank, path)
    # The group must end through Python, without the GIL. Where the reducer holds it last, its end
    # waits, with the GIL, for a thread of gloo that may need the GIL (PyTorch stores a Python
    # context with every backward).
    gc.collect()
    torch.distributed.destroy_process_group()


def _train_in_ddp(rank: int, path: str) -> None:
    net = Net()
    model = nn.parallel.DistributedDataParallel(ORTModule(net, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(model(*batch(4, seed=10 * step + 2 * micro + rank))).backward()
        optimizer.step()
    if rank == 0:
        torch.save({k: v.clone() for k, v in net.state_dict().items()}, path)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.nightly  # trainer/test_ddp.py has the same by torchrun
def test_ddp_two_processes(tmp_path: object) -> None:
    path = f"{tmp_path}/state.pt"
    torch.multiprocessing.spawn(_ddp_worker, (_free_port(), path), nprocs=2)
    theirs = Net()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for seed in range(10 * step, 10 * step + 4):  # what the two ranks see, averaged
            (loss_of(theirs(*batch(4, seed=seed))) / 2).backward()
        optimizer.step()
    state = torch.load(path)
    for name, value in theirs.state_dict().items():
        assert_close(state[name], value, name)
