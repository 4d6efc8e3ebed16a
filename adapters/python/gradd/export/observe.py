"""One eager forward beside a capture: what forward() really does, before it is traced.

A trace shows what torch's operators do to the call's tensors. It does not show what the Python code
around them took from elsewhere, which buffers it replaced, or which part of the result came out of
a custom autograd.Function. So the forward of the user runs once in PyTorch, in the module's current
mode and on the call's own values, and leaves nothing behind: buffers and arguments are copies,
attributes and random states are put back, and what autograd saves for a backward is thrown away at
once, so that the memory of activations is never held. Parameters are the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradd import schema
from gradd.check.without_chance import without_checkpoints
from gradd.export import autocast, backward, inner, lost, refuse, results, shared
from gradd.export.attributes import Attributes
from gradd.export.guards.arguments import Asked, layouts, own_layouts
from gradd.export.guards.check import Guards, describe
from gradd.export.guards.contexts import Trial
from gradd.export.guards.outside import Outside
from gradd.export.guards.reads import Abandoned
from gradd.export.guards.spots import Answer
from gradd.export.guards.watch import Disturbed, Watch
from gradd.export.identity import Same, standing
from gradd.export.modes import Modes
from gradd.export.naming import Call
from gradd.spec import CaptureError

_TRIES = 5
_FRESH = torch.empty(0).clone()._version  # of a copy that nobody has written


@dataclass(frozen=True)
class BufferSeen:
    """A buffer around the observed forward.

    Attributes:
        before: The values that it had, in memory of their own.
        after: The tensor that stood in its place afterwards; None if it was removed.
        replaced: forward() put another tensor in its place.
    """

    before: torch.Tensor
    after: torch.Tensor | None
    replaced: bool

    def changed(self) -> bool:
        """True if form or values differ; NaN equals itself."""
        a, b = self.before, self.after
        if b is None or a.shape != b.shape or a.dtype != b.dtype:
            return True
        if a.is_floating_point() and a.itemsize == 1:  # torch computes nothing with such
            return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if a.is_floating_point() or a.is_complex():
            return not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) or not torch.equal(
                torch.isnan(a), torch.isnan(b)
            )
        return not torch.equal(a, b)


@dataclass
class Observation:
    """What one eager forward showed.

    Attributes:
        outputs: Tensor leaves of the result in the order of the capture's user outputs, with the
            graph of their grad_fn (which saved no tensors: it can be walked, not run).
        buffers: By qualified name, tied buffers under each of their names.
        error: What forward() raised; then everything else is empty.
        gradients: Whether the trace has to run with gradients enabled: where forward() asks for the
            mode, it is that of the caller.
        outside: What forward() read from outside; None if it raised or was not run.
        used: Ids of the outside tensors that operators have read.
        layouts: How the call's tensors lie in memory, if forward() asks for such.
        asked: What else it asks them.
        read: Attributes of the module that forward() read, see Watch.attributes_read().
        handed: The outputs beside what the caller has, see shared.py.
        asking: Globals of code that asks type() for the class of a number.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    buffers: dict[str, BufferSeen] = field(default_factory=dict)
    error: Exception | None = None
    gradients: bool = True
    outside: Outside | None = None
    used: frozenset[int] = frozenset()
    layouts: tuple | None = None
    asked: Asked | None = None
    read: frozenset[tuple[str, str]] | None = None
    handed: shared.Handed = field(default_factory=shared.Handed)
    asking: list[dict] = field(default_factory=list)


def observe(call: Call, cast: torch.dtype | None) -> Observation:
    """Runs the forward of a call once, under autocast to `cast`.

    Where forward() asks whether gradients are recorded, switches them on, or fails while they are,
    and the caller records none, it runs a second time without them: the outputs are those of the
    first if there are any, everything else is of the second.

    Args:
        call: The call that is going to be traced.
        cast: Element type of the autocast around the call, or None.

    Raises:
        CaptureError: "outside_state" or "outside_written": forward() reads something that cannot
            be watched, or writes something that a graph would not write. What it wrote is undone.
    """
    seen, asks = _undisturbed(call, cast, True)
    if torch.is_grad_enabled() or not (asks or seen.error is not None):
        return seen
    again, _ = _undisturbed(call, cast, False)  # parameters may be made in inference mode
    if seen.error is None:
        again.outputs, again.handed = seen.outputs, seen.handed
    return again


def _undisturbed(call: Call, cast: torch.dtype | None, gradients: bool) -> tuple[Observation, bool]:
    """Again, if it cannot be told which objects are older than the forward.

    And if values count that were left out.
    """
    whole = False
    for _ in range(_TRIES - 1):
        try:
            return _observe(call, cast, gradients, whole)
        except _Relied:
            whole = True
        except Disturbed:
            pass
    return _observe(call, cast, gradients, True)


class _Relied(Exception):
    """What forward() did may rest on results that were not computed."""


