"""Rounds of a federation, whatever carries them: what clients give, and what a server makes of it.

A client gets the weights of all, trains on its own data, and gives what has changed in those that
are trained. The server adds the mean of these updates, weighted by their examples, to the weights
(McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data").
`gradd.train.flower` has both for Flower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradd.train.library import TrainError
from gradd.train.module import Module
from gradd.train.optimizer import Optimizer
from gradd.train.state import CheckpointState

Batches = Callable[[], Iterable[Sequence[Any]]]  # of one round: inputs of the model, each


class Update(NamedTuple):
    """What a client gives in a round.

    Attributes:
        values: What has been added to the trained weights, in their order; f32 or f16.
        examples: How many it was learnt from.
        loss: The mean of the round's steps.
    """

    values: np.ndarray
    examples: int
    loss: float


class LocalTraining:
    """Trains on data that stay where they are.

    Every round begins with a new optimizer, since the weights are others.

    Args:
        files: Folder of the artifacts; `nominal_checkpoint` does where there is no `checkpoint`.
        batches: Is called in each round for its batches.
        half: Whether updates are f16, half as long.
        clip: Largest norm of an update, which is scaled down to it; None = any.
        noise: Standard deviation of normal noise that is added to each number of an update, behind
            `clip`. It is no accounting of what updates reveal.
        seed: Of the noise; None = from the system.

    Raises:
        ValueError: `clip` is not above 0, or `noise` below 0.
    """

    def __init__(
        self,
        files: str | os.PathLike,
        batches: Batches,
        *,
        half: bool = False,
        clip: float | None = None,
        noise: float = 0.0,
        seed: int | None = None,
    ) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip}, expected a number above 0, or None")
        if not noise >= 0:
            raise ValueError(f"noise={noise}, expected a number of 0 or more")
        self.files, self.batches = Path(files), batches
        self.half, self.clip, self.noise = half, clip, noise
        self._random = np.random.default_rng(seed)

    def fit(self, weights: np.ndarray, learning_rate: float | None = None) -> Update:
        """One round.

        Args:
            weights: Of all parameters, in the order of the model's inputs; f32.
            learning_rate: None = the optimizer's.

        Raises:
            TrainError: The weights have another number of elements than the model, there was no
                batch, or the training has left the finite numbers.
        """
        module = self._load(weights)
        optimizer = Optimizer(self.files / "optimizer_model.onnx", module)
        if learning_rate is not None:
            optimizer.set_learning_rate(learning_rate)
        before = module.get_contiguous_parameters(True).numpy()

        def step(batch: Sequence[Any]) -> float:
            loss = _first(module(*batch))
            optimizer.step()
            module.lazy_reset_grad()
            return loss

        loss, examples = _mean_loss(self.batches(), step)
        change = module.get_contiguous_parameters(True).numpy().astype(np.float64) - before
        values = self._released(change)
        if not np.isfinite(values).all():
            raise TrainError(
                "TENSOR", f"the update is not finite in {values.dtype}; the mean loss was {loss}"
            )
        return Update(values, examples, loss)

    def evaluate(self, weights: np.ndarray) -> tuple[float, int]:
        """The eval model's loss, its first output, on the batches, and the number of examples.

        Raises:
            TrainError: As `fit`, or there is no eval model.
        """
        module = self._load(weights).eval()
        return _mean_loss(self.batches(), lambda batch: _first(module(*batch)))

    def _load(self, weights: np.ndarray) -> Module:
        module = _load(self.files)
        module.copy_buffer_to_parameters(np.ascontiguousarray(weights), trainable_only=False)
        return module

    def _released(self, change: np.ndarray) -> np.ndarray:
        norm = float(np.linalg.norm(change))
        if self.clip is not None and norm > self.clip:
            change = change * (self.clip / norm)
        if self.noise:
            change = change + self._random.normal(0.0, self.noise, change.shape)
        with np.errstate(over="ignore"):  # fit() looks for infinities
            return change.astype(np.float16 if self.half else np.float32)


class GlobalWeights:
    """The weights of all, on the server.

    Args:
        files: Folder of the artifacts, with a checkpoint that has values.
    """

    def __init__(self, files: str | os.PathLike) -> None:
        self._module = _load(Path(files))

    @property
    def values(self) -> np.ndarray:
        """All of them, in the order of the model's inputs: what clients get."""
        return self._module.get_contiguous_parameters(False).numpy().copy()

    def check(self, update: Update) -> None:
        """Looks at an update as one of a stranger.

        Raises:
            ValueError: It has another size or type, numbers that are not finite, or no examples.
        """
        values, expected = update.values, self._module.get_parameters_size(True)
        if values.shape != (expected,) or values.dtype not in (np.float32, np.float16):
            raise ValueError(
                f"an update of {values.dtype}{list(values.shape)}, expected "
                f"float32[{expected}] or float16[{expected}]"
            )
        if not np.isfinite(values).all():
            raise ValueError("an update with numbers that are not finite")
        if update.examples < 1:
            raise ValueError(f"an update of {update.examples} examples, expected 1 or more")

    def add(self, updates: Sequence[Update]) -> None:
        """Adds the mean of updates, weighted by examples, summed in f64 in the order given.

        Raises:
            ValueError: There is none, or one of them does not pass `check`; nothing has changed.
        """
        if not updates:
            raise ValueError("there is no update")
        for update in updates:
            self.check(update)
        total = np.zeros(updates[0].values.shape, np.float64)
        for update in updates:
            total += update.values.astype(np.float64) * update.examples
        mean = total / sum(update.examples for update in updates)
        trained = self._module.get_contiguous_parameters(True).numpy()
        self._module.copy_buffer_to_parameters((trained + mean).astype(np.float32))

    def save(self, checkpoint: str | os.PathLike) -> None:
        """Writes a checkpoint, beside the one that there is, and renames it."""
        CheckpointState.save_checkpoint(self._module.state, checkpoint)


def _load(files: Path) -> Module:
    checkpoint = files / "checkpoint"
    nominal = files / "nominal_checkpoint"
    if nominal.exists() and not checkpoint.exists():
        checkpoint = nominal
    state = CheckpointState.load_checkpoint(checkpoint)
    evaluated = files / "eval_model.onnx"
    return Module(files / "training_model.onnx", state, evaluated if evaluated.exists() else None)


def _first(outputs: Any) -> float:
    return float(outputs[0] if isinstance(outputs, tuple) else outputs)


def _mean_loss(
    batches: Iterable[Sequence[Any]], loss_of: Callable[[Sequence[Any]], float]
) -> tuple[float, int]:
    """Weighted by examples, which are the first axis of the first input."""
    total, examples = 0.0, 0
    for batch in batches:
        n = len(batch[0])
        total += loss_of(batch) * n
        examples += n
    if not examples:
        raise TrainError("TENSOR", "there is no batch to learn from")
    return total / examples, examples
