"""Segments have a largest size: larger data lies in several, and everything works as in one."""

from __future__ import annotations

import copy
import os
import struct
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.calls.slots import Layout
from gradd.memory import shm
from gradd.optim import FusedAdam
from gradd.session.ring import packed
from helpers.nets import assert_same_grads
from helpers.sessions import session

KIB = 1 << 10
LARGEST = 128 * KIB
ROOM = LARGEST - shm.PAGE  # the header takes a page
WIDE = 256 * KIB  # a parameter that is larger than a segment


class Layers(nn.Module):
    """Six layers of 36 KiB, three of which share a segment, a wide one, and one that is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in range(6))
            self.wide = nn.Linear(96, WIDE // (4 * 96) + 1)
            self.frozen = nn.Linear(96, 96).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.wide(torch.tanh(self.frozen(x))).square().mean()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of at most LARGEST bytes, unless one tensor is larger."""
    monkeypatch.setattr(shm, "SEGMENT_BYTES", LARGEST)


def wrapped() -> ORTModule:
    return ORTModule(Layers(), strict=True)


def largest() -> int:
    """Bytes of the largest segment of parameters, gradients or state that is none of its own."""
    client = session()
    found = [segment.size for pool in (client.parameters, client.gradients, client.state)
             for segment, _, _ in pool._free.values()]  # fmt: skip
    return max(size for size in found if size < WIDE)


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))


