"""Where the tensors of a client live: memory of the host, or of one GPU.

A client asks nothing else what a device is. `HOST` makes sealed memfds (shm.py). A `Gpu` makes its
memory with the driver of CUDA (`cuMemCreate`), which both sides map: it is the client's, outlives
the daemon, and is known to the daemon by a descriptor. Of a driver, only documented functions of
libcuda are called, through ctypes.

A segment of either kind has what pools need: `id`, `size`, `start`, `room`, `address`, `reserved`,
`header`, `reserve()`, `close()`; `view[a:b]`, an object that keeps these bytes; and `make(view,
dtype, count)`, a tensor over them, which keeps that object.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from gradd import errors
from gradd.memory import unused
from gradd.memory.shm import Header, Segment, available_bytes, round_up


class DeviceError(errors.UnsupportedError):
    """Parameters or inputs are where the daemon cannot reach them."""

    reason = "device"


_PINNED = _DESCRIPTOR = _DEVICE = 1  # of CU_MEM_ALLOCATION_TYPE, HANDLE_TYPE, LOCATION_TYPE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_U64, _SIZE, _INT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_BYTE = ctypes.c_ubyte


class Host:
    """Memory of this machine's host.

    Attributes:
        device: Of its tensors.
        uuid: What the driver calls the device; "" = it has none. Within the user's directory, a
            GPU's daemon has the directory of this name.
        serve: What `gradd serve` needs to compute there: arguments.
        environment: The same: variables.
    """

    device = torch.device("cpu")
    uuid = ""
    serve: tuple[str, ...] = ()
    environment: ClassVar[dict[str, str]] = {}

    def segment(self, number: int, size: int, header: Header, in_pieces: bool = False) -> Segment:
        """A new segment; see Segment."""
        return Segment(number, size, header, in_pieces)

    def available(self) -> int:
        """Bytes that this machine has left."""
        return available_bytes()

    def give_back(self) -> int:
        """Returns memory that freed tensors have left behind; the bytes that torch had kept."""
        unused.trim()
        return 0

    def make_room(self) -> bool:
        """As give_back(); whether memory of the device has become free: the host has no cache."""
        return self.give_back() > 0

    def described(self, error: errors.OutOfMemoryError) -> errors.OutOfMemoryError:
        """The error, with what torch holds there: nothing."""
        return error

    def words(self) -> HostWords:
        """Those of a timeline."""
        return HostWords()

    def fill_with_nan(self, places: Sequence[tuple[int, int]]) -> None:
        """Nothing: what waits for results gets the error."""

    def settle(self) -> None:
        """Nothing: torch has done its work when it returns."""


HOST = Host()


class _Location(ctypes.Structure):
    _fields_ = (("type", _INT), ("id", _INT))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", _INT),
        ("handles", _INT),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", _INT))


class _Driver:
    """The functions of libcuda that are called here, each of which raises its error."""

    def __init__(self, library: str, device: int) -> None:
        """Raises: OSError (there is no such library), DeviceLostError."""
        self._library = ctypes.CDLL(library)
        self._context = ctypes.c_void_p()
        self._check("cuInit", _INT(0))
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), _INT(device))
        self._leaving: set[int] = set()  # addresses that are to be unmapped
        self._unneeded: queue.SimpleQueue[tuple[int, int] | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._unmap_all, name="gradd-unmap", daemon=True).start()

    def unmap(self, address: int, size: int) -> None:
        """Unmaps memory soon, when all work is done that the GPU has by now; safe in finalizers.

        A thread of its own waits: the work may wait for a daemon that has died, and what drops the
        memory may hold the lock that is needed to start the next one.
        """
        self._leaving.add(address)
        self._unneeded.put((address, size))

    def wait_for_unmapping(self) -> bool:
        """Waits until all that memory is free; whether there was any. Nothing may be pending."""
        if not self._leaving:
            return False
        free = threading.Event()
        self._unneeded.put(free)
        free.wait()
        return True

    def _unmap_all(self) -> None:
        while True:
            item = self._unneeded.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            address, size = item
            with contextlib.suppress(errors.GraddError):
                self.call("cuCtxSynchronize")  # work of torch's may still read it
                self.call("cuMemUnmap", _U64(address), _SIZE(size))
                self.call("cuMemAddressFree", _U64(address), _SIZE(size))
            self._leaving.discard(address)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function, in the device's context: threads may have another one, or none.

        Raises:
            OutOfMemoryError: The GPU has no memory for it.
            DeviceLostError: Any other failure.
        """
        before = ctypes.c_void_p()
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            self._check(name, *arguments)
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def _check(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if not error:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(_INT(error), ctypes.byref(text))
        kind = errors.OutOfMemoryError if error == _OUT_OF_MEMORY else errors.DeviceLostError
        raise kind(f"{name}: {(text.value or b'an unknown error').decode()} ({error})")


class _Mapping:
    """Memory of a GPU at an address of this process, until nothing refers to it."""

    def __init__(self, driver: _Driver, device: int, handle: _U64, size: int) -> None:
        at = _U64()
        self._driver, self.address, self.size = driver, 0, size
        self._mapped = False
        driver.call(
            "cuMemAddressReserve", ctypes.byref(at), _SIZE(size), _SIZE(0), _U64(0), _U64(0)
        )
        self.address = at.value
        try:
            driver.call("cuMemMap", at, _SIZE(size), _SIZE(0), handle, _U64(0))
            self._mapped = True
            access = _Access(_Location(_DEVICE, device), _READ_WRITE)
            driver.call("cuMemSetAccess", at, _SIZE(size), ctypes.byref(access), _SIZE(1))
        except BaseException:
            self.__del__()  # not when the error is gone, which may be kept
            raise

    def __del__(self) -> None:
        if self._mapped:
            self._driver.unmap(self.address, self.size)
        elif self.address:
            with contextlib.suppress(errors.GraddError):
                self._driver.call("cuMemAddressFree", _U64(self.address), _SIZE(self.size))
        self.address, self._mapped = 0, False


class _Bytes:
    """Some bytes of a mapping."""

    __slots__ = ("__weakref__", "address", "mapping", "size")

    def __init__(self, mapping: _Mapping, start: int, size: int) -> None:
        self.mapping = mapping
        self.address = mapping.address + start
        self.size = size


class _View:
    """`view[a:b]` of a segment."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping

    def __getitem__(self, part: slice) -> _Bytes:
        return _Bytes(self._mapping, part.start, part.stop - part.start)


class GpuSegment:
    """Memory that cuMemCreate has made, mapped here and known to the daemon by a descriptor.

    Attributes: those of Segment, and the `uuid` of its GPU.
    """

    is_host = False
    start = 0  # no header: the daemon reads none from a GPU

    def __init__(self, gpu: Gpu, number: int, size: int, header: Header) -> None:
        """Raises: OutOfMemoryError, DeviceLostError."""
        self.id = number
        self.header = header
        self.fd = -1
        self.uuid, self.device = gpu.uuid, gpu.device
        self.size = self.room = self.reserved = round_up(max(size, 1), gpu.grain)
        handle, fd = _U64(), _INT()
        where = ctypes.byref(gpu.properties)
        driver = gpu.driver
        driver.call("cuMemCreate", ctypes.byref(handle), _SIZE(self.size), where, _U64(0))
        try:
            out = ctypes.byref(fd)
            driver.call("cuMemExportToShareableHandle", out, handle, _INT(_DESCRIPTOR), _U64(0))
            self.fd = fd.value
            self._mapping: _Mapping | None = _Mapping(
                driver, gpu.properties.location.id, handle, self.size
            )
        except BaseException:
            self.close()
            raise
        finally:
            driver.call("cuMemRelease", handle)  # the mapping keeps the memory
        self.address = self._mapping.address
        self.view = _View(self._mapping)
        self.make: Callable[..., torch.Tensor] = gpu.tensor

    def reserve(self, end: int) -> None:
        """All of it has its memory from the beginning."""

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping; tensors on it stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping = None
        self.view = None  # type: ignore[assignment]


class HostWords:
    """Numbers of 64 bits in memory that the host and the daemon share.

    Attributes:
        segment: Their memory: a page of the host's.
    """

    READY, DONE, GROUPS = 0, 16, 32  # positions: in lines of the cache of their own

    def __init__(self) -> None:
        """Raises: NoSpaceError."""
        self.segment = Segment(0, 1)
        self._numbers = self.segment.view.cast("Q")

    def read(self, word: int) -> int:
        """Its value now."""
        return self._numbers[word]

    def write(self, word: int, value: int) -> None:
        """Writes it at once."""
        self._numbers[word] = value

    def write_in_turn(self, word: int, value: int) -> None:
        """The same: the host has done all before."""
        self.write(word, value)

    def wait_in_turn(self, word: int, value: int) -> None:
        """Nothing: the host waits where it reads what it waits for."""

    def close(self) -> None:
        """Nothing waits for it any more."""
        self._numbers.release()
        self.segment.close()


class Words(HostWords):
    """The same for a GPU, whose streams write them and wait for them."""

    def __init__(self, gpu: Gpu) -> None:
        """Raises: NoSpaceError, DeviceLostError (the driver cannot map memory of the host)."""
        super().__init__()
        self._gpu = gpu
        self._mapped = mmap.mmap(self.segment.fd, self.segment.size)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mapped)
        self._here, there = ctypes.c_void_p(ctypes.addressof(self._anchor)), _U64()
        size, driver = _SIZE(self.segment.size), gpu.driver
        try:
            driver.call("cuMemHostRegister_v2", self._here, size, _INT(_MAPPED))
            driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), self._here, _INT(0))
        except BaseException:
            self.close()
            raise
        self._address = there.value

    def write_in_turn(self, word: int, value: int) -> None:
        """torch's current stream writes it when it has done all before."""
        self._give("cuStreamWriteValue64_v2", word, value, 0)

    def wait_in_turn(self, word: int, value: int) -> None:
        """torch's current stream waits until it has at least this value; the host does not."""
        self._give("cuStreamWaitValue64_v2", word, value, _AT_LEAST)

    def _give(self, call: str, word: int, value: int, flags: int) -> None:
        at = _U64(self._address + 8 * word)
        self._gpu.driver.call(call, self._gpu.stream(), at, _U64(value), _INT(flags))

    def close(self) -> None:
        """No stream waits for it any more."""
        with contextlib.suppress(errors.GraddError):
            self._gpu.driver.call("cuMemHostUnregister", self._here)
        super().close()
        self._anchor = None
        self._mapped.close()


class Gpu:
    """Memory of one GPU.

    Attributes:
        device, uuid, serve, environment: As for Host.
        driver: Its functions.
        grain: Bytes of which a segment's size is a multiple.
        properties: Of its memory, for cuMemCreate.
    """

    def __init__(
        self,
        device: torch.device,
        library: str,
        tensor: Callable[..., torch.Tensor],
        stream: Callable[[], int],
    ) -> None:
        """Args:
            device: With its number.
            library: The driver's.
            tensor: Makes a tensor: address, owner, elements, dtype, device.
            stream: The driver's handle of torch's current stream.

        Raises:
            OSError: There is no such library.
            DeviceLostError: The driver does not know the device.
        """
        self.device = device
        self.driver = _Driver(library, device.index)
        self._make, self._stream = tensor, stream
        number = device.index
        self.properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_DEVICE, number), None)
        grain, uuid = _SIZE(), (ctypes.c_ubyte * 16)()
        self.driver.call("cuDeviceGetUuid_v2", uuid, _INT(number))
        where = ctypes.byref(self.properties)
        self.driver.call("cuMemGetAllocationGranularity", ctypes.byref(grain), where, _INT(0))
        self.grain = grain.value
        text = bytes(uuid).hex()
        self.uuid = "-".join(("GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        self.serve = ("--device", device.type, "--require-device")
        self.environment = {"CUDA_VISIBLE_DEVICES": self.uuid}

    def segment(
        self, number: int, size: int, header: Header, in_pieces: bool = False
    ) -> GpuSegment:
        """A new segment. Its memory cannot be reserved in pieces."""
        return GpuSegment(self, number, size, header)

    def tensor(self, owner: _Bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor over these bytes, which keeps them."""
        return self._make(owner.address, owner, count, dtype, self.device)

    def available(self) -> int:
        """Bytes that the GPU has left."""
        free, total = _SIZE(), _SIZE()
        self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def _held(self) -> int:
        """Bytes that torch holds there in this process, for tensors or for later ones."""
        return torch.get_device_module(self.device).memory_reserved(self.device)

    def give_back(self) -> int:
        """Returns memory that torch keeps for later tensors; its bytes."""
        before = self._held()
        torch.get_device_module(self.device).empty_cache()
        return before - self._held()

    def make_room(self) -> bool:
        """The same, and memory of segments that are gone; whether any has become free.

        Nothing may be pending.
        """
        return self.driver.wait_for_unmapping() + self.give_back() > 0

    def described(self, error: errors.OutOfMemoryError) -> errors.OutOfMemoryError:
        """The error, and how much of the GPU's memory torch holds in this process."""
        what = f"{error.what}; PyTorch holds {self._held() >> 20} MiB there in this process"
        return errors.OutOfMemoryError(what, error.session)

    def words(self) -> Words:
        """Those of a timeline. Raises: NoSpaceError, DeviceLostError."""
        return Words(self)

    def settle(self) -> None:
        """Waits until the work of torch's current stream is done."""
        self.driver.call("cuStreamSynchronize", self.stream())

    def stream(self) -> ctypes.c_void_p:
        """torch's current stream."""
        return ctypes.c_void_p(self._stream())

    def fill_with_nan(self, places: Sequence[tuple[int, int]]) -> None:
        """Fills memory with ones: NaN in all types of floats. Waits for that alone.

        Args:
            places: Addresses, and bytes.
        """
        stream = ctypes.c_void_p()
        self.driver.call("cuStreamCreate", ctypes.byref(stream), _INT(_NON_BLOCKING))
        try:
            for address, size in places:
                self.driver.call("cuMemsetD8Async", _U64(address), _BYTE(255), _SIZE(size), stream)
            self.driver.call("cuStreamSynchronize", stream)
        finally:
            self.driver.call("cuStreamDestroy_v2", stream)


class _Interface:
    """An address for torch, by the protocol `__cuda_array_interface__`, version 3."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _cuda_tensor(
    address: int, owner: object, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """set_() gives type and shape without a view, which would share a version counter."""
    size = count * dtype.itemsize
    raw = torch.as_tensor(_Interface(address, size, owner), device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(raw.untyped_storage(), 0, (count,))


def _cuda(device: torch.device) -> Gpu:
    def stream() -> int:
        return torch.cuda.current_stream(device).cuda_stream

    torch.cuda.init()  # makes the context in which the driver is called
    return Gpu(device, "libcuda.so.1", _cuda_tensor, stream)


_kinds: dict[str, Callable[[torch.device], Gpu]] = {"cuda": _cuda}


def register(kind: str, make: Callable[[torch.device], Gpu]) -> None:
    """Adds a type of device, for tests without a GPU."""
    _kinds[kind] = make


def is_known(device: torch.device) -> bool:
    """Whether the daemon may compute on a device of this type."""
    return device.type == "cpu" or device.type in _kinds


def types() -> list[str]:
    """The types of devices that the daemon may compute on."""
    return ["cpu", *_kinds]


@functools.cache
def of(device: torch.device) -> Host | Gpu:
    """The memory of a device.

    Raises:
        DeviceError: The daemon cannot share memory of such a device.
        DeviceLostError: Its driver fails.
    """
    if device.type == "cpu":
        return HOST
    make = _kinds.get(device.type)
    if make is None:
        raise DeviceError(f"gradd does not compute on devices of type {device.type}")
    try:
        return make(device)
    except OSError as error:
        raise DeviceError(f"{device}: there is no driver of CUDA ({error})") from None
