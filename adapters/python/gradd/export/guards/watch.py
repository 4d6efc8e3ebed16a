"""Recorder and tensor watch around one forward, and what comes of them.

watch = Watch(call, stand_ins, args, kwargs)
with watch.on():
    with watch.recording():
        forward(*args, **kwargs)
    watch.settle()
outside = watch.outside(outputs)     # when the module's own state has been put back
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradd.export.guards import frames
from gradd.export.guards.check import describe
from gradd.export.guards.images import is_a
from gradd.export.guards.memory import shares
from gradd.export.guards.outside import Outside, refuse_trainable
from gradd.export.guards.recorder import Recorder
from gradd.export.guards.spots import Answer, Bytes, Class, Spot, static
from gradd.export.guards.tensors import Tensors
from gradd.export.naming import Call
from gradd.spec import CaptureError

logger = logging.getLogger("gradd")
_said: list[str] = []
# What every forward depends on without asking: types of new tensors, modes of functions (devices).
_FLAGS = (torch.get_default_dtype, torch._C._len_torch_function_stack)
# What torch runs around every forward and at every read of a parameter; nobody records it.
_CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")


def _containers(value: Any) -> Iterator[Any]:
    if is_a(value, dict):
        yield value
        for element in dict.values(value):
            yield from _containers(element)
    elif is_a(value, (list, tuple)):
        yield value
        for element in value:
            yield from _containers(element)


def _leaves(containers: Iterable[Any]) -> Iterator[torch.Tensor]:
    for container in containers:
        for value in container.values() if is_a(container, dict) else container:
            if is_a(value, torch.Tensor):
                yield value


class Disturbed(CaptureError):
    """Another forward has to tell what is new: garbage was collected, or a cache was cold."""


class Watch:
    """See the top of this file.

    Attributes:
        tensors: The watch over operators.
        able: False where this interpreter shows no operands: nothing is recorded then.
    """

    def __init__(
        self,
        call: Call,
        stand_ins: list[torch.Tensor],
        args: tuple,
        kwargs: dict,
        whole: bool = True,
    ) -> None:
        """Args:
        call: The call, whose module has stand-ins in the place of its buffers.
        stand_ins: Those.
        args: What forward() is going to be called with.
        kwargs: The same.
        whole: Every result is computed, large ones too.
        """
        self._call, module = call, call.module
        passed = [*_containers(args), *_containers(kwargs)]
        own = {id(t): t for t in (*module.parameters(), *module.buffers(), *stand_ins)}
        self.tensors = Tensors(own, _leaves(passed), whole)
        self.tensors.free_to_write(stand_ins)
        self.tensors.keep_forms()
        self.able = frames.supported()
        self._recorder = Recorder(module, self.tensors, passed)
        self._spots: list[Spot] = []
        self._old: list[torch.Tensor] = []
        self._unseen: list[CaptureError] = []
        self._written: list[torch.Tensor] = []
        if not self.able and not _said:
            _said.append("said")
            logger.warning(
                "this Python does not show what forward() reads from outside (globals, closures, "
                "helper objects): a change of such a value goes unnoticed; use CPython 3.11 to 3.13"
            )

    def on(self) -> Any:
        """Context of recording() and settle()."""
        return self._recorder.ageing()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the forward."""
        forward, module = self._call.forward, self._call.module
        if getattr(forward, "__self__", None) is module:
            # A function that was put in its place may have any name.
            own = forward.__func__ is static(type(module), "forward")
            self._recorder.reads.attribute(module, "forward" if own else forward.__name__)
        with self.tensors, self._recorder.recording() if self.able else contextlib.nullcontext():
            yield

    def settle(self) -> None:
        """Sorts out what is of outside, and undoes writes into parameters and outside tensors."""
        young = self._recorder.young()
        self._recorder.settle(young)
        self._old = self.tensors.old(young)
        self._unseen = self._recorder.unseen(young)
        self._spots = self._recorder.spots()
        self._unseen += self._recorder.reads.kept_alive(
            self._spots, self.tensors.by_value | self.tensors.used
        )
        self._written = self.tensors.put_back(young)
        if self._recorder.reads.locks.put_back():
            text = "forward() leaves a lock acquired; release it, or take it outside of forward()"
            self._unseen.append(CaptureError("outside_written", text))

    def close(self) -> None:
        """Ends the watch."""
        self._recorder.close()
        self._spots, self._old, self._written = [], [], []

    def about_to(self, reason: str, text: str) -> None:
        """forward() is about to do what it must not, found by other means than the recording.

        Raises:
            Abandoned: Always.
        """
        self._recorder.reads.effect(text, reason=reason)

    def gradients_switched_on(self) -> None:
        """forward() enters enable_grad() or its like: without effect if the caller has it on."""
        self._recorder.reads.ask_grad_mode()

    def asks_for_gradients(self) -> bool:
        """True if forward() asked whether gradients are recorded, or switched them on."""
        return self._recorder.reads.grad_mode

    def attributes_read(self) -> frozenset[tuple[str, str]] | None:
        """Attributes of the module that forward() read: path of the submodule and name.

        None where that is not recorded. After outside(), which raises if the recording failed.
        """
        if not self.able:
            return None
        paths = {id(sub.__dict__): path for path, sub in self._call.module.named_modules()}
        return frozenset((paths[i], n) for i, n in self._recorder.reads.of_tree if i in paths)

    def asks_for_layouts(self) -> frozenset[str]:
        """The names by which forward() asked how tensors lie in memory."""
        return frozenset(self._recorder.reads.layout)

    def asks_kinds(self) -> list[dict]:
        """Globals of code that asked type() for the class of a number."""
        return list(self._recorder.reads.asking.values())

    def asks_arguments(self) -> frozenset[str]:
        """What else forward() asked the call's tensors, see arguments.py."""
        return frozenset(self._recorder.reads.facts)

    def undo(self) -> str:
        """Puts back what forward() wrote outside, and says what it was.

        Of several spots in one object the one that was read first knows best: it comes last, and
        is asked again then.
        """
        text = describe([s for s in self._spots if not _same(s)])
        for spot in reversed(self._spots):
            with contextlib.suppress(Exception):  # what is gone cannot be put back
                if not _same(spot):
                    spot.put_back()
        return text

    def refuse_writes(self) -> None:
        """Puts back what a forward() that raised has written outside.

        Raises:
            CaptureError: "outside_written" or "input_mutation", if there was any.
        """
        self._refuse_writes(self.undo())

    def outside(
        self, outputs: list[torch.Tensor], written: dict[str, torch.Tensor] | None = None
    ) -> Outside:
        """What forward() read.

        Args:
            outputs: What it returned.
            written: The real buffers, by name, whose stand-ins it wrote.

        Raises:
            CaptureError: See observe().
        """
        changed = self.undo()
        if self._recorder.disturbed:
            raise Disturbed(
                "outside_state", "another thread collects garbage whenever forward() is recorded"
            )
        if self._recorder.reads.cold:
            raise Disturbed(
                "outside_state",
                "forward() calls a cached function that makes another in every call",
            )
        failure = self._recorder.failure
        if failure is not None:
            text = failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
            raise CaptureError(
                "outside_state", f"what forward() reads could not be recorded: {text}"
            )
        self._refuse_writes(changed)
        self._refuse_aliases(written or {})
        if self._unseen:
            raise self._unseen[0]
        refuse_trainable(outputs, self._old, self.tensors)
        self._spots += [Answer(f, None, f(), f"torch.{f.__name__}()") for f in _FLAGS]
        of_modules = torch.nn.Module
        self._spots += [Class(of_modules, n, static(of_modules, n), f"Module.{n}") for n in _CALLED]
        by_value = self.tensors.by_value | self._recorder.reads.arrays_taken
        return Outside(self._spots, self._old, by_value)

    def _refuse_writes(self, changed: str) -> None:
        names = {id(t): n for n, t in self._call.module.named_parameters()}
        for tensor in self._written:
            if id(tensor) in names:
                raise CaptureError(
                    "input_mutation", f"forward() writes to the parameter {names[id(tensor)]!r}"
                )
            raise CaptureError(
                "outside_written",
                f"forward() writes in place to a tensor of shape {list(tensor.shape)} that is "
                "neither a buffer nor made in the call; register it as a buffer",
            )
        if self.tensors.gradients_written:
            raise CaptureError(
                "outside_written",
                "forward() writes .grad of a tensor, which a graph does not do; do it outside of "
                "forward()",
            )
        if changed:
            raise CaptureError(
                "outside_written",
                f"forward() writes {changed}; a graph computes results and buffers "
                "only: return the value, or write it outside of forward()",
            )

    def _refuse_aliases(self, written: dict[str, torch.Tensor]) -> None:
        """A graph reads what is outside before it writes a buffer, PyTorch in the order of code."""
        places = [(s.owner, f"through {s.label}") for s in self._spots if is_a(s, Bytes)]
        places += [(t, f"through another tensor, of shape {list(t.shape)}") for t in self._old]
        for name, buffer in written.items():
            for value, text in places:
                if shares(buffer, value):
                    raise CaptureError(
                        "outside_written",
                        f"forward() writes the buffer {name!r} and reads its memory {text}; read "
                        "the buffer itself",
                    )


def _same(spot: Spot) -> bool:
    try:
        return spot.same()
    except Exception:  # what cannot be read any more has changed
        return False
