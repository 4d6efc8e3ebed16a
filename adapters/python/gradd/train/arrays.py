"""Arrays of numpy as tensors of the library, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradd.train.library import MAX_RANK, Tensor, TrainError, Type

# ONNX's codes of element types, which are the library's.
CODES = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    4: np.uint16,
    5: np.int16,
    6: np.int32,
    7: np.int64,
    9: np.bool_,
    10: np.float16,
    11: np.float64,
    12: np.uint32,
    13: np.uint64,
}
BF16 = 16
_OF_DTYPE = {np.dtype(kind): code for code, kind in CODES.items()}


def _bf16() -> Any:
    """numpy's bf16, which the package ml_dtypes adds; None without it."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def dtype_of(code: int) -> np.dtype:
    """The numpy type of a code.

    Raises:
        TypeError: numpy has none.
    """
    if code in CODES:
        return np.dtype(CODES[code])
    if code == BF16 and _bf16() is not None:
        return _bf16()
    raise TypeError(
        f"numpy has no element type for ONNX's {code}; bf16 needs the package ml_dtypes"
    )


def code_of(array: np.ndarray, what: str) -> int:
    """The code of an array's type.

    Raises:
        TypeError: Tensors have no such type; names `what`.
    """
    code = _OF_DTYPE.get(array.dtype)
    if code is None and array.dtype.name == "bfloat16":
        code = BF16
    if code is None:
        raise TypeError(f"{what} has the element type {array.dtype}, which no tensor can have")
    return code


def make_type(code: int, shape: tuple[int, ...] | None, what: str) -> Type:
    """A type of the library; without a shape the rank is -1.

    Raises:
        TrainError: The shape has too many axes; names `what`.
    """
    if shape is None:
        return Type(code, -1)
    if len(shape) > MAX_RANK:
        raise TrainError("LIMIT", f"{what} has {len(shape)} axes, at most {MAX_RANK}")
    return Type(code, len(shape), (ctypes.c_int64 * MAX_RANK)(*shape))


def shape_of(kind: Type) -> tuple[int, ...]:
    """The shape of a type."""
    return tuple(kind.dims[: kind.rank])


def is_ortvalue(value: Any) -> bool:
    """Whether it is an OrtValue of onnxruntime (which is not imported for that)."""
    return hasattr(value, "numpy") and type(value).__name__ in ("OrtValue", "Buffer")


def to_array(value: Any, what: str) -> np.ndarray:
    """A contiguous array in native byte order of an array, a tensor of torch on the CPU, a number
    or an OrtValue.

    Raises:
        TypeError: It is something else; names `what`.
    """
    array = value.numpy() if is_ortvalue(value) else value
    if hasattr(array, "detach"):
        array = array.detach()  # numpy does not read a tensor with a gradient
    if isinstance(array, (bool, int, float, np.generic, list)) or hasattr(array, "__array__"):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{what} is no array on the CPU: {error}") from None
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} is a {type(value).__name__}, expected an array or an OrtValue")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes an axis where none is


def read_numbers(array: np.ndarray, code: int, what: str) -> np.ndarray:
    """The numbers that the strings of an array are.

    Raises:
        TypeError: One is no number of the type that the code says; names `what`.
    """
    try:
        return array.astype(dtype_of(code))
    except ValueError as error:
        raise TypeError(f"{what} has a string that is no {dtype_of(code)}: {error}") from None


def to_tensor(array: np.ndarray, what: str) -> Tensor:
    """A tensor on the array's memory, which must outlive it."""
    return Tensor(make_type(code_of(array, what), array.shape, what), array.ctypes.data)


def copy_values(kind: Type, data: int | None) -> np.ndarray:
    """A new array with values that lie at an address."""
    made = np.empty(shape_of(kind), dtype_of(kind.dtype))
    if made.nbytes:
        ctypes.memmove(made.ctypes.data, data, made.nbytes)
    return made


class Ready:
    """The library's structures for a call, which serve for others with arrays like those.

    Attributes:
        inputs: The tensors.
        outputs: Room for those of the results.

    Args:
        held: The inputs, of native byte order and contiguous; they must outlive the call.
        whats: What they are called in messages.
        n_outputs: How many results there are.

    Raises:
        TypeError: Tensors have no such type.
        TrainError: An input has too many axes.
    """

    def __init__(self, held: list[np.ndarray], whats: list[str], n_outputs: int) -> None:
        tensors = [to_tensor(array, what) for array, what in zip(held, whats)]
        self.inputs = (Tensor * max(len(held), 1))(*tensors)
        self.outputs = (Tensor * max(n_outputs, 1))()
        self._kinds = [(array.dtype, array.shape) for array in held]
        self._tensors = [self.inputs[i] for i in range(len(held))]  # the same memory
        self._made = [self.outputs[i] for i in range(n_outputs)]
        self._results: list[tuple[tuple[int, ...], np.dtype, int]] = []

    def takes(self, values: Sequence[Any]) -> bool:
        """Makes the tensors those of other inputs; false, if they are not just like the first."""
        if len(values) != len(self._kinds):
            return False
        for value, (dtype, shape) in zip(values, self._kinds):
            if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                return False
            if not value.flags.c_contiguous:
                return False
        for value, tensor in zip(values, self._tensors):
            tensor.data = value.ctypes.data
        return True

    def results(self) -> list[np.ndarray]:
        """Copies of what the call has put into `outputs`."""
        if not self._results:  # of types that follow from those of the inputs
            made = [copy_values(t.type, t.data) for t in self._made]
            self._results = [(array.shape, array.dtype, array.nbytes) for array in made]
            return made
        copies = []
        for tensor, (shape, dtype, nbytes) in zip(self._made, self._results):
            copies.append(np.empty(shape, dtype))
            if nbytes:
                ctypes.memmove(copies[-1].ctypes.data, tensor.data, nbytes)
        return copies


class Buffer:
    """Values that belong together, with the methods of onnxruntime's OrtValue.

    Args:
        array: The values, which are not copied.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        """The values."""
        return self._array

    def shape(self) -> list[int]:
        """Their shape."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """Their type as onnxruntime names it."""
        return "tensor(float)"

    def element_type(self) -> int:
        """Their type as ONNX numbers it."""
        return code_of(self._array, "the buffer")

    def data_ptr(self) -> int:
        """Their address."""
        return self._array.ctypes.data

    def device_name(self) -> str:
        """Where they are."""
        return "cpu"

    def is_tensor(self) -> bool:
        """True."""
        return True

    def has_value(self) -> bool:
        """True."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=bool(copy))
