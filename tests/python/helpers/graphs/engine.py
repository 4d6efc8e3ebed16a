"""ctypes face of gradd.h: the engine in process, without daemon and protocol.

Tests use it to check plans and gradients of a captured graph directly, so that a failure is the
engine's own and not the transport's. Arrays are numpy, contiguous.
"""

from __future__ import annotations

import atexit
import ctypes as C
import functools

import ml_dtypes
import numpy as np

from helpers import BUILD

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
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
}
DTYPES[16] = BF16
CODES = {np.dtype(v): k for k, v in DTYPES.items()}


class Type(C.Structure):
    _fields_ = [("dtype", C.c_int), ("rank", C.c_int), ("dims", C.c_int64 * 8)]

    @classmethod
    def of(cls, array: np.ndarray) -> Type:
        return cls(CODES[array.dtype], array.ndim, (C.c_int64 * 8)(*array.shape))

    def empty(self) -> np.ndarray:
        return np.full(tuple(self.dims[: self.rank]), 77, DTYPES[self.dtype])


class Options(C.Structure):
    _fields_ = [
        ("inputs", C.POINTER(Type)),
        ("n_inputs", C.c_int),
        ("grads", C.POINTER(C.c_int32)),
        ("n_grads", C.c_int),
        ("outputs", C.POINTER(C.c_int32)),
        ("n_outputs", C.c_int),
        ("grad_outputs", C.POINTER(C.c_int32)),
        ("n_grad_outputs", C.c_int),
        ("flags", C.c_uint32),
        ("device", C.c_void_p),
        ("parameters", C.POINTER(C.c_int32)),
        ("n_parameters", C.c_int),
        ("label_rows", C.c_int64),
        ("real_rows", C.c_int64),
        ("source_rows", C.c_int64),
        ("memory_budget", C.c_int64),
        ("recompute", C.c_int),
        ("cancel", C.POINTER(C.c_int)),
    ]


RECOMPUTE = ("none", "layers", "compromise")

ADMIT = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_int64)


class DeviceOptions(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("threads", C.c_int),
        ("memory_limit", C.c_int64),
        ("compile_ms", C.c_int64),
        ("admit", ADMIT),
        ("admit_context", C.c_void_p),
    ]


class Info(C.Structure):
    _fields_ = [
        ("n_outputs", C.c_int),
        ("n_grads", C.c_int),
        ("outputs", C.POINTER(Type)),
        ("has_grad", C.POINTER(C.c_bool)),
        ("arena_bytes", C.c_int64),
        ("saved_bytes", C.c_int64),
        ("constant_bytes", C.c_int64),
        ("n_launches_forward", C.c_int),
        ("n_launches_backward", C.c_int),
        ("compile_ms", C.c_double),
        ("parameter_bytes", C.c_int64),
        ("threads", C.c_int),
        ("early", C.POINTER(C.c_bool)),
        ("whole_bytes", C.c_int64),
        ("recomputed_bytes", C.c_int64),
        ("recompute_us", C.c_double),
        ("model_us", C.c_double),
    ]


class Point(C.Structure):
    _fields_ = [
        ("arena_bytes", C.c_int64),
        ("recomputed_bytes", C.c_int64),
        ("extra_us", C.c_double),
    ]


class Curve(C.Structure):
    _fields_ = [("points", Point * 8), ("n", C.c_int), ("model_us", C.c_double)]


