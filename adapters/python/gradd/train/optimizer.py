"""What changes the parameters of a module: an optimizer, and a schedule of its learning rate."""

from __future__ import annotations

import os
from ctypes import byref

from gradd.train import library
from gradd.train.library import call
from gradd.train.module import LOAD_PARAMETERS, Module, refuse_ort_format


class Optimizer:
    """Changes the parameters of a module by their gradients.

    Args:
        optimizer_uri: The optimizer model, which says kind and constants.
        module: The module to train.

    Raises:
        RuntimeError: The file is no optimizer model that is known.
    """

    def __init__(self, optimizer_uri: str | os.PathLike, module: Module) -> None:
        refuse_ort_format(optimizer_uri)
        model = library.Model(path=os.fsencode(optimizer_uri))
        self._constants = library.OptimizerConstants()
        self._module = module
        self._lock = module._state._state.lock
        call("optimizer_load", byref(model), byref(self._constants))
        with self._lock:
            call("set_optimizer", module._session, byref(self._constants))

    def step(self) -> None:
        """Changes every parameter that has a gradient."""
        with self._lock:
            self._module._state._state.need_values(LOAD_PARAMETERS)
            call("optimizer_step", self._module._session, None)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the steps that follow.

        Args:
            learning_rate: 0 or more; 1e-3 by default.
        """
        with self._lock:
            call("set_learning_rate", self._module._session, learning_rate)

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return call("learning_rate", self._module._session)


class LinearLRScheduler:
    """Raises the learning rate from 0 over the first steps, then lets it fall to 0.

    Args:
        optimizer: The optimizer.
        warmup_step_count: Steps of the rise.
        total_step_count: Steps until it is 0.
        initial_lr: The learning rate between the two.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        self._optimizer = optimizer
        with optimizer._lock:
            session = optimizer._module._session
            counts = (warmup_step_count, total_step_count)
            call("set_linear_schedule", session, *counts, initial_lr)

    def step(self) -> None:
        """Sets the learning rate for the number of steps that the optimizer has taken."""
        with self._optimizer._lock:
            call("schedule_step", self._optimizer._module._session)
