"""Models whose tensors are on a GPU of the stand-in for CUDA train through the emulated kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gradd import ORTModule, optim
from gradd.memory import devices
from gradd.memory.gpu_segments import WAYS
from gradd.session import client as clients
from helpers import emu_torch
from helpers.models.families import build

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]


class Mlp(nn.Module):
    """Two layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 5)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Inputs of 12 features, and classes."""
        return F.cross_entropy(self.layers(x), labels)


def _features(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 12, generator=generator)
    return {"x": x, "labels": torch.randint(5, (6,), generator=generator)}


@dataclass(frozen=True)
class Task:
    """A model and its batches by step."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]


def _family(name: str) -> Task:
    return Task(lambda: build(name)[0], lambda step: build(name)[1](2, 9, step))


TASKS = {
    "mlp": Task(Mlp, _features),
    "llama": _family("llama"),
    "gpt2": _family("gpt2"),
    "bert": _family("bert_cls"),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: optim.FusedAdam(p, lr=1e-2, max_grad_norm=1.0),
}


@dataclass
class Trained:
    """Losses, and the parameters at the end on the CPU."""

    losses: list[float]
    parameters: list[torch.Tensor]


def _train(
    task: Task,
    device: str,
    optimizer: str,
    wrap: Callable[[nn.Module], nn.Module],
    before_backward: Callable[[int], None] = lambda step: None,
) -> Trained:
    torch.manual_seed(2)
    model = task.model().to(device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # which .to() has parted: there it makes new parameters
    wrapped = wrap(model)
    steps = OPTIMIZERS[optimizer](wrapped.parameters())
    losses = []
    for step in range(4):
        out = wrapped(**{k: v.to(device) for k, v in task.batch(step).items()})
        loss = out if isinstance(out, torch.Tensor) else out.loss
        before_backward(step)
        loss.backward()
        assert all(p.grad.device == p.device for p in model.parameters() if p.grad is not None)
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [p.detach().cpu() for p in model.parameters()])


def _strict(model: nn.Module) -> nn.Module:
    return ORTModule(model, strict=True)


@pytest.mark.parametrize(
    "name",
    ["mlp", "llama", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("gpt2", "bert"))],
)
def test_losses_are_those_of_the_cpu(name: str) -> None:
    task, kept = TASKS[name], []

    def wrap(model: nn.Module) -> nn.Module:
        kept.append(_strict(model))
        return kept[0]

    got = _train(task, "emu", "sgd", wrap)
    stats = kept[0].gradd_stats()
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {} and stats["mirrored"] == 0
    assert stats["forwards"] >= 4 and stats["self_checks"] > 0
    expected = _train(task, "cpu", "sgd", lambda model: model)
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.parameters, expected.parameters, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_daemon_loses_no_bit(daemon: object, optimizer: str) -> None:
    task = TASKS["mlp"]
    expected = _train(task, "emu", optimizer, _strict)

    def kill(step: int) -> None:
        if step in (1, 3):
            daemon.kill(clients.get_client(device=torch.device("emu", 0)).daemon_pid)

    got = _train(task, "emu", optimizer, _strict, kill)
    client = clients.get_client(device=torch.device("emu", 0))
    assert client.recoveries == 2
    assert got.losses == expected.losses
    assert all(map(torch.equal, got.parameters, expected.parameters))


@pytest.mark.parametrize(
    ("way", "name", "optimizer"),
    [
        *((way, "mlp", optimizer) for way in ("handles", "pinned") for optimizer in OPTIMIZERS),
        *(pytest.param(w, "llama", "fused", marks=pytest.mark.nightly) for w in WAYS),
    ],
)
def test_each_way_of_sharing_memory_gives_the_same_bits(
    daemon: object, way: str, name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over killed daemons. With pinned memory nothing of the user's is shared."""
    expected, kept = _train(TASKS[name], "emu", optimizer, _strict), []
    assert devices.of(torch.device("emu", 0)).way is WAYS["vmm"]
    clients.close_all()
    emu_torch.forget_ways()
    monkeypatch.setenv("GRADD_GPU_MEMORY", way)

    def wrap(model: nn.Module) -> nn.Module:
        kept.append(_strict(model))
        return kept[0]

    def kill(step: int) -> None:
        if step in (1, 3):
            daemon.kill(clients.get_client(device=torch.device("emu", 0)).daemon_pid)

    got = _train(TASKS[name], "emu", optimizer, wrap, kill)
    client = clients.get_client(device=torch.device("emu", 0))
    assert client.memory.way is WAYS[way] and client.recoveries == 2
    assert got.losses == expected.losses
    assert all(map(torch.equal, got.parameters, expected.parameters))
    stats, tensors = kept[0].gradd_stats(), list(kept[0].parameters())
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}
    assert stats["mirrored"] == (0 if WAYS[way].moves else len(tensors))
    assert {client.locate(p) is not None for p in tensors} == {WAYS[way].moves}
    out = kept[0](**{k: v.to("emu") for k, v in TASKS[name].batch(0).items()})
    (out if isinstance(out, torch.Tensor) else out.loss).backward()
    assert {client.locate(p.grad) is not None for p in tensors} == {WAYS[way].moves}


