"""libgradd_train through ctypes: its structures, and one way to call it.

The structures are those of train/gradd_train.h, field by field.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

MAX_RANK = 8
MOMENTS = 2
FILE = "libgradd_train.so"


class TrainError(RuntimeError):
    """A call of the library failed.

    Attributes:
        code: The kind of failure: "TENSOR", "MODEL", "IO", "NOMEM", "UNSUPPORTED", ...
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Type(Structure):
    """gradd_type_t: element type and shape."""

    _fields_ = [("dtype", c_int), ("rank", c_int), ("dims", c_int64 * MAX_RANK)]


class Parameter(Structure):
    """gradd_train_parameter_t."""

    _fields_ = [
        ("name", c_char_p),
        ("type", Type),
        ("data", c_void_p),
        ("trainable", c_bool),
        ("gradient", c_void_p),
        ("moments", c_void_p * MOMENTS),
        ("steps", c_int64),
    ]


class Property(Structure):
    """gradd_train_property_t."""

    _fields_ = [
        ("name", c_char_p),
        ("kind", c_int),
        ("integer", c_int64),
        ("real", c_float),
        ("text", c_char_p),
    ]


class Model(Structure):
    """gradd_train_model_t."""

    _fields_ = [("bytes", c_void_p), ("n", c_size_t), ("path", c_char_p)]


class Lasting(Structure):
    """gradd_train_lasting_t."""

    _fields_ = [("checkpoint", c_char_p), ("commit_every", c_int64), ("commit_ms", c_int64)]


class Progress(Structure):
    """gradd_train_progress_t."""

    _fields_ = [
        ("step", c_int64),
        ("learning_rate", c_float),
        ("initial_learning_rate", c_float),
        ("position", c_int64),
    ]


class OptimizerConstants(Structure):
    """gradd_train_optimizer_t."""

    _fields_ = [
        ("kind", c_int),
        ("mode", c_int),
        ("bias_correction", c_bool),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("momentum", c_double),
        ("weight_decay", c_double),
        ("max_norm", c_double),
    ]


class Options(Structure):
    """gradd_train_options_t."""

    _fields_ = [
        ("training", Model),
        ("eval", Model),
        ("optimizer", OptimizerConstants),
        ("threads", c_int),
        ("max_plans", c_int),
        ("memory_budget", c_int64),
        ("seed", c_uint64),
    ]


class Tensor(Structure):
    """gradd_train_tensor_t."""

    _fields_ = [("type", Type), ("data", c_void_p)]


class Memory(Structure):
    """gradd_train_memory_t."""

    _fields_ = [
        ("parameters", c_int64),
        ("gradients", c_int64),
        ("moments", c_int64),
        ("arena", c_int64),
        ("constants", c_int64),
        ("buffers", c_int64),
        ("plans", c_int),
    ]


