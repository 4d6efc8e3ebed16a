"""Calls of CUDA that fail once, in the trainer or in its daemon: right numbers, or a named error.

Whatever comes of the training in which a call fails, the next one is right.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule, errors
from gradd.session import client as clients
from helpers import ROOT, emu_torch
from helpers.selection import drawn, every_run

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]

_OF_THE_TRAINER = {
    "vmm": (
        *("cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap"),
        *("cuMemSetAccess", "cudaHostRegister", "cudaHostGetDevicePointer"),
        *("cudaStreamSynchronize", "cudaMemcpyAsync", "cudaSetDevice"),
        *("cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2", "cuCtxRecordEvent"),
        *("cudaEventCreateWithFlags", "cudaStreamWaitEvent"),
    ),
    "handles": ("cudaMalloc", "cudaIpcGetMemHandle"),
    "pinned": ("cudaHostRegister", "cudaHostGetDevicePointer", "cudaMemcpyAsync"),
}
_OF_THE_DAEMON = {
    "vmm": (
        *("cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaSetDevice", "cudaMemGetInfo"),
        *("cudaGetDriverEntryPointByVersion", "cudaStreamCreateWithFlags", "cudaMalloc"),
        *("cudaMallocAsync", "cudaMemsetAsync", "cudaMemcpyAsync"),
        *("cudaStreamSynchronize", "cuMemImportFromShareableHandle", "cuMemAddressReserve"),
        *("cuMemMap", "cuMemSetAccess", "cudaHostRegister", "cudaHostGetDevicePointer", "kernel"),
    ),
    "handles": ("cudaIpcOpenMemHandle", "cuMemGetAddressRange_v2", "cudaIpcCloseMemHandle"),
    "pinned": ("cudaHostRegister", "cudaHostGetDevicePointer"),
}
POINTS = [
    (side, way, call, n)
    for side, ways in (("trainer", _OF_THE_TRAINER), ("daemon", _OF_THE_DAEMON))
    for way, calls in ways.items()
    for call in calls
    for n in ("1", "2", "7")
]
# A function, and what its body begins with.
_CAN_FAIL = re.compile(
    r"^(?:cudaError_t|CUresult) (\w+)\([^{}]*\{\n(?:    [^\n]*\n)*?"
    r"    (?:SIM_CALL|DRIVER_CALL|const cudaError_t failing = sim_failing)\(",
    re.MULTILINE,
)
# Calls that no training here makes.
_ELSEWHERE = {
    "cudaDeviceGetAttribute": "test_emu_attention.c",
    "cudaDeviceSynchronize": "a process that ends memory, and what measures products",
    "cudaEventCreate": "what measures products",
    "cudaEventElapsedTime": "what measures products",
    "cudaEventSynchronize": "what measures products",
    "cudaEventQuery": "test_comm.c",
    "cudaEventRecord": "test_comm.c; calls of several streams",
    "cudaMemset": "memory is set in the order of a stream",
    "cudaGetDevice": "its result is what the process has set",
    "cudaIpcGetEventHandle": "events of other processes are not used",
    "cudaIpcOpenEventHandle": "events of other processes are not used",
}


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
    point: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, way, call, n = point
    library = ctypes.CDLL(str(emu_torch.LIBRARY))
    happened = tmp_path / "failed"
    expected = _losses("cpu")
    if way != "vmm":
        monkeypatch.setenv("GRADD_GPU_MEMORY", way)
    if side == "trainer":
        library.sim_fail(call.encode(), int(n))
    else:
        monkeypatch.setenv("GRADD_SIM_FAIL", f"{call}:{n}")
        monkeypatch.setenv("GRADD_SIM_ONCE", str(happened))
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
    reached = not library.sim_left() if side == "trainer" else happened.exists()
    library.sim_fail(b"", 0)
    assert reached or n != "1"  # else the point is none
    assert len(failed) <= 1
    (client,) = (c for c in clients.clients() if c.memory.uuid)
    assert client.unreleased_runs() == []


def test_every_call_of_the_stand_in_is_a_point() -> None:
    sources = (ROOT / "tests/sim").glob("*.c")
    calls = {call for source in sources for call in _CAN_FAIL.findall(source.read_text())}
    tried = {call for _, _, call, _ in POINTS}
    assert len(calls) > 30 and calls == (tried - {"kernel"}) | _ELSEWHERE.keys()
