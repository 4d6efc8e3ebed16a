"""A process group for tensors of type `emu`: gloo, on copies of them on the CPU.

A copy to the CPU is work of torch's current stream, for which the host waits; the way back is work
of that stream again. So a collective takes part in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

Tensors = Sequence[torch.Tensor]


class _Done(distributed.Work):
    """Work that is done."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future


class EmuGroup(distributed.ProcessGroup):
    """The collectives that DistributedDataParallel needs.

    Attributes:
        collectives: How many of them this process has made.
    """

    collectives = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # One process needs no sockets.
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout) if size > 1 else None
        self.reduced: list[int] = []  # elements of each reduction

    def getBackendName(self) -> str:
        return "emu"

    def _on_cpu(self, tensors: Tensors, collective: Any, *options: Any) -> _Done:
        EmuGroup.collectives += 1
        if self._gloo is None:
            return _Done(list(tensors))
        copies = [t.cpu() for t in tensors]
        collective(copies, *options).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return _Done(list(tensors))

    def allreduce(self, tensors: Tensors, *options: Any) -> _Done:
        self.reduced += [t.numel() for t in tensors]
        return self._on_cpu(tensors, getattr(self._gloo, "allreduce", None), *options)

    def broadcast(self, tensors: Tensors, *options: Any) -> _Done:
        return self._on_cpu(tensors, getattr(self._gloo, "broadcast", None), *options)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, *options: Any) -> _Done:
        if self._gloo is None:
            for output, tensor in zip(outputs[0], inputs, strict=True):
                output.copy_(tensor)
            return _Done(outputs[0])
        copies = [[t.cpu() for t in list_of_one] for list_of_one in outputs]
        self._gloo.allgather(copies, [t.cpu() for t in inputs], *options).wait()
        for list_of_one, found in zip(outputs, copies, strict=True):
            for tensor, copy in zip(list_of_one, found, strict=True):
                tensor.copy_(copy)
        return _Done([t for list_of_one in outputs for t in list_of_one])

    def barrier(self, opts: Any = None) -> _Done:
        if self._gloo is not None:
            self._gloo.barrier().wait()
        return _Done([])


def register() -> None:
    """Makes "emu" a back end of torch.distributed."""
    distributed.Backend.register_backend("emu", EmuGroup, devices=["emu"])
