"""Whole trainers as engines: plain Trainer and ORTTrainer on the samples, one step at a time.

A worker (worker.py) is told how many steps to take, and a trainer's train() takes them all. So
train() runs in a thread of its own here and waits, at the start of every step, until it is told.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import worker

STEPS = 4000  # more than a run takes; rows of the data are made as they are read


class Stepped:
    """A trainer whose train() takes one step for each call of this object."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        go, done = self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

        class Waiting(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                go.acquire()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                done.release()

        trainer.add_callback(Waiting())
        self._trainer, self._step = trainer, trainer.training_step
        trainer.training_step = self._training_step
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self._loss: Any = None

    def __call__(self) -> Any:
        """Takes a step, with its optimizer's; returns the loss, a tensor.

        Raises:
            RuntimeError: train() has ended.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._train, daemon=True)
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._end is not None:
            raise RuntimeError(f"train() has ended: {self._end}") from self._end
        return self._loss

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._loss = self._step(*args, **kwargs)
        return self._loss

    def _train(self) -> None:
        try:
            self._trainer.train()
            self._end = RuntimeError("all its steps are taken")
        except BaseException as error:  # the worker's thread raises it
            self._end = error
        self._done.release()


class TrainerWorker(worker.Worker):
    """A worker whose step is that of a trainer, with all that a trainer does around it."""

    def _wrap(self, engine: str) -> Any:
        if not hasattr(self, "load"):  # a trivial module, to load code
            return super()._wrap("eager" if engine == "Trainer" else "gradd")
        import common

        self._folder = tempfile.TemporaryDirectory(prefix="gradd-bench-")
        trainer = common.make_trainer(
            *self.load.sample,
            self._folder.name,
            plain=engine == "Trainer",
            model=self.module,
            max_steps=STEPS,
            logging_strategy="no",
            use_cpu=True,
        )
        self._optimizer = trainer  # it has one, whose state counts
        return Stepped(trainer)

    def step(self) -> Any:
        """One step of the trainer."""
        return self._call()


if __name__ == "__main__":
    sys.exit(worker.main(TrainerWorker))