def test_blocks_in_segments(small: None) -> None:
    assert packed([]) == []
    assert packed([0, 1, 65]) == [(3, 64 + 64 + 128)]
    assert packed([ROOM, 1]) == [(1, ROOM), (1, 64)]
    assert packed([ROOM - 64, 64, 1]) == [(2, ROOM), (1, 64)]
    assert packed([1, 2 * ROOM, 1, 1]) == [(1, 64), (1, 2 * ROOM), (2, 128)]
    half = (torch.float32, (ROOM // 8,))
    layout = Layout.of([half, (torch.bfloat16, (3,)), half, half, half])
    assert [[row[2:] for row in rows] for _, rows in layout.parts] == [
        [(0, ROOM // 2, ROOM // 8), (ROOM // 2, 6, 3)],
        [(0, ROOM // 2, ROOM // 8), (ROOM // 2, ROOM // 2, ROOM // 8)],
        [(0, ROOM // 2, ROOM // 8)],
    ]
    assert [size for size, _ in layout.parts] == [ROOM // 2 + 64, ROOM, ROOM // 2]


def test_gradients_are_torchs(daemon: Any, small: None) -> None:
    model = wrapped()
    plain = copy.deepcopy(model.module)
    for seed in range(3):
        model(data(seed)).backward()
        plain(data(seed)).backward()  # adds up
    assert_same_grads(model, plain)
    assert len(session().gradients._free) > 3 and largest() <= LARGEST
    assert all(p.grad is None or p.grad.data_ptr() % 64 == 0 for p in model.parameters())


def test_a_gradient_that_is_kept_keeps_its_segment_alone(daemon: Any, small: None) -> None:
    model = wrapped()
    model(data()).backward()
    client = session()
    segments = len(client.gradients._free)
    kept, value = model.module.layers[0].weight.grad, model.module.layers[0].weight.grad.clone()
    model.zero_grad(set_to_none=True)
    for seed in range(8):  # another slot meanwhile
        model(data(seed)).backward()
        model.zero_grad(set_to_none=True)
    assert torch.equal(kept, value)
    assert model.gradd_stats()["slots"] == 2
    place = client.locate(kept)
    del model
    client.flush()
    assert set(client.gradients._free) == {place[0]} and segments == 3
    assert torch.equal(kept, value)
    del kept
    client.flush()
    assert not client.gradients._free


def test_killed_between_forward_and_backward(daemon: Any, small: None) -> None:
    model = wrapped()
    model(data()).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    loss = model(data())
    daemon.kill()
    loss.backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters() if p.requires_grad), expected))
    assert session().recoveries == 1


def trained(daemon: Any, kill: bool, **options: Any) -> tuple[ORTModule, FusedAdam]:
    """Some steps, with a saved and loaded state in between; the daemon dies in three places."""
    module = Layers().to(options.pop("dtype", torch.float32))
    model = ORTModule(module, strict=True)
    optimizer = FusedAdam((p for p in model.parameters() if p.requires_grad), lr=1e-2, **options)
    for i in range(6):
        optimizer.zero_grad()
        loss = model(data(i).to(module.frozen.weight.dtype))
        if kill and i == 1:
            daemon.kill()
        loss.backward()
        if kill and i == 2:
            daemon.kill()
        if i == 4:  # gradients that are not the slot's
            for p in model.parameters():
                p.grad = None if p.grad is None else 2 * p.grad
        optimizer.step()
        if i == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedAdam(optimizer.param_groups[0]["params"], lr=1e-2, **options)
            optimizer.load_state_dict(saved)
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "master_weights": True}])
def test_fused_adam(daemon: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """In several segments, and with a daemon that dies, the bits are those of one segment."""
    results = []
    for limit, kill in ((512 << 20, False), (LARGEST, False), (LARGEST, True)):
        monkeypatch.setattr(shm, "SEGMENT_BYTES", limit)
        results.append(trained(daemon, kill, **options))
    (expected, state), *others = results
    for model, optimizer in others:
        assert all(map(torch.equal, expected.parameters(), model.parameters()))
        for p, q in zip(state.state, optimizer.state, strict=True):
            ours, theirs = optimizer.state[q], state.state[p]
            assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] == 6
            for name in ours.keys() - {"step"}:
                assert torch.equal(ours[name], theirs[name])


def test_state_of_an_optimizer(daemon: Any, small: None) -> None:
    model = wrapped()
    optimizer = FusedAdam(model.parameters())
    model(data()).backward()
    optimizer.step()
    client = session()
    assert len(client.state._free) > 4 and largest() <= LARGEST
    del optimizer
    client.flush()
    assert not client.state._free


def test_parameters_that_move(daemon: Any, small: None) -> None:
    model = wrapped()
    plain = copy.deepcopy(model.module)
    model.load_state_dict(Layers(1).state_dict(), assign=True)
    plain.load_state_dict(Layers(1).state_dict(), assign=True)
    vector = 2 * nn.utils.parameters_to_vector(plain.parameters()).detach()
    for module in (model, plain):
        module(data()).backward()
        module.zero_grad()
        nn.utils.vector_to_parameters(vector.clone(), module.parameters())
        module(data()).backward()
    assert_same_grads(model, plain)
    assert largest() <= LARGEST and model.gradd_stats()["fallbacks"] == {}


def test_no_space_for_all_of_it(daemon: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were made before go back; the backward can be repeated when there is space."""
    model = wrapped()
    client, loss = session(), model(data())
    optimizer = FusedAdam(model.parameters())
    create, made = type(client).create_segment, []

    def fails(self: Any, size: int, kind: str) -> shm.Segment:
        if len(made) == 2:
            raise errors.NoSpaceError("cannot reserve")
        made.append(create(self, size, kind))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(client), "create_segment", fails)
        with pytest.raises(errors.NoSpaceError):
            loss.backward(retain_graph=True)
    client.flush()
    assert len(made) == 2 and not client.gradients._free
    loss.backward()
    with monkeypatch.context() as patch:
        made.clear()
        patch.setattr(type(client), "create_segment", fails)
        with pytest.raises(errors.NoSpaceError):
            optimizer.step()
    client.flush()
    assert not client.state._free
    optimizer.step()
    assert len(client.state._free) > 4


# ---- headers ----


def test_segments_begin_with_a_header(daemon: Any) -> None:
    model = wrapped()
    model(data()).backward()
    FusedAdam(model.parameters()).step()
    client = session()
    owners = set()
    for segment in client._segments.values():
        fields = struct.unpack_from("<QIIQQQI", segment.view)
        magic, version, page, size, id, owner, purpose = fields
        owners.add(owner)
        assert magic.to_bytes(8, "little") == b"GRADDSEG" and (version, page) == (1, 4096)
        assert (size, id) == (segment.size, segment.id)
        assert shm.PURPOSES[purpose] == segment.header.purpose
    assert len(owners) == 1 and owners != {0}
    (shown,) = daemon.ps()["sessions"]
    bytes_of = shown["segment_kinds"]
    assert bytes_of.pop("other") == 0 == bytes_of.pop("base") and all(bytes_of.values())
    assert sum(bytes_of.values()) == shown["segment_bytes"] == client.segment_bytes()
    assert bytes_of["gradients"] == client.gradients.bytes()


def test_a_descriptor_that_has_become_another_one(daemon: Any) -> None:
    """The next daemon is not given other memory of the same size: nothing is computed with it."""
    model, other = wrapped(), wrapped()
    model(data()).backward()
    client = session()
    mine, theirs = (
        client._segments[client.locate(m.module.wide.weight)[0]] for m in (model, other)
    )
    assert mine.size == theirs.size
    kept = os.dup(mine.fd)
    os.dup2(theirs.fd, mine.fd)
    daemon.kill()
    what = f"segment {mine.id}: header: field 'id': expected {mine.id}, got {theirs.id}"
    with pytest.raises(errors.SharedMemoryError, match=what):
        model(data())
    os.dup2(kept, mine.fd)
    os.close(kept)
    model(data()).backward()
    assert client.recoveries > 0
