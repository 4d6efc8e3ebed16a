"""The driver of CUDA, called through ctypes: only documented functions of libcuda."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Sequence
from typing import Any

from gradd import errors

DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NO_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
U64, SIZE, INT, BYTE = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_ubyte

Call = tuple[Any, ...]  # the name of a function, and its arguments
_Item = tuple[int, Sequence[Call], object]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", INT), ("id", INT))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", INT),
        ("handles", INT),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", BYTE * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", INT))


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", BYTE * 64),)


class Driver:
    """The functions of libcuda, each of which raises its error, in the context of one device.

    Attributes:
        context: Of the device, that which torch has as well.
        properties: Of the device's memory, for cuMemCreate.
    """

    def __init__(self, library: str, device: int) -> None:
        """Raises: OSError (there is no such library), DeviceLostError."""
        self._library = ctypes.CDLL(library)
        self.context = ctypes.c_void_p()
        self._check("cuInit", INT(0))
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), INT(device))
        self.properties = Properties(_PINNED, DESCRIPTOR, Location(DEVICE, device), None)
        self._leaving: set[int] = set()  # addresses of memory that is going to end
        self._unneeded: queue.SimpleQueue[_Item | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._end_all, name="gradd-unmap", daemon=True).start()

    def end(self, address: int, calls: Sequence[Call], kept: object = None) -> None:
        """Ends memory soon, when all work is done that the GPU has by now; safe in finalizers.

        A thread of its own waits: the work may wait for a daemon that has died, and what drops the
        memory may hold the lock that is needed to start the next one.

        Args:
            address: Of the memory.
            calls: What ends it.
            kept: Is let go after that.
        """
        self._leaving.add(address)
        self._unneeded.put((address, calls, kept))

    def wait_for_ends(self) -> bool:
        """Waits until all that memory is free; whether there was any. Nothing may be pending."""
        if not self._leaving:
            return False
        free = threading.Event()
        self._unneeded.put(free)
        free.wait()
        return True

    def _end_all(self) -> None:
        while True:
            item = self._unneeded.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._end(*item)
            del item  # before the next one comes

    def _end(self, address: int, calls: Sequence[Call], _kept: object) -> None:
        with contextlib.suppress(errors.GraddError):
            self.call("cuCtxSynchronize")  # work of torch's may still read it
            for name, *arguments in calls:
                self.call(name, *arguments)
        self._leaving.discard(address)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function, in the device's context: threads may have another one, or none.

        Raises:
            OutOfMemoryError: The GPU has no memory for it.
            DeviceLostError: Any other failure.
        """
        before = ctypes.c_void_p()
        self._check("cuCtxPushCurrent_v2", self.context)
        try:
            self._check(name, *arguments)
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def _check(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise errors.DeviceLostError(f"{name}: this driver has no such function") from None
        error = function(*arguments)
        if not error:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(INT(error), ctypes.byref(text))
        kind = errors.OutOfMemoryError if error == _OUT_OF_MEMORY else errors.DeviceLostError
        raise kind(f"{name}: {(text.value or b'an unknown error').decode()} ({error})")
