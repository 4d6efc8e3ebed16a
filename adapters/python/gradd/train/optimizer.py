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
        self.constants = library.OptimizerConstants()
        self.module = module
        self.lock = module.state.handle.lock
        call("optimizer_load", byref(model), byref(self.constants))
        with self.lock:
            call("set_optimizer", module.session, byref(self.constants))

    def step(self) -> None:
        """Changes every parameter that has a gradient."""
        with self.lock:
            self.module.state.handle.need_values(LOAD_PARAMETERS)
            call("optimizer_step", self.module.session, None)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the steps that follow.

        Args:
            learning_rate: 0 or more; 1e-3 by default.
        """
        with self.lock:
            call("set_learning_rate", self.module.session, learning_rate)

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return call("learning_rate", self.module.session)


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
        with optimizer.lock:
            session = optimizer.module.session
            counts = (warmup_step_count, total_step_count)
            call("set_linear_schedule", session, *counts, initial_lr)

    def step(self) -> None:
        """Sets the learning rate for the number of steps that the optimizer has taken."""
        with self._optimizer.lock:
            call("schedule_step", self._optimizer.module.session)
