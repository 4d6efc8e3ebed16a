"""Compares the daemon with PyTorch: at the first call of every kind of plan, and again later.

A call is computed twice without randomness: in the daemon by the run flag, in PyTorch by a function
mode (without_randomness.py). PyTorch runs the user's own forward if that has no effects beyond the
graph, which reveals changes that Dynamo's guards have missed; otherwise it runs the graph. The
daemon's side ends and gives its arena back before PyTorch's begins.

A difference is no verdict. PyTorch in double precision (in f32 for results computed in bf16 or f16)
shows whether the daemon is further off than PyTorch; then the same is computed from other data. An
error shows there as well; a ReLU unit whose input was within rounding of zero does not.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors
from gradd.calls.run import Run
from gradd.calls.selection import Selection, selection_of
from gradd.check import checktimes, other_data
from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Finding, Key, Tally, distance
from gradd.check.checktimes import Kind, Times
from gradd.check.other_data import Data
from gradd.check.reference import Reference, Take, Task, seed
from gradd.fallback import SelfCheckError
from gradd.memory import unused
from gradd.session import protocol
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from gradd.calls.graph import Graph
    from gradd.check.checked import Checked

logger = logging.getLogger("gradd")
_DRAWS = 3  # one may show next to nothing by luck
_STALE = 10  # times the bounds: the same operations of PyTorch
_ENOUGH = 3  # other data
_PART = 0.25  # of a whole check, that one of few rows takes at least
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


class Checks:
    """The self-checks of one compiled function, whose lock the caller of every method holds."""

    def __init__(self, mode: str) -> None:
        self.times = Times(mode)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self.last_step = 0

    def due(self, graph: Graph, selection: Selection) -> tuple[Kind, bool]:
        """Counts a call; its kind of plan, and whether `run` is to be called."""
        return self.times.due(graph.kinds, (selection.of_plan(), selection.asked))

    def run(self, piece: Checked, selection: Selection, kind: Kind, data: Data) -> None:
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
        again = (kind.done or kind.waits) and not kind.failed
        try:
            # Users look for anomalies in their own backward, not in this one.
            with unused.unkept(), torch.autograd.set_detect_anomaly(False):
                check.run(data, kind, again)
            kind.succeed(sizes, check.says_something, check.zeros)
        except SelfCheckError as error:
            self.counts["failures"] += 1
            text = _sentence(piece, kind, error.what)
            if not isinstance(error, _Incomparable):
                kind.failed[sizes] = text
            if isinstance(error, _Stale):  # its graph is as wrong in PyTorch
                piece.owner.failed = SelfCheckError(text)
            raise SelfCheckError(text) from error.__cause__
        finally:
            seconds = checktimes.clock() - start
            self.seconds += seconds
            self.last_step = kind.calls
            shorter = check.whole and not again and other_data.rows(piece.fits, data) is not None
            self.times.over(kind, seconds * _PART if shorter else seconds)
            piece.client.ring.forget_peak()
            piece.slots.drop_idle()
        self.counts["passed"] += 1
        logger.info("self-check of call %d passed in %.2f s", kind.calls, seconds)

    def stats(self) -> dict[str, Any]:
        """The statistics of checks."""
        return {
            "self_checks": self.counts["passed"],
            "self_check_failures": self.counts["failures"],
            "self_checks_on_few_rows": self.counts["few"],
            "self_check_forwards": self.counts["forwards"],
            "self_check_seconds": self.seconds,
            "last_checked_step": self.last_step,
        }


def _sentence(piece: Checked, kind: Kind, text: str) -> str:
    what = f"step {kind.calls}"
    if kind.calls == 1:
        what = "the first " + (
            "training step" if torch.is_grad_enabled() else "call without gradients"
        )
    return f"{what} of {piece.title} {text}. {_OFF}"


class _Check:
    """The check of one call.

    Attributes:
        says_something: Numbers were compared.
        zeros: Parameters whose gradient is zero in PyTorch.
        whole: All of the call was compared.
    """

    def __init__(self, piece: Checked, selection: Selection, counts: Counter[str]) -> None:
        self.piece, self.graph, self.selection = piece, piece.graph, selection
        self.counts = counts
        self.half = self.graph.info.half
        self.says_something = False
        self.zeros: set[Key] = set()
        self.whole = False

    def run(self, data: Data, kind: Kind, again: bool) -> None:
        """Few rows of a later call, or of a large one, for PyTorch's side of that would be the peak
        of the training's memory. Only if they differ, or cannot be run, the whole of it.
        """
        piece, large = self.piece, self._is_large(data)
        part = other_data.piece if large else other_data.rows
        less = part(piece.fits, data, kind.calls if again else 0) if kind.rows else None
        if less is not None and (again or large):
            self.counts["few"] += 1
            if not self._agrees(less, self.selection) or not (again or self.says_something):
                self._examine(data, self.selection)
                kind.rows = not again  # the whole is right: only the cut differs
        else:
            self._examine(data, self.selection)
        whole = None if again else self._whole_selection(data)
        if whole is None or less is not None and self._agrees(less, whole):
            return
        try:
            self._examine(data, whole)
        except errors.OutOfMemoryError as error:  # the call itself has room
            logger.info("outputs that the call leaves out are not compared: %s", error.what)

    def _is_large(self, data: Data) -> bool:
        """Whether a run of the whole call takes much memory."""
        binding, _, inputs = self._tensors(data)
        call = self.piece.call(self.graph, binding, inputs, self.selection)
        return call.plan.info.peak > _SMALL

    def _examine(self, data: Data, selection: Selection) -> None:
        """Compares a whole call.

        Raises:
            SelfCheckError: For what differs again on other data, wherever it could.
        """
        self.whole = True
        findings, tally = self._compare(data, selection)
        self._note(tally, selection)
        del tally  # a second set of gradients would need a second slot
        for finding in findings:
            if finding.distance is None:
                raise SelfCheckError(f"differs from PyTorch: {finding.text}")
        if findings:
            self._judge({f.key: f for f in findings}, data, selection)

    def _judge(self, suspects: dict[Key, Finding], data: Data, selection: Selection) -> None:
        agreed: Counter[Key] = Counter()
        strikes = set[Key]()
        for other in other_data.others(data):
            try:
                findings, tally = self._compare(other, selection)
            except (_Incomparable, errors.GraddError):
                continue  # these data mean nothing to the module
            differing = {f.key for f in findings if not f.excused}
            for key, finding in list(suspects.items()):
                if key in differing:
                    strikes.add(key)
                    continue
                agreed[key] += 1
                excused = key in {f.key for f in findings}
                if excused or tally.would_show(finding):
                    del suspects[key]
            del tally
            if not suspects:
                logger.info("what differs from PyTorch is within rounding: other data agree")
                return
        for key, finding in suspects.items():
            if key in strikes or not finding.excused and agreed[key] < _ENOUGH:
                raise SelfCheckError(f"differs from PyTorch: {finding.text}")

    def _agrees(self, data: Data, selection: Selection) -> bool:
        """Whether a cut batch runs and agrees."""
        try:
            findings, tally = self._compare(data, selection)
        except (_Incomparable, errors.GraddError) as error:
            logger.info("a self-check on few rows fails: %s", error)
            return False
        self._note(tally, selection)
        return all(f.excused for f in findings)

    def _note(self, tally: Tally, selection: Selection) -> None:
        self.says_something = self.says_something or tally.says_something()
        if selection is self.selection:
            self.zeros = tally.zeros()

    def _whole_selection(self, data: Data) -> Selection | None:
        """A plan for all outputs and their gradients, if the call's own plan shows less."""
        whole = selection_of(self.graph, *self._tensors(data)[1:], lazy=False)
        seeded = self._seeded(self.selection)
        more = any(whole.real[k] not in seeded for k in whole.gmask)
        return whole if more or whole.real != self.selection.real else None

    def _seeded(self, selection: Selection) -> list[int]:
        """Outputs from which a backward starts: the loss alone if the graph holds one."""
        loss = self.graph.cap.loss_leaf
        found = [i for i in selection.real if self.graph.user[i].leaf == loss]
        return found[:1] if selection is self.selection and found else list(selection.real)

    # ---- one comparison ----

    def _compare(self, data: Data, selection: Selection) -> tuple[list[Finding], Tally]:
        """Both sides, and a third in higher precision if they differ."""
        ours, task = self._in_daemon(data, selection)
        reference = Reference(self.piece, task)
        tally = Tally(ours, self.half)
        if self._by_forward(reference, data, tally):
            if not tally.findings():
                return [], tally
            tally = self._not_stale(reference, data, tally)
        else:
            tally = Tally(ours, self.half)
            self._in_torch(reference, data, tally.add)
        findings = tally.findings()
        values = [f for f in findings if f.distance is not None]
        exact = Tally(ours, self.half, tally)
        dtype = torch.float32 if self.half else torch.float64
        reference.only = {f.key for f in values}
        for key in tally.kept.keys() - reference.only:
            del tally.kept[key]  # within its bound of all gradients
        if values and self._in_higher(reference, data, exact, dtype):
            still = {f.key: f for f in exact.findings()}
            # A value that is smaller than the difference may be nothing but roundings.
            small = {k for k in still if 0 <= exact.distances[k].size < exact.distances[k].off}
            if small and not self.half:
                exact.noise = self._noise(reference, data, {k: exact.kept[k] for k in small})
                still = {f.key: f for f in exact.findings()}
            for finding in values:
                finding.excused = finding.key not in still
                finding.text = getattr(still.get(finding.key), "text", finding.text)
        return findings, tally

    def _by_forward(self, reference: Reference, data: Data, tally: Tally) -> bool:
        """The user's own forward on PyTorch's side, where that is possible."""
        own = self.piece.own_forward() if data.parts is not None else None
        if own is None:
            return False
        try:
            return reference.run_forward(own, data, tally.add)
        except Exception as error:  # whatever it raises on a part of a batch, or on stand-ins
            logger.info("the graph is compared, as forward() raises %r", error)
            return False
        finally:
            unused.trim()

    def _not_stale(self, reference: Reference, data: Data, before: Tally) -> Tally:
        """The comparison with the graph in PyTorch.

        Args:
            reference: Runs the graph.
            data: Of the call.
            before: The comparison with forward(), which differs.

        Raises:
            SelfCheckError: forward() itself does not compute the results of the graph.
        """
        tally, kept = Tally(before.ours, self.half), before.kept
        stale = Tally(kept, self.half, slack=_STALE)

        def take(key: Key, value: torch.Tensor | None) -> None:
            tally.add(key, value)
            own = kept.get(key)
            if self.half and value is not None and own is not None and own.shape == value.shape:
                # TorchDynamo decomposes some operations: another step may leave the range.
                lost = ~(own.isfinite() & value.isfinite())
                kept[key], value = own.masked_fill(lost, 0), value.detach().masked_fill(lost, 0)
            if key in kept:
                stale.add(key, value)

        self._in_torch(reference, data, take)
        for finding in stale.findings():
            raise _Stale(
                f"differs from what forward() computes by now: {finding.text}; TorchDynamo has not "
                "seen a change of what that reads"
            )
        return tally

    def _in_torch(self, reference: Reference, data: Data, take: Take) -> None:
        """PyTorch's side; its failure is one of the check, not of training."""
        try:
            reference.run(data, take)
        except CaptureError:
            raise
        except Exception as error:  # whatever the module raises when it runs without randomness
            raise _Incomparable(
                f"cannot be compared: in PyTorch it raises {type(error).__name__}: {error}"
            ) from error
        finally:
            unused.trim()

    def _in_higher(
        self, reference: Reference, data: Data, tally: Tally, dtype: torch.dtype
    ) -> bool:
        """False if nothing exact is to be had: a graph may insist on its own precision."""
        with contextlib.suppress(RuntimeError, TypeError, ValueError, CaptureError):
            reference.run(data, tally.add, dtype)
            unused.trim()
            return True
        return False

    def _noise(
        self, reference: Reference, data: Data, exact: dict[Key, torch.Tensor]
    ) -> dict[Key, float]:
        """The effect of roundings to f32 on these values: the largest of a few draws."""
        noise = dict.fromkeys(exact, 0.0)

        def take(key: Key, shaken: torch.Tensor | None) -> None:
            if key in exact and shaken is not None and shaken.shape == exact[key].shape:
                noise[key] = max(noise[key], distance(shaken, exact[key]).off)

        with contextlib.suppress(RuntimeError, TypeError, ValueError, CaptureError):
            for draw in range(_DRAWS):
                reference.run(data, take, torch.float64, draw)
        return noise

    def _tensors(self, data: Data) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        binding, bound = self.graph.bind(self.piece.state)
        return binding, bound, data.leaves

    def _in_daemon(
        self, data: Data, selection: Selection
    ) -> tuple[dict[Key, torch.Tensor | None], Task]:
        """The daemon's values, and the computation for PyTorch."""
        piece, graph = self.piece, self.graph
        binding, bound, inputs = self._tensors(data)
        inputs = [t.detach() for t in inputs]
        piece.slots.drop_idle()  # another plan may lay gradients out in another way
        before = set(graph.plans)
        call = piece.call(graph, binding, inputs, selection)
        call, inputs = call.live(inputs, quiet=True)
        run = Run(call, bound, inputs, piece.counts, protocol.DROPOUT_OFF | protocol.ONCE)
        values: dict[Key, torch.Tensor | None] = {(BUFFER, n): b for n, b in piece.buffers()}
        self.counts["forwards"] += 1
        try:
            with torch.no_grad():
                results = run.start()
                outputs = dict(zip(selection.real, results, strict=False))
                changed = results[len(selection.real) :]  # and indices of sparse gradients
                task = self._task(outputs, selection)
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
            if data.parts != () or selection is not self.selection:  # no call needs such a plan
                for key in set(graph.plans) - before:
                    graph.made.pop(graph.plans.pop(key), None)
            del run, call
        values.update({(OUTPUT, str(i)): t for i, t in outputs.items()})
        for spec, value in zip(graph.changed, changed, strict=False):
            values[BUFFER, spec.fqn] = value
        piece.client.flush()  # gives the arena back
        return values, task

    def _task(self, outputs: dict[int, torch.Tensor], selection: Selection) -> Task:
        seeds = {}
        for i in self._seeded(selection) if self.selection.grad else ():
            tensor = outputs[i]
            # Without a finite value, the gradients of all other outputs would be lost in NaN.
            if tensor.is_floating_point() and (
                selection is self.selection or bool(tensor.isfinite().any())
            ):
                seeds[i] = seed(tensor, _F16_SCALE if self.half == _F16 else 1.0)
        return Task(tuple(outputs), seeds, self.selection.grad)
