"""Compares the daemon with PyTorch: at the first call of every kind of plan, and again later.

A call is computed twice without randomness: in the daemon by the run flag, in PyTorch by modes
(without_randomness.py). PyTorch runs the user's own forward if that has no effects beyond the
graph, which reveals changes that Dynamo's guards have missed; otherwise it runs the graph. The
daemon's side ends and gives its arena back before PyTorch's begins.

A difference is no verdict. PyTorch computes what differs again, in double precision (in f32 if it
carries the roundings of bf16 or f16) and with other roundings (precise.py): an error shows there,
a ReLU unit whose input was within rounding of zero does not.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from typing import Any

import torch

from gradd import errors
from gradd.calls.run import Run
from gradd.calls.selection import Selection
from gradd.check import checktimes, cut
from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key, Tally, Values
from gradd.check.checktimes import Kind, Times
from gradd.check.cut import Data
from gradd.check.precise import Precise
from gradd.check.reference import Piece, Reference, Task, seed
from gradd.fallback import SelfCheckError
from gradd.memory import unused
from gradd.session import protocol
from gradd.spec import CaptureError

logger = logging.getLogger("gradd")
_DRAWS = 8  # of roundings, at the most
_STALE = 10  # times the bounds: the same operations of PyTorch
_SMALL = 64 << 20  # bytes of a run that PyTorch computes whole: it needs several times as many
_F16 = 10  # code of the element type
# Of the loss: 1 over the elements of a batch is often less than f16 holds in full, and what is left
# of it is chance.
_F16_SCALE = 64.0
_OFF = "GRADD_SELF_CHECK=0 disables this check"


class _Incomparable(SelfCheckError):
    """PyTorch itself fails on these data."""


class _Stale(SelfCheckError):
    """forward() computes something else than its graph."""


class Checks(Times):
    """The self-checks of one compiled function, whose lock the caller of every method holds."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self.last_step = 0

    def run(self, piece: Piece, selection: Selection, kind: Kind, data: Data) -> None:
        """Checks a call, if that is due; a call that is known to differ is an error at once.

        Raises:
            SelfCheckError: The daemon's values differ from PyTorch's; the message says which.
            CaptureError: PyTorch's own graph shows what no capture can hold.
        """
        sizes = tuple(x.shape for x in data.leaves)
        if piece.fallback.retry:
            kind.failed.clear()
        known = kind.failure(sizes)
        if known is not None:
            raise SelfCheckError(known)
        if sizes in kind.passed and kind.calls < kind.due:
            return
        start = checktimes.clock()
        check = _Check(piece, selection, self.counts)
        again = kind.done and not kind.failed
        try:
            # Users look for anomalies in their own backward, not in this one.
            with unused.unkept(), torch.autograd.set_detect_anomaly(False):
                check.run(data, kind, again)
            kind.succeed(sizes, check.says_something, check.zeros or ())
        except SelfCheckError as error:
            self.counts["failures"] += 1
            text = f"{_name(kind)} of {piece.title} {error.what}. {_OFF}"
            if not isinstance(error, _Incomparable):
                kind.failed[sizes] = text
            if isinstance(error, _Stale):  # its graph is as wrong in PyTorch
                piece.owner.failed = SelfCheckError(text)
            raise SelfCheckError(text) from error.__cause__
        finally:
            seconds = checktimes.clock() - start
            self.seconds += seconds
            self.last_step = kind.calls
            self.over(kind, seconds)
            piece.client.ring.forget_peak()
            piece.slots.drop_idle()
        self.counts["passed"] += 1
        logger.info("self-check of call %d passed in %.2f s", kind.calls, seconds)

    def stats(self) -> dict[str, Any]:
        return {
            "self_checks": self.counts["passed"],
            "self_check_failures": self.counts["failures"],
            "self_checks_on_few_rows": self.counts["few"],
            "self_check_forwards": self.counts["forwards"],
            "self_check_seconds": self.seconds,
            "last_checked_step": self.last_step,
        }