def test_parameters_and_gradients_lie_in_memory_that_both_map() -> None:
    model = Mlp().to("emu")
    wrapped = _strict(model)
    client = clients.get_client(device=torch.device("emu", 0))
    batch = {k: v.to("emu") for k, v in _features(0).items()}
    for _ in range(2):
        wrapped(**batch).backward()
        pointers = {p.grad.data_ptr() for p in model.parameters()}
        wrapped.zero_grad()
    for tensor in model.parameters():
        assert client.locate(tensor) is not None
    wrapped(**batch).backward()
    assert {p.grad.data_ptr() for p in model.parameters()} == pointers  # the same slot again
    assert all(client.locate(p.grad) is not None for p in model.parameters())


def test_tensors_outlive_their_client() -> None:
    model = Mlp().to("emu")
    before = [p.detach().cpu() for p in model.parameters()]
    wrapped = _strict(model)
    wrapped(**{k: v.to("emu") for k, v in _features(0).items()}).backward()
    clients.close_all()
    assert all(map(torch.equal, (p.detach().cpu() for p in model.parameters()), before))
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_wrapped_model_that_draws_may_move() -> None:
    """A call knows the state of its device's generator, and finds out late that it is another."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.5))
    wrapped = _strict(model)
    for step, device in enumerate(("cpu", "emu", "cpu")):
        wrapped.to(device)
        out = wrapped(_features(step)["x"].to(device))
        out.sum().backward()
        assert 0 < int((out == 0).sum()) < out.numel()
        assert all(p.grad.device.type == device for p in model.parameters())
        wrapped.zero_grad()
    assert wrapped.gradd_stats()["fallbacks"] == {}


def test_a_wrapped_model_may_move_to_a_gpu_and_back() -> None:
    torch.manual_seed(4)
    model = Mlp()
    expected = copy.deepcopy(model)
    wrapped = _strict(model)
    losses = []
    for step, device in enumerate(("cpu", "emu", "emu", "cpu", "emu")):
        wrapped.to(device)
        loss = wrapped(**{k: v.to(device) for k, v in _features(step).items()})
        loss.backward()
        losses.append(loss.item())
        wrapped.zero_grad()
    assert wrapped.gradd_stats()["fallbacks"] == {}
    given = [expected(**_features(step)).item() for step in range(len(losses))]
    torch.testing.assert_close(losses, given, rtol=1e-4, atol=1e-5)


def test_what_computes_on_the_cpu_in_between_is_cut_out() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.gelu(self.first(x)) * torch.tensor(0.5)
            y = torch.sin(x.cpu()) + torch.arange(8.0)
            return self.last(y.to(x.device))

    torch.manual_seed(4)
    model = Mixed()
    expected = copy.deepcopy(model)
    wrapped = ORTModule(model.to("emu"))
    x = torch.randn(4, 6)
    out = wrapped(x.to("emu"))
    out.sum().backward()
    expected(x).sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected(x).detach(), rtol=1e-4, atol=1e-5)
    assert wrapped.gradd_stats()["parts_in_torch"].keys() == {"device"}
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-4, atol=1e-5)


def test_a_step_without_waits_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests prove: work of the trainer that is not waited for shows."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    wrapped = _strict(Mlp().to("emu"))
    batches = [{k: v.to("emu") for k, v in _features(step).items()} for step in range(2)]
    losses = [wrapped(**batch).item() for batch in batches]
    monkeypatch.setattr(devices.Gpu, "settle", lambda self: None)
    for delay in ("40000", "400000"):  # a busy machine's daemon may be late itself
        monkeypatch.setenv("GRADD_SIM_DELAY_US", delay)
        late = [wrapped(**batches[i % 2]) for i in range(6)]
        monkeypatch.setenv("GRADD_SIM_DELAY_US", "50")
        if any(loss.item() != losses[i % 2] for i, loss in enumerate(late)):
            return
    pytest.fail("each step read the batch that was still under way")
