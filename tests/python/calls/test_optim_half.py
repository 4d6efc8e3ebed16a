"""FusedAdam on bf16 and f16 parameters: against torch.optim.AdamW on float32 copies, with master
weights and without, saved and loaded, clipped, mixed with float32 parameters, and under kills."""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import threading
import time

import pytest
import torch

from gradd import ORTModule, errors
from gradd.optim import AdamWMode, FusedAdam
from helpers.nets import Net, batch

TORCH = {"adam_w_mode": AdamWMode.ADAMW_TORCH, "eps": 1e-8, "weight_decay": 0.05}
HALF = torch.bfloat16  # of the test that runs


@pytest.fixture(autouse=True, params=[torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def half_type(request, monkeypatch):
    monkeypatch.setitem(globals(), "HALF", request.param)


def parameters(seed: int = 0, sizes=((70,), (33, 5))) -> list[torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=gen).to(HALF)) for s in sizes]


def gradient(p: torch.Tensor, step: int) -> torch.Tensor:
    wave = torch.sin(torch.arange(p.numel(), dtype=torch.float32) * (step + 1.3)) * 0.3
    return wave.reshape(p.shape).to(HALF)


def reference(start: list[torch.Tensor], steps: int, *, rounds: bool, clip: float | None = None):
    """torch's AdamW on float32 copies; `rounds` them to the half after every step if asked to."""
    copies = [torch.nn.Parameter(p.detach().float()) for p in start]
    optimizer = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.05)
    for step in range(steps):
        for p in copies:
            p.grad = gradient(p, step).float()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(copies, clip)
        optimizer.step()
        if rounds:
            for p in copies:
                p.data = p.data.to(HALF).float()
    return copies


def run(params: list[torch.nn.Parameter], optimizer: FusedAdam, steps: range | int) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        for p in params:
            p.grad = gradient(p, step)
        optimizer.step()


@pytest.mark.quick
@pytest.mark.parametrize("clip", [None, 0.2])
def test_master_weights_are_torch_adamw_on_float32(daemon, clip):
    mine = parameters()
    want = reference(mine, 10, rounds=False, clip=clip)
    optimizer = FusedAdam(mine, lr=1e-2, max_grad_norm=clip, master_weights=True, **TORCH)
    run(mine, optimizer, 10)
    for p, q in zip(mine, want, strict=True):
        state = optimizer.state[p]
        assert p.dtype is HALF and all(
            state[name].dtype is torch.float32 for name in ("master", "exp_avg", "exp_avg_sq")
        )
        torch.testing.assert_close(state["master"], q.detach(), rtol=2e-6, atol=2e-6)
        assert torch.equal(p.detach(), state["master"].to(HALF))


@pytest.mark.quick
def test_without_master_weights_the_update_is_rounded(daemon):
    mine = parameters()
    want = reference(mine, 6, rounds=True)
    optimizer = FusedAdam(mine, lr=1e-2, **TORCH)
    run(mine, optimizer, 6)
    for p, q in zip(mine, want, strict=True):
        assert "master" not in optimizer.state[p]
        moved = (p.detach().float() - q.detach()).abs()
        # A tie that float32 sees differently moves one last place; it may not happen often.
        assert float(moved.max()) <= float(q.detach().abs().max()) * 2**-7
        assert float((moved > 0).float().mean()) < 0.02


def test_small_updates_add_up_only_in_master_weights(daemon):
    plain, kept = (torch.nn.Parameter(torch.ones(8, dtype=HALF)) for _ in range(2))
    step = torch.finfo(HALF).eps / 8  # a quarter of the last place below 1
    options = {"lr": step, "adam_w_mode": AdamWMode.ADAMW_TORCH, "eps": 1e-8}
    for p, master in ((plain, False), (kept, True)):
        optimizer = FusedAdam([p], master_weights=master, **options)
        for _ in range(8):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(plain.detach(), torch.ones(8, dtype=HALF))
    assert torch.equal(kept.detach(), torch.full((8,), 1 - 8 * step, dtype=HALF))


def test_mixed_parameters_and_clipping(daemon):
    half = parameters()
    full = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    want = [p.detach().clone() for p in (*half, full)]
    optimizer = FusedAdam([full, *half], lr=1e-2, max_grad_norm=0.3, master_weights=True, **TORCH)
    copies = [torch.nn.Parameter(p.float()) for p in want]
    ref = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.05)
    for step in range(5):
        for p, q in zip((*half, full), copies, strict=True):
            p.grad = gradient(p, step).to(p.dtype)
            q.grad = p.grad.float().clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 0.3)
        ref.step()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert "master" not in optimizer.state[full]
    torch.testing.assert_close(full, copies[2], rtol=2e-6, atol=2e-6)
    for p, q in zip(half, copies, strict=False):
        torch.testing.assert_close(optimizer.state[p]["master"], q.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("master", [False, True])
def test_state_dict_continues_bit_for_bit(daemon, master):
    whole, first = parameters(), parameters()
    options = {"lr": 1e-2, "master_weights": master, **TORCH}
    straight, begun = FusedAdam(whole, **options), FusedAdam(first, **options)
    run(whole, straight, 7)
    run(first, begun, 3)
    file = io.BytesIO()
    torch.save((first, begun.state_dict()), file)
    file.seek(0)
    params, saved = torch.load(file, weights_only=False)
    assert all(t.dtype is not HALF for s in saved["state"].values()
               for t in s.values() if torch.is_tensor(t))  # fmt: skip
    resumed = FusedAdam(params, **options)
    resumed.load_state_dict(saved)
    run(params, resumed, range(3, 7))
    for p, q in zip(whole, params, strict=True):
        assert torch.equal(p, q)
        for name, value in straight.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed.state[q][name]))


