"""Parameters move into shared memory piece by piece; little more than they take is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.calls import parameters
from gradd.memory import shm, unused
from gradd.session import client as clients
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")
MIB = 1 << 20


def taken() -> int:
    """Bytes of this process's anonymous pages and of its segments, mapped or not."""
    total = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    segments: dict[int, int] = {}  # a mapping of Python's has another descriptor
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:gradd"):
                segments[entry.stat().st_ino] = entry.stat().st_blocks * 512
        except FileNotFoundError:
            pass  # the descriptor of the folder itself
    return total + sum(segments.values())


@pytest.fixture
def peaks(monkeypatch):
    """taken() after every tensor that has moved."""
    found: list[int] = []
    move = parameters.State._move_one

    def watched(self, tensor, stays):
        move(self, tensor, stays)
        found.append(taken())

    monkeypatch.setattr(parameters.State, "_move_one", watched)
    return found


def small_segments(monkeypatch, size: int) -> list[int]:
    """Segments of at most this size from now on; the list gets the sizes of those that are made."""
    made: list[int] = []
    pass_segment = clients.Client.pass_segment

    def noted(self, segment):
        pass_segment(self, segment)
        made.append(segment.size)

    monkeypatch.setattr(shm, "SEGMENT_BYTES", size)
    monkeypatch.setattr(clients.Client, "pass_segment", noted)
    return made


@pytest.mark.one_in(4)
@pytest.mark.parametrize("width", every_run((512,), [512, 2048, 3072]))
def test_wrapping_takes_a_tenth_more(peaks, width) -> None:
    """Layers of 1 MiB, which lie on glibc's heap, of 16 MiB, and of 36 MiB, which do not."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(300 * MIB // (4 * width * width))]
    size = sum(p.numel() * 4 for layer in layers for p in layer.parameters())
    unused.trim()
    before = taken()
    model = ORTModule(nn.Sequential(*layers))
    assert len(peaks) == len(layers)
    assert max(peaks) - before < max(size // 10, 4 * width * width + 12 * MIB)
    assert taken() - before < 8 * MIB
    assert model.gradd_stats()["shared_bytes"] >= size


def test_segments_have_a_largest_size(monkeypatch) -> None:
    made = small_segments(monkeypatch, 4 * MIB)
    torch.manual_seed(3)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(7)]  # 1 MiB each
    layers.append(nn.Linear(512, 4096, bias=False))  # 8 MiB
    module = nn.Sequential(*layers)
    expected = [p.detach().clone() for p in module.parameters()]
    model = ORTModule(module, strict=True)
    sizes = [3 * MIB, 3 * MIB, 1 * MIB, 8 * MIB]  # a page of 4 MiB is the header's
    assert made == [size + shm.PAGE for size in sizes]
    assert all(map(torch.equal, module.parameters(), expected))
    x = torch.randn(2, 512)
    found = model(x)
    found.sum().backward()
    assert model.gradd_stats()["fallbacks"] == {}
    assert all(p.grad is not None for p in module.parameters())


def test_space_that_ends_halfway(monkeypatch) -> None:
    """The model keeps its values; it is wrapped when there is space."""
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))  # 4 MiB each
    expected = [p.detach().clone() for p in module.parameters()]
    reserve = shm.Segment.reserve

    def fails(self, end):
        if end > 16 * MIB:
            raise errors.NoSpaceError("cannot reserve")
        reserve(self, end)

    monkeypatch.setattr(shm.Segment, "reserve", fails)
    with pytest.raises(errors.NoSpaceError):
        ORTModule(module)
    assert all(map(torch.equal, module.parameters(), expected))
    module(torch.ones(2, 1024)).sum().backward()
    monkeypatch.undo()
    model = ORTModule(module, strict=True)  # the daemon knows nothing of the moves before
    model(torch.ones(2, 1024)).sum().backward()
    assert all(map(torch.equal, module.parameters(), expected))
