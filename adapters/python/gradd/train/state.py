"""What a training has learnt: parameters, optimizer, properties, and the file that holds them."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterator
from ctypes import byref, c_void_p
from typing import Any

import numpy as np

from gradd.train import arrays, library
from gradd.train.library import call, create

_INT, _FLOAT, _TEXT = range(3)
_INT64 = (-(2**63), 2**63 - 1)
# What ONNX Runtime says of nominal checkpoints.
_LOAD_STATES = "Please load the parameter states first (Module.copy_buffer_to_parameters)"
_LOAD_ALL_STATES = "Please load all the parameter states first (Module.copy_buffer_to_parameters)"


class StateHandle:
    """The library's object, alive as long as its state or a session of it."""

    def __init__(self, pointer: c_void_p) -> None:
        self.pointer = pointer
        self.lock = threading.RLock()  # one thread at a time uses a state and its session
        self.has_module = False
        self.is_nominal = False
        self.find_nominal()
        weakref.finalize(self, call, "state_destroy", pointer)

    def find_nominal(self) -> None:
        """Looks whether a parameter has no values."""
        count = call("state_count", self.pointer)
        self.is_nominal = any(not self.parameter(i).data for i in range(count))

    def need_values(self, what: str) -> None:
        """Fails if a parameter has no values.

        Raises:
            TrainError: The checkpoint is nominal, and Module.copy_buffer_to_parameters was not
                called.
        """
        if self.is_nominal:
            raise library.TrainError(
                "TENSOR", f"the checkpoint is nominal, its parameters have no values. {what}"
            )

    def find(self, name: str) -> int:
        """Position of a parameter; -1 = there is none."""
        return call("state_find", self.pointer, name.encode())

    def parameter(self, i: int) -> library.Parameter:
        """The parameter at a position."""
        return call("state_parameter", self.pointer, i)


