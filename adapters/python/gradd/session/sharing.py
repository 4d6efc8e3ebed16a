"""How a GPU's memory reaches its daemon: the client finds out by trying.

Drivers refuse some ways (a partition of a GPU, another container, an old version), and so may the
daemon's. The first segment of a process there decides: a small one of each kind of WAYS is made and
passed to the daemon, until one is taken. `GRADD_GPU_MEMORY` allows one kind alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gradd import errors, options
from gradd.memory.devices import HOST, DeviceError, Gpu
from gradd.memory.gpu_segments import WAYS, GpuSegment
from gradd.memory.shm import Header, Segment

if TYPE_CHECKING:
    from gradd.session.client import Client

logger = logging.getLogger("gradd")

_REFUSALS = (errors.DeviceLostError, errors.SharedMemoryError, errors.UnsupportedError)


def segment(
    client: Client, number: int, size: int, header: Header, in_pieces: bool
) -> Segment | GpuSegment:
    """A new segment of the client's memory, see Host.segment(); a GPU's first one finds the way.

    Raises:
        DeviceError: There is no way, or no daemon computes there.
        OutOfMemoryError: The GPU has no memory for it.
    """
    memory = client.memory
    if memory is not HOST and memory.way is None:
        _find_way(client, memory, header)
    return memory.segment(number, size, header, in_pieces)


def _find_way(client: Client, memory: Gpu, header: Header) -> None:
    """Says so if it is not the first one."""
    wanted = options.gpu_memory(WAYS)
    client.connect()
    refused = [f"GRADD_GPU_MEMORY={wanted}"] if wanted else []
    for name, way in WAYS.items():
        if wanted and name != wanted:
            continue
        try:
            tried = way(memory, client.next_id(), 1, header)
            client.pass_segment(tried)
        except _REFUSALS as error:
            refused.append(f"{name}: {error.what}")
            continue
        client.drop_segment(tried)
        memory.way = way
        if refused:
            why = "; ".join(refused)
            logger.warning(
                "%s shares memory with its daemon by %s (%s)", memory.device, way.text, why
            )
        return
    raise DeviceError(f"no daemon can share memory of {memory.device}: {'; '.join(refused)}")
