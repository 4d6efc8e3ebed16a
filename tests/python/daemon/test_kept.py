"""Sessions that outlive their process: another process goes on, with the bits of one without it."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH, Daemon
from torch import nn

import gradd
from gradd import ORTModule, errors, keeping, optim
from gradd.session import client
from helpers.waiting import until

STEPS = 24

# Trains from where a kept session is, or from the beginning; prints each step that it begins.
TRAINER = """
import os, sys, torch, gradd
from torch import nn
from gradd import ORTModule, optim

STEPS, out = int(sys.argv[1]), sys.argv[2]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(40, 300), nn.Linear(300, 1)
        self.norm = nn.BatchNorm1d(300)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("big", torch.linspace(-1, 1, 3000))

    def forward(self, x):
        return self.outer(self.dropout(torch.tanh(self.norm(self.inner(x))))).square().mean()

torch.manual_seed(3)
model = ORTModule(Net(), strict=True)
optimizer = optim.FusedAdam(model.parameters(), lr=0.01, max_grad_norm=1.0)
if "new" in sys.argv:
    kept = gradd.keep("net", model, optimizer, keep_alive="5m")
    torch.manual_seed(7)
elif "again" in sys.argv:
    kept = gradd.reattach("net", model, optimizer)
    torch.set_rng_state(kept.random_state)
    assert kept.steps == kept.notes["step"], (kept.steps, kept.notes)
else:
    kept = None
    torch.manual_seed(7)
for step in range(kept.steps if kept else 0, STEPS):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
    print(step, flush=True)
    model(x).backward()
    if kept:
        kept.note(step=step + 1)
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
    optimizer.step()
    optimizer.zero_grad()
