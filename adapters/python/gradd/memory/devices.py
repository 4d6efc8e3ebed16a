"""Where the tensors of a client live: memory of the host, or of one GPU.

A client asks nothing else what a device is. `HOST` makes sealed memfds (shm.py). A `Gpu` makes
memory that its driver and the daemon's share (gpu_segments.py): it is the client's, and outlives
the daemon.

A segment of either kind has what pools need: `id`, `size`, `start`, `room`, `address`, `reserved`,
`header`, `reserve()`, `close()`; `view[a:b]`, an object that keeps these bytes; and `make(view,
dtype, count)`, a tensor over them, which keeps that object.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from gradd import errors, options
from gradd.memory import driver, unused
from gradd.memory.driver import BYTE, INT, SIZE, U64, Driver
from gradd.memory.gpu_segments import GpuSegment
from gradd.memory.shm import Header, Segment, available_bytes


class DeviceError(errors.UnsupportedError):
    """Parameters or inputs are where the daemon cannot reach them."""

    reason = "device"


class Host:
    """Memory of this machine's host.

    Attributes:
        device: Of its tensors.
        uuid: What the driver calls the device; "" = it has none. Within the user's directory, a
            GPU's daemon has the directory of this name.
        serve: What `gradd serve` needs to compute there: arguments.
        environment: The same: variables.
        moves: Whether parameters move into segments, and results stay there.
    """

    device = torch.device("cpu")
    uuid = ""
    serve: tuple[str, ...] = ()
    environment: ClassVar[dict[str, str]] = {}
    moves = True

    def lock(self) -> Any:
        """A new lock for a client."""
        return threading.RLock()

    def segment(self, number: int, size: int, header: Header, in_pieces: bool = False) -> Segment:
        """A new segment; see Segment."""
        return Segment(number, size, header, in_pieces)

    def available(self) -> int:
        """Bytes that this machine has left."""
        return available_bytes()

    def taken(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors over segments that are there now, as the user gets them."""
        return results

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
        return HostWords()

    def fill_with_nan(self, places: Sequence[tuple[int, int]]) -> None:
        """Nothing: what waits for results gets the error."""

    def settle(self) -> None:
        """Nothing: torch has done its work when it returns."""

    def go_on_behind_all(self) -> None:
        """The same: nothing reads memory any more whose tensors are gone."""


HOST = Host()


class HostWords:
    """Numbers of 64 bits in memory that the host and the daemon share."""

    READY, DONE, GROUPS = 0, 16, 32  # positions: in lines of the cache of their own

    def __init__(self) -> None:
        """Raises: NoSpaceError."""
        self.segment = Segment(0, 1)  # their memory: a page of the host's
        self._numbers = self.segment.view.cast("Q")

    def read(self, word: int) -> int:
        return self._numbers[word]

    def write(self, word: int, value: int) -> None:
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
        self._here, there = ctypes.c_void_p(ctypes.addressof(self._anchor)), U64()
        size, call = SIZE(self.segment.size), gpu.driver.call
        try:
            call("cuMemHostRegister_v2", self._here, size, INT(driver.MAPPED))
            call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), self._here, INT(0))
        except BaseException:
            self.close()
            raise
        self._address = there.value

    def write_in_turn(self, word: int, value: int) -> None:
        """torch's current stream writes it when it has done all before."""
        self._give("cuStreamWriteValue64_v2", word, value, 0)

    def wait_in_turn(self, word: int, value: int) -> None:
        """torch's current stream waits until it has at least this value; the host does not."""
        self._give("cuStreamWaitValue64_v2", word, value, driver.AT_LEAST)

    def _give(self, call: str, word: int, value: int, flags: int) -> None:
        at = U64(self._address + 8 * word)
        self._gpu.driver.call(call, self._gpu.stream(), at, U64(value), INT(flags))

    def close(self) -> None:
        """No stream waits for it any more."""
        with contextlib.suppress(errors.GraddError):
            self._gpu.driver.call("cuMemHostUnregister", self._here)
        super().close()
        self._anchor = None
        self._mapped.close()


