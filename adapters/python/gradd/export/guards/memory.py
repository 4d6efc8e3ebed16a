"""Memory that C code reads: numpy arrays, buffers of the standard library, objects of ctypes.

Whatever supports the buffer protocol is compared by its bytes. An array that an attribute of
another one makes (`a.T`, a field of a record array) is new, and its memory is not.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from gradd.calls.watch import untyped_storage
from gradd.export.guards.images import is_a
from gradd.export.guards.spots import static

WATCHED = 1 << 16  # bytes that are compared at every call
# Attributes of an array that lead to its memory, and those that tell how it lies there.
EXPOSING = frozenset({"data", "ctypes", "__array_interface__", "__array_struct__"})
FORM = frozenset({"shape", "ndim", "size", "dtype", "itemsize", "nbytes", "strides", "flags"})
_CDATA = ctypes.c_int.__mro__[2]
_POINTERS = (ctypes._Pointer, ctypes._CFuncPtr, ctypes.py_object)
_BUFFERS = (bytearray, memoryview, array.array, mmap.mmap, pickle.PickleBuffer, _CDATA)
_OTHERS = (bytes, np.ndarray, np.generic, torch.Tensor)
_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_buffer(value: Any) -> bool:
    """True for objects of which every attribute shows the memory."""
    return is_a(value, (_CDATA, mmap.mmap, memoryview, pickle.PickleBuffer))


def is_memory(value: Any) -> bool:
    """True for what gives its memory to C code; a class of the user's does it in Python."""
    kind = type(value)
    known = _known.get(kind)
    if known is None:
        known = _known[kind] = _is_memory(kind, value)
    return known


def _is_memory(kind: type, value: Any) -> bool:
    if issubclass(kind, _OTHERS):
        return False
    if issubclass(kind, _BUFFERS):
        return True
    if is_a(static(kind, "__buffer__"), type(_is_memory)):
        return False
    return size_of(value) is not None


def size_of(value: Any) -> int | None:
    """Number of bytes, or None if they cannot be looked at."""
    if is_a(value, _POINTERS):
        return None
    try:
        with memoryview(value) as found:
            return found.nbytes
    except Exception:
        return None


def overlaps(value: Any, arrays: Iterable[np.ndarray]) -> bool:
    """True for an array in the memory of one of these."""
    return is_a(value, np.ndarray) and any(np.may_share_memory(value, a) for a in arrays)


def span(value: Any) -> tuple[int, int]:
    """Begin and end of the memory of a tensor, an array or a buffer; (0, 0) if it shows none."""
    try:
        if is_a(value, torch.Tensor):
            storage = untyped_storage(value)
            return (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        if not is_a(value, np.ndarray):
            value = np.frombuffer(value, np.uint8)
        return byte_bounds(value)
    except Exception:  # it has none, or its elements do not follow each other
        return (0, 0)


def shares(a: Any, b: Any) -> bool:
    """True if two of these have bytes in common."""
    (begin, end), (first, last) = span(a), span(b)
    return max(begin, first) < min(end, last)