found = {"model": model.state_dict(), "state": optimizer.state_dict()["state"]}
torch.save(found, out)
os._exit(0)
"""


class Trainer:
    """A process that trains to STEPS, or is killed before."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(STEPS), str(out), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_SELF_CHECK": "0"},
        )

    def until(self, step: int) -> None:
        """Waits for that step, a later one, or the end: a kill may have come some steps later."""
        while line := self.process.stdout.readline():
            if int(line) >= step:
                return
        assert self.process.wait(60) == 0, self.process.communicate()[1][-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def result(self) -> dict:
        errors_ = self.process.communicate(timeout=120)[1]
        assert self.process.returncode == 0, errors_[-3000:]
        return torch.load(self.out)


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[list[Trainer]]:
    found: list[Trainer] = []
    yield found
    for trainer in found:
        trainer.process.kill()
        trainer.process.wait(60)
        trainer.process.stdout.close()
        trainer.process.stderr.close()


def _same(found: dict, expected: dict) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            other = found["state"][number][name]
            same = torch.equal(other, value) if torch.is_tensor(value) else other == value
            assert same, (number, name)


def _goes_on(folder: Path, trainers: list[Trainer], seed: int, kills: int) -> None:
    draw = random.Random(seed)
    trainers.append(Trainer(folder / "whole"))
    expected = trainers[0].result()
    word, first = "new", 1
    for _ in range(kills):
        trainer = Trainer(folder / "killed", word)
        trainers.append(trainer)
        at = draw.randint(first, min(first + 4, STEPS - 2))
        trainer.until(at)
        time.sleep(draw.uniform(0.0, 0.004))  # anywhere in the step, its commit included
        trainer.kill()
        word, first = "again", at + 2
    trainers.append(Trainer(folder / "last", word))
    _same(trainers[-1].result(), expected)


def test_a_killed_trainer_is_taken_up_again(
    daemon: Daemon, tmp_path: Path, trainers: list[Trainer]
) -> None:
    _goes_on(tmp_path, trainers, seed=4, kills=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_killed_again_and_again(
    daemon: Daemon, tmp_path: Path, trainers: list[Trainer], seed: int
) -> None:
    _goes_on(tmp_path, trainers, seed=seed, kills=4)


def test_killed_before_the_first_step(
    daemon: Daemon, tmp_path: Path, trainers: list[Trainer]
) -> None:
    """Twice, during the capture: the random state is that of the last step all the same."""
    trainers.append(Trainer(tmp_path / "whole"))
    expected = trainers[0].result()
    for word, at in (("new", 5), ("again", 1), ("again", 1)):
        trainers.append(Trainer(tmp_path / "killed", word))
        trainers[-1].until(at)
        trainers[-1].kill()
    trainers.append(Trainer(tmp_path / "last", "again"))
    _same(trainers[-1].result(), expected)


# ---- within one process: its client closes, and another one opens ----


def _net(width: int = 6) -> tuple[nn.Module, optim.FusedAdam]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return model, optim.FusedAdam(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: optim.FusedAdam, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _leave() -> None:
    """As the process would."""
    client.close_all()


def test_memory_is_taken_over_in_place(daemon: Daemon) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    kept = gradd.keep("net", model, optimizer)
    for seed in range(3):
        _step(model, optimizer, seed)
    kept.note(where="here", list=[1, 2.5, None])
    _step(model, optimizer, 3)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    inodes = {os.fstat(s.fd).st_ino for s in client.get_client()._segments.values()}
    _leave()
    fresh, other = _net()
    fresh = ORTModule(fresh, strict=True)
    again = gradd.reattach("net", fresh, other)
    assert again.steps == 4 and again.notes == {"where": "here", "list": [1, 2.5, None]}
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for p, moment in zip(fresh.parameters(), moments, strict=True):
        assert torch.equal(other.state[p]["exp_avg"], moment) and other.state[p]["step"] == 4
    mine = client.get_client()
    for p in fresh.parameters():
        segment = mine._segments[mine.locate(p)[0]]
        assert os.fstat(segment.fd).st_ino in inodes, "it was copied"
    for seed in (4, 5):
        _step(fresh, other, seed)
    assert again.steps == 6
    gradd.forget("net")


def test_a_module_on_the_meta_device(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    _leave()
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    gradd.reattach("net", fresh)
    assert "the state of FusedAdam is let go" in caplog.text
    assert isinstance(fresh[0].weight, nn.Parameter)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name
    gradd.forget("net")


def test_what_does_not_fit_is_named_and_changes_nothing(daemon: Daemon) -> None:
    net, optimizer = _net()
    gradd.keep("net", net, optimizer)
    _leave()
    wide, other = _net(width=7)
    before = [p.clone() for p in wide.parameters()]
    with pytest.raises(errors.TensorError, match=r"0\.bias: expected torch.float32\[6\], got .*7"):
        gradd.reattach("net", wide, other)
    for p, value in zip(wide.parameters(), before, strict=True):
        assert torch.equal(p, value)
    right, _ = _net()
    with pytest.raises(errors.TensorError, match="expected FusedAdam, got SGD"):
        gradd.reattach("net", right, torch.optim.SGD(right.parameters(), lr=0.1))
    backwards = optim.FusedAdam(list(right.parameters())[::-1])
    with pytest.raises(errors.TensorError, match="another order"):
        gradd.reattach("net", right, backwards)
    with pytest.raises(errors.SessionError, match=r"no session 'nets': there is net$"):
        gradd.reattach("nets", right)
    gradd.forget("net")
    with pytest.raises(errors.SessionError, match="no session 'net': none is kept"):
        gradd.forget("net")


def test_values_that_are_none(daemon: Daemon) -> None:
    net, optimizer = _net()
    for wrong in ("soon", "10 weeks", -2, True, "-5m", float("inf")):
        with pytest.raises(ValueError, match="keep_alive="):
            gradd.keep("net", net, optimizer, keep_alive=wrong)
    for wrong in ("", "a b", "x" * 65, 'a"b', "\xfc"):
        for call in (gradd.keep, gradd.reattach):
            with pytest.raises(ValueError, match="name .* 1 to 64 printable"):
                call(wrong, net, optimizer)
    with pytest.raises(TypeError, match="a name is a str, got int"):
        gradd.keep(5, net, optimizer)
    kept = gradd.keep("net", net, optimizer)
    with pytest.raises(TypeError, match="numbers, texts"):
        kept.note(what=object())
    with pytest.raises(errors.LimitError, match="the limit is 1048576"):
        kept.note(what="x" * (1 << 20))
    kept.note(what="x" * (1 << 19))  # more than there was room for
    _step(ORTModule(net, strict=True), optimizer, 0)
    _leave()
    fresh, other = _net()
    assert len(gradd.reattach("net", fresh, other).notes["what"]) == 1 << 19
    gradd.forget("net")


def _groups(net: nn.Module, *sizes: int) -> optim.FusedAdam:
    """With so many parameters in each group."""
    params = iter(list(net.parameters()))
    groups = [{"params": list(itertools.islice(params, n)), "lr": 0.1 * (k + 1)}
              for k, n in enumerate(sizes)]  # fmt: skip
    return optim.FusedAdam(groups)


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2), (2, 4)])
def test_other_groups_are_refused_and_change_nothing(daemon: Daemon, sizes: tuple) -> None:
    net, _ = _net()
    optimizer = _groups(net, 3, 3)
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    expected = [p.clone() for p in net.parameters()]
    _leave()
    other, _ = _net()
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(errors.TensorError, match=r"groups .* expected 3 \+ 3, got"):
        gradd.reattach("net", ORTModule(other), _groups(other, *sizes))
    assert all(map(torch.equal, other.parameters(), before))
    right, _ = _net()
    kept = gradd.reattach("net", right, _groups(right, 3, 3))
    assert kept.steps == 1 and all(map(torch.equal, right.parameters(), expected))
    gradd.forget("net")


def test_two_models_of_a_process_are_taken_over_by_one(daemon: Daemon) -> None:
    """They share segments, in which one's tensors are between the other's."""
    nets = [_net() for _ in range(3)]
    models = [ORTModule(net, strict=True) for net, _ in nets]
    for k, (_, optimizer) in enumerate(nets):
        _step(models[k], optimizer, 8 + k)  # so all of them have gradients' places of their own
        gradd.keep(f"net{k}", models[k], optimizer)
    alone = copy.deepcopy([net for net, _ in nets])
    states = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in nets]
    _leave()
    again = [_net() for _ in range(2)]
    for k in (1, 0):
        net, optimizer = again[k]
        assert gradd.reattach(f"net{k}", net, optimizer).steps == 1
    for k, (net, optimizer) in enumerate(again):
        other = optim.FusedAdam(alone[k].parameters(), lr=0.1)
        other.load_state_dict(states[k])
        model, reference = ORTModule(net, strict=True), ORTModule(alone[k], strict=True)
        for seed in range(3):
            _step(model, optimizer, seed)
            _step(reference, other, seed)
        assert all(map(torch.equal, net.state_dict().values(), alone[k].state_dict().values()))
    net, optimizer = _net()
    assert gradd.reattach("net2", net, optimizer).steps == 1
    assert all(map(torch.equal, net.state_dict().values(), alone[2].state_dict().values()))
    for k in range(3):
        gradd.forget(f"net{k}")


