"""Tensors of type `emu` compute what those of the CPU do, and their memory has CUDA's rules."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers import ROOT, emu_torch

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]


def _write_columns(x: torch.Tensor) -> torch.Tensor:
    x[1] = 5
    x[:, 2].add_(3)
    x.t()[1:3].mul_(2)
    return x


def _resized(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().resize_(40)
    y[x.numel() :] = 0
    return y


def _set(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(0, device=x.device)
    y.set_(x.untyped_storage(), 4, (3, 2), (8, 1))
    return y.clone().add_(torch.empty(0, device=x.device).set_(x).sum())


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = F.linear(x, x)
    assert y.dtype is torch.bfloat16
    return y


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"x": x, "view": x[1:]}, file)
    file.seek(0)
    read = torch.load(file)
    assert read["x"].device == x.device
    return read["x"] * read["view"][0]


def _on_another_stream(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return x * 2 + 1
    ready, side = torch.Event("emu"), torch.Stream("emu")
    y = x * 2
    ready.record()
    with side:
        side.wait_event(ready)
        z = y + 1
        done = side.record_event()
    torch.accelerator.current_stream().wait_event(done)
    return z


WORK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "writes to views": _write_columns,
    "unfold": lambda x: x.unfold(1, 3, 2).sum(-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)).conj() * 2),
    "resize_": _resized,
    "set_": _set,
    "bits": lambda x: x.view(torch.int32) ^ 5,
    "another dtype": lambda x: x.to(torch.float16).double(),
    "channels last": lambda x: F.interpolate(
        x.view(1, 2, 4, 4).to(memory_format=torch.channels_last), scale_factor=2
    ),
    "expanded": lambda x: x[:, :1].expand(4, 8).contiguous() + x[0].expand_as(x),
    "indices": lambda x: x.index_put((torch.tensor([0, 2], device=x.device),), x[1]),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 2, 4, 4)] * 3, is_causal=True
    ),
    "many outputs": lambda x: torch.cat(x.sort(dim=1)[:1] + x.topk(2)[:1], dim=1),
    "autocast": _under_autocast,
    "deepcopy": lambda x: copy.deepcopy(x),
    "pinned": lambda x: x.cpu().pin_memory().to(x.device, non_blocking=True),
    "saved": _saved,
    "streams": _on_another_stream,
    "foreach": lambda x: torch.stack(torch._foreach_mul([x, x + 1], 3.0)),
}


@pytest.mark.parametrize("name", WORK)
def test_results_are_those_of_the_cpu(name: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    here = WORK[name](x.clone())
    there = WORK[name](x.clone().to("emu"))
    assert there.device == torch.device("emu:0")
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-7)  # composites round apart


def _layers(name: str) -> list[nn.Module]:
    """From 8 features to 4."""
    if name != "convolutions":
        return [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)]
    first = [nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)]
    return [*first, nn.ConvTranspose1d(4, 2, 2, bias=False), nn.Flatten(), nn.Linear(6, 4)]


@pytest.mark.parametrize("name", ["sgd", "adamw", "checkpoint", "convolutions"])
def test_training_is_that_of_the_cpu(name: str) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*_layers(name))
        model.to(device)
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(5, 8).to(device)
            y = checkpoint(model, x, use_reentrant=False) if name == "checkpoint" else model(x)
            F.cross_entropy(y, torch.arange(5, device=device) % 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach().cpu() for t in model.state_dict().values()]

    torch.testing.assert_close(train("emu"), train("cpu"), rtol=1e-6, atol=1e-6)


def test_random_numbers_have_a_state_of_the_device() -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device="emu")
    state = torch.emu.get_rng_state()
    second = F.dropout(torch.ones(9, device="emu"))
    torch.rand(3)
    torch.emu.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(9, device="emu")), second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="emu"), first)
    mine = torch.Generator("emu").manual_seed(5)
    assert torch.equal(torch.rand(4, device="emu", generator=mine), first)


def test_devices_are_two() -> None:
    a, b = torch.ones(3, device="emu:0"), torch.full((3,), 2.0, device="emu:1")
    assert torch.equal((a.to("emu:1") + b).cpu(), torch.full((3,), 3.0))
    assert b.to("emu:0").device.index == 0 and torch.emu.device_count() == 2
    with torch.device("emu:1"):
        assert torch.zeros(2).device.index == 1


class Owner:
    """An object that lives as long as a tensor's memory."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append("ended")


def test_a_tensor_of_an_address_keeps_its_owner() -> None:
    base = torch.arange(6.0, device="emu")
    ended: list[str] = []
    owner = Owner(ended)
    tensor = torch.ops.emu.from_address(base.data_ptr() + 8, id(owner), [2, 2], base.dtype, 0)
    del owner
    view = tensor[1]
    del tensor
    assert view.tolist() == [4.0, 5.0] and not ended
    view.add_(1)
    del view
    assert ended and base.tolist() == [0, 1, 2, 3, 5, 6]


HOW_MEMORY_IS_SHARED = """
import ctypes, torch
from helpers import emu_torch
emu_torch.load()
sim = ctypes.CDLL(str(emu_torch.LIBRARY))
small, other, large = (torch.ones(n, device="emu") for n in (7, 7, 1 << 20))
def of(t):
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = sim.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(t.data_ptr()))
    handle = sim.cuIpcGetMemHandle(ctypes.create_string_buffer(64), ctypes.c_uint64(t.data_ptr()))
    return found, t.data_ptr() - base.value, size.value, handle
print([of(t) for t in (small, other, large)])
"""
TOUCHED = """
import ctypes, torch
from helpers import emu_torch
emu_torch.load()
ctypes.string_at(torch.ones(7, device="emu").data_ptr(), 1)
"""


def _said(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "GRADD_SIM_VMM": "",
            **environment,
        },
        cwd=ROOT,
        text=True,
        capture_output=True,
    )


def test_small_tensors_share_a_block_that_has_a_handle() -> None:
    found = eval(_said(HOW_MEMORY_IS_SHARED).stdout)
    block = 2 << 20
    assert found == [(0, 0, block, 0), (0, 512, block, 0), (0, 0, 4 << 20, 0)]


def test_memory_of_expandable_segments_has_no_handle() -> None:
    found = eval(_said(HOW_MEMORY_IS_SHARED, GRADD_SIM_VMM="1").stdout)
    assert [(error, size, bool(handle)) for error, _, size, handle in found] == [
        (0, 2 << 20, True)
    ] * 3


def test_the_process_cannot_touch_memory_of_the_device() -> None:
    assert _said(TOUCHED).returncode == -11