def _observe(
    call: Call, cast: torch.dtype | None, gradients: bool, whole: bool
) -> tuple[Observation, bool]:
    seen = Observation(gradients=gradients)
    attributes = Attributes(call.module)
    with contextlib.ExitStack() as stack:
        # At last: a spot that was first read when forward() had written it puts that back.
        stack.callback(attributes.restore)
        with refuse.kept_state(call.module, attributes) as effects, _quiet(cast, gradients):
            same = Same(call.module, schema.flatten_inputs(call.args, call.kwargs)[0])
            buffers = _Buffers(call.module)
            args, kwargs = _own_arguments(call, same)
            leaves, _, _ = schema.flatten_inputs(args, kwargs)
            watch = Watch(call, buffers.copies(), args, kwargs, whole)
            stack.callback(watch.close)
            with watch.on(), _enabling(watch.gradients_switched_on):
                found = _run(seen, watch, call.forward, args, kwargs)
                watch.settle()
            left_out = watch.tensors.uncomputed
            if seen.error is not None or buffers.replaced():
                left_out.missed()
            if left_out.relied:
                watch.undo()
                raise _Relied
            own = _own_effect(effects)
            replaced = attributes.replaced()  # a trace does not know
            written = buffers.written()
            if seen.error is None:
                seen.buffers = buffers.seen()
                seen.handed = shared.Handed(seen.outputs)
                for number, leaf in enumerate(leaves):
                    seen.handed.add("argument", number, leaf)
                seen.handed.add_state(call.module, seen.buffers)
        if replaced is not None:
            found = found or refuse.attribute_written(replaced)
        asks = watch.asks_for_gradients()
        if not gradients and any(t.grad_fn is not None for t in seen.outputs):
            found = found or _enabled()
        again = gradients != torch.is_grad_enabled()  # it runs once more, as the caller has it
        if seen.error is not None and not again:
            watch.refuse_writes()  # a trace would write them, too, before it raises
        elif seen.error is not None or asks and again:
            watch.undo()
        else:
            try:
                seen.outside = watch.outside(seen.outputs, written)
            except CaptureError as error:
                raise own or found or error from None
            if found is not None:
                raise own or found
            seen.used = frozenset(watch.tensors.used)
            seen.read = watch.attributes_read()
            seen.asking = watch.asks_kinds()
            seen.layouts = _layouts(watch.asks_for_layouts(), call)
            if seen.layouts is not None:
                seen.outside.spots.append(_own_layouts(call.module))
            seen.asked = _asked(watch.asks_arguments(), call, leaves)
    return seen, asks


def _layouts(asked: frozenset[str], call: Call) -> tuple | None:
    """How the call's tensors lie in memory, if forward() asked by any of these names.

    Raises:
        CaptureError: "memory_layout": copies of the tensors would answer in another way.
    """
    if not asked:
        return None
    leaves, _, _ = schema.flatten_inputs(call.args, call.kwargs)
    strided = any(name.startswith("as_strided") for name in asked)
    own = standing(call.module).values()
    for what, remedy, tensors in (
        ("among its arguments", "pass x.contiguous()", leaves),
        ("of the module", "make it contiguous", own),
    ):
        for x in tensors:
            if _lies_otherwise(x, strided):
                raise CaptureError(
                    "memory_layout",
                    f"forward() asks for {', '.join(sorted(asked))}, and a tensor of shape "
                    f"{list(x.shape)} {what} has the strides {x.stride()}: {remedy}",
                )
    return layouts(leaves)


def _lies_otherwise(x: Any, strided: bool) -> bool:
    """True for a tensor whose copy, or whose counterpart in the graph, lies in another way."""
    if not torch.is_tensor(x) or x.layout is not torch.strided or x.is_contiguous():
        return False
    return strided or torch.empty_like(x).stride() != x.stride()


def _own_layouts(module: torch.nn.Module) -> Answer:
    ask = own_layouts(module)
    return Answer(ask, None, ask(), "how parameters and buffers lie in memory")


def _asked(names: frozenset[str], call: Call, copies: list) -> Asked:
    """What forward() asks the call's tensors.

    Raises:
        CaptureError: "outside_state": the copies with which it ran have answered otherwise.
    """
    given, _, _ = schema.flatten_inputs(call.args, call.kwargs)
    asked = Asked(names, given)
    name = asked.differ(copies)
    if name is not None:
        raise CaptureError(
            "outside_state",
            f"forward() reads .{name} of an argument, which a graph does not know: decide by it "
            "outside of forward()",
        )
    return asked


def _own_effect(effects: Callable[[], None]) -> CaptureError | None:
    """What the trace is going to refuse about the module itself, which says more."""
    try:
        effects()
    except CaptureError as error:
        return error
    return None


def _run(
    seen: Observation, watch: Watch, forward: Callable, args: tuple, kwargs: dict
) -> CaptureError | None:
    """Runs it; returns what is to be said of modes that it leaves, and of its result."""
    modes, trial, found = Modes(), Trial(), None
    try:
        with inner.watched(watch.about_to), watch.recording():
            returned = trial.run(forward, *args, **kwargs)
        result = results.Result()
        seen.outputs = list(result.flatten(returned))
        found = lost.refusal(returned, result, seen.outputs, watch.tensors.is_made)
        for leaf in seen.outputs:
            watch.tensors.note(leaf)  # no operator may have read it
    except Abandoned:
        pass  # what it was about to do is going to be refused
    except Exception as error:  # whatever the module raises; the trace will say it better
        seen.error = error.with_traceback(None)
    return modes.put_back() or trial.refusal() or found


