"""Writes to parameters that no version counter records.

A lazy output is computed late and a run is replayed after a kill: both with the parameters of their
forward, or not at all. Sparse writes go to single elements, which drawn fingerprints do not see.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Daemon
from torch import nn

from gradd import ORTModule, errors
from gradd.memory import watch
from gradd.session import client
from helpers import sessions
from helpers.hostile import raw_client
from helpers.nets import Net, batch, loss_of
from helpers.selection import quick_or_slow

Write = Callable[[nn.Parameter], Any]
WIDTH = 512  # of 256 lines of the first weight 16 are drawn


def _in_thread(p: nn.Parameter) -> None:
    thread = threading.Thread(target=lambda: p.data.view(-1)[777].fill_(5.0))
    thread.start()
    thread.join()


def _by_address(p: nn.Parameter) -> None:
    ctypes.c_float.from_address(p.data_ptr() + 4 * 777).value = 5.0


def _by_storage(p: nn.Parameter) -> None:
    p.untyped_storage()[4 * 777 + 2] ^= 0x55


def _through_a_view(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.view(-1).numpy()[777] = 5.0


def _fused(p: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    optimizer.step()


def _fused_function(p: nn.Parameter) -> None:
    with torch.no_grad():
        torch._fused_sgd_(
            [p], [p.grad], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip


def _swap_rows(p: nn.Parameter) -> None:
    rows = p.data[[300, 301]].clone()
    p.data[300], p.data[301] = rows[1], rows[0]


DENSE: dict[str, Write] = {
    "data minus": lambda p: p.data.sub_(0.1 * p.grad),
    "data add": lambda p: p.data.add_(p.grad, alpha=-1.0),
    "data copy": lambda p: p.data.copy_(torch.randn_like(p)),
    "detached copy": lambda p: p.detach().copy_(torch.zeros(p.shape)),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
    "fused": _fused,
    "fused function": _fused_function,
    "dlpack": lambda p: torch.from_dlpack(p.detach()).mul_(1.01),
}
SPARSE: dict[str, Write] = {
    "data": lambda p: p.data.view(-1)[777].fill_(5.0),
    "data of a row": lambda p: p[97].data.zero_(),
    "numpy": lambda p: p.detach().numpy().reshape(-1).__setitem__(777, 5.0),
    "numpy of a view": _through_a_view,
    "dlpack": lambda p: torch.from_dlpack(p.detach()).view(-1)[777].fill_(5.0),
    "storage": _by_storage,
    "address": _by_address,
    "thread": _in_thread,
    "rows that change places": _swap_rows,
}
READS: dict[str, Write] = {
    "data": lambda p: p.data.norm(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "address": lambda p: p.data_ptr(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).norm(),
    "other memory": lambda p: setattr(p, "data", p.data.clone()),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
}


def _model(seed: int = 0) -> ORTModule:
    return ORTModule(Net(width=WIDTH, seed=seed), strict=True)


def _expected(model: ORTModule) -> torch.Tensor:
    return model(batch()[0]).detach().clone()


@pytest.mark.parametrize(
    "write", [*(f"dense {n}" for n in DENSE), *(f"sparse {n}" for n in SPARSE)]
)
def test_a_lazy_output_is_never_that_of_other_parameters(shared_daemon: Daemon, write: str) -> None:
    model = _model()
    loss, scores = model(*batch())
    torch.optim.SGD(model.parameters()).step()  # the first one computes what is held before it
    loss, scores = model(*batch())
    loss.backward()
    kind, _, name = write.partition(" ")
    weight = model.first.weight
    before = weight.detach().clone()
    (DENSE if kind == "dense" else SPARSE)[name](weight)
    assert not torch.equal(before, weight), "the write must change something"
    with pytest.raises(errors.StaleError, match="have changed since"):
        scores.sum()
    assert "not computed" in repr(scores)
    model.zero_grad()
    loss, scores = model(*batch())  # the next forward sees the new values
    assert torch.allclose(scores.detach(), nn.Module.__call__(_plain(model), batch()[0]), atol=1e-5)


def _plain(model: ORTModule) -> Net:
    net = Net(width=WIDTH)
    net.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    return net


@pytest.mark.parametrize("read", READS)
def test_reads_leave_lazy_outputs_valid(shared_daemon: Daemon, read: str) -> None:
    model = _model()
    expected = _expected(model)
    loss, scores = model(*batch())
    READS[read](model.first.weight)
    assert torch.equal(scores.detach(), expected)
    loss.backward()


@pytest.mark.parametrize("how", ["data", "numpy", "storage", "dlpack"])
def test_an_alias_that_was_taken_long_ago(shared_daemon: Daemon, how: str) -> None:
    """Its uses leave no trace: as long as it lives, each forward is summed in full."""
    model = _model()
    weight = model.first.weight
    loss_of(model(*batch())).backward()  # at home in shared memory
    takes: dict[str, Callable[[], Any]] = {
        "data": lambda: weight.data,
        "numpy": lambda: weight.detach().numpy(),
        "storage": lambda: weight.untyped_storage(),
        "dlpack": lambda: torch.from_dlpack(weight.detach()),
    }
    alias = takes[how]()
    for _ in range(7):
        model(*batch())[0].backward()
    _, scores = model(*batch())
    if how == "storage":
        alias[4 * 777 + 2] ^= 0x55
    else:
        alias.reshape(-1)[777] = 5.0
    with pytest.raises(errors.StaleError):
        scores.sum()


KILLED: dict[str, Write] = {
    "data minus": DENSE["data minus"],
    "fused function": DENSE["fused function"],
    "element": SPARSE["data"],
}


@pytest.mark.parametrize("write", KILLED)
def test_a_run_is_not_replayed_with_other_parameters(daemon: Daemon, write: str) -> None:
    model = _model()
    model(*batch())[0].backward()
    loss, _ = model(*batch(seed=1))
    value = float(loss.detach())
    KILLED[write](model.first.weight)
    daemon.kill()
    with pytest.raises(errors.StaleError, match="the parameters have changed since then"):
        loss.backward()
    assert float(loss.detach()) == value  # outputs keep their values
    model.zero_grad()
    model(*batch(seed=1))[0].backward()
    assert model.first.weight.grad is not None


def test_a_run_is_replayed_after_a_read(daemon: Daemon) -> None:
    model = _model()
    model(*batch(seed=1))[0].backward()
    expected = model.first.weight.grad.clone()
    model.zero_grad()
    loss, scores = model(*batch(seed=1))
    model.first.weight.data.norm()
    daemon.kill()
    loss.backward()
    assert torch.equal(model.first.weight.grad, expected)
    assert sessions.session().recoveries == 1


def test_a_kill_between_the_write_and_the_read(daemon: Daemon) -> None:
    """What is compared is of the bytes alone: another daemon finds the same."""
    model = _model()
    expected = _expected(model)
    first = model(*batch())
    second = model(*batch())
    daemon.kill()
    assert torch.equal(first[1].detach(), expected)
    model.first.weight.data.view(-1)[777] = 5.0
    daemon.kill()
    with pytest.raises(errors.StaleError):
        second[1].sum()


# ---- what it costs, and that it ends ----


def _sums_of_forwards(model: ORTModule, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sums: list[int] = []
    ask = client.Client.ask

    def noted(self: Any, verb: str, fields: dict, *rest: Any) -> Any:
        if verb == "forward":
            sums.append(fields.get("look", 0))
        return ask(self, verb, fields, *rest)

    monkeypatch.setattr(client.Client, "ask", noted)
    return sums


def test_an_ordinary_training_is_summed_in_its_first_forwards_only(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = _sums_of_forwards(model, monkeypatch)
    for _ in range(12):
        model(*batch())[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sums[-6:] == [1] * 6, sums
    del sums[:]
    for _ in range(3):
        model(*batch())[0].backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    assert sums == [1, 2, 2]
    with torch.no_grad():
        model(*batch())
    assert sums[-1] == 0  # nothing is ever run again
    assert not watch.accesses.given or not watch.accesses.settle(list(model.parameters()))


@pytest.mark.parametrize("name", quick_or_slow({"data"}, watch.NAMES))
def test_an_attribute_that_was_replaced_and_put_back(shared_daemon: Daemon, name: str) -> None:
    """Restoring `before = torch.Tensor.numpy` takes the watch off unintentionally."""
    model, (x, y) = ORTModule(Net(), strict=True), batch()
    for _ in range(12):
        model.zero_grad()
        loss_of(model(x, y)).backward()
    before = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, before)
    model.zero_grad()
    loss, scores = model(x, y)
    count = watch.accesses.count
    weight = model.module.first.weight
    _ = weight.data if name == "data" else getattr(weight.detach(), name)()
    assert watch.accesses.count != count, "noted again"
    assert loss is not None and scores is not None


def test_torchs_class_is_as_it_was() -> None:
    """Looked up on the class the attributes are torch's own, and afterwards on tensors, too."""
    before = {name: getattr(torch.Tensor, name) for name in watch.NAMES}
    own = {name for name in watch.NAMES if name in torch.Tensor.__dict__}
    memory = torch.zeros(64)
    watch.add(memory.data_ptr(), memory.nbytes)
    try:
        count = watch.accesses.count
        assert {name: getattr(torch.Tensor, name) for name in watch.NAMES} == before
        assert torch.zeros(3).data.numpy().sum() == 0 and watch.accesses.count == count
        with watch.ours:
            memory[3:5].data.data_ptr()
        assert watch.accesses.count == count
        memory[3:5].data.fill_(2.0)
        memory.detach().numpy()[:2] = 1
        memory.untyped_storage()
        assert watch.accesses.count == count + 3 and memory.sum() == 6
        memory.data = torch.ones(2)
        assert memory.data.tolist() == [1.0, 1.0]
    finally:
        watch.accesses.given.clear()
        for begin in list(watch._ranges):
            if watch._ranges[begin] - begin == 256:
                watch.remove(begin)
    if not watch._ranges:
        assert {name for name in watch.NAMES if name in torch.Tensor.__dict__} == own
    assert {name: getattr(torch.Tensor, name) for name in watch.NAMES} == before


def test_the_daemon_compares_before_it_runs(daemon: Daemon) -> None:
    with raw_client.Raw(daemon.directory).open() as session:
        first = session.ask("forward", look=2)
        assert set(first) >= {"gen", "sum"} and "changed" not in first
        same = {"gen": first["gen"], "sum": first["sum"]}
        again = session.ask("forward", **same)
        assert {k: again[k] for k in same} == same
        bits = session.at(raw_client.Y, (raw_client.ROWS, 4)).copy()
        session.at(raw_client.W, (raw_client.TABLE, 4))[3, 1] += 1
        changed = session.ask("forward", **same)
        assert changed["ok"] and changed["changed"] == 1 and "gen" not in changed
        assert (session.at(raw_client.Y, (raw_client.ROWS, 4)) == bits).all()
        assert session.ask("backward")["code"] == "STALE"
        assert session.ask("forward", gen=first["gen"])["changed"] == 1
        assert session.ask("forward", sum=first["sum"])["changed"] == 1
        assert session.ask("forward", look=3)["code"] == "UNSUPPORTED"
        assert "gen" not in session.ask("forward")
