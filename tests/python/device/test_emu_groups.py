"""Gradients in groups on a GPU: torch's stream waits for each group, the host for none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.memory import devices
from gradd.session import client as clients
from gradd.session import control, timeline
from helpers import emu_torch

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]
DEVICE = "emu:0"  # no device yet where this file is only collected
LAYERS, WIDTH = 4, 64
_LAYER = str(4 * WIDTH * WIDTH + 1)  # bytes of a group with the gradients of one layer


class Stack(nn.Module):
    """Layers; the loss refuses labels that are no class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, WIDTH]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Trainer:
    """A module in groups of that size ("0": together), and its gradients in a step."""

    def __init__(self, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRADD_SELF_CHECK", "0")
        monkeypatch.setenv("GRADD_GROUP_BYTES", size)
        self.model = ORTModule(Stack().to(DEVICE), strict=True)
        self.x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        self.one = torch.ones((), device=DEVICE)
        self.client = clients.get_client(device=torch.device(DEVICE))
        for _ in range(2):
            self.step()

    def step(self) -> list[torch.Tensor]:
        """Changes those of the last layer in a hook; copies, for which nothing has waited."""
        self.model.zero_grad()
        self.model(self.x).backward(self.one)
        return [p.grad.clone() for p in self.model.parameters()]

    def double(self, layer: int, action: Any) -> None:
        """A hook that multiplies a gradient by two, in the stream, and then does something once."""

        def hook(p: torch.Tensor) -> None:
            handle.remove()
            p.grad.mul_(2)
            action()

        weight = self.model.layers[layer].weight
        handle = weight.register_post_accumulate_grad_hook(hook)


def _assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a.cpu(), b.cpu()), number


def test_the_stream_waits_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Trainer("0", monkeypatch).step()
    trainer = Trainer(_LAYER, monkeypatch)
    counts: Counter[str] = Counter()
    waited: list[int] = []
    real = devices.Words.wait_in_turn

    def wait(self: Any, word: int, value: int) -> None:
        waited.append(word)
        real(self, word, value)

    monkeypatch.setattr(devices.Words, "wait_in_turn", wait)
    call = control.Connection.call
    monkeypatch.setattr(
        control.Connection,
        "call",
        lambda *given, **named: counts.update(["call"]) or call(*given, **named),
    )
    found = trainer.step()
    assert not counts  # the host waits for nothing
    words = devices.Words
    assert waited == [words.DONE, *[words.GROUPS] * (LAYERS - 1), words.DONE]
    _assert_same(found, together)


@pytest.mark.parametrize("layer", [LAYERS - 1, 1])
def test_a_kill_between_groups_costs_no_bit(
    daemon: Any, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stream has changed in a group that was done stays."""
    expected = Trainer("0", monkeypatch)
    expected.double(layer, lambda: None)
    right = expected.step()
    trainer = Trainer(_LAYER, monkeypatch)
    client = trainer.client
    done, ended = [], []
    real = timeline.wait_for_end
    monkeypatch.setattr(
        timeline, "wait_for_end", lambda pid, most: ended.append(pid) or real(pid, most)
    )

    def kill() -> None:
        ended.append(-client.worker_pid)
        torch.accelerator.synchronize(DEVICE)  # the change is made, in the group that was done
        daemon.kill(client.daemon_pid)
        done.append(client.timeline.words.read(devices.Words.GROUPS) & 0xFFFF)

    trainer.double(layer, kill)
    _assert_same(trainer.step(), right)
    assert client.recoveries == 1
    assert done[0] >= LAYERS - layer
    assert ended == [ended[0], -ended[0]]  # what it had on the GPU is over


def test_a_failure_between_groups_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on: gradients that were not given are NaN."""
    trainer = Trainer(_LAYER, monkeypatch)
    real = clients.Timeline.envelope

    def envelope(self: Any, pending: Any) -> dict[str, Any]:
        sent = real(self, pending)
        return {**sent, "groups": [99999]} if "groups" in sent else sent

    with monkeypatch.context() as patch:
        patch.setattr(clients.Timeline, "envelope", envelope)
        found = trainer.step()
        assert all(gradient.isnan().all().item() for gradient in found)
    with pytest.raises(errors.TensorError, match="field 'groups'"):
        trainer.step()
    assert all(gradient.isfinite().all().item() for gradient in trainer.step())
