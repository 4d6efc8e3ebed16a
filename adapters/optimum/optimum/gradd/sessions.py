"""Trainings that outlive their process: notes of a Trainer in a kept session, and back.

With each step of the optimizer go the state of the trainer as it will be behind the step, the
scheduler's, and those of the random generators. `train(resume_from_checkpoint="session:NAME")`
makes of them what Trainer reads from a checkpoint's folder; parameters, and the optimizer's state,
are mapped in place.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from .daemon_training import DaemonTraining

PREFIX = "session:"
_LOGGED = 100  # entries of the log that are noted


class Session:
    """The kept session of one train()."""

    def __init__(self, trainer: DaemonTraining, name: str, keep_alive: str) -> None:
        self.name = name  # of the session
        self.folder = ""  # where Trainer finds the state to resume from; "": it is a new training
        self._trainer = trainer
        self._keep_alive = keep_alive
        self._kept: Any = None
        self._random: dict[str, Any] = {}  # of the step from which it goes on
        if trainer.args.world_size > 1:
            raise NotImplementedError(
                f"keep_session: {trainer.args.world_size} processes train; one process can"
            )

    @contextlib.contextmanager
    def resumed(self) -> Iterator[str]:
        """A folder with the state of the trainer.

        Raises:
            SessionError: There is no such session, or another process uses it.
            StaleError: A step of it is half done.
            ValueError: It is no training's.
        """
        from gradd import keeping

        steps, notes = keeping.look(self.name)
        if "trainer" not in notes:
            raise ValueError(
                f"session '{self.name}' has no notes of a Trainer: it has not trained a step"
                if not steps
                else f"session '{self.name}' was not kept by a Trainer"
            )
        with tempfile.TemporaryDirectory(prefix="gradd-") as folder:
            with open(os.path.join(folder, TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
                json.dump(notes["trainer"], file)
            self.folder = folder
            yield folder

    def begin(self) -> None:
        """A new training: model and optimizer are there."""
        import gradd

        self._check()
        if self._kept is None:
            self._kept = gradd.keep(
                self.name, self._trainer.model, self._optimizer(), keep_alive=self._keep_alive
            )

    def take_over(self) -> None:
        """One that goes on: parameters and state are mapped, the scheduler moves on."""
        import gradd

        self._check()
        self._kept = gradd.reattach(self.name, self._trainer.model, self._optimizer(),
                                    keep_alive=self._keep_alive)  # fmt: skip
        notes = self._kept.notes
        scheduler = self._trainer.lr_scheduler
        scheduler.load_state_dict(copy.deepcopy(notes["scheduler"]))
        with warnings.catch_warnings():  # the optimizer of this process has not stepped yet
            warnings.simplefilter("ignore", UserWarning)
            scheduler.step()
        self._random = notes["random"]

    def restore_random(self) -> None:
        """The generators, as they were behind the step."""
        version, state, gauss = self._random["python"]
        random.setstate((version, tuple(state), gauss))
        kind, keys, at, has_gauss, cached = self._random["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), at, has_gauss, cached))
        torch.set_rng_state(self._kept.random_state)

    def note(self) -> None:
        """What will be true behind the step that comes now."""
        trainer = self._trainer
        state = dataclasses.asdict(
            dataclasses.replace(trainer.state, log_history=trainer.state.log_history[-_LOGGED:])
        )
        state["global_step"] += 1
        state["total_flos"] += trainer.current_flos
        for one in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(one, ExportableState) and not isinstance(
                state["stateful_callbacks"].get(type(one).__name__), list
            ):
                state["stateful_callbacks"][type(one).__name__] = one.state()
        version, python, gauss = random.getstate()
        kind, keys, at, has_gauss, cached = np.random.get_state()
        self._kept.note(
            trainer=json.loads(json.dumps(state, default=str)),
            scheduler=_plain(trainer.lr_scheduler.state_dict()),
            random={
                "python": [version, list(python), gauss],
                "numpy": [kind, keys.tobytes(), int(at), int(has_gauss), float(cached)],
            },
        )

    def _optimizer(self) -> Any:
        return self._trainer.gradd_own_optimizer()

    def _check(self) -> None:
        from gradd.optim import FusedAdam

        if not isinstance(self._optimizer(), FusedAdam):
            raise ValueError(
                f"keep_session: the state of {type(self._optimizer()).__name__} is not kept; use "
                "optim='adamw_ort_fused'"
            )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without callables, which it gets from its own code."""
    return {name: value for name, value in state.items() if not callable(value)}
