"""Frozen weights that several processes have mapped, and that are in memory once.

The memory is sealed against writing, so no process can change it for others. Each maps it
privately: a page that a process writes becomes its own, and the daemon goes on to read the common
one. So before a call reads such a tensor, it is compared with what it was: its version counter, and
after an access past that (watch.py), which of its pages are the process's own. A tensor that was
written, or that is going to be trained, gets memory of this session, with one warning.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradd.memory.parameter_changes import version_of
from gradd.memory.shm import PAGE, Base, nbytes
from gradd.memory.watch import accesses, data_ptr, untyped_storage

if TYPE_CHECKING:
    from gradd.session.client import Client

logger = logging.getLogger("gradd")
_IN_MEMORY, _SWAPPED, _OF_FILE = (np.uint64(1) << np.uint64(bit) for bit in (63, 62, 61))
mapped: list[weakref.ref[Base]] = []  # by this process; empty: settle() finds nothing
_seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id: the tensor and its version


def note(base: Base) -> None:
    """This process has mapped a base."""
    mapped.append(weakref.ref(base, mapped.remove))


def holds(tensor: torch.Tensor) -> Base | None:
    """The base in which a tensor lies."""
    at = data_ptr(tensor)
    for ref in tuple(mapped):  # a collection may shorten it
        base = ref()
        if base is not None and base.address <= at < base.address + base.size:
            return base
    return None


def settle(client: Client, tensors: Iterable[torch.Tensor]) -> None:
    """Tensors of a call that the daemon must not read from a base get memory of their own."""
    for tensor in tensors:
        base = holds(tensor)
        if base is None:
            continue
        why = _changed(tensor)
        if why:
            leave(client, tensor, base, why)


def leave(client: Client, tensor: torch.Tensor, base: Base, why: str) -> None:
    """Moves a tensor out of a base."""
    size = nbytes(tensor.dtype, tensor.shape)
    if not base.said:
        base.said = True
        logger.warning(
            "the base '%s': a tensor of %d bytes %s; this process has its own copy of such tensors "
            "from now on, and others keep theirs",
            base.name,
            size,
            why,
        )
    with torch.no_grad(), client.lock:
        copy = client.parameters.tensor(tensor.dtype, tensor.shape)
        tensor.data = copy.copy_(tensor.detach())
    _seen.pop(id(tensor), None)


def _changed(tensor: torch.Tensor) -> str:
    """Why a tensor may not stay; "": it may."""
    if tensor.requires_grad:
        return "is going to be trained"
    version = 0 if tensor.is_inference() else version_of(tensor)
    known = _seen.get(id(tensor))
    is_new = known is None or known[0]() is not tensor
    if not is_new and known[1] != version:  # type: ignore[index]
        return "was written"
    place = untyped_storage(tensor).data_ptr()
    if is_new or place in accesses.noted:
        if not accesses.is_given(tensor):
            accesses.noted.discard(place)
        if is_written(tensor):
            return "was written"
    if is_new:
        _seen[id(tensor)] = (weakref.ref(tensor), version)
    return ""


def is_written(tensor: torch.Tensor) -> bool:
    """Whether a page of a tensor in a base is this process's own by now."""
    first = data_ptr(tensor) // PAGE
    last = (data_ptr(tensor) + nbytes(tensor.dtype, tensor.shape) - 1) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        data = os.pread(pages.fileno(), 8 * (last - first + 1), 8 * first)
    found = np.frombuffer(data, dtype=np.uint64)
    there = (found & (_IN_MEMORY | _SWAPPED)) != 0
    return len(found) != last - first + 1 or bool((there & ((found & _OF_FILE) == 0)).any())
