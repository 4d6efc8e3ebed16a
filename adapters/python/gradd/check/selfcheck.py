"""Compares the daemon with PyTorch: at the first call of every kind of plan, and again later.

A call is computed twice without randomness: in the daemon by the run flag, in PyTorch by modes
(modes.py). PyTorch runs the user's own forward if that has no effects beyond the
graph, which reveals changes that Dynamo's guards have missed; otherwise it runs the graph. The
daemon's side ends and gives its arena back before PyTorch's begins.

A difference is no verdict. PyTorch computes what differs again with other roundings (modes.py),
then in double precision; what carries roundings of bf16 or f16, in f32. An error shows there, a
ReLU unit whose input was within rounding of zero does not.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from gradd import errors
from gradd.calls.run import Run
from gradd.calls.selection import Selection
from gradd.check import checktimes, cut
from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key, Tally, Values
from gradd.check.checktimes import Kind, Times
from gradd.check.cut import Data
from gradd.check.modes import Precise
from gradd.check.reference import Piece, Reference, Task, seed
from gradd.fallback import SelfCheckError
from gradd.memory import unused
from gradd.session import protocol

logger = logging.getLogger("gradd")
_DRAWS = 4  # of roundings, at the most; twice as many of those of a half
_STALE = 10  # times the bounds: the same operations of PyTorch
_SMALL = 64 << 20  # bytes of a run that PyTorch computes whole: it needs several times as many
_F16 = 10  # code of the element type
# Of the loss: 1 over the elements of a batch is often less than f16 holds in full, and what is left
# of it is chance.
_F16_SCALE = 64.0
_COUNTS = ("checks", "check_failures", "checks_on_few_rows", "check_forwards", "check_seconds")


class Checks(Times):
    """The self-checks of one compiled function, whose lock the caller of every method holds."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.counts: Counter[str] = Counter()

    def stats(self) -> dict[str, Any]:
        counts = {f"self_{name}": self.counts[name] for name in _COUNTS}
        return {**counts, "last_checked_step": self.counts["last"]}

    def run(self, piece: Piece, selection: Selection, kind: Kind, data: Data) -> None:
        """Checks a call, if that is due; a call that is known to differ is an error at once.

        Raises:
            SelfCheckError: The daemon's values differ from PyTorch's; the message says which.
        """
        sizes = tuple(x.shape for x in data.leaves)
        if piece.fallback.retry:
            kind.failed.clear()
        if (known := kind.failure(sizes)) is not None:
            raise SelfCheckError(known)
        if sizes in kind.passed and kind.calls < kind.due:
            return
        start = checktimes.clock()
        check = _Check(piece, selection, kind, self.counts)
        try:
            # Users look for anomalies in their own backward, not in this one.
            with unused.unkept(), torch.autograd.set_detect_anomaly(False):
                wrong = check.run(data)
            if wrong:
                first = "training step" if torch.is_grad_enabled() else "call without gradients"
                name = f"step {kind.calls}" if kind.calls > 1 else f"the first {first}"
                wrong = f"{name} of {piece.title} {wrong}. GRADD_SELF_CHECK=0 disables this check"
                self.counts["check_failures"] += 1
                kind.failed[sizes] = wrong
                if check.stale:  # the graph is as wrong in PyTorch
                    piece.owner.failed = SelfCheckError(wrong)
                raise SelfCheckError(wrong)
            kind.succeed(sizes, check.says_something)
            self.counts["checks"] += 1
        finally:
            seconds = checktimes.clock() - start
            self.counts.update(check_seconds=seconds)
            self.counts["last"] = kind.calls
            self.over(kind, seconds)
            piece.client.ring.forget_peak()
            piece.slots.drop_idle()
        logger.info("self-check of call %d passed in %.2f s", kind.calls, seconds)