def test_an_optimizer_of_meta_tensors_is_refused(daemon: Daemon) -> None:
    net, optimizer = _net()
    gradd.keep("net", net, optimizer)
    _leave()
    with torch.device("meta"):
        fresh, other = _net()
    with pytest.raises(errors.TensorError, match=r"0\.weight is on the meta .*to_empty"):
        gradd.reattach("net", fresh, other)
    fresh = fresh.to_empty(device="cpu")
    other = optim.FusedAdam(fresh.parameters(), lr=0.1)
    gradd.reattach("net", fresh, other)
    assert all(map(torch.equal, fresh.parameters(), net.parameters()))
    gradd.forget("net")


def test_another_optimizer_is_named(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    other = optim.FusedAdam(net.parameters(), lr=0.1)  # its cell is run again
    for seed in (1, 2):
        _step(model, other, seed)
    assert caplog.text.count("'net': a FusedAdam has stepped parameters") == 1
    expected = [p.clone() for p in net.parameters()]
    _leave()
    fresh, again = _net()
    kept = gradd.reattach("net", fresh, again)
    assert "number of steps (1) are older" in caplog.text
    assert all(map(torch.equal, fresh.parameters(), expected)) and kept.steps == 1
    gradd.keep("net", fresh, torch.optim.SGD(fresh.parameters(), lr=0.5))
    _leave()
    with pytest.raises(errors.TensorError, match="expected SGD, got AdamW"):
        gradd.reattach("net", fresh, torch.optim.AdamW(fresh.parameters()))
    gradd.forget("net")


def test_a_state_that_is_loaded_is_kept_at_once(daemon: Daemon) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    kept = gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    best = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    _step(model, optimizer, 1)
    net.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    assert kept.steps == 2
    _leave()
    fresh, other = _net()
    again = gradd.reattach("net", fresh, other)
    assert again.steps == 2
    for p, (number, state) in zip(fresh.parameters(), best[1]["state"].items(), strict=True):
        assert other.state[p]["step"] == state["step"] == 1, number
        assert torch.equal(other.state[p]["exp_avg"], state["exp_avg"])
    assert all(map(torch.equal, fresh.state_dict().values(), best[0].values()))
    _step(ORTModule(fresh, strict=True), other, 2)
    assert again.steps == 3
    gradd.forget("net")


@pytest.mark.parametrize("added", [True, False])
def test_layers_that_are_thawed_are_kept(daemon: Daemon, added: bool) -> None:
    net, _ = _net()
    net[0].requires_grad_(False)
    rest = [p for p in net.parameters() if p.requires_grad]
    optimizer = optim.FusedAdam(rest if added else net.parameters(), lr=0.1)
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    net[0].requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [*net[0].parameters()], "lr": 0.01})
    _step(model, optimizer, 1)
    expected = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    _leave()
    fresh, other = _net()
    if added:
        first = [*fresh[0].parameters()]
        other = optim.FusedAdam([p for p in fresh.parameters() if all(p is not q for q in first)])
        other.add_param_group({"params": first})
    gradd.reattach("net", fresh, other)
    assert [other.state[p]["step"] for p in fresh.parameters()] == [1, 1, 2, 2, 2, 2]
    found = [other.state[p]["exp_avg"] for p in fresh.parameters()]
    assert all(map(torch.equal, found, expected))
    gradd.forget("net")


