"""FusedAdam through the daemon: against torch's AdamW and against the formulas, clipping, state
dicts, gradients that are not the daemon's own, and kills of the daemon around a step."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import re
import subprocess
import weakref

import pytest
import torch

from gradd import ORTModule, errors, optim
from gradd.optim import AdamWMode, FusedAdam
from helpers import sessions
from helpers.nets import Net, batch

TORCH = {"adam_w_mode": AdamWMode.ADAMW_TORCH, "eps": 1e-8}


def groups(net):
    """Weights decay, biases do not; two learning rates."""
    return [
        {"params": [p for n, p in net.named_parameters() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in net.named_parameters() if "bias" in n], "lr": 3e-3},
    ]


def largest_difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def train(model, optimizer, steps, seed=0, clip=None):
    """Trains on the module's own loss; returns the losses."""
    losses = []
    for i in range(steps):
        loss, _ = model(*batch(6, seed + i))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.quick
def test_torch_mode_is_torch_adamw(daemon):
    mine, ref = Net(), Net()
    model = ORTModule(mine)
    got = train(model, FusedAdam(groups(mine), lr=1e-2, **TORCH), 12)
    want = train(ref, torch.optim.AdamW(groups(ref), lr=1e-2, weight_decay=0), 12)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-5
    assert largest_difference(mine, ref) < 1e-5


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_other_modes_match_their_formulas(daemon, mode, bias_correction):
    lr, (b1, b2), eps, decay = 1e-2, (0.8, 0.95), 1e-6, 0.1
    p = torch.nn.Parameter(torch.linspace(-1, 1, 70))
    optimizer = FusedAdam(
        [p], lr, bias_correction, (b1, b2), eps, AdamWMode(mode), weight_decay=decay
    )
    want, m, v = p.detach().double().clone(), torch.zeros(70).double(), torch.zeros(70).double()
    for t in range(1, 6):
        grad = torch.sin(torch.arange(70.0) * t)
        p.grad = grad.clone()
        optimizer.step()
        g = grad.double() + (decay * want if mode == 0 else 0)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        rate = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if bias_correction else lr
        want = want - rate * m / (v.sqrt() + eps)
        want = want * (1 - lr * decay) if mode == 1 else want
        assert (p.double() - want).abs().max() < 2e-6


def test_defaults_are_those_of_onnx_runtime():
    group = FusedAdam([torch.nn.Parameter(torch.ones(1))])
    assert group.adam_w_mode == AdamWMode.ADAMW_TRANSFORMERS
    assert group.defaults["eps"] == 1e-6 and group.defaults["lr"] == 1e-3
    with pytest.raises(ValueError, match="beta parameter"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], betas=(1.0, 0.9))


_BAD = [
    ({"lr": math.nan}, "Invalid learning rate: nan"),
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": math.inf}, "Invalid learning rate: inf"),
    ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    ({"eps": math.nan}, "Invalid epsilon value: nan"),
    ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ({"weight_decay": math.inf}, "Invalid weight_decay value: inf"),
    ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, math.nan)}, "Invalid beta parameter at index 1: nan"),
    ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
]


@pytest.mark.parametrize(("setting", "text"), _BAD)
def test_settings_that_are_none_are_refused(daemon, setting, text):
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        FusedAdam([p], **setting)
    optimizer = FusedAdam([p], lr=0.1)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.add_param_group({"params": [q], **setting})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones(3)
    before, version = dict(optimizer.param_groups[0]), p._version
    optimizer.param_groups[0].update(setting)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3)) and p._version == version and not optimizer.state[p]
    optimizer.param_groups[0].update(before)
    optimizer.step()
    assert torch.isfinite(p).all() and not torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("norm", [-1, math.nan])
def test_a_clip_that_is_none_is_refused(daemon, norm):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=f"^Invalid max_grad_norm value: {norm}$"):
        FusedAdam([p], max_grad_norm=norm)
    optimizer = FusedAdam([p], max_grad_norm=math.inf)
    optimizer.max_grad_norm = norm
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