def _name(kind: Kind) -> str:
    if kind.calls > 1:
        return f"step {kind.calls}"
    return "the first " + ("training step" if torch.is_grad_enabled() else "call without gradients")


class _Check:
    """The check of one call.

    Attributes:
        says_something: Numbers were compared.
        zeros: Parameters whose gradient is zero in PyTorch.
    """

    def __init__(self, piece: Piece, selection: Selection, counts: Counter[str]) -> None:
        self.piece, self.graph, self.selection = piece, piece.graph, selection
        self.counts = counts
        self.half = self.graph.info.half
        self.says_something = False
        self.zeros: set[Key] | None = None

    def run(self, data: Data, kind: Kind, again: bool) -> None:
        """A piece of a later call, or of a large one, for PyTorch's side of that would be the peak
        of the training's memory. Only if it differs, or cannot be run, the whole of it.

        Raises:
            SelfCheckError: It differs, by a backward of the loss or by one of all outputs.
        """
        less = None
        if kind.rows and (again or self._is_large(data)):
            less = cut.piece(self.piece.fits, data, kind.calls if again else 0)
        self.counts["few"] += less is not None
        loss, real = self._loss(), self.selection.real
        rest = {real[k] for k in self.selection.gmask} - set(loss) if loss and not again else ()
        for seeded in (loss or real, real) if rest else (loss or real,):
            if less is not None and self._agrees(less, seeded, again or seeded is not loss):
                continue
            for text in self._compare(data, seeded):
                raise SelfCheckError(f"differs from PyTorch: {text}")
            kind.rows = kind.rows and (less is None or not again)  # the cut alone differs

    def _is_large(self, data: Data) -> bool:
        """Whether a run of the whole call takes much memory."""
        binding, _ = self.graph.bind(self.piece.state)
        call = self.piece.call(self.graph, binding, data.leaves, self.selection)
        return call.plan.info.peak > _SMALL

    def _loss(self) -> list[int]:
        """The outputs from which the backward of a training step starts, if the graph tells."""
        loss = self.graph.cap.loss_leaf
        return [i for i in self.selection.real if self.graph.user[i].leaf == loss][:1]

    def _agrees(self, data: Data, seeded: list[int], enough: bool) -> bool:
        """Whether a cut batch runs and agrees; if that is not enough, whether it says something."""
        try:
            agrees = not self._compare(data, seeded)
        except (_Incomparable, errors.GraddError) as error:
            logger.info("a self-check on few rows fails: %s", error)
            return False
        return agrees and (enough or self.says_something)

    # ---- one comparison ----

    def _compare(self, data: Data, seeded: list[int]) -> list[str]:
        """What differs by more than roundings, in words; a backward starts from these outputs."""
        ours, task = self._in_daemon(data, seeded)
        reference = Reference(self.piece, task)
        tally = self._by_forward(reference, data, ours)
        if tally is None or tally.settle():
            tally = self._by_graph(reference, data, ours, tally)
        self.says_something = self.says_something or tally.says_something()
        self.zeros = tally.zeros() if self.zeros is None else self.zeros & tally.zeros()
        if tally.settle() and not tally.missing:
            self._excuse(reference, data, tally)
        return list(tally.differing.values())

    def _by_forward(self, reference: Reference, data: Data, ours: Values) -> Tally | None:
        """The comparison with the user's own forward, where that is possible."""
        own, tally = self.piece.own_forward(), Tally(ours, self.half)
        try:
            compared = own is not None and reference.run_forward(own, data, tally.add)
        except Exception as error:  # whatever it raises on a part of a batch, or on stand-ins
            logger.info("the graph is compared, as forward() raises %r", error)
            return None
        return tally if compared else None

    def _by_graph(
        self, reference: Reference, data: Data, ours: Values, before: Tally | None
    ) -> Tally:
        """The comparison with the graph in PyTorch, after one with forward() if that differs.

        Raises:
            SelfCheckError: The graph fails, or forward() itself does not compute its results.
        """
        tally = Tally(ours, self.half)
        stale = Tally(before.kept if before is not None else {}, self.half, _STALE)

        def take(key: Key, value: torch.Tensor | None) -> None:
            tally.add(key, value)
            if key in stale.ours:
                stale.add(key, value)

        try:
            reference.run(data, take)
        except CaptureError:
            raise
        except Exception as error:  # whatever the module raises when it runs without randomness
            raise _Incomparable(
                f"cannot be compared: in PyTorch it raises {type(error).__name__}: {error}"
            ) from error
        for key, text in stale.settle().items():
            # TorchDynamo decomposes some operations: another step may leave the range of a half.
            if not self.half or key in stale.missing or math.isfinite(stale.distances[key].off):
                raise _Stale(
                    f"differs from what forward() computes by now: {text}; TorchDynamo has not "
                    "seen a change of what that reads"
                )
        return tally

    def _excuse(self, reference: Reference, data: Data, tally: Tally) -> None:
        """Takes away what differs from the exact value as other roundings do."""
        reference.only = tally.differing
        dtype: torch.dtype | None = torch.float32 if self.half else torch.float64
        try:
            reference.run(data, tally.exact, Precise(dtype))
        except Exception as error:  # a graph may insist on its own precision
            logger.info("there is no higher precision, as the graph raises %r", error)
            dtype = None
            for key, value in list(tally.kept.items()):
                tally.exact(key, value)
        for draw in range(_DRAWS):
            if tally.differing:
                with contextlib.suppress(Exception):
                    reference.run(data, tally.draw, Precise(dtype, self.half, draw))

    def _in_daemon(self, data: Data, seeded: list[int]) -> tuple[Values, Task]:
        """The daemon's values, and the computation for PyTorch."""
        piece, graph, selection = self.piece, self.graph, self.selection
        binding, bound = graph.bind(piece.state)
        inputs = [t.detach() for t in data.leaves]
        piece.slots.drop_idle()  # another plan may lay gradients out in another way
        before = set(graph.plans)
        call = piece.call(graph, binding, inputs, selection)
        call, inputs = call.live(inputs, quiet=True)
        if data.parts:
            piece.client.later("about", {"check": call.plan.info.id})
        run = Run(call, bound, inputs, piece.counts, protocol.DROPOUT_OFF | protocol.ONCE)
        values: dict[Key, torch.Tensor | None] = {(BUFFER, n): b for n, b in piece.buffers()}
        self.counts["forwards"] += 1
        try:
            with torch.no_grad():
                results = run.start()
                outputs = dict(zip(selection.real, results, strict=False))
                changed = results[len(selection.real) :]  # and indices of sparse gradients
                task = self._task(outputs, seeded)
                starts = [
                    task.seeds.get(selection.real[k]) if k in selection.gmask else None
                    for k in range(len(results))
                ]
                if any(s is not None for s in starts):
                    grads = run.backward(starts, keep=False)
                    keys = [(GRADIENT, n) for n in run.plan.params]
                    keys += [(INPUT, n) for n in run.plan.input_grads]
                    values.update(zip(keys, grads, strict=True))
        finally:
            run.end()
            if data.parts:  # no call needs such a plan
                for key in set(graph.plans) - before:
                    graph.made.pop(graph.plans.pop(key), None)
            del run, call
        values.update({(OUTPUT, str(i)): t for i, t in outputs.items()})
        for spec, value in zip(graph.changed, changed, strict=False):
            values[BUFFER, spec.fqn] = value
        piece.client.flush()  # gives the arena back
        return values, task

    def _task(self, outputs: dict[int, torch.Tensor], seeded: list[int]) -> Task:
        seeds = {}
        for i in seeded if self.selection.grad else ():
            # Without a finite value, the gradients of all other outputs would be lost in NaN.
            if outputs[i].is_floating_point() and bool(outputs[i].isfinite().any()):
                seeds[i] = seed(outputs[i], _F16_SCALE if self.half == _F16 else 1.0)
        return Task(tuple(outputs), seeds, self.selection.grad)
