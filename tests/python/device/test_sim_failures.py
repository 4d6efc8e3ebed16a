"""Calls of CUDA that fail once, in the trainer or in its daemon: right numbers, or a named error.

Whatever comes of the training in which a call fails, the next one is right.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule, errors
from gradd.session import client as clients
from helpers import emu_torch
from helpers.selection import drawn, every_run

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]

_OF_THE_TRAINER = (
    *("cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap"),
    *("cuMemSetAccess", "cudaHostRegister", "cudaHostGetDevicePointer", "cudaStreamSynchronize"),
    *("cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2"),
)
_OF_THE_DAEMON = (
    *("cudaGetDeviceProperties", "cudaStreamCreateWithFlags", "cudaMalloc", "cudaMallocAsync"),
    *("cudaMemset", "cudaMemsetAsync", "cudaMemcpyAsync", "cudaStreamSynchronize"),
    *("cudaMemGetInfo", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap"),
    *("cuMemSetAccess", "kernel"),
)
POINTS = [
    (side, call, n)
    for side, calls in (("trainer", _OF_THE_TRAINER), ("daemon", _OF_THE_DAEMON))
    for call in calls
    for n in ("1", "2", "7")
]


class Net(nn.Module):
    """Two layers, a norm and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Features of shape [N, 6], and classes."""
        return F.cross_entropy(self.layers(x), labels)


def _losses(device: str) -> list[float]:
    """Of five steps."""
    torch.manual_seed(7)
    net = Net()
    model: nn.Module = net
    if device != "cpu":
        model = ORTModule(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        labels = torch.randint(3, (8,), generator=generator)
        loss = model(x.to(device), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("point", every_run(drawn(POINTS, 10), POINTS), ids="-".join)
def test_a_call_that_fails_once(
    point: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, call, n = point
    library = ctypes.CDLL(str(emu_torch.LIBRARY))
    expected = _losses("cpu")
    if side == "trainer":
        library.sim_fail(call.encode(), int(n))
    else:
        monkeypatch.setenv("GRADD_SIM_FAIL", f"{call}:{n}")
        monkeypatch.setenv("GRADD_SIM_ONCE", str(tmp_path / "failed"))
    failed = []
    for _ in range(3):
        try:
            torch.testing.assert_close(_losses("emu"), expected, rtol=1e-4, atol=1e-5)
        except errors.GraddError as error:
            assert any(word in str(error) for word in ("CUDA", "cu", "GPU")), error
            failed.append(str(error))
        except RuntimeError as error:  # a call of torch's own
            assert side == "trainer" and "emu" in str(error), error
            failed.append(str(error))
    library.sim_fail(b"", 0)
    assert len(failed) <= 1
    (client,) = (c for c in clients.clients() if c.memory.uuid)
    assert client.unreleased_runs() == []
