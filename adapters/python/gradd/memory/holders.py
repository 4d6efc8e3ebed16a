"""Detects other holders of a tensor's memory: tensors, processes, an array, a buffer, a mapping.

`torch.from_numpy`, `frombuffer` and DLPack leave the memory with its owner, whose references torch
does not count: such a storage looks as if its tensor were its only user. But its deleter shows the
difference: it drops a reference to the owner. Storages that torch read itself (`torch.load`,
safetensors' files) are not resizable either, but have no other users.

This module reads the c10::StorageImpl of 64-bit builds: function table, reference count, address,
deleter, context of the deleter. Before the first use it checks this layout against storages with
known owners; if the layout differs, every storage that cannot be resized counts as held.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass

import numpy as np
import torch

from gradd import private
from gradd.memory.watch import address, data_ptr, untyped_storage, uses

_ADDRESS, _DELETER, _CONTEXT = 2, 3, 4  # words of a storage
_OWNER, _CALLS = 1, slice(3, 5)  # words of the context: the owner, the function's code


def _words(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * count).from_address(address))


def _storage(tensor: torch.Tensor) -> tuple[int, ...]:
    return _words(address(tensor), _CONTEXT + 1)


@dataclass(frozen=True)
class _Layout:
    """The meaning of the words in this version of torch."""

    deleter: int  # of memory with a context of its own, in which the owner is
    calls: frozenset[tuple[int, ...]]  # the code of contexts whose owner is an object of Python


@functools.cache
def _layout() -> _Layout | None:
    """None if the words differ from this module's expectations."""
    array, buffer = np.ones(1, np.uint8), bytearray(1)
    probes = [
        (array, torch.from_numpy(array)),
        (buffer, torch.frombuffer(buffer, dtype=torch.uint8)),
    ]
    deleters, calls = set(), set()
    for owner, tensor in probes:
        words = _storage(tensor)
        if words[_ADDRESS] != data_ptr(tensor):
            return None
        context = _words(words[_CONTEXT], _CALLS.stop)
        if context[0] != words[_ADDRESS] or context[_OWNER] != id(owner):
            return None
        deleters.add(words[_DELETER])
        calls.add(context[_CALLS])
    plain = _storage(torch.empty(1, device="cpu"))
    if len(deleters) != 1 or plain[_DELETER] in deleters or plain[_ADDRESS] != plain[_CONTEXT]:
        return None
    return _Layout(deleters.pop(), frozenset(calls))


def others(tensor: torch.Tensor) -> int:
    """How many hold the memory of a dense tensor beside this one; 0 if it is alone.

    `is_shared()` is True of every tensor of CUDA, whether another process has it or not.
    """
    found = (
        uses(tensor)
        - _uses_when_alone()
        + (tensor.is_cpu and tensor.is_shared())
        + is_foreign(tensor)
    )
    return found if tensor.requires_grad else found + _handles(tensor)


def _handles(tensor: torch.Tensor) -> int:
    """How many hold the tensor itself out of Python's sight, as an export by DLPack does.

    Its memory must not move: they have an address. A graph of autograd that has saved the tensor
    counts as well, which costs a copy for as long as it lives; DLPack refuses what requires a
    gradient, so that only other tensors are asked.
    """
    return private.tensor_users(tensor) - 1


@functools.cache
def _uses_when_alone() -> int:
    return uses(torch.empty(1, device="cpu"))


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether code other than torch may read or write the memory of a dense CPU tensor."""
    if untyped_storage(tensor).resizable():
        return False
    layout = _layout()
    if layout is None:
        return True
    words = _storage(tensor)
    if words[_DELETER] != layout.deleter:
        return False
    context = _words(words[_CONTEXT], _CALLS.stop)
    if context[_CALLS] not in layout.calls:
        return True  # DLPack, or a library's own
    return _is_shared(context[_OWNER])


def _is_shared(address: int) -> bool:
    """Whether an owner, to which a storage holds one reference, may have other users."""
    references = _references(address)  # before this function has one, too
    owner = ctypes.cast(address, ctypes.py_object).value
    if isinstance(owner, np.ndarray | bytearray):
        based = getattr(owner, "base", None) is not None  # on memory of another object
        return based or references > _references_when_alone()
    return not memoryview(owner).readonly


def _references(address: int) -> int:
    return sys.getrefcount(ctypes.cast(address, ctypes.py_object).value)


@functools.cache
def _references_when_alone() -> int:
    """Of an array that only a storage holds."""
    tensor = torch.from_numpy(np.ones(1, np.uint8))
    return _references(_words(_storage(tensor)[_CONTEXT], _CALLS.stop)[_OWNER])