class _Check:
    """The check of one call."""

    def __init__(self, piece: Piece, selection: Selection, kind: Kind, counts: Counter) -> None:
        self.piece, self.graph, self.selection = piece, piece.graph, selection
        self.kind, self.counts = kind, counts
        self.half = self.graph.info.half
        self.says_something = False  # numbers were compared
        self.stale = False  # forward() computes something else than its graph

    def run(self, data: Data) -> str:
        """What differs, by a backward of the loss or by one of all outputs; empty = nothing.

        A piece of a later call, or of a large one, is compared, for PyTorch's side of that would be
        the peak of the training's memory. Only if it differs, or cannot be run, the whole of it.
        """
        kind, less = self.kind, None
        again = kind.done and not kind.failed
        binding, _ = self.graph.bind(self.piece.state)
        call = self.piece.call(self.graph, binding, data.leaves, self.selection)
        if kind.rows and (again or call.plan.info.peak > _SMALL):
            less = cut.piece(self.piece.fits, data, kind.calls if again else 0)
        self.counts["checks_on_few_rows"] += less is not None
        real, leaf = self.selection.real, self.graph.cap.loss_leaf
        loss = [i for i in real if self.graph.user[i].leaf == leaf][:1] or real
        rest = not again and any(real[k] not in loss for k in self.selection.gmask)
        for seeded in (loss, real) if rest else (loss,):
            if less is not None and self._agrees(less, seeded, again or seeded is not loss):
                continue
            if wrong := self._compare(data, seeded):
                return wrong
            kind.rows = kind.rows and (less is None or not again)  # the cut alone differs
        return ""

    def _agrees(self, data: Data, seeded: list[int], enough: bool) -> bool:
        """Whether a cut batch runs and agrees; if that is not enough, whether it says something."""
        try:
            agrees = not self._compare(data, seeded)
        except errors.GraddError as error:
            logger.info("a self-check on few rows fails: %s", error)
            return False
        return agrees and (enough or self.says_something)

    # ---- one comparison ----

    def _compare(self, data: Data, seeded: list[int]) -> str:
        """What differs by more than roundings, in words; a backward starts from these outputs."""
        ours, task = self._in_daemon(data, seeded)
        reference, own = Reference(self.piece, task), self.piece.own_forward()
        tally, compared = Tally(ours, self.half), False
        try:
            compared = own is not None and reference.run_forward(own, data, tally.add)
        except Exception as error:  # whatever it raises on a part of a batch, or on stand-ins
            logger.info("the graph is compared, as forward() raises %r", error)
        if not compared or tally.settle():
            before = Tally(tally.kept if compared else {}, self.half, _STALE)
            tally = Tally(ours, self.half)
            if wrong := self._by_graph(reference, data, tally, before):
                return wrong
        self.says_something = self.says_something or tally.says_something()
        zeros, known = tally.zeros(), self.kind.zeros
        self.kind.zeros = zeros if known is None else known & zeros
        if tally.settle() and tally.differing.keys() <= tally.distances.keys():
            self._excuse(task, data, tally)
        return next((f"differs from PyTorch: {text}" for text in tally.differing.values()), "")

    def _by_graph(self, reference: Reference, data: Data, tally: Tally, before: Tally) -> str:
        """Compares with the graph in PyTorch, and that with what differs in forward()."""

        def take(key: Key, value: torch.Tensor | None) -> None:
            tally.add(key, value)
            if key in before.ours:
                before.add(key, value)

        try:
            reference.run(data, take)
        except Exception as error:  # whatever the module raises when it runs without randomness
            return f"cannot be compared: in PyTorch it raises {type(error).__name__}: {error}"
        for key, text in before.settle().items():
            # TorchDynamo decomposes some operations: another step may leave the range of a half.
            found = before.distances.get(key)
            self.stale = not self.half or found is None or math.isfinite(found.off)
            if self.stale:
                return (
                    f"differs from what forward() computes by now: {text}; TorchDynamo has not "
                    "seen a change of what that reads"
                )
        return ""

    def _excuse(self, task: Task, data: Data, tally: Tally) -> None:
        """Takes away what differs from the exact value as other roundings do.

        In f32 PyTorch's own value stands for the exact one at first, unless something has left the
        range: draws are off by far more, and double precision takes several times as long where
        there are convolutions. What still differs then may be PyTorch's own error.
        """
        if self.half:
            self._draw(torch.float32, task, data, tally)
            return
        if not any(math.isinf(tally.distances[key].off) for key in tally.differing):
            self._draw(None, task, data, tally)
        self._draw(torch.float64, task, data, tally)

    def _draw(self, dtype: torch.dtype | None, task: Task, data: Data, tally: Tally) -> None:
        """The same with the values in one precision; None = that of the operands."""
        if not tally.differing:
            return

        def run(mode: Precise, take: Callable[[Key, torch.Tensor | None], None]) -> None:
            Reference(self.piece, task, mode, tally.differing).run(data, take)

        try:
            if dtype is not None:
                run(Precise(dtype), tally.exact)
        except Exception as error:  # a graph may insist on its own precision
            logger.info("there is no higher precision, as the graph raises %r", error)
            dtype = None
        if dtype is None:
            for key, value in list(tally.kept.items()):
                tally.exact(key, value)
        for draw in range(2 * _DRAWS if self.half else _DRAWS):
            if tally.differing:
                with contextlib.suppress(Exception):
                    run(Precise(dtype, self.half, draw), tally.draw)

    def _in_daemon(self, data: Data, seeded: list[int]) -> tuple[Values, Task]:
        """The daemon's values, and the computation for PyTorch."""
        piece, graph, selection = self.piece, self.graph, self.selection
        binding, bound = graph.bind(piece.state)
        inputs = [t.detach() for t in data.leaves]
        piece.slots.drop_idle()  # another plan may lay gradients out in another way
        plans = set(graph.plans)
        call, inputs = piece.call(graph, binding, inputs, selection).live(inputs, quiet=True)
        if data.parts:
            piece.client.later("about", {"check": call.plan.info.id})
        run = Run(call, bound, inputs, piece.counts, protocol.DROPOUT_OFF | protocol.ONCE)
        self.counts["check_forwards"] += 1
        scale = _F16_SCALE if self.half == _F16 else 1.0
        try:
            with torch.no_grad():
                results = run.start()  # outputs, buffers, and indices of sparse gradients
                outputs = dict(zip(selection.real, results, strict=False))
                seeds = {
                    i: seed(outputs[i], scale)
                    for i in (seeded if selection.grad else ())
                    # Without a finite value, other gradients would be lost in NaN.
                    if outputs[i].is_floating_point() and bool(outputs[i].isfinite().any())
                }
                values: dict[Key, torch.Tensor | None] = {
                    (OUTPUT, str(i)): t for i, t in outputs.items()
                }
                for spec, value in zip(graph.changed, results[len(outputs) :], strict=False):
                    values[BUFFER, spec.fqn] = value
                starts = [
                    seeds.get(i) if k in selection.gmask else None for k, i in enumerate(outputs)
                ]
                if any(s is not None for s in starts):
                    starts += [None] * (len(results) - len(starts))
                    keys = [(GRADIENT, n) for n in run.plan.params]
                    keys += [(INPUT, n) for n in run.plan.input_grads]
                    values.update(zip(keys, run.backward(starts, keep=False), strict=True))
        finally:
            run.end()
            if data.parts:  # no call needs such a plan
                for key in set(graph.plans) - plans:
                    graph.made.pop(graph.plans.pop(key), None)
            del run, call
        piece.client.flush()  # gives the arena back
        return values, Task(tuple(outputs), seeds, selection.grad)
