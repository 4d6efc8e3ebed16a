"""Frozen weights that several processes have mapped: counted once, and safe from each other."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PYTHONPATH, Daemon
from torch import nn

import gradd
from gradd import ORTModule, errors, optim
from gradd.memory.shm import Base
from gradd.session import client
from helpers.waiting import until

WIDTH = 512
BYTES = 4 * WIDTH * WIDTH  # of the base's matrix

LEARNER = """
import json, sys, torch, gradd
from gradd.session import client
sys.path.insert(0, sys.argv[1])
from test_bases import Net, steps

model = Net(device="meta")
gradd.load("base", model)
model.adapt(int(sys.argv[2]))
print(json.dumps(steps(model)), flush=True)
for line in sys.stdin:
    if line == "write\\n":
        with torch.no_grad():
            model.base.weight.mul_(2)
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    rss = next(int(x.split()[1]) for x in lines if x.startswith("Private_Dirty"))
    print(json.dumps([steps(model), model.base.weight.sum().item(), rss]), flush=True)
client.close_all()
"""


class Net(nn.Module):
    """A frozen matrix, and an adapter that learns."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        if device == "cpu":
            with torch.no_grad():
                self.base.weight.copy_(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.base.requires_grad_(False)

    def adapt(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.adapter = nn.Parameter(torch.randn(WIDTH, 2) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.base(x) / WIDTH) @ self.adapter).square().mean()


def steps(model: Net, n: int = 3) -> list[float]:
    wrapped = ORTModule(model, strict=True)
    optimizer = optim.FusedAdam([model.adapter], lr=0.01)
    x = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)
    losses = []
    for _ in range(n):
        loss = wrapped(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain(seed: int) -> list[float]:
    """The same without a base."""
    model = Net()
    model.adapt(seed)
    return steps(model)


def _base_of(daemon: Daemon) -> dict[str, Any]:
    (row,) = [row for row in daemon.ps()["kept"] if row["base"]]
    return row


@pytest.fixture
def learners(daemon: Daemon) -> Iterator[list[subprocess.Popen]]:
    found: list[subprocess.Popen] = []
    yield found
    for process in found:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def _start(learners: list[subprocess.Popen], seed: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LEARNER, str(Path(__file__).parent), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_SELF_CHECK": "0"},
    )
    learners.append(process)
    return process


def _ask(process: subprocess.Popen, word: str) -> Any:
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_a_base_of_two_processes(daemon: Daemon, learners: list[subprocess.Popen]) -> None:
    """Each has the bits of a process of its own; a write of one changes nothing for the other."""
    model = Net()
    gradd.share(model, "base")
    other = _start(learners, 5)
    model.adapt(4)
    assert steps(model) == _plain(4)
    assert json.loads(other.stdout.readline()) == _plain(5)
    row = _base_of(daemon)
    assert row["name"] == "base" and row["users"] == 2 and row["bytes"] == BYTES
    kinds = [s["segment_kinds"] for s in daemon.ps()["sessions"]]
    assert [k["base"] for k in kinds] == [BYTES] * 2 and kinds[1]["parameters"] < BYTES
    table = subprocess.check_output(
        [os.environ["GRADD_BIN"], "ps", "--dir", str(daemon.directory)], text=True
    )
    assert "base, 2" in table
    total = float(model.base.weight.sum())
    before = _ask(other, "go")
    written = _ask(other, "write")
    assert written[0] != before[0] and written[1] == pytest.approx(2 * before[1], abs=1e-3)
    assert written[2] - before[2] < 3 * BYTES >> 10  # KiB: a copy, and no more
    assert float(model.base.weight.sum()) == total
    model.adapt(4)
    assert steps(model) == _plain(4)
    other.kill()
    other.wait(60)
    until(lambda: _base_of(daemon)["users"] == 1, "a dead process uses it")
    gradd.forget("base")
    assert steps(model)  # its memory stays
    del model


@pytest.mark.parametrize("way", ["version", "numpy", "data", "alias", "trained"])
def test_a_write_makes_a_copy(daemon: Daemon, way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    gradd.share(model, "base")
    model.adapt(1)
    wrapped, x = ORTModule(model, strict=True), torch.ones(4, WIDTH)
    first = wrapped(x).item()
    assert "was written" not in caplog.text
    original = gradd.load("base")["base.weight"].clone()
    weight = model.base.weight
    if way == "version":
        with torch.no_grad():
            weight[7].zero_()
    elif way == "numpy":
        weight.numpy()[7] = 0
    elif way == "data":
        weight.data[7] = 0
    elif way == "alias":
        alias = weight.detach().numpy()
        wrapped(x)  # has looked, and found nothing
        alias[7] = 0
    else:
        weight.requires_grad_(True)
        optimizer = optim.FusedAdam([weight], lr=0.1)
        wrapped(x).backward()
        optimizer.step()
    second = wrapped(x).item()
    with torch.no_grad():
        assert second != first and second == pytest.approx(model(x).item(), rel=1e-5)
    assert torch.equal(gradd.load("base")["base.weight"], original)
    warnings = [r for r in caplog.records if "the base 'base'" in r.getMessage()]
    assert len(warnings) == 1
    wrapped(x)
    gradd.forget("base")
    del model, wrapped, weight, original


def test_no_process_can_write_to_it(daemon: Daemon) -> None:
    gradd.share(Net(), "base")
    held = gradd.load("base")
    (base,) = [s for s in client.get_client()._segments.values() if isinstance(s, Base)][:1]
    with pytest.raises(PermissionError):
        mmap.mmap(base.fd, base.size, mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        os.pwrite(base.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(base.fd, 0)
    gradd.forget("base")
    del held, base


def test_a_request_that_writes_there_changes_nothing(daemon: Daemon) -> None:
    """The daemon's mapping is private, too: an output in a base ends no process."""
    model = Net()
    gradd.share(model, "base")
    model.adapt(1)
    expected = steps(model)
    mine = client.get_client()
    place = (*mine.locate(model.base.weight), 1, (WIDTH, WIDTH))
    number = mine.next_id()
    mine.bind(number, [place])
    worker = daemon.worker()
    fields = {"bind": number, "groups": {}, "tensors": {}}
    with pytest.raises(errors.GraddError):
        mine.request("step", fields)
    model.adapt(1)
    assert steps(model) == expected and daemon.worker() == worker
    gradd.forget("base")
    del model


def test_what_is_refused(daemon: Daemon) -> None:
    model = Net()
    with pytest.raises(errors.SessionError, match="there is no session 'base'"):
        gradd.load("base", model)
    with pytest.raises(ValueError, match="no parameter is frozen"):
        gradd.share(nn.Linear(2, 2), "base")
    gradd.share(model, "base")
    with pytest.raises(errors.SessionError, match="there is a base 'base' already"):
        gradd.share(Net(), "base")
    with pytest.raises(errors.SessionError, match="'base' is a base"):
        gradd.reattach("base", model)
    with pytest.raises(errors.SessionError, match="'base' is the name of a base"):
        gradd.keep("base", model)
    with pytest.raises(
        errors.TensorError, match=r"base\.weight: expected .*\[512, 512\], got none"
    ):
        gradd.load("base", nn.Linear(2, 2))
    gradd.forget("base")
    gradd.keep("base", model)
    with pytest.raises(errors.SessionError, match="'base' is a kept session"):
        gradd.load("base")
    gradd.forget("base")
    del model


def test_a_kept_session_of_a_learner(daemon: Daemon) -> None:
    """The base stays one; the adapter is the session's."""
    model = Net()
    gradd.share(model, "base")
    model.adapt(2)
    first = steps(model)
    gradd.keep("learner", model)
    client.close_all()
    until(lambda: _base_of(daemon)["users"] == 0, "a closed client uses it")
    again = Net(device="meta")
    again.adapter = nn.Parameter(torch.empty(WIDTH, 2, device="meta"))
    gradd.reattach("learner", again)
    assert _base_of(daemon)["users"] == 1
    assert torch.equal(again.adapter, model.adapter) and first != steps(again)
    kinds = daemon.ps()["sessions"][0]["segment_kinds"]
    assert kinds["base"] == BYTES and kinds["parameters"] < BYTES
    gradd.forget("learner")
    gradd.forget("base")
    del model, again


def test_a_base_outlives_workers_and_ends_in_time(daemon: Daemon) -> None:
    model = Net()
    gradd.share(model, "base", keep_alive=0)
    model.adapt(3)
    expected = steps(model)
    daemon.kill_worker()
    model.adapt(3)
    assert steps(model) == expected and _base_of(daemon)["users"] == 1
    del model
    client.get_client().flush()
    until(lambda: not daemon.ps()["kept"], "it stays without a user")


class Normed(nn.Module):
    """A frozen net with buffers that are saved, that are not, and that have two names."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, device=device)
        self.norm = nn.BatchNorm1d(6, device=device)
        self.register_buffer("places", torch.arange(6.0, device=device), persistent=False)
        self.register_buffer("twice", self.places)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.mask + self.twice


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_base_has_the_values_of_buffers(daemon: Daemon, device: str) -> None:
    torch.manual_seed(0)
    base = Normed()
    base(torch.randn(20, 6) * 3 + 1)
    base.places.mul_(2)
    gradd.share(base.requires_grad_(False), "base")
    net = gradd.load("base", Normed(device))
    assert net.places is net.twice or device == "cpu"
    for (name, mine), theirs in zip(net.named_buffers(), base.buffers(), strict=True):
        assert mine is not theirs and torch.equal(mine, theirs), name
    x = torch.randn(4, 6)
    for one in (base, net):
        one.eval()
    assert torch.equal(net(x), base(x))
    model = ORTModule(net, strict=True)
    torch.testing.assert_close(model(x), base(x))
    net.train()(x)
    assert not torch.equal(net.norm.running_mean, base.norm.running_mean), "each has its own"
    other = Normed()
    other.load_state_dict(gradd.load("base"), assign=True)
    assert torch.equal(other.norm.running_var, base.norm.running_var)
    with pytest.raises(errors.TensorError, match=r"base 'base': places: .*got none in"):
        gradd.load("base", nn.ModuleDict({"layer": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}))
    gradd.forget("base")


def test_a_base_leaves_out_what_it_cannot_have(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(3, 3).requires_grad_(False)
    net.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))
    gradd.share(net, "base")
    assert "the buffer turns, a torch.complex64 tensor on cpu, is not in the base" in caplog.text
    gradd.forget("base")