def test_parameters_with_other_holders_move(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    held = net[0].weight.detach().clone()
    net[0].weight.data = held
    _step(model, optimizer, 0)
    assert "they move into shared memory" in caplog.text
    expected = [p.clone() for p in net.parameters()]
    _leave()
    fresh, other = _net()
    assert gradd.reattach("net", fresh, other).steps == 1
    assert all(map(torch.equal, fresh.parameters(), expected))
    gradd.forget("net")


def test_an_optimizer_of_former_parameters_is_named(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = _net()
    gradd.keep("net", net, optimizer)
    assert not caplog.text
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    _step(ORTModule(net, strict=True), optimizer, 0)  # of parameters without a gradient
    assert "not the model's 0.weight" in caplog.text
    gradd.forget("net")


@pytest.mark.parametrize("gone", [False, True])
def test_a_cell_that_reattaches_runs_again(daemon: Daemon, gone: bool) -> None:
    whole, reference = _net()
    alone = ORTModule(whole, strict=True)
    for seed in range(6):
        _step(alone, reference, seed)
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer).note(what=1)
    for seed in range(2):
        _step(model, optimizer, seed)
    for first in (2, 4):
        if gone:
            del net, optimizer, model
            gc.collect()
        net, optimizer = _net()
        model = ORTModule(net, strict=True)
        kept = gradd.reattach("net", model, optimizer)
        assert kept.steps == first and kept.notes == {"what": 1}
        assert keeping.look("net") == (first, {"what": 1})
        for seed in range(first, first + 2):
            _step(model, optimizer, seed)
    assert all(map(torch.equal, net.state_dict().values(), whole.state_dict().values()))
    _leave()
    fresh, other = _net()
    assert gradd.reattach("net", fresh, other).steps == 6
    assert all(map(torch.equal, fresh.state_dict().values(), whole.state_dict().values()))
    gradd.forget("net")


@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR"])
def test_a_scheduler_goes_on_behind_reattach(daemon: Daemon, kind: str) -> None:
    settings = {
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
        "CosineAnnealingLR": {"T_max": 7},
        "OneCycleLR": {"max_lr": 0.3, "total_steps": 9},
    }[kind]
    make = getattr(torch.optim.lr_scheduler, kind)

    def train(steps: range, name: str) -> list[float]:
        net, optimizer = _net()
        model = ORTModule(net, strict=True)
        scheduler = make(optimizer, **settings)
        if steps.start:
            kept = gradd.reattach(name, model, optimizer)
            scheduler.load_state_dict(kept.notes["scheduler"])
            scheduler.step()
        else:
            kept = gradd.keep(name, model, optimizer)
        rates = []
        for seed in steps:
            rates.append(optimizer.param_groups[0]["lr"])
            kept.note(scheduler=scheduler.state_dict())
            _step(model, optimizer, seed)
            scheduler.step()
        return rates

    whole = train(range(6), "whole")
    first = train(range(3), "net")
    _leave()
    assert first + train(range(3, 6), "net") == pytest.approx(whole)
    for name in ("net", "whole"):
        gradd.forget(name)


def test_the_wrapper_need_not_stay(daemon: Daemon) -> None:
    net, optimizer = _net()
    kept = gradd.keep("net", ORTModule(net, strict=True), optimizer)
    gc.collect()
    model = ORTModule(net, strict=True)
    for seed in range(2):
        _step(model, optimizer, seed)
    assert kept.steps == 2
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    _leave()
    fresh, other = _net()
    assert gradd.reattach("net", ORTModule(fresh), other).steps == 2
    assert all(map(torch.equal, fresh.state_dict().values(), expected.values()))
    gradd.forget("net")


def test_a_name_that_is_given_again_is_named(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = _net()
    for _ in range(2):
        gradd.keep("net", net, optimizer)
    assert "another model" not in caplog.text
    gradd.keep("net", *_net())
    assert "'net' was that of another model" in caplog.text
    gradd.forget("net")


def test_steps_are_those_of_the_session_without_its_optimizer(daemon: Daemon) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    for seed in range(3):
        _step(model, optimizer, seed)
    _leave()
    fresh, _ = _net()
    assert gradd.reattach("net", fresh).steps == 3
    _leave()
    fresh, _ = _net()
    assert gradd.reattach("net", fresh).steps == 3
    gradd.forget("net")


def test_parameters_that_move_stay_kept(daemon: Daemon) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    optimizer = optim.FusedAdam(model.parameters(), lr=0.1)
    gradd.keep("net", model, optimizer)  # the same process may call it again
    _step(model, optimizer, 1)
    net[0].weight.data = net[0].weight.data.clone()
    _step(model, optimizer, 2)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    _leave()
    fresh, other = _net()
    assert gradd.reattach("net", fresh, other).steps == 2
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name
    gradd.forget("net")


class _Failing(torch.optim.SGD):
    """Updates one parameter, and then no more."""

    fails = False

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)
                if self.fails:
                    raise RuntimeError("killed")


def test_an_optimizer_of_torch(daemon: Daemon) -> None:
    """Its state is not kept; parameters are, unless it has died in the middle of a step."""
    net, _ = _net()
    optimizer = _Failing(net.parameters())
    model = ORTModule(net, strict=True)
    kept = gradd.keep("net", model, optimizer)
    for seed in range(3):
        kept.note(seed=seed)
        _step(model, optimizer, seed)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    _leave()
    fresh, _ = _net()
    other = _Failing(fresh.parameters())
    fresh = ORTModule(fresh, strict=True)
    again = gradd.reattach("net", fresh, other)
    assert (again.steps, again.notes) == (3, {"seed": 2})
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name
    other.fails = True
    with pytest.raises(RuntimeError, match="killed"):
        _step(fresh, other, 3)
    _leave()
    last, _ = _net()
    with pytest.raises(errors.StaleError, match="died in the middle of step 4"):
        gradd.reattach("net", last, _Failing(last.parameters()))
    gradd.forget("net")


def test_half_a_step_of_fused_adam_is_named(daemon: Daemon) -> None:
    """Client and worker die in the same commit: its gradients are gone."""
    net, optimizer = _net()
    gradd.keep("net", net, optimizer)
    _step(net, optimizer, 0)
    words = optimizer.journal
    words[1] += 1  # one chunk of the next step is done
    _leave()
    with pytest.raises(errors.StaleError, match="died in the middle of step 2"):
        gradd.reattach("net", *_net())
    words[1] -= 1
    words[2] = words[1]  # the first chunk of the next step is about to be written
    with pytest.raises(errors.StaleError, match="died in the middle of step 2"):
        gradd.reattach("net", *_net())
    gradd.forget("net")


@pytest.mark.parametrize("kill", ["kill", "kill_worker"])
def test_the_name_outlives_a_daemon_and_its_worker(daemon: Daemon, kill: str) -> None:
    net, optimizer = _net()
    model = ORTModule(net, strict=True)
    gradd.keep("net", model, optimizer)
    _step(model, optimizer, 0)
    getattr(daemon, kill)()
    _step(model, optimizer, 1)
    expected = [p.clone() for p in net.parameters()]
    _leave()
    fresh, other = _net()
    assert gradd.reattach("net", fresh, other).steps == 2
    for p, value in zip(fresh.parameters(), expected, strict=True):
        assert torch.equal(p, value)
    gradd.forget("net")


def test_what_is_kept_outlives_model_and_optimizer(daemon: Daemon) -> None:
    net = nn.Linear(3, 2)
    gradd.keep("net", net, optim.FusedAdam(net.parameters()))
    (kept,) = daemon.ps()["kept"]
    del net
    gc.collect()
    client.get_client().flush()  # memory that nothing holds goes now
    assert daemon.ps()["kept"][0]["bytes"] == kept["bytes"]
    gradd.forget("net")
    gc.collect()
    client.get_client().flush()
    assert daemon.ps()["kept"] == []
    assert not client.get_client().state.bytes()


HOLDER = """
import sys, torch, gradd
from gradd import optim
net = torch.nn.Linear(3, 2)
gradd.keep("net", net, optim.FusedAdam(net.parameters()), keep_alive=sys.argv[1])
print("kept", flush=True)
sys.stdin.readline()
"""


def _holder(keep_alive: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, keep_alive],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert process.stdout.readline() == "kept\n"
    return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def test_one_process_at_a_time(daemon: Daemon) -> None:
    holder = _holder("5m")
    try:
        net = nn.Linear(3, 2)
        optimizer = optim.FusedAdam(net.parameters())
        used = f"session 'net' is in use by process {holder.pid}"
        for ask in (
            lambda: gradd.reattach("net", net, optimizer),
            lambda: gradd.keep("net", net, optimizer),
            lambda: gradd.forget("net"),
        ):
            with pytest.raises(errors.SessionError, match=used):
                ask()
        daemon.kill_worker()  # it loses its connection, and not its session
        with pytest.raises(errors.SessionError, match=used):
            gradd.reattach("net", net, optimizer)
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(errors.SessionError, match=used):
            gradd.reattach("net", net, optimizer)
    finally:
        _end(holder)
    with pytest.raises(errors.SessionError, match="is kept: take it over by gradd.reattach"):
        gradd.keep("net", net, optimizer)
    gradd.reattach("net", net, optimizer)
    gradd.forget("net")


def _gradd(daemon: Daemon, *words: str) -> subprocess.CompletedProcess:
    command = [os.environ["GRADD_BIN"], *words, "--dir", str(daemon.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_shows_and_ends_them(daemon: Daemon) -> None:
    holder = _holder("5m")
    try:
        (used,) = daemon.ps()["kept"]
        assert (used["name"], used["pid"], used["in_use"]) == ("net", holder.pid, 1)
        assert used["bytes"] > 1 << 20 and used["seconds"] == 300
        refused = _gradd(daemon, "forget", "--name", "net")
        assert refused.returncode == 1 and f"in use by process {holder.pid}" in refused.stderr
    finally:
        _end(holder)
    until(lambda: not daemon.ps()["kept"][0]["in_use"], "it stays in use")
    assert 0 < daemon.ps()["kept"][0]["left_ms"] <= 300_000
    table = _gradd(daemon, "ps").stdout.splitlines()
    assert table[-2].startswith("KEPT ") and table[-1].split()[:3] == [
        "net",
        str(holder.pid),
        "left",
    ]
    assert _gradd(daemon, "forget", "--name", "nets").stderr.endswith("there is net\n")
    assert _gradd(daemon, "forget", "--name", "net").stdout == "forgotten\n"
    assert daemon.ps()["kept"] == [] and "KEPT" not in _gradd(daemon, "ps").stdout
    looks = _gradd(daemon, "top", "--times", "2", "--every", "1").stdout
    assert looks.count(f"pid {daemon.pid()}, up ") == 2
    assert _gradd(daemon, "forget").returncode == 2


def test_a_kept_session_ends_in_time(daemon: Daemon) -> None:
    memory = f"/proc/{daemon.pid()}/fd"

    def held() -> int:
        links = (f"{memory}/{fd}" for fd in os.listdir(memory))
        return sum("memfd:" in os.readlink(link) for link in links if os.path.islink(link))

    before = held()
    _end(_holder("1s"))
    until(lambda: "event=kept " in daemon.log(), "it is not kept")
    until(lambda: "event=kept_no_more" in daemon.log(), "it stays")
    until(lambda: held() == before, "its memory stays")  # a thread gives much of it back
    with pytest.raises(errors.SessionError, match="none is kept"):
        gradd.reattach("net", nn.Linear(3, 2))
    for _ in range(3):
        _end(_holder("0"))
    until(lambda: daemon.log().count("event=kept_no_more") == 4, "it stays")
    until(lambda: held() == before, "its memory stays")
    assert not keeping._kept