@contextlib.contextmanager
def _quiet(cast: torch.dtype | None, gradients: bool) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        without_checkpoints(),
        torch.compiler.set_stance("force_eager"),  # compiled code would show nothing
        backward.hooks(),
        autocast.entered(cast),
    ):
        yield


@contextlib.contextmanager
def kept_outside(seen: Observation) -> Iterator[None]:
    """Undoes what a trace writes into spots of outside that the forward only read."""
    try:
        yield
    finally:
        if seen.outside is not None:
            seen.outside.put_back()


def bind(seen: Observation, program: Any) -> None:
    """Matches tensors of outside with the constants of a trace.

    Raises:
        CaptureError: The forward raises although its trace did not, or something that it reads can
            neither become an input nor be watched.
    """
    if seen.error is not None:
        raise CaptureError(
            "export_failed", f"forward() raises {type(seen.error).__name__}: {seen.error}"
        )
    if seen.outside is not None:
        seen.outside.bind(program.constants, seen.used)


def inputs(seen: Observation) -> dict[str, Any]:
    """Name of a constant that becomes an input -> where its value is read."""
    return seen.outside.inputs if seen.outside is not None else {}


def guards(seen: Observation) -> Guards | None:
    """What has to stay as it is for a capture to apply.

    Raises:
        CaptureError: "outside_written": something that forward() reads has changed meanwhile.
    """
    if seen.outside is None:
        return None
    made = Guards(seen.outside.spots, seen.layouts, seen.asked, seen.read)
    if not made.holds():
        raise CaptureError(
            "outside_written",
            f"{describe(made.changed())} changes while the module is captured",
        )
    return made


@contextlib.contextmanager
def _enabling(note: Callable[[], None]) -> Iterator[None]:
    """Notes every enable_grad() or inference_mode(False) that is entered, however it is written."""
    kinds = (torch.enable_grad, torch.inference_mode)
    before = [kind.__enter__ for kind in kinds]

    def noting(enter: Callable) -> Callable:
        def noted(self: Any) -> None:
            if not getattr(self, "mode", False):  # inference_mode(True) switches them off
                note()
            enter(self)

        return noted

    for kind, enter in zip(kinds, before, strict=True):
        kind.__enter__ = noting(enter)
    try:
        yield
    finally:
        for kind, enter in zip(kinds, before, strict=True):
            kind.__enter__ = enter


def _enabled() -> CaptureError:
    return CaptureError(
        "unsupported_output_type",
        "forward() switches gradients on (torch.enable_grad) in a call that records none, and "
        "returns what has one; call it with gradients enabled",
    )


def _own_arguments(call: Call, same: Same) -> tuple[tuple, dict]:
    """The call's arguments with copies in the place of tensors: forward() may write them."""
    leaves, _, _ = schema.flatten_inputs(call.args, call.kwargs)
    copies = [_stand_in(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    same.fill(copies, standing(call.module))
    return schema.unflatten_inputs(call.args, call.kwargs, copies)


class _Buffers:
    """Copies in the place of all buffers; refuse.kept_state() puts the real ones back.

    A buffer that has several names is one copy.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[str, dict, str]] = []
        self._before: dict[int, torch.Tensor] = {}  # id of a copy -> its values at the start
        self._copies: dict[str, torch.Tensor] = {}
        self._real: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for path, sub in module.named_modules(remove_duplicate=False):
            for key, tensor in list(sub._buffers.items()):
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                copy = made.get(id(tensor))
                if copy is None:
                    copy = made[id(tensor)] = made[id(copy)] = _stand_in(tensor)
                    self._before[id(copy)] = copy.detach().clone()
                sub._buffers[key] = copy
                self._places.append((name, sub._buffers, key))
                self._copies[name], self._real[name] = copy, tensor

    def copies(self) -> list[torch.Tensor]:
        return list(self._copies.values())

    def replaced(self) -> bool:
        """Whether forward() has put a tensor in the place of one."""
        return any(table.get(key) is not self._copies[name] for name, table, key in self._places)

    def written(self) -> dict[str, torch.Tensor]:
        """The real buffers, by name, of what forward() has replaced or written, or may have."""
        seen = self.seen()
        return {
            name: self._real[name]
            for name, copy in self._copies.items()
            if seen[name].replaced or copy._version != _FRESH or seen[name].changed()
        }

    def seen(self) -> dict[str, BufferSeen]:
        found = {}
        for name, table, key in self._places:
            copy, after = self._copies[name], table.get(key)
            found[name] = BufferSeen(self._before[id(copy)], after, after is not copy)
        return found


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that forward() cannot tell from the buffer or argument."""
    copy = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    copy.__dict__ = tensor.__dict__  # what forward() reads there is known by its place
    return copy.requires_grad_(tensor.requires_grad)