def test_clipping_is_torch_clipping(daemon):
    mine, ref = Net(), Net()
    model = ORTModule(mine)
    optimizer = FusedAdam(mine.parameters(), lr=1e-2, max_grad_norm=0.05, **TORCH)
    train(model, optimizer, 8)
    train(ref, torch.optim.AdamW(ref.parameters(), lr=1e-2, weight_decay=0), 8, clip=0.05)
    assert largest_difference(mine, ref) < 1e-5
    loss, _ = model(*batch(6, 99))
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in mine.parameters()]))
    before = [p.grad.clone() for p in mine.parameters()]
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for p, g in zip(mine.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_gradients_from_elsewhere_are_copied_and_counted(daemon):
    p = torch.nn.Parameter(torch.ones(10))
    optimizer = FusedAdam([p], lr=0.1, **TORCH)
    p.grad = torch.ones(20)[::2]
    optimizer.step()
    assert optimizer.copied_grads == 1
    assert torch.allclose(p, torch.full((10,), 0.9), atol=1e-5)


def test_parameters_without_gradient_keep_their_step(daemon):
    a, b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    ra, rb = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    mine = FusedAdam([a, b], lr=0.1, **TORCH)
    ref = torch.optim.AdamW([ra, rb], lr=0.1, weight_decay=0)
    for step in range(4):
        for p, q in ((a, ra), (b, rb)):
            p.grad = q.grad = None
            if p is a or step % 2:
                p.grad, q.grad = torch.full((4,), step + 0.5), torch.full((4,), step + 0.5)
        mine.step()
        ref.step()
    assert torch.allclose(a, ra, atol=1e-6) and torch.allclose(b, rb, atol=1e-6)
    assert mine.state[a]["step"] == 4 and mine.state[b]["step"] == 2


def test_in_place_update_is_seen_by_autograd(daemon):
    p = torch.nn.Parameter(torch.ones(4))
    y = (p * p).sum()
    p.grad = torch.ones(4)
    FusedAdam([p], **TORCH).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_state_dict_continues_bit_for_bit(daemon):
    whole, first = Net(), Net()
    model, part = ORTModule(whole), ORTModule(first)
    straight = FusedAdam(whole.parameters(), lr=1e-2)
    train(model, straight, 6)
    begun = FusedAdam(first.parameters(), lr=1e-2)
    train(part, begun, 3)
    saved = copy.deepcopy((first.state_dict(), begun.state_dict()))
    second = Net(seed=5)
    resumed = ORTModule(second)
    second.load_state_dict(saved[0])
    optimizer = FusedAdam(second.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, 3, seed=3)
    assert largest_difference(whole, second) == 0


def test_takes_over_the_state_of_torch_adamw(daemon):
    mine, ref = Net(), Net()
    reference = torch.optim.AdamW(ref.parameters(), lr=1e-2, weight_decay=0)
    train(ref, reference, 3)
    mine.load_state_dict(ref.state_dict())
    model = ORTModule(mine)
    optimizer = FusedAdam(mine.parameters(), lr=1e-2, **TORCH)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(model, optimizer, 3, seed=3)
    train(ref, reference, 3, seed=3)
    assert largest_difference(mine, ref) < 1e-6


def test_scheduler_closure_and_added_group(daemon):
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([p], lr=0.1, **TORCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.add_param_group({"params": [q], "lr": 0.01})

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum() + (q * q).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 6.0
    schedule.base_lrs.append(0.01)
    assert torch.allclose(p, torch.full((3,), 0.9), atol=1e-5)
    assert torch.allclose(q, torch.full((3,), 0.99), atol=1e-5)


def test_other_types_are_refused_by_name(daemon):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    with pytest.raises(errors.TensorError, match="float64.*float32"):
        FusedAdam([p]).step()


def test_daemon_killed_between_steps(daemon):
    whole, killed = Net(), Net()
    train(ORTModule(whole), FusedAdam(whole.parameters(), lr=1e-2, max_grad_norm=0.1), 9)
    model = ORTModule(killed)
    optimizer = FusedAdam(killed.parameters(), lr=1e-2, max_grad_norm=0.1)
    for part in range(3):
        train(model, optimizer, 3, seed=3 * part)
        if part < 2:
            daemon.kill()
    assert largest_difference(whole, killed) == 0


def test_daemon_killed_during_steps(daemon):
    """Big enough that a kill lands inside of a step; every one must be finished, none twice."""
    import threading
    import time

    def parameter():
        return torch.nn.Parameter(torch.linspace(-1, 1, 1_500_000))

    p, q = parameter(), parameter()
    grad = torch.linspace(1, -1, 1_500_000)
    reference = FusedAdam([q], lr=1e-2, max_grad_norm=1.0)
    q.grad = grad.clone()
    for _ in range(20):
        reference.step()
    optimizer = FusedAdam([p], lr=1e-2, max_grad_norm=1.0)
    p.grad = grad.clone()
    optimizer.step()
    done, killed = threading.Event(), threading.Event()

    def killer():
        for wait in (0.1, 0.25, 0.15, 0.3, 0.2):  # as often as a client tries again, no more
            if done.wait(wait):
                return
            with contextlib.suppress(subprocess.CalledProcessError):  # none runs at this moment
                daemon.kill()
                killed.set()

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for i in range(19):
            optimizer.step()
            time.sleep(0.01)
            if i == 9:
                killed.wait(60)  # a busy machine may be late with the first
    finally:
        done.set()
        thread.join()
    assert torch.equal(p, q)
    assert optimizer._client.recoveries > 0


def test_a_step_without_gradients_has_no_norm(daemon):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([p], lr=1e-2, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    p.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(12**0.5)
    p.grad = None
    optimizer.step()
    assert optimizer.grad_norm == 0.0


# ---- the length of the journal's chunks ----

CHUNK = 128 << 10


@pytest.mark.parametrize(
    ("device", "largest", "elements"),
    [
        ("cpu", 1 << 30, CHUNK),
        ("", 1 << 30, CHUNK),  # of a daemon that does not say it
        ("cuda", 1 << 30, 16 << 20),
        ("emu", CHUNK + 1, 2 * CHUNK),
        ("cuda", 3 * CHUNK, 3 * CHUNK),
        ("fake", 5, CHUNK),
    ],
)
def test_the_device_decides_the_length_of_chunks(device, largest, elements):
    assert optim._chunk_elements(device, largest) == elements


def _steps(length=None):
    """The optimizer and the parameters after three steps."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (2 * CHUNK + 5, 7)]
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    with pytest.MonkeyPatch.context() as patch:
        if length:
            patch.setattr(optim, "_chunk_elements", lambda device, largest: length)
        for seed in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
    return optimizer, params


@pytest.mark.fake
def test_a_journal_fits_the_device_of_the_daemon(daemon):
    optimizer, _ = _steps()
    words = optimizer._journal_words
    on_cpu = sessions.session().device == "cpu"
    chunk = CHUNK if on_cpu else 3 * CHUNK
    assert words.numel() * 8 == 4096 + 3 * 4 * chunk
    assert int(words[0]) == (0x4C4E524A44524731 if on_cpu else 0x324E524A << 32 | chunk)
    assert int(words[1]) == 3 << 24


@pytest.mark.fake
def test_every_length_of_chunks_leaves_the_same_bits(daemon):
    (_, want), *others = (_steps(n * CHUNK) for n in (1, 2, 3))
    for _, got in others:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- what moves between two steps ----


def _replaced_moment(params, optimizer):
    state = optimizer.state[params[0]]
    state["exp_avg"] = state["exp_avg"].clone().mul_(2)


def _moment_with_other_memory(params, optimizer):
    moment = optimizer.state[params[0]]["exp_avg_sq"]
    moment.data = moment.clone().mul_(2)


def _forgotten_state(params, optimizer):
    optimizer.state.clear()


def _forgotten_state_of_one(params, optimizer):
    optimizer.state.pop(params[0])


def _exchanged_states(params, optimizer):
    first, second = (optimizer.state[p] for p in params[:2])
    optimizer.state[params[0]], optimizer.state[params[1]] = second, first


def _exchanged_moments(params, optimizer):
    first, second = (optimizer.state[p] for p in params[:2])
    first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]


def _other_count(params, optimizer):
    state = optimizer.state[params[0]]
    state["step"] = 40 if isinstance(state["step"], int) else torch.tensor(40.0)


def _count_in_a_tensor(params, optimizer):
    optimizer.state[params[0]]["step"] = torch.tensor(40.0)


def _moved_parameter(params, optimizer):
    params[0].data = params[0].data.mul(0.5)


def _transposed_parameter(params, optimizer):
    params[0].data = params[0].data.t()


def _exchanged_parameters(params, optimizer):
    params[0].data, params[1].data = params[1].data, params[0].data


def _gradient_from_elsewhere(params, optimizer):
    params[0].grad = params[0].grad.clone().mul_(2)


def _transposed_gradient(params, optimizer):
    params[0].grad = params[0].grad.t()


def _exchanged_gradients(params, optimizer):
    params[0].grad, params[1].grad = params[1].grad, params[0].grad


def _no_gradient(params, optimizer):
    params[0].grad = None


def _other_group(params, optimizer):
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def _other_order(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def _added_parameter(params, optimizer):
    new = torch.nn.Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    params.append(new)
    optimizer.add_param_group({"params": [new]})


def _loaded_state(params, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(3)
    optimizer.load_state_dict(saved)


MOVED = [
    *(_replaced_moment, _moment_with_other_memory, _forgotten_state, _forgotten_state_of_one),
    *(_exchanged_states, _exchanged_moments, _other_count, _count_in_a_tensor, _moved_parameter),
    *(_transposed_parameter, _exchanged_parameters, _gradient_from_elsewhere),
    *(_transposed_gradient, _exchanged_gradients, _no_gradient),
    *(_other_group, _other_order, _added_parameter, _loaded_state),
]


def _trained(kind, settings, change):
    """Parameters after steps between which one thing changes, and the optimizer."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=i < 2) for i in range(3)))
    model = ORTModule(net) if kind is FusedAdam else net
    params = list(net.parameters())
    weights, biases = ([p for p in params if (p.dim() == 2) is is_2d] for is_2d in (True, False))
    groups = [{"params": weights}, {"params": biases, "lr": 3e-2}]
    optimizer = kind(groups, lr=1e-2, weight_decay=0.0, **settings)
    order = [*weights, *biases]
    for step in range(7):
        optimizer.zero_grad()
        model(
            torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        ).square().sum().backward()
        if step == 3:
            if kind is FusedAdam:
                assert optimizer._placed is not None and optimizer._gradients is not None
            change(order, optimizer)
        optimizer.step()
    return order, optimizer


@pytest.mark.parametrize("change", MOVED)
def test_what_moves_between_two_steps_is_found_where_it_is(daemon, change):
    got, optimizer = _trained(FusedAdam, TORCH, change)
    want, _ = _trained(torch.optim.AdamW, {}, change)
    for p, q in zip(got, want, strict=True):
        assert torch.allclose(p, q, atol=2e-6), change.__name__
    assert len(got) > 5 or optimizer._placed is not None or change is _transposed_parameter


def test_master_weights_may_be_asked_for_between_two_steps(daemon):
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], lr=1e-5, **TORCH)
    for step in range(300):
        p.grad = torch.ones_like(p)
        optimizer.master_weights = step >= 100
        optimizer.step()
    assert optimizer.state[p]["master"].dtype is torch.float32
    assert bool((p < 1).all()), "200 steps of 1e-5 add up in the copy only"


def test_places_keep_no_gradients_alive(daemon):
    layer = torch.nn.Linear(8, 1, bias=False)
    model, p = ORTModule(layer), layer.weight
    optimizer = FusedAdam([p], lr=1e-2, **TORCH)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        gradient = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert gradient() is None