def test_masters_can_be_added_to_and_left_out_of_a_saved_state(daemon):
    first = parameters()
    begun = FusedAdam(first, lr=1e-2, **TORCH)
    run(first, begun, 2)
    saved = copy.deepcopy(begun.state_dict())
    more = FusedAdam(first, lr=1e-2, master_weights=True, **TORCH)
    more.load_state_dict(saved)
    run(first, more, range(2, 4))
    assert all(torch.equal(p.detach(), more.state[p]["master"].to(HALF)) for p in first)
    less = FusedAdam(first, lr=1e-2, **TORCH)
    less.load_state_dict(more.state_dict())
    run(first, less, range(4, 5))
    assert all("master" not in less.state[p] for p in first)


def test_takes_over_the_state_of_torch_adamw(daemon):
    """torch keeps moments in the half; they are widened."""
    (p,) = parameters(sizes=((50,),))
    q = torch.nn.Parameter(p.detach().clone())
    ref = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.05, eps=1e-4)  # f16 has no 1e-8
    q.grad = gradient(q, 0)
    ref.step()
    p.data = q.data.clone()
    optimizer = FusedAdam([p], lr=1e-2, **TORCH)
    optimizer.load_state_dict(copy.deepcopy(ref.state_dict()))
    assert optimizer.state[p]["exp_avg"].dtype is torch.float32
    q.grad = p.grad = gradient(q, 1)
    ref.step()
    optimizer.step()
    torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-3)


def test_loading_the_model_beats_the_master_weights(daemon):
    (p,) = parameters(sizes=((50,),))
    optimizer = FusedAdam([p], lr=1e-2, master_weights=True, **TORCH)
    run([p], optimizer, 3)
    with torch.no_grad():
        p.copy_(torch.full_like(p, 5.0))
    run([p], optimizer, range(3, 4))
    assert float((p - 5.0).abs().max()) < 0.1


def test_float64_is_refused_by_name(daemon):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    with pytest.raises(errors.TensorError, match="float64.*float32, bfloat16 and float16"):
        FusedAdam([p]).step()


def train(daemon, killed: bool) -> Net:
    net = Net().to(HALF)
    model = ORTModule(net)
    optimizer = FusedAdam(net.parameters(), lr=1e-2, max_grad_norm=0.1, master_weights=True)
    for step in range(6):
        x, y = batch(6, step)
        loss, _ = model(x.to(HALF), y)
        loss.backward()
        if killed and step in (1, 3):
            daemon.kill()
        optimizer.step()
        optimizer.zero_grad()
    assert model.gradd_stats()["fallbacks"] == {}
    return net


def test_daemon_killed_between_steps(daemon):
    whole, killed = train(daemon, False), train(daemon, True)
    for p, q in zip(whole.parameters(), killed.parameters(), strict=True):
        assert p.dtype is HALF and torch.equal(p, q)


@pytest.mark.parametrize("master", [False, True])
def test_daemon_killed_during_steps(daemon, master):
    def parameter():
        return torch.nn.Parameter(torch.linspace(-1, 1, 1_500_000).to(HALF))

    p, q = parameter(), parameter()
    grad = torch.linspace(1, -1, 1_500_000).to(HALF)
    options = {"lr": 1e-2, "max_grad_norm": 1.0, "master_weights": master}
    whole = FusedAdam([q], **options)
    q.grad = grad.clone()
    for _ in range(16):
        whole.step()
    optimizer = FusedAdam([p], **options)
    p.grad = grad.clone()
    optimizer.step()
    done, killed = threading.Event(), threading.Event()

    def killer():
        for wait in (0.1, 0.25, 0.15):
            if done.wait(wait):
                return
            with contextlib.suppress(subprocess.CalledProcessError):  # none runs at this moment
                daemon.kill()
                killed.set()

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for i in range(15):
            optimizer.step()
            time.sleep(0.02)
            if i == 7:
                killed.wait(60)  # a busy machine may be late with the first
    finally:
        done.set()
        thread.join()
    assert torch.equal(p, q)
    for name, value in whole.state[q].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][name])), name
    assert optimizer._client.recoveries > 0
