"""A model that trains."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_int64, c_void_p
from typing import Any

import numpy as np

from gradd.train import arrays, library
from gradd.train.library import call
from gradd.train.state import CheckpointState, StateHandle

_TRAINING, _EVAL = range(2)
# What ONNX Runtime says of nominal checkpoints.
LOAD_PARAMETERS = "Please load the model parameters first. (Module.copy_buffer_to_parameters)"
default_seed = 0  # of modules that are given none
Outputs = Any  # an array or an OrtValue, or a tuple of them


def _close(session: c_void_p, state: StateHandle) -> None:
    """Closes a session; the state, which is kept by this call's argument, goes after it."""
    with state.lock:
        call("close", session)
        state.has_module = False


class Module:
    """Training and evaluation steps of a model.

    Attributes:
        training: Whether a call is a training step.
        state: The parameters.
        session: The library's object.

    Args:
        train_model_uri: The training model.
        state: The parameters, which the module trains in place.
        eval_model_uri: The evaluation model; without one there is no `eval()` and no export.
        device: "cpu".
        session_options: onnxruntime's; of them `intra_op_num_threads` counts.
        memory_budget: Most bytes for activations in a step: what does not fit is computed again.
            0 = what it takes.
        seed: Of random numbers (dropout); None = that of onnxruntime.set_seed(), or 0.

    Raises:
        RuntimeError: A file is no model that can be trained, the state does not fit, or it has a
            module already.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: str | os.PathLike,
        state: CheckpointState,
        eval_model_uri: str | os.PathLike | None = None,
        device: str = "cpu",
        session_options: Any = None,
        *,
        memory_budget: int = 0,
        seed: int | None = None,
    ) -> None:
        self.training = True
        if device.split(":")[0] != "cpu":
            raise library.TrainError(
                "UNSUPPORTED", f"device {device!r}: gradd.train runs on the CPU, device='cpu'"
            )
        self.state = state
        options = library.Options(memory_budget=memory_budget)
        options.seed = default_seed if seed is None else seed
        options.threads = int(getattr(session_options, "intra_op_num_threads", 0) or 0)
        options.training.path = os.fsencode(train_model_uri)
        if eval_model_uri is not None:
            options.eval.path = os.fsencode(eval_model_uri)
        refuse_ort_format(train_model_uri, eval_model_uri)
        handle = state.handle
        with handle.lock:
            self.session = library.create("open", handle.pointer, byref(options))
            handle.has_module = True
        self._known: dict[tuple[str, int], list[str]] = {}
        self._ready: dict[int, arrays.Ready] = {}  # of each phase, for the last call
        weakref.finalize(self, _close, self.session, handle)

    def __call__(self, *user_inputs: Any) -> Outputs:
        """One step: with `training` a forward and a backward, else a forward of the eval model.

        Args:
            *user_inputs: The inputs in the order of `input_names()`, arrays or OrtValues.

        Returns:
            The outputs in the order of `output_names()`, one alone without a tuple: arrays, or
            OrtValues if all inputs are such.

        Raises:
            RuntimeError: An input does not fit, or there is no eval model.
            TypeError: An input is no array.
        """
        kinds = {type(value) for value in user_inputs if arrays.is_ortvalue(value)}
        as_ortvalues = len(kinds) == 1 and all(map(arrays.is_ortvalue, user_inputs))
        outputs = self._step(user_inputs)
        if as_ortvalues:
            (kind,) = kinds
            make = getattr(kind, "ortvalue_from_numpy", arrays.Buffer)
            outputs = [make(output) for output in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _step(self, user_inputs: Sequence[Any]) -> list[np.ndarray]:
        phase = _TRAINING if self.training else _EVAL
        with self.state.handle.lock:  # the structures serve one call at a time
            ready, held = self._ready.get(phase), user_inputs
            if ready is None or not ready.takes(user_inputs):
                held, whats = self._to_arrays(phase, user_inputs)
                ready = arrays.Ready(held, whats, len(self._names("output", phase)))
                self._ready[phase] = ready
            self.state.handle.need_values(LOAD_PARAMETERS)
            name = "step" if self.training else "eval_step"
            call(name, self.session, ready.inputs, len(held), ready.outputs, None)
            return ready.results()

    def _to_arrays(
        self, phase: int, user_inputs: Sequence[Any]
    ) -> tuple[list[np.ndarray], list[str]]:
        """The inputs as the library reads them, and what they are called in messages."""
        names = self._names("input", phase)
        whats = [f"input {name!r}" for name in names[: len(user_inputs)]]
        whats += ["an input too many"] * (len(user_inputs) - len(whats))
        held = [arrays.to_array(value, what) for value, what in zip(user_inputs, whats)]
        for i, array in enumerate(held[: len(names)]):
            if array.dtype.kind in "US":
                code = call("input_type", self.session, phase, i).dtype
                held[i] = arrays.read_numbers(array, code, whats[i])
        return held, whats

    def train(self, mode: bool = True) -> Module:
        """Makes calls training steps, or not; returns self."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Makes calls evaluation steps; returns self."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """The next step's gradients replace those there are, instead of being added."""
        with self.state.handle.lock:
            call("lazy_reset_grad", self.session)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> arrays.Buffer:
        """A copy of the parameters, one after the other in the order of the model's inputs.

        Args:
            trainable_only: Whether to leave out those that are frozen.

        Raises:
            RuntimeError: One has no values, or is not of f32.
        """
        values = np.empty(self.get_parameters_size(trainable_only), np.float32)
        with self.state.handle.lock:
            self.state.handle.need_values(LOAD_PARAMETERS)
            call("copy_out", self.session, trainable_only, values.ctypes.data, values.size)
        return arrays.Buffer(values)

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Elements of all parameters together.

        Args:
            trainable_only: Whether to leave out those that are frozen.
        """
        count = c_int64()
        with self.state.handle.lock:
            call("contiguous_count", self.session, trainable_only, byref(count))
        return count.value

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Gives the parameters the values of a buffer, as get_contiguous_parameters lays them out.

        A module of a nominal checkpoint needs this before its first step.

        Args:
            buffer: An OrtValue or an array of f32.
            trainable_only: Whether frozen parameters are left out.

        Raises:
            RuntimeError: The buffer has another number of elements.
            TypeError: Its elements are not f32.
        """
        values = arrays.to_array(buffer, "the buffer")
        if values.dtype != np.float32:
            raise TypeError(f"the buffer has the element type {values.dtype}, expected float32")
        with self.state.handle.lock:
            call("copy_in", self.session, trainable_only, values.ctypes.data, values.size)
            self.state.handle.find_nominal()

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike, graph_output_names: Sequence[str]
    ) -> None:
        """Writes a model with the parameters inside, for inference.

        Args:
            inference_model_uri: The file.
            graph_output_names: Its outputs: it has the part of the eval model that they need.

        Raises:
            RuntimeError: There is no eval model, or no such output; the file cannot be written.
            TypeError: The names are no list of them.
        """
        if isinstance(graph_output_names, str) or not all(
            isinstance(name, str) for name in graph_output_names
        ):
            raise TypeError(
                f"graph_output_names is {graph_output_names!r}, expected a list of names"
            )
        names = (c_char_p * max(len(graph_output_names), 1))(
            *(name.encode() for name in graph_output_names)
        )
        with self.state.handle.lock:
            path = os.fsencode(inference_model_uri)
            call("export", self.session, path, names, len(graph_output_names))

    def input_names(self) -> list[str]:
        """Names of the inputs that a call takes."""
        return self._names("input", _TRAINING if self.training else _EVAL)

    def output_names(self) -> list[str]:
        """Names of the outputs that a call returns."""
        return self._names("output", _TRAINING if self.training else _EVAL)

    def _names(self, what: str, phase: int) -> list[str]:
        if (what, phase) not in self._known:  # each step asks
            n = call(f"{what}_count", self.session, phase)
            names = [call(f"{what}_name", self.session, phase, i).decode() for i in range(n)]
            self._known[what, phase] = names
        return list(self._known[what, phase])

    # ---- beyond ONNX Runtime's interface ------------------------------------------------------

    def freeze(self, pattern: str) -> int:
        """Trains the matching parameters no more.

        Args:
            pattern: Of their names; "*" stands for any characters.

        Returns:
            How many it changed.

        Raises:
            RuntimeError: None matches, or none would be left to train.
        """
        return self._choose("freeze", pattern)

    def thaw(self, pattern: str) -> int:
        """Trains the matching parameters from now on; see freeze()."""
        return self._choose("thaw", pattern)

    def _choose(self, name: str, pattern: str) -> int:
        changed = c_int()
        with self.state.handle.lock:
            call(name, self.session, pattern.encode(), byref(changed))
        return changed.value

    def set_seed(self, seed: int) -> None:
        """Starts the random numbers of the steps that follow again."""
        with self.state.handle.lock:
            call("set_seed", self.session, seed)

    def prepare(self, *shapes: Sequence[int]) -> None:
        """Makes what a step with inputs of these shapes needs, without a step; memory() says it.

        Args:
            *shapes: Of the inputs in the order of input_names().

        Raises:
            RuntimeError: They do not fit, or a budget of memory cannot be met.
        """
        phase = _TRAINING if self.training else _EVAL
        inputs = (library.Tensor * max(len(shapes), 1))()
        for i, (name, shape) in enumerate(zip(self._names("input", phase), shapes)):
            code = call("input_type", self.session, phase, i).dtype
            inputs[i].type = arrays.make_type(code, tuple(shape), f"input {name!r}")
        with self.state.handle.lock:
            call("prepare", self.session, phase, inputs, len(shapes))

    def memory(self) -> dict[str, int]:
        """Bytes that the module holds: of `parameters`, `gradients`, `moments`, the `arena` of
        activations, `constants` and `buffers`; and how many `plans`."""
        with self.state.handle.lock:
            found = call("memory", self.session)
        return {name: getattr(found, name) for name in library.MEMORY}


def refuse_ort_format(*paths: str | os.PathLike | None) -> None:
    """Names files of ONNX Runtime's own format, which are not read.

    Raises:
        TrainError: A path ends in ".ort".
    """
    for path in paths:
        if path is not None and os.fspath(path).endswith(".ort"):
            raise library.TrainError(
                "UNSUPPORTED",
                f"{os.fspath(path)}: gradd reads .onnx models; generate the artifacts without "
                "ort_format=True",
            )