MEMORY = [name for name, _ in Memory._fields_]
_P = c_void_p
# Function, what it returns (STATUS: a failure becomes a TrainError), what it takes.
STATUS = "status"
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "state_create": (STATUS, (POINTER(_P),)),
    "state_destroy": (None, (_P,)),
    "state_load": (STATUS, (c_char_p, POINTER(_P))),
    "open_state": (STATUS, (c_char_p, POINTER(Lasting), POINTER(_P))),
    "commit": (STATUS, (_P,)),
    "state_progress": (Progress, (_P,)),
    "state_set_position": (None, (_P, c_int64)),
    "state_save": (STATUS, (_P, c_char_p, c_bool)),
    "state_add": (STATUS, (_P, c_char_p, POINTER(Type), c_char_p, c_bool)),
    "state_count": (c_int, (_P,)),
    "state_find": (c_int, (_P, c_char_p)),
    "state_parameter": (Parameter, (_P, c_int)),
    "state_write": (STATUS, (_P, c_int, POINTER(Type), _P)),
    "state_set_property": (STATUS, (_P, POINTER(Property))),
    "state_property_count": (c_int, (_P,)),
    "state_find_property": (c_int, (_P, c_char_p)),
    "state_property": (Property, (_P, c_int)),
    "open": (STATUS, (_P, POINTER(Options), POINTER(_P))),
    "close": (None, (_P,)),
    "set_optimizer": (STATUS, (_P, POINTER(OptimizerConstants))),
    "optimizer_load": (STATUS, (POINTER(Model), POINTER(OptimizerConstants))),
    "input_count": (c_int, (_P, c_int)),
    "output_count": (c_int, (_P, c_int)),
    "input_name": (c_char_p, (_P, c_int, c_int)),
    "output_name": (c_char_p, (_P, c_int, c_int)),
    "step": (STATUS, (_P, POINTER(Tensor), c_int, POINTER(Tensor), POINTER(c_int))),
    "eval_step": (STATUS, (_P, POINTER(Tensor), c_int, POINTER(Tensor), POINTER(c_int))),
    "prepare": (STATUS, (_P, c_int, POINTER(Tensor), c_int)),
    "input_type": (Type, (_P, c_int, c_int)),
    "lazy_reset_grad": (None, (_P,)),
    "optimizer_step": (STATUS, (_P, POINTER(c_double))),
    "learning_rate": (c_float, (_P,)),
    "set_learning_rate": (STATUS, (_P, c_float)),
    "set_linear_schedule": (STATUS, (_P, c_int64, c_int64, c_float)),
    "schedule_step": (STATUS, (_P,)),
    "set_seed": (None, (_P, c_uint64)),
    "freeze": (STATUS, (_P, c_char_p, POINTER(c_int))),
    "thaw": (STATUS, (_P, c_char_p, POINTER(c_int))),
    "contiguous_count": (STATUS, (_P, c_bool, POINTER(c_int64))),
    "copy_out": (STATUS, (_P, c_bool, _P, c_int64)),
    "copy_in": (STATUS, (_P, c_bool, _P, c_int64)),
    "memory": (Memory, (_P,)),
    "export": (STATUS, (_P, c_char_p, POINTER(c_char_p), c_int)),
}


def candidates() -> list[Path]:
    """Where the library may be: in the package, or built in the source tree."""
    here = Path(__file__).resolve().parent
    build = here.parents[3] / "build"
    return [here / "_native" / FILE, build / "lib" / FILE, build / "train" / "native" / FILE]


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        ImportError: It is not there.
    """
    if sys.byteorder != "little":
        raise ImportError("gradd.train: this machine is big-endian")
    path = next((p for p in candidates() if p.exists()), None)
    if path is None:
        raise ImportError(f"gradd.train: no {FILE}; in a source tree `make` builds it")
    made = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(made, f"gradd_train_{name}")
        function.argtypes = arguments
        function.restype = c_int32 if result is STATUS else result
    made.gradd_error_message.restype = c_char_p
    made.gradd_status_name.restype = c_char_p
    made.gradd_status_name.argtypes = [c_int32]
    return made


@functools.cache
def _function(name: str) -> tuple[Any, bool]:
    """A function, and whether it returns a status."""
    return getattr(library(), f"gradd_train_{name}"), _FUNCTIONS[name][0] is STATUS


def call(name: str, *arguments: Any) -> Any:
    """Calls gradd_train_`name`.

    Returns:
        What it returns, None for a status.

    Raises:
        TrainError: It failed.
    """
    function, gives_status = _function(name)
    result = function(*arguments)
    if not gives_status:
        return result
    if result != 0:
        made = library()
        code = made.gradd_status_name(result).decode()
        raise TrainError(code, made.gradd_error_message().decode(errors="replace"))
    return None


def create(name: str, *arguments: Any) -> c_void_p:
    """Calls a function that makes an object, its last argument; returns the object."""
    made = c_void_p()
    call(name, *arguments, byref(made))
    return made
