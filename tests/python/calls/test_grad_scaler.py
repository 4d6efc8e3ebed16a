"""torch.amp.GradScaler with FusedAdam and with torch's optimizers, beside the same in PyTorch."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradd import ORTModule
from gradd.optim import AdamWMode, FusedAdam
from helpers.nets import Net, batch

F16 = torch.float16
TORCH = {"adam_w_mode": AdamWMode.ADAMW_TORCH, "eps": 1e-8, "weight_decay": 0.05}
BAD = (2, 3, 6)  # steps with gradients that are not finite


def scaler(scale: float = 2.0**12) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def fused(params: Any) -> FusedAdam:
    return FusedAdam(params, lr=1e-2, **TORCH)


def eager(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.05, fused=True)


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        torch.as_tensor(value).clone()
        for p in optimizer.param_groups[0]["params"]
        for _, value in sorted(optimizer.state.get(p, {}).items())
    ]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(0)
    sizes = ((70,), (33, 5))
    return [torch.nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for s in sizes]


def gradient(p: torch.Tensor, step: int) -> torch.Tensor:
    wave = torch.sin(torch.arange(p.numel(), dtype=torch.float32) * (step + 1.3)) * 0.3
    return wave.reshape(p.shape).to(p.dtype)


def fill(params: list[torch.nn.Parameter], step: int, scale: float) -> None:
    for p in params:
        p.grad = (gradient(p, step).float() * scale).to(p.dtype)
    if step in BAD:
        params[1].grad[4, 2] = float("inf" if step == 2 else "nan")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "unscales"),
    [(torch.float32, False), (torch.float32, True), (F16, False)],  # torch unscales no f16
    ids=["f32", "f32_unscaled", "f16"],
)
def test_steps_scales_and_skips_are_those_of_torch(daemon, dtype: Any, unscales: bool) -> None:
    ours, theirs = parameters(dtype), parameters()
    mine, other = fused(ours), eager(theirs)
    a, b = scaler(), scaler()
    for step in range(9):
        fill(ours, step, a.scale(torch.ones(())).item())
        fill(theirs, step, b.scale(torch.ones(())).item())
        before = [p.detach().clone() for p in ours], state_of(mine)
        for optimizer, s, params in ((mine, a, ours), (other, b, theirs)):
            if unscales:
                s.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            s.step(optimizer)
            s.update()
        assert a.get_scale() == b.get_scale()
        if step in BAD:
            assert all(map(torch.equal, before[0], ours))
            assert all(map(torch.equal, before[1], state_of(mine)))
        steps = [int(mine.state[p]["step"]) for p in ours]
        assert steps == [int(other.state[p]["step"]) for p in theirs]
        tol = 2e-6 if dtype is torch.float32 else 4e-3
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.float(), q, rtol=tol, atol=tol)
    assert not hasattr(mine, "grad_scale") and not hasattr(mine, "found_inf")


def test_the_norm_is_that_of_unscaled_gradients(daemon) -> None:
    ours, theirs = parameters(), parameters()
    mine = FusedAdam(ours, lr=1e-2, max_grad_norm=0.2, **TORCH)
    other = eager(theirs)
    s = scaler()
    for step in range(2):
        fill(ours, step, s.scale(torch.ones(())).item())
        fill(theirs, step, 1.0)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.2)
        other.step()
        s.step(mine)
        s.update()
        assert mine.grad_norm == pytest.approx(float(norm), rel=1e-6)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[int], None]
) -> list[float]:
    """Under autocast to f16; the loss of some steps is too large for f16 gradients."""
    s = scaler(2.0**8)
    scales = []
    for step in range(8):
        x, y = batch(6, step)
        with torch.autocast("cpu", F16):
            loss, _ = model(x * (1e6 if step in BAD else 1), y)
        optimizer.zero_grad()
        s.scale(loss * (1e30 if step in BAD else 1)).backward()
        between(step)
        s.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()
        scales.append(s.get_scale())
    return scales


OPTIMIZERS = {
    "FusedAdam": fused,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.05),
    "AdamW fused": eager,
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_under_autocast_to_f16(daemon, name: str) -> None:
    net = Net()
    theirs = copy.deepcopy(net)
    model = ORTModule(net, strict=True)
    make = OPTIMIZERS[name]
    other = eager if name == "FusedAdam" else make
    ours = train(model, make(net.parameters()), lambda step: None)
    assert ours == train(theirs, other(theirs.parameters()), lambda step: None)
    assert len(set(ours)) > 2
    assert model.gradd_stats()["fallbacks"] == {}
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)


def test_daemon_killed_between_steps(daemon) -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    scales = []
    for net, dies in zip(nets, (False, True), strict=True):
        kill = daemon.kill if dies else (lambda: None)
        model = ORTModule(net, strict=True)
        optimizer = fused(net.parameters())
        scales.append(train(model, optimizer, lambda step, kill=kill: step % 2 or kill()))
    assert scales[0] == scales[1]
    for p, q in zip(*(n.parameters() for n in nets), strict=True):
        assert torch.equal(p, q)


def test_daemon_killed_during_steps(daemon) -> None:
    """Skipped or not, a step that is repeated after a kill leaves the same bits."""
    start = torch.linspace(-1, 1, 1_500_000)

    def step(optimizer: FusedAdam, p: torch.nn.Parameter, i: int, s: Any) -> None:
        p.grad = start.flip(0) * s.scale(torch.ones(())).item()
        if i % 3 == 1:
            p.grad[i * 1000] = float("inf")
        s.step(optimizer)
        s.update()

    p, q = (torch.nn.Parameter(start.clone()) for _ in range(2))
    whole, a = fused([q]), scaler()
    for i in range(16):
        step(whole, q, i, a)
    optimizer, b = fused([p]), scaler()
    step(optimizer, p, 0, b)
    done, killed = threading.Event(), threading.Event()

    def killer() -> None:
        for wait in (0.1, 0.25, 0.15):
            if done.wait(wait):
                return
            with contextlib.suppress(subprocess.CalledProcessError):  # none runs at this moment
                daemon.kill()
                killed.set()

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for i in range(1, 16):
            step(optimizer, p, i, b)
            time.sleep(0.02)
            if i == 7:
                killed.wait(60)  # a busy machine may be late with the first
    finally:
        done.set()
        thread.join()
    assert a.get_scale() == b.get_scale()
    assert torch.equal(p, q)
    for name, value in whole.state[q].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][name])), name