class Lock:
    """The lock of a client of a GPU, which keeps its requests in order among streams of torch too.

    A block that is given back is used again by the next call, and turns rise from call to call. So
    whichever call gets the lock has torch's current stream go on behind all that the stream of the
    call before it was given.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._lock, self._gpu = threading.RLock(), gpu
        self._depth = 0  # how often the thread that has it has acquired it
        self._stream: int | None = None  # of the last call

    def acquire(self, timeout: float = -1) -> bool:
        """As that of RLock, for what gives no work to a stream."""
        found = self._lock.acquire(timeout=timeout)
        self._depth += found
        return found

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()
        if self._depth > 1:
            return
        before, self._stream = self._stream, self._gpu.stream().value or 0
        try:
            if before not in (None, self._stream):
                self._gpu.go_on_behind(before)
        except BaseException:
            self.release()
            raise

    def __exit__(self, *_error: object) -> None:
        self.release()


class Gpu:
    """Memory of one GPU.

    Attributes:
        device, uuid, serve, environment: As for Host.
        driver: Its functions.
        way: The kind of its segments, once it is known (session/sharing.py).
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
        self.driver = Driver(library, device.index)
        self.way: type[GpuSegment] | None = None
        self._make, self._stream = tensor, stream
        uuid = (BYTE * 16)()
        self.driver.call("cuDeviceGetUuid_v2", uuid, INT(device.index))
        text = bytes(uuid).hex()
        self.uuid = "-".join(("GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        self.serve = ("--device", device.type, "--require-device")
        self.environment = {"CUDA_VISIBLE_DEVICES": self.uuid}

    def lock(self) -> Lock:
        """As for Host."""
        return Lock(self)

    def segment(
        self, number: int, size: int, header: Header, in_pieces: bool = False
    ) -> GpuSegment:
        """A new segment, once the way is known. Its memory cannot be reserved in pieces."""
        return self.way(self, number, size, header)  # type: ignore[misc]

    @property
    def moves(self) -> bool:
        """As for Host; before the way is known, True."""
        return self.way is None or self.way.moves

    def taken(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """As for Host: copies, made in the order of torch's current stream, of pinned memory."""
        return results if self.moves else [t.clone() for t in results]

    def tensor(self, owner: Any, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor over some bytes of a segment's view, which keeps them."""
        return self._make(owner.address, owner, count, dtype, self.device)

    def available(self) -> int:
        """Bytes that the GPU has left."""
        free, total = SIZE(), SIZE()
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
        return self.driver.wait_for_ends() + self.give_back() > 0

    def described(self, error: errors.OutOfMemoryError) -> errors.OutOfMemoryError:
        """The error, and how much of the GPU's memory torch holds in this process."""
        what = f"{error.what}; PyTorch holds {self._held() >> 20} MiB there in this process"
        return errors.OutOfMemoryError(what, error.session)

    def words(self) -> Words:
        """Raises: NoSpaceError, DeviceLostError."""
        return Words(self)

    def settle(self) -> None:
        """Waits until the work of torch's current stream is done."""
        self.driver.call("cuStreamSynchronize", self.stream())

    def stream(self) -> ctypes.c_void_p:
        """torch's current stream."""
        return ctypes.c_void_p(self._stream())

    def go_on_behind(self, stream: int) -> None:
        """torch's current stream waits for what another one has been given; the host does not."""
        with self._waiting() as event:
            self.driver.call("cuEventRecord", event, ctypes.c_void_p(stream))

    def go_on_behind_all(self) -> None:
        """The same for all streams of this process, as long as results lie in segments.

        torch does not tell which stream was named to `record_stream()` for memory that it has not
        allocated, nor which streams there are; the driver knows those of other libraries as well.
        """
        if self.moves:
            with self._waiting() as event:
                self.driver.call("cuCtxRecordEvent", self.driver.context, event)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[ctypes.c_void_p]:
        """An event to record in this context; torch's current stream waits for it then."""
        event, call = ctypes.c_void_p(), self.driver.call
        call("cuEventCreate", ctypes.byref(event), INT(driver.NO_TIMES))
        try:
            yield event
            call("cuStreamWaitEvent", self.stream(), event, INT(0))
        finally:
            call("cuEventDestroy_v2", event)

    def fill_with_nan(self, places: Sequence[tuple[int, int]]) -> None:
        """Fills memory with ones: NaN in all types of floats. Waits for that alone.

        Args:
            places: Addresses, and bytes.
        """
        stream = ctypes.c_void_p()
        self.driver.call("cuStreamCreate", ctypes.byref(stream), INT(driver.NON_BLOCKING))
        try:
            for address, size in places:
                self.driver.call("cuMemsetD8Async", U64(address), BYTE(255), SIZE(size), stream)
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
    made = Gpu(device, "libcuda.so.1", _cuda_tensor, stream)
    made.environment |= _nccl_of_torch()
    return made


def _nccl_of_torch() -> dict[str, str]:
    """Where the daemon finds the NCCL that torch's wheel has brought, unless it is told."""
    spec = importlib.util.find_spec("nvidia")
    if options.get("GRADD_NCCL") is not None or spec is None:
        return {}
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.exists():
            return {"GRADD_NCCL": str(path)}
    return {}


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
