"""Whole trainers as engines, without and with gradd, one step at a time.

The samples have plain Trainer and ORTTrainer; other_trainers.py has those of other packages.

A worker (worker.py) is told how many steps to take, and a trainer's train() takes them all. So
train() runs in a thread of its own here and waits, at the start of every step, until it is told.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import worker


class Stepped:
    """A training that takes one step for each call of this object.

    What trains calls begin() before a step and end() behind it.
    """

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.train: Callable[[], Any] = lambda: None
        self.loss: Any = None
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None

    def begin(self) -> None:
        """Waits until a step is asked for."""
        self._go.acquire()

    def end(self) -> None:
        """A step is done, and `loss` is its loss."""
        self._done.release()

    def __call__(self) -> Any:
        """Takes a step, with its optimizer's; returns the loss, a tensor.

        Raises:
            RuntimeError: train() has ended.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._end is not None:
            raise RuntimeError(f"train() has ended: {self._end}") from self._end
        return self.loss

    def _run(self) -> None:
        try:
            self.train()
            self._end = RuntimeError("all its steps are taken")
        except BaseException as error:  # the worker's thread raises it
            self._end = error
        self._done.release()


def of_transformers(trainer: Any) -> Stepped:
    """The steps of a trainer of transformers, or of one made from it."""
    from transformers import TrainerCallback

    stepped, step = Stepped(), trainer.training_step

    class Waiting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            stepped.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stepped.end()

    def training_step(*args: Any, **kwargs: Any) -> Any:
        stepped.loss = step(*args, **kwargs)
        return stepped.loss

    trainer.add_callback(Waiting())
    trainer.training_step, stepped.train = training_step, trainer.train
    return stepped


def of_lightning(trainer: Any, task: Any, data: Any) -> Stepped:
    """The steps of Lightning's trainer."""
    import lightning

    stepped = Stepped()

    class Waiting(lightning.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            stepped.begin()

        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, *args: Any) -> None:
            stepped.loss = outputs["loss"]
            stepped.end()

    trainer.callbacks.append(Waiting())
    stepped.train = lambda: trainer.fit(task, data)
    return stepped


class TrainerWorker(worker.Worker):
    """A worker whose step is that of a trainer, with all that a trainer does around it."""

    def _wrap(self, engine: str) -> Any:
        self._losses: list[float] = []
        if not hasattr(self, "load"):  # a trivial module, to load code
            return super()._wrap("eager" if engine == "Trainer" else "gradd")
        self._folder = tempfile.TemporaryDirectory(prefix="gradd-bench-")
        ours = engine != "Trainer"
        trainer, self._wrapper = self.load.make_trainer(self.module, ours, self._folder.name)
        self._optimizer = trainer  # it has one, whose state counts
        return of_lightning(*trainer) if isinstance(trainer, tuple) else of_transformers(trainer)

    def step(self) -> Any:
        """One step of the trainer."""
        loss = self._call()
        self._losses.append(float(loss))
        return loss

    def facts(self, steps: int) -> dict[str, Any]:
        """The losses of all steps, and what ran in PyTorch, by reason, though gradd was there."""
        stats = self._wrapper.gradd_stats() if self._wrapper is not None else {"in_torch": {}}
        return {"losses": self._losses, "in_torch": dict(stats["in_torch"])}


if __name__ == "__main__":
    sys.exit(worker.main(TrainerWorker))
