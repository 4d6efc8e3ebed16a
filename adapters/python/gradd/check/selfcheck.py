"""Comparison of the daemon with PyTorch: at the first call of every kind of plan, and again later.

A call is computed twice without chance: in the daemon by the run flag, in PyTorch by a function
mode (without_chance.py). All outputs, the new values of buffers and the gradients of parameters and
inputs are compared, also of those that the graph believes out of reach. The daemon's side is over,
and its arena is given back, before PyTorch's begins.

A difference is no verdict. PyTorch in double precision (in f32 for what computes in bf16 or f16)
says whether the daemon is further off than PyTorch is; then the same is computed from other data.
An error shows there as well; a unit of a ReLU whose input was within rounding of zero does not.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, unused_memory
from gradd.calls.captured import CapturedGraph
from gradd.calls.run import Run
from gradd.calls.wish import Wish, wish_of
from gradd.check import checktimes, other_data
from gradd.check.agreement import (
    BUFFER,
    F16,
    GRADIENT,
    INPUT,
    OUTPUT,
    Finding,
    Key,
    Tally,
    Trial,
    apart,
)
from gradd.check.checktimes import Kind, Times
from gradd.check.other_data import Data, cut, others
from gradd.check.reference import Task, seed
from gradd.fallback import SelfCheckError
from gradd.session import protocol
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from gradd.dynamo.piece import Piece

logger = logging.getLogger("gradd")
_DRAWS = 3  # one may show next to nothing by luck
_PART = 0.25  # of a whole check, that one of few rows takes at least
_SMALL = 64 << 20  # bytes of a run that PyTorch computes whole: it needs several times as many
# Of the loss: 1 over the elements of a batch is often less than f16 holds in full, and what is left
# of it is chance.
_F16_SCALE = 64.0
_OFF = "GRADD_SELF_CHECK=0 disables this check"


@dataclass
class _Outcome:
    """What one comparison found."""

    findings: list[Finding]
    tally: Tally


class _Incomparable(SelfCheckError):
    """PyTorch itself fails on these data."""


class Checks:
    """The self-checks of one compiled function, whose lock the caller of every method holds."""

    def __init__(self, mode: str) -> None:
        self.times = Times(mode)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self.last_step = 0

    def due(self, graph: CapturedGraph, wish: Wish) -> tuple[Kind, bool]:
        """Counts a call; its kind of plan, and whether `run` is to be called."""
        return self.times.due(graph.kinds, (wish.of_plan(), wish.asked))

    def run(self, piece: Piece, graph: CapturedGraph, wish: Wish, kind: Kind, data: Data) -> None:
        """Checks a call, if that is due; a call that is known to differ is an error at once.

        Raises:
            SelfCheckError: The daemon's values differ from PyTorch's; the message says which.
            CaptureError: PyTorch's own graph shows what no capture can hold.
        """
        sizes = tuple(x.shape for x in data.leaves if torch.is_tensor(x))
        if piece.fallback.retry:
            kind.failed.clear()
        known = kind.failure(sizes)
        if known is not None:
            raise SelfCheckError(known)
        if sizes in kind.passed and kind.calls < kind.due:
            return
        start = checktimes.clock()
        check = _Check(piece, graph, wish, self.counts)
        again = (kind.done or kind.waits) and not kind.failed
        try:
            with unused_memory.unkept():
                if again:
                    check.again(data, kind)
                else:
                    check.first(data)
            kind.succeed(sizes, check.says_something)
        except SelfCheckError as error:
            self.counts["failures"] += 1
            text = _sentence(piece, kind, error.what)
            kind.fail(sizes, text, check.proven and not isinstance(error, _Incomparable))
            raise SelfCheckError(text) from error.__cause__
        finally:
            seconds = checktimes.clock() - start
            self.seconds += seconds
            self.last_step = kind.calls
            shorter = check.whole and not again and cut(piece.fits(graph), data) is not None
            self.times.over(kind, seconds * _PART if shorter else seconds)
            piece.client.ring.forget_peak()
            piece.slots.drop_idle()
        self.counts["passed"] += 1
        logger.info("self-check of call %d passed in %.2f s", kind.calls, seconds)

    def stats(self) -> dict[str, Any]:
        """What statistics say about checks."""
        return {
            "self_checks": self.counts["passed"],
            "self_check_failures": self.counts["failures"],
            "self_checks_on_few_rows": self.counts["few"],
            "self_check_forwards": self.counts["forwards"],
            "self_check_seconds": self.seconds,
            "last_checked_step": self.last_step,
        }


def _sentence(piece: Piece, kind: Kind, text: str) -> str:
    name = piece.title
    if kind.calls > 1:
        return f"step {kind.calls} of {name} {text}. {_OFF}"
    what = "training step" if torch.is_grad_enabled() else "call without gradients"
    return f"the first {what} of {name} {text}. {_OFF}"


class _Check:
    """The check of one call."""

    def __init__(
        self, piece: Piece, graph: CapturedGraph, wish: Wish, counts: Counter[str]
    ) -> None:
        self.piece = piece
        self.graph = graph
        self.wish = wish
        self.counts = counts
        self.half = graph.info.half
        self.says_something = False
        self.proven = True
        self.whole = False

    def first(self, data: Data) -> None:
        """The whole call; outputs that its plan leaves out are compared on few rows.

        A large call is compared on few rows and positions only, for PyTorch's side of the whole
        would be the peak of the training's memory.
        """
        large = self._is_large(data)
        less = (other_data.piece if large else cut)(self.piece.fits(self.graph), data)
        if large and less is not None and self._is_right(less):
            self.counts["few"] += 1
        else:
            self._examine(data, self.wish)
        whole = self._whole_wish(data)
        if whole is None:
            return
        if less is not None and self._agrees(less, whole):
            return
        try:
            self._examine(data, whole, bool(self.half))
        except errors.OutOfMemoryError as error:  # the call itself has room
            logger.info("outputs that the call leaves out are not compared: %s", error.what)

    def _is_right(self, less: Data) -> bool:
        """Whether a part of the call agrees, and tells something."""
        return self._agrees(less, self.wish, exact=False) and self.says_something

    def _is_large(self, data: Data) -> bool:
        """Whether a run of the whole call takes much memory."""
        binding, _, inputs = self._tensors(data.leaves)
        inputs = [t.detach() for t in inputs]
        return self.piece.prepared(self.graph, binding, inputs, self.wish).plan.info.peak > _SMALL

    def again(self, data: Data, kind: Kind) -> None:
        """Few rows of a later call; only if they differ, or cannot be run, the whole of it."""
        less = None
        if kind.rows:
            part = other_data.piece if self._is_large(data) else cut
            less = part(self.piece.fits(self.graph), data, kind.calls)
        if less is not None:
            self.counts["few"] += 1
            if self._agrees(less, self.wish):
                return
            logger.info("a self-check on few rows differs; the whole batch is compared")
        self._examine(data, self.wish)
        kind.rows = kind.rows and less is None  # the whole is right: what differs is the cut

    def _examine(self, data: Data, wish: Wish, exact: bool = False) -> None:
        """Compares a whole call; raises SelfCheckError for what is an error."""
        self.whole = True
        outcome = self._compare(data, wish, exact)
        self.says_something = self.says_something or outcome.tally.says_something()
        findings = outcome.findings
        del outcome  # a second set of gradients would need a second slot
        if findings:
            self._judge(findings, data, wish)

    def _agrees(self, data: Data, wish: Wish, exact: bool = True) -> bool:
        """Whether a cut batch runs and agrees."""
        try:
            outcome = self._compare(data, wish, bool(self.half and exact), passing=True)
        except (_Incomparable, errors.GraddError):
            return False
        self.says_something = self.says_something or outcome.tally.says_something()
        return all(f.excused for f in outcome.findings)

    def _whole_wish(self, data: Data) -> Wish | None:
        """A plan for all outputs and their gradients, if the call's own plan shows less."""
        whole = wish_of(self.graph, *self._tensors(data.leaves)[1:], lazy=False)
        seeded = self._seeded(self.wish)
        if self.half or whole.real != self.wish.real:
            return whole
        return whole if any(i not in seeded for i in self._differentiable(whole)) else None

    @staticmethod
    def _differentiable(wish: Wish) -> list[int]:
        return [wish.real[k] for k in wish.gmask]

    def _seeded(self, wish: Wish) -> list[int]:
        """Outputs from which a backward starts: the loss alone if the graph holds one."""
        if wish is self.wish:
            for i in wish.real:
                if self.graph.user[i].leaf == self.graph.cap.loss_leaf:
                    return [i]
        return list(wish.real)

    # ---- one comparison ----

    def _compare(
        self, data: Data, wish: Wish, exact: bool = False, passing: bool = False
    ) -> _Outcome:
        """Both sides, and a third in higher precision if they differ or `exact` asks for it.

        Args:
            data: The call.
            wish: What of it.
            exact: Compare with a higher precision anyway.
            passing: The plan is not needed afterwards.
        """
        ours, task = self._in_daemon(data, wish, passing or wish is not self.wish)
        tally = Tally(ours, self.half)
        self._in_torch(task, data, tally)
        findings = tally.findings()
        values = [f for f in findings if f.apart is not None]
        if values or exact:
            judge = self._against_f32 if self.half else self._against_f64
            still = judge(task, data, tally)
            findings = [f for f in findings if f.apart is None] + still
        return _Outcome(findings, tally)

    def _against_f64(self, task: Task, data: Data, tally: Tally) -> list[Finding]:
        """What differs; excused where PyTorch is as far off."""
        bad = [f for f in tally.findings() if f.apart is not None]
        exact = Tally(tally.ours, 0, tally.kept)
        if not self._in_higher(torch.float64, task, data, exact):
            return bad
        still = {f.key for f in exact.findings({f.key for f in bad})}
        # A value that is smaller than the difference may be nothing but roundings.
        zero = {k: exact.kept[k] for k in still if exact.apart[k].large < exact.apart[k].top}
        if zero:
            exact.noise = self._noise(task, data, zero)
            still = {f.key for f in exact.findings(still)}
        for finding in bad:
            finding.excused = finding.key not in still
        return bad

    def _noise(self, task: Task, data: Data, exact: dict[Key, torch.Tensor]) -> dict[Key, float]:
        """What roundings to f32 do to these values: the most of a few draws."""
        noise = dict.fromkeys(exact, 0.0)

        def take(key: Key, shaken: torch.Tensor | None) -> None:
            if key in exact and shaken is not None and shaken.shape == exact[key].shape:
                noise[key] = max(noise[key], apart(shaken, exact[key]).top)

        with contextlib.suppress(RuntimeError, TypeError, ValueError, CaptureError):
            for draw in range(_DRAWS):
                self.piece.reference(self.graph, task, torch.float64, draw).run(data, take)
        return noise

    def _against_f32(self, task: Task, data: Data, tally: Tally) -> list[Finding]:
        """The same for what computes in bf16 or f16."""
        exact = Tally(tally.ours, self.half, tally.kept)
        if not self._in_higher(torch.float32, task, data, exact) or not any(exact.own.values()):
            exact = tally  # forward() enters autocast by itself: nothing is more exact
        return [f for f in exact.findings() if f.apart is not None]

    def _tensors(self, leaves: list) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        binding, bound = self.graph.bind(self.piece.state)
        return binding, bound, self.piece.inputs(self.graph, leaves)

    def _in_daemon(
        self, data: Data, wish: Wish, passing: bool
    ) -> tuple[dict[Key, torch.Tensor | None], Task]:
        """The daemon's values, and what PyTorch is to compute."""
        piece, graph = self.piece, self.graph
        binding, bound, inputs = self._tensors(data.leaves)
        inputs = [t.detach() for t in inputs]
        piece.slots.drop_idle()  # another plan may lay gradients out in another way
        before = set(graph.plans)
        flags = protocol.DROPOUT_OFF | protocol.ONCE
        prepared = piece.prepared(graph, binding, inputs, wish)
        prepared, inputs = prepared.live(inputs, quiet=True)
        run = Run(prepared, bound, inputs, piece.counts, flags)
        values: dict[Key, torch.Tensor | None] = {}
        for name, buffer in piece.buffers():
            values[BUFFER, name] = buffer
        self.counts["forwards"] += 1
        try:
            with torch.no_grad():
                results = run.start()
                outputs = dict(zip(wish.real, results, strict=False))
                changed = results[len(wish.real) :]  # and indices of sparse gradients
                task = self._task(outputs, wish)
                starts = [task.seeds.get(i) for i in wish.real] + [None] * len(changed)
                starts = [s if k in wish.gmask else None for k, s in enumerate(starts)]
                if any(s is not None for s in starts):
                    grads = run.backward(starts, keep=False)
                    keys = [(GRADIENT, n) for n in run.plan.params]
                    keys += [(INPUT, n) for n in run.plan.input_grads]
                    values.update(zip(keys, grads, strict=True))
        finally:
            run.end()
            if passing:
                for key in set(graph.plans) - before:
                    graph.made.pop(graph.plans.pop(key), None)
            del run, prepared
        values.update({(OUTPUT, str(i)): t for i, t in outputs.items()})
        for spec, value in zip(graph.changed, changed, strict=False):
            values[BUFFER, spec.fqn] = value
        piece.client.flush()  # gives the arena back
        return values, task

    def _task(self, outputs: dict[int, torch.Tensor], wish: Wish) -> Task:
        seeds = {}
        for i in self._seeded(wish) if self.wish.grad else ():
            tensor = outputs[i]
            # Without a finite value, the gradients of all other outputs would be lost in NaN.
            if tensor.is_floating_point() and (wish is self.wish or bool(tensor.isfinite().any())):
                seeds[i] = seed(tensor, _F16_SCALE if self.half == F16 else 1.0)
        return Task(tuple(outputs), seeds, self.wish.grad)

    def _in_torch(self, task: Task, data: Data, tally: Tally) -> None:
        """PyTorch's side; its failure is one of the check, not of training."""
        try:
            self.piece.reference(self.graph, task).run(data, tally.add)
        except CaptureError:
            raise
        except Exception as error:  # whatever the module raises when it runs without chance
            raise _Incomparable(
                f"cannot be compared: in PyTorch it raises {type(error).__name__}: {error}"
            ) from error
        finally:
            unused_memory.trim()

    def _in_higher(self, dtype: torch.dtype, task: Task, data: Data, tally: Tally) -> bool:
        """False if nothing exact is to be had: a module may insist on its own precision."""
        with contextlib.suppress(RuntimeError, TypeError, ValueError, CaptureError):
            self.piece.reference(self.graph, task, dtype).run(data, tally.add)
            unused_memory.trim()
            return True
        return False

    # ---- the verdict ----

    def _judge(self, findings: list[Finding], data: Data, wish: Wish) -> None:
        """Raises SelfCheckError for what differs again on other data, or cannot be decided."""
        for finding in findings:
            if finding.apart is None:
                raise SelfCheckError(f"differs from PyTorch: {finding.text}")
        trial = Trial(findings)
        for used, other in others(data):
            if self._hears(trial, used, other, wish):
                break
        guilty = trial.guilty()
        if guilty is not None:
            raise SelfCheckError(f"differs from PyTorch: {guilty.text}")
        if trial.open:
            self.proven = False
            raise SelfCheckError(f"differs from PyTorch: {trial.open[0].text}")
        logger.info("what differs from PyTorch is within rounding: other data agree")

    def _hears(self, trial: Trial, used: frozenset[int], data: Data, wish: Wish) -> bool:
        try:
            outcome = self._compare(data, wish, bool(self.half and wish is not self.wish))
        except (_Incomparable, errors.GraddError):
            return False  # these data mean nothing to the module
        return trial.hear(outcome.tally, outcome.findings, used)
