"""Outputs, self-checks and memory of modules on a GPU: what differs from the CPU's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradd import DebugOptions, ORTModule, errors, estimate
from gradd.calls.lazy import LazyTensor
from gradd.memory import devices
from gradd.memory.shm import Header
from gradd.optim import FusedAdam
from gradd.session import client as clients
from helpers import emu_torch
from helpers.models import families
from helpers.nets import assert_close, assert_same_grads, batch, pair

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]

DEVICE = "emu:0"  # no device yet where this file is only collected


@pytest.fixture
def here() -> Iterator[None]:
    """Tensors are made on the GPU, as a script does with torch.set_default_device()."""
    before = torch.get_default_device()
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(before)


def test_lazy_outputs_are_on_the_gpu(here: None) -> None:
    ours, theirs = pair()
    mine, expected = (model(*batch())[1] for model in (ours, theirs))
    assert isinstance(mine, LazyTensor) and mine.device == torch.device(DEVICE) and not mine.is_cpu
    assert isinstance(mine.to(DEVICE), LazyTensor) and not mine.gradd_is_computed
    copy = mine.cpu()
    assert type(copy) is torch.Tensor and copy.is_cpu
    assert_close(copy, expected.cpu())
    for scores in (copy, expected):
        scores.double().square().sum().backward()
    assert_same_grads(ours, theirs)


def test_a_lazy_output_is_never_that_of_other_parameters(here: None) -> None:
    """The fingerprint of what a forward has read comes by a reply that was not waited for."""
    model = pair()[0]
    for _ in range(3):
        loss, scores = model(*batch())
        loss.backward()
    model.first.weight.data.add_(1)
    with pytest.raises(errors.StaleError, match="have changed since"):
        scores.sum()


@pytest.mark.nightly
def test_the_daemon_gets_the_cpus_graph(tmp_path: Path) -> None:
    """Bit for bit: constants, order and names."""
    found = []
    for device in ("cpu", DEVICE):
        model, args = families.build("llama")[0].to(device), families.build("llama")[1](2, 9, 1)
        prefix = tmp_path / device.replace(":", "")
        options = DebugOptions(save_onnx=True, onnx_prefix=str(prefix))
        out = ORTModule(model, options, strict=True)(**{k: v.to(device) for k, v in args.items()})
        out.loss.backward()
        found.append([p.read_bytes() for p in sorted(tmp_path.glob(f"{prefix.name}_*.onnx"))])
    assert found[0] and found[0] == found[1]


def test_a_gradient_passes_a_conversion(here: None) -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        model(*batch())[1].double().square().sum().backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("several", [False, True])
def test_torch_compile_takes_it_as_a_back_end(here: None, several: bool) -> None:
    ours, theirs = pair()
    step = torch.compile(ours, backend="gradd", options={"strict": True})
    if several:  # graphs of the CPU are of another daemon
        torch.compile(nn.Linear(4, 4, device="cpu"), backend="gradd")(
            torch.zeros(1, 4, device="cpu")
        )
    for model in (step, theirs):
        model(*batch())[0].backward()
    assert_same_grads(ours, theirs)
    assert {_device_of_daemon(p) for p in ours.parameters()} == {torch.device(DEVICE)}


def _device_of_daemon(tensor: torch.Tensor) -> torch.device | None:
    found = clients.find(tensor)
    return None if found is None else found[0].memory.device


def test_an_estimate_is_of_the_daemon_of_its_gpu(here: None) -> None:
    model = pair()[1]
    known = {client.memory.device for client in clients.clients()}
    planned = estimate(model, batch(), batches=[2, 4])
    assert planned[1].total > planned[0].total > planned[0].parameters
    added = {client.memory.device for client in clients.clients()} - known
    assert added <= {torch.device(DEVICE)}
    assert {_device_of_daemon(p) for p in model.parameters()} == {None}  # it stays where it was
    assert "KiB" in planned[0]._repr_html_()


def test_self_checks_leave_the_gpus_random_state(here: None) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + torch.rand_like(x))

    model = ORTModule(Noisy(), strict=True)
    x = batch()[0]
    torch.manual_seed(5)
    before = torch.emu.get_rng_state()
    model(x).sum().backward()
    assert model.gradd_stats()["self_checks"] == 1
    assert torch.equal(torch.emu.get_rng_state(), before)


@dataclass
class Stepped:
    """A parameter after three steps, the last of which is pending."""

    client: clients.Client
    parameter: nn.Parameter
    kill: Callable[[], None]

    def check(self) -> None:
        """All three are done, once."""
        with self.client.lock:
            self.client.catch_up()
        assert self.client.recoveries <= 1  # 0: the daemon was done before it was killed
        expected = nn.Parameter(torch.linspace(-1, 1, 5000))
        plain = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.0)
        for _ in range(3):
            expected.grad = torch.ones_like(expected)
            plain.step()
        torch.testing.assert_close(self.parameter.detach().cpu(), expected, rtol=1e-4, atol=1e-4)


def _step_on_its_way(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> Stepped:
    """A step that is pending at a daemon that has died meanwhile."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 5000).to(DEVICE))
    optimizer = FusedAdam([parameter], lr=0.1)
    client = clients.get_client(device=torch.device(DEVICE))
    send = client._send

    def stop_and_send(pending: Any) -> None:
        os.kill(client.worker_pid, signal.SIGSTOP)
        send(pending)

    for step in range(3):
        parameter.grad = torch.ones_like(parameter)
        with monkeypatch.context() as patched:
            if step == 2:
                patched.setattr(client, "_send", stop_and_send)
            optimizer.step()
    assert client.timeline.pending
    parameter.grad = None
    return Stepped(client, parameter, lambda: daemon.kill(client.daemon_pid))


def test_memory_is_dropped_without_a_wait_for_a_dead_daemon(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has the lock that is needed to find the next one."""
    stepped = _step_on_its_way(daemon, monkeypatch)
    client = stepped.client
    segment = devices.of(torch.device(DEVICE)).segment(client.next_id(), 1, Header("parameters", 1))
    ended = threading.Event()

    def drop() -> None:
        with client.lock:
            segment.close()
        ended.set()

    stepped.kill()
    threading.Thread(target=drop, daemon=True).start()
    assert ended.wait(60)
    stepped.check()


def test_the_next_daemon_gets_memory_that_a_pending_request_needs(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = _step_on_its_way(daemon, monkeypatch)
    client = stepped.client
    with client.lock:
        client.gradients.drain()  # the optimizer's copy of the gradient
    stepped.kill()
    stepped.check()