class EngineError(Exception):
    """A failed call: `code` is the bare status name."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


def _load() -> C.CDLL:
    lib = C.CDLL(str(BUILD / "lib" / "libgradd.so"))
    lib.gradd_status_name.restype = C.c_char_p
    lib.gradd_error_message.restype = C.c_char_p
    lib.gradd_model_input_name.restype = C.c_char_p
    lib.gradd_model_output_name.restype = C.c_char_p
    lib.gradd_model_reach.restype = C.POINTER(C.c_ubyte)
    lib.gradd_model_is_random.restype = C.c_bool
    lib.gradd_plan_info.restype = C.POINTER(Info)
    for name in (
        "gradd_model_destroy",
        "gradd_plan_destroy",
        "gradd_run_destroy",
        "gradd_device_close",
        "gradd_device_trim",
        "gradd_run_set_early",
    ):
        getattr(lib, name).restype = None
    return lib


LIB = _load()


def check(status: int) -> None:
    if status:
        name = LIB.gradd_status_name(status).decode()
        raise EngineError(name, LIB.gradd_error_message().decode())


def _ints(values):
    return (C.c_int32 * max(1, len(values)))(*values)


def _pointers(arrays):
    return (C.c_void_p * max(1, len(arrays)))(
        *[None if a is None else a.ctypes.data for a in arrays]
    )


class Cell:
    """A pointer of the library, and those that must be destroyed before it."""

    def __init__(self, destroy: str):
        self.pointer = C.c_void_p()
        self.destroy = destroy
        self.children: list[Cell] = []

    def close(self) -> None:
        if not self.pointer:
            return
        for child in self.children:
            child.close()
        pointer, self.pointer = self.pointer, C.c_void_p()
        getattr(LIB, self.destroy)(pointer)


class Handle:
    """What the library owns. The collector may finalize a run after its plan when both are in one
    cycle, so the parent knows the pointers (not the objects) that were made from it."""

    destroy = ""

    def __init__(self, parent: Handle | None = None):
        self.cell = Cell(self.destroy)
        if parent is not None:
            parent.cell.children.append(self.cell)

    @property
    def handle(self) -> C.c_void_p:
        return self.cell.pointer

    def __del__(self):
        self.cell.close()


class Device(Handle):
    """What runs plans. `admit` is asked for new memory of runs: bytes to status."""

    destroy = "gradd_device_close"

    def __init__(self, threads=0, admit=None):
        super().__init__()
        self.admit = ADMIT((lambda _, size: admit(size)) if admit else 0)
        options = DeviceOptions(threads=threads, compile_ms=10000, admit=self.admit)
        check(LIB.gradd_device_open(C.byref(options), C.byref(self.handle)))

    def trim(self) -> None:
        LIB.gradd_device_trim(self.handle)


@functools.cache
def device(threads: int = 0) -> Device:
    """The device of that many threads, one for all tests of the process."""
    opened = Device(threads)
    atexit.register(opened.cell.close)  # while the modules are still there
    return opened


class Model(Handle):
    """A loaded ONNX model."""

    destroy = "gradd_model_destroy"

    def __init__(self, onnx: bytes):
        super().__init__()
        check(LIB.gradd_model_load(onnx, C.c_size_t(len(onnx)), C.byref(self.handle)))
        self.inputs = [
            LIB.gradd_model_input_name(self.handle, i).decode()
            for i in range(LIB.gradd_model_n_inputs(self.handle))
        ]
        self.outputs = [
            LIB.gradd_model_output_name(self.handle, i).decode()
            for i in range(LIB.gradd_model_n_outputs(self.handle))
        ]
        self.random = LIB.gradd_model_is_random(self.handle)
        self.half = LIB.gradd_model_half(self.handle)

    def reach(self, output: int = 0) -> set[str]:
        """Names of the inputs that a gradient of this output can reach."""
        size = C.c_size_t()
        bits = LIB.gradd_model_reach(self.handle, output, C.byref(size))
        number = int.from_bytes(bytes(bits[: size.value]), "little")
        return {name for i, name in enumerate(self.inputs) if number >> i & 1}


class Plan(Handle):
    """A model compiled for the types of `feed`; `grads` and `outputs` are names."""

    destroy = "gradd_plan_destroy"

    def __init__(
        self,
        model: Model,
        feed: dict,
        grads=(),
        outputs=None,
        grad_outputs=(),
        *,
        threads=0,
        plain=False,
        on=None,
        parameters=(),
        flags=0,
        memory_budget=0,
        recompute="none",
    ):
        super().__init__(model)
        self.device = on or device(threads)
        self.device.cell.children.append(self.cell)
        self.model = model
        self.outputs = list(model.outputs if outputs is None else outputs)
        self.grads = list(grads)
        self.types = {n: Type.of(feed[n]) for n in model.inputs}
        types = (Type * max(1, len(model.inputs)))(*self.types.values())
        g = _ints([model.inputs.index(n) for n in self.grads])
        o = _ints([model.outputs.index(n) for n in self.outputs])
        p = _ints([model.inputs.index(n) for n in parameters])
        go = _ints([self.outputs.index(n) for n in grad_outputs])
        options = Options(
            types, len(model.inputs), g, len(self.grads), o, len(self.outputs), go,
            len(grad_outputs), flags | plain, self.device.handle, p, len(parameters),
            memory_budget=memory_budget, recompute=RECOMPUTE.index(recompute),
        )  # fmt: skip
        check(LIB.gradd_plan_create(model.handle, C.byref(options), C.byref(self.handle)))
        self.info = LIB.gradd_plan_info(self.handle).contents

    def curve(self) -> Curve:
        """Planned memory against modelled time."""
        curve = Curve()
        check(LIB.gradd_plan_curve(self.handle, C.byref(curve)))
        return curve


class Run(Handle):
    """One forward and its backwards."""

    destroy = "gradd_run_destroy"

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.plan = plan
        check(LIB.gradd_run_create(plan.handle, C.byref(self.handle)))

    def forward(self, feed: dict, seed=0, flags=0) -> dict:
        plan = self.plan
        self.feed = [np.ascontiguousarray(feed[n]) for n in plan.model.inputs]
        out = [plan.info.outputs[j].empty() for j in range(len(plan.outputs))]
        check(
            LIB.gradd_run_forward(
                self.handle, C.c_uint64(seed), C.c_uint32(flags), _pointers(self.feed),
                _pointers(out), None,
            )
        )  # fmt: skip
        return dict(zip(plan.outputs, out, strict=True))

    def give(self) -> dict:
        """Gives memory for the early gradients of the next forwards; those by name."""
        early = {
            n: self.plan.types[n].empty()
            for i, n in enumerate(self.plan.grads)
            if self.plan.info.early[i]
        }
        self.early = early
        LIB.gradd_run_set_early(self.handle, _pointers([early.get(n) for n in self.plan.grads]))
        return early

    def backward(self, grad_outputs: dict, keep=False, into=None) -> dict:
        """Gradients by name, in the arrays of `into` if there are some; None where there is no
        path."""
        plan = self.plan
        arrive = [grad_outputs.get(n) for n in plan.outputs]
        index = [plan.model.inputs.index(n) for n in plan.grads]
        out = [np.full_like(self.feed[i], 77) for i in index]
        if into is not None:
            out = [into.get(n, o) for n, o in zip(plan.grads, out, strict=True)]
        written = (C.c_bool * max(1, len(out)))()
        check(
            LIB.gradd_run_backward(
                self.handle, _pointers(arrive), _pointers(out), C.c_bool(keep), written, None
            )
        )
        return {n: (g if w else None) for n, g, w in zip(plan.grads, out, written, strict=False)}
