"""How a GPU's memory reaches its daemon: the client finds out by trying.

Drivers refuse some ways (a partition of a GPU, another container, an old version), and so may the
daemon's. The first segment of a process there decides: a small one of each kind of WAYS is made and
passed to the daemon, until one is taken. `GRADD_GPU_MEMORY` allows one kind alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gradd import errors, options
from gradd.memory.devices import DeviceError
from gradd.memory.gpu_segments import WAYS
from gradd.memory.shm import Header

if TYPE_CHECKING:
    from gradd.session.client import Client

logger = logging.getLogger("gradd")

_REFUSALS = (errors.DeviceLostError, errors.SharedMemoryError, errors.UnsupportedError)


def choose(client: Client, header: Header) -> None:
    """Sets the way of the client's GPU; says so if it is not the first one.

    Args:
        client: The session.
        header: Of the client's first segment.

    Raises:
        DeviceError: None is possible, or no daemon computes there.
        OutOfMemoryError: The GPU has no memory for a small segment.
    """
    memory, wanted = client.memory, options.gpu_memory(WAYS)
    client.connect()
    refused = [f"GRADD_GPU_MEMORY={wanted}"] if wanted else []
    for name, way in WAYS.items():
        if wanted and name != wanted:
            continue
        try:
            segment = way(memory, client.next_id(), 1, header)
            client.pass_segment(segment)
        except _REFUSALS as error:
            refused.append(f"{name}: {error.what}")
            continue
        client.drop_segment(segment)
        memory.way = way
        if refused:
            logger.warning("%s is shared by %s (%s)", memory.device, way.text, "; ".join(refused))
        return
    raise DeviceError(f"no daemon can share memory of {memory.device}: {'; '.join(refused)}")