class Parameter:
    """A parameter of the model; `CheckpointState.parameters` has them.

    Args:
        state: The object of the library that holds it.
        index: Its position there.
    """

    def __init__(self, state: StateHandle, index: int) -> None:
        self._state = state
        self._index = index

    @property
    def _now(self) -> library.Parameter:
        return self._state.parameter(self._index)

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self._now.name.decode()

    @property
    def data(self) -> np.ndarray:
        """A copy of its values; assigning changes them.

        Raises:
            RuntimeError: It has no values yet (a nominal checkpoint); assigned values are of
                another type or shape.
        """
        with self._state.lock:
            self._state.need_values(_LOAD_STATES)
            now = self._now
            return arrays.copy_values(now.type, now.data)

    @data.setter
    def data(self, value: Any) -> None:
        what = f"parameter {self.name!r}"
        array = arrays.to_array(value, what)
        tensor = arrays.to_tensor(array, what)
        with self._state.lock:
            call("state_write", self._state.pointer, self._index, byref(tensor.type), tensor.data)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of its gradient since the last reset: zeros before the first step, None if it is
        frozen or there is no module."""
        with self._state.lock:
            now = self._now
            if now.gradient:
                return arrays.copy_values(now.type, now.gradient)
            zeros = now.trainable and self._state.has_module
            return (
                np.zeros(arrays.shape_of(now.type), arrays.dtype_of(now.type.dtype))
                if zeros
                else None
            )

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._now.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """Parameters by name. Iterating gives pairs of name and Parameter.

    Args:
        state: The object of the library that holds them.
    """

    def __init__(self, state: StateHandle) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        index = self._state.find(name)
        if index < 0:
            raise KeyError(f"Parameter {name} not found.")
        self._state.need_values(_LOAD_STATES)
        return Parameter(self._state, index)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        self._state.need_values(_LOAD_ALL_STATES)
        self[name].data = value

    def __contains__(self, name: str) -> bool:
        return self._state.find(name) >= 0

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for i in range(len(self)):
            parameter = Parameter(self._state, i)
            yield parameter.name, parameter

    def __repr__(self) -> str:
        return str([name for name, _ in self])

    def __len__(self) -> int:
        return call("state_count", self._state.pointer)


class Properties:
    """Values of the user that travel with the state: int, float (f32) or str, by name.

    Iterating gives pairs of name and value.

    Args:
        state: The object of the library that holds them.
    """

    def __init__(self, state: StateHandle) -> None:
        self._state = state

    def _at(self, i: int) -> tuple[str, int | float | str]:
        found = call("state_property", self._state.pointer, i)
        values = (found.integer, found.real, (found.text or b"").decode())
        return found.name.decode(), values[found.kind]

    def _find(self, name: str) -> int:
        return call("state_find_property", self._state.pointer, name.encode())

    def __getitem__(self, name: str) -> int | float | str:
        with self._state.lock:
            index = self._find(name)
            if index < 0:
                raise KeyError(f"Property {name} not found.")
            return self._at(index)[1]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        made = library.Property(name=name.encode())
        if isinstance(value, (int, np.integer)):
            if not _INT64[0] <= int(value) <= _INT64[1]:
                raise OverflowError(f"property {name!r}: {value} does not fit into 64 bits")
            made.kind, made.integer = _INT, int(value)
        elif isinstance(value, (float, np.floating)):
            with np.errstate(over="ignore"):
                rounded = float(np.float32(value))
            if math.isinf(rounded) and not math.isinf(value):
                raise OverflowError(f"property {name!r}: {value} does not fit into f32")
            made.kind, made.real = _FLOAT, rounded
        elif isinstance(value, str):
            if "\0" in value:
                raise ValueError(
                    f"property {name!r} has a zero character, which a file cannot hold"
                )
            made.kind, made.text = _TEXT, value.encode()
        else:
            kind = type(value).__name__
            raise TypeError(f"property {name!r} is a {kind}, expected an int, a float or a str")
        with self._state.lock:
            call("state_set_property", self._state.pointer, byref(made))

    def __contains__(self, name: str) -> bool:
        return self._find(name) >= 0

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        for i in range(len(self)):
            yield self._at(i)

    def __repr__(self) -> str:
        return str([name for name, _ in self])

    def __len__(self) -> int:
        return call("state_property_count", self._state.pointer)


class CheckpointState:
    """The state of a training; `CheckpointState.load_checkpoint` makes one, or `open`.

    Args:
        state: The object of the library that holds it.
    """

    def __init__(self, state: StateHandle) -> None:
        if not isinstance(state, StateHandle):
            kind = type(state).__name__
            raise TypeError(
                f"CheckpointState of a {kind}: use CheckpointState.load_checkpoint(path)"
            )
        self.handle = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)

    @classmethod
    def empty(cls) -> CheckpointState:
        """A state without parameters, to add some to."""
        return cls(StateHandle(create("state_create")))

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike) -> CheckpointState:
        """Reads a checkpoint, a nominal one too.

        Args:
            checkpoint_uri: The file.

        Raises:
            RuntimeError: It cannot be read, or is no checkpoint.
        """
        return cls(StateHandle(create("state_load", os.fsencode(checkpoint_uri))))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        checkpoint: str | os.PathLike | None = None,
        *,
        commit_every: int = 0,
        commit_ms: int = 0,
    ) -> CheckpointState:
        """Opens a state in a file, in which training is committed as it goes on.

        Whatever interrupts the program or the machine, the file has all of the state as it was
        committed last: parameters, optimizer, running statistics, learning rate and schedule, seed,
        position and properties. A commit comes before a training step, by time or by steps.

        Args:
            path: The file.
            checkpoint: What it is made of if it is not there.
            commit_every: So many steps of the optimizer are one commit; 0 = by time:
            commit_ms: So much time is between commits, and as much more as it takes for them to
                take at most 3 % of it; 0 = a second.

        Raises:
            RuntimeError: It cannot be read, is no state, or is open already.
        """
        start = None if checkpoint is None else os.fsencode(checkpoint)
        options = library.Lasting(start, commit_every, commit_ms)
        return cls(StateHandle(create("open_state", os.fsencode(path), byref(options))))

    def commit(self) -> None:
        """Commits what there is to the file: the end of a training does not do it by itself.

        Raises:
            RuntimeError: The state has no file, it cannot be written, its path names another file
                or none by now, or gradients wait for the optimizer.
        """
        with self.handle.lock:
            call("commit", self.handle.pointer)

    @property
    def step(self) -> int:
        """Steps that the optimizer has taken."""
        return call("state_progress", self.handle.pointer).step

    @property
    def position(self) -> int:
        """Where the training is in the data, as the program counts it; kept with the step."""
        return call("state_progress", self.handle.pointer).position

    @position.setter
    def position(self, value: int) -> None:
        with self.handle.lock:
            call("state_set_position", self.handle.pointer, value)

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike,
        include_optimizer_state: bool = False,
    ) -> None:
        """Writes a checkpoint; a file that is there stays until the new one is complete.

        Args:
            state: What to write.
            checkpoint_uri: The file.
            include_optimizer_state: Whether to write moments and steps as well.

        Raises:
            RuntimeError: It cannot be written, or is the file that the state is committed to.
        """
        with state.handle.lock:
            path = os.fsencode(checkpoint_uri)
            call("state_save", state.handle.pointer, path, bool(include_optimizer_state))

    def add(
        self,
        name: str,
        code: int,
        shape: tuple[int, ...],
        values: bytes | None,
        requires_grad: bool,
    ) -> None:
        """Adds a parameter.

        Args:
            name: Its name in the model.
            code: Its element type as ONNX numbers it.
            shape: Its shape.
            values: Little-endian and row-major; None = it gets them later.
            requires_grad: Whether it is trained.

        Raises:
            RuntimeError: The name is there already, or a checkpoint cannot hold the type.
        """
        kind = arrays.make_type(code, shape, f"parameter {name!r}")
        if values is not None and code in (*arrays.CODES, arrays.BF16):
            size = 2 if code == arrays.BF16 else np.dtype(arrays.CODES[code]).itemsize
            expected = size * int(np.prod(shape, dtype=np.int64))
            if len(values) != expected:
                message = f"parameter {name!r}: {len(values)} bytes of values, expected {expected}"
                raise library.TrainError("TENSOR", message)
        with self.handle.lock:
            call(
                "state_add", self.handle.pointer, name.encode(), byref(kind), values, requires_grad
            )

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The properties by name."""
        return self._properties
