"""Finds the operators that PyTorch runs in a call, but in none of its graphs.

They are after a graph break, in code that Dynamo skips (`torch.compiler.disable`), or in hooks. A
dispatch mode sees them: Dynamo compiles and runs under it as without it, and it is off within
graphs. It costs more than a call, so it is on in the first call, after each new graph, and in the
call after one with another sequence of graphs. Later calls that run the same graphs run the same
operators between them, as far as Python's state does not say otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradd import private
from gradd.dynamo import traces
from gradd.dynamo.work import Amounts, is_opaque
from gradd.graph.locations import is_users
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from types import FrameType

    from gradd.dynamo.own_forward import Now
    from gradd.dynamo.owner import Owner

logger = logging.getLogger("gradd")
REASON = "graph_break"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+?)_at_\d+$")
# Operators that read a value, or make memory, and compute nothing.
_IDLE = frozenset(
    ("_local_scalar_dense", "resize_", "set_", "empty_like", "zeros_like", "ones_like", "full_like")
    + ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")
)
_NAMED = 3  # operators, and places, that a message names
_PATHS = 256  # sequences of graphs that are known
_WAIT = 16  # calls of known sequences in which one waits for an unknown one
_OURS = os.path.join(os.path.dirname(__file__), "")
_numbers = itertools.count()


class Reached(NamedTuple):
    """A graph that a call has run."""

    number: int  # of the graph
    end: traces.End | None  # where and why Dynamo has broken it; None = it has not
    amounts: Callable[[], Amounts]  # returns the operations of a forward


class _Gap:
    def __init__(self) -> None:
        self.place = ""
        self.names: Counter[str] = Counter()
        self.amounts = Amounts()

    def add(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Notes an operator that has run."""
        name = _name(function)
        if not self.names:
            self.place = _place(sys._getframe(1))
        self.names[name] += 1
        unknown = name if is_opaque(function) else ""
        self.amounts = self.amounts.plus(
            Amounts(0, _operations(function, args, kwargs, result), unknown)
        )

    def said(self, why: str) -> str:
        """The operators, where the first one was called, and why no graph has it."""
        names = list(self.names)
        text = ", ".join(names[:_NAMED])
        if len(names) > _NAMED:
            text += f" and {len(names) - _NAMED} more"
        return text + (f" in {self.place}" if self.place else "") + (f" ({why})" if why else "")


class Watch(TorchDispatchMode):
    """Sees the operators of a call outside of graphs."""

    supports_higher_order_operators = True

    def __init__(self, path: list[Reached]) -> None:
        super().__init__()
        self.gaps: dict[int, _Gap] = {}  # by the number of graphs in front
        self._path = path
        self._paused = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo may compile under it, and sees nothing of it."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and notes it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._paused and (_computes(function, args, kwargs) or _draws(function, result)):
            gap = self.gaps.setdefault(len(self._path), _Gap())
            gap.add(function, args, kwargs, result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators of a graph are not seen, nor those of another call."""
        on_top = private.dispatch_mode() is self
        self._paused += 1
        if on_top:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if on_top:
                self.__enter__()
            self._paused -= 1


class Between(NamedTuple):
    """What calls that run the same graphs do between them."""

    breaks: int = 0  # times that a call leaves a graph
    gaps: int = 0  # times that PyTorch runs operators there
    error: CaptureError | None = None  # says which
    texts: tuple[str, ...] = ()  # of each place


class Call:
    """A call of a module, as far as graphs are concerned.

    Attributes:
        around: The call that it is a part of.
        path: The graphs that it has run.
        numbers: Of these.
        watch: Sees operators.
    """

    __slots__ = ("around", "numbers", "path", "watch")

    def __init__(self, now: Now, watched: bool) -> None:
        self.around, now.run = now.run, self
        self.path: list[Reached] = []
        self.numbers: tuple[int, ...] = ()
        self.watch: Watch | None = None
        if watched:
            self.begin()

    def begin(self) -> None:
        """Operators are seen from now on."""
        self.watch = Watch(self.path)
        self.watch.__enter__()


class Gaps:
    """The operators that PyTorch runs between the graphs of a module's calls."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._known: dict[tuple[int, ...], Between] = {}
        self._whys: dict[str, str] = {}  # Dynamo's words, by place: it says them once
        self.due = 1  # calls at most in which operators are to be seen

    def count(self, call: Call, why: str) -> bool:
        """Counts what a call has done between its graphs, and says it once.

        Returns whether it is known that PyTorch has run operators there.

        Args:
            call: It has ended.
            why: Dynamo's last words about a break, if it has compiled in this call.

        Raises:
            CaptureError: PyTorch has run operators there, where nothing may run in PyTorch.
        """
        if not call.path:
            return False  # the call as a whole has run in PyTorch
        owner = self._owner
        key = call.numbers
        found = self._known.get(key)
        self.due -= self.due > 0
        if call.watch is not None and (found is None or call.watch.gaps):
            if found is None:
                self.due = 0
            if len(self._known) >= _PATHS:
                self._known.clear()
            found = self._known[key] = self._between(call.path, call.watch.gaps, why)
        elif found is None:
            self.due = _WAIT
            owner.counts["breaks"] += len(call.path) - 1
            return False
        owner.counts["breaks"] += found.breaks
        if found.error is None:
            return False
        owner.fallback.decide(found.error)
        owner.parts[REASON] += found.gaps
        if list(filter(owner.is_new, found.texts)):
            owner.fallback.warn(REASON, found.error, 0.0, 0.0, in_part=True)
        return True

    def _said(self, gap: _Gap, why: str) -> str:
        """The text about a gap; one at a place of an earlier one has that one's reason."""
        if why and len(self._whys) < _PATHS:
            self._whys.setdefault(gap.place, why)
        return gap.said(why or self._whys.get(gap.place, ""))

    def _between(self, path: Sequence[Reached], gaps: dict[int, _Gap], why: str) -> Between:
        owner = self._owner
        ends = {at: graph.end for at, graph in enumerate(path, 1) if graph.end is not None}
        breaks = max(len({*ends, *gaps}), len(path) - 1)
        # A graph that calls a function with a break ends in front of it, for the same reason.
        known = {ends[at].place for at in gaps if at in ends}
        for place in known:
            owner.is_new(place)  # nor is it said of another break in that line later
        for end in ends.values():
            if end.place not in known and owner.is_new(end.place):
                logger.warning(
                    "%s: torch.compile breaks the graph at %s (%s); no operator runs there, and "
                    "the graphs on both sides take a request each (breaks)",
                    owner.title,
                    *end,
                )
        if not gaps:
            return Between(breaks)
        total = Amounts()
        for part in (*(g.amounts() for g in path), *(g.amounts for g in gaps.values())):
            total = total.plus(part)
        texts = [self._said(gap, _why(ends.get(at), gap, why)) for at, gap in gaps.items()]
        texts = list(dict.fromkeys(texts))
        more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        error = CaptureError(
            REASON,
            f"no graph has {'; '.join(texts[:_NAMED])}{more}. {total.said('the call')}",
        )
        return Between(breaks, len(gaps), error, tuple(texts))


def entry(
    owner: Owner,
    module: torch.fx.GraphModule,
    run: Callable[..., Any],
    amounts: Callable[[], Amounts],
) -> Callable[..., Any]:
    """The function that Dynamo calls in place of a graph: it tells the call of it.

    Args:
        owner: Of the graph.
        module: Dynamo's graph.
        run: Runs it.
        amounts: Returns the operations of a forward.
    """
    reached = Reached(next(_numbers), traces.end_of(module), amounts)
    new = True

    def enter(*args: Any) -> Any:
        nonlocal new
        now = owner.now
        now.graphs += 1
        call, now.run = now.run, None
        if call is None:  # of torch.compile, or one that is planned
            return run(*args)
        call.path.append(reached)
        call.numbers += (reached.number,)
        try:
            if call.watch is None:
                return run(*args)
            with call.watch.paused():
                return run(*args)
        finally:
            now.run = call
            if new and call.watch is None:
                call.begin()
            new = False

    return enter


def _why(end: traces.End | None, gap: _Gap, why: str) -> str:
    """Why a graph ends in front of operators; with the line, where the operators have none."""
    if end is None:
        return why
    return end.why if gap.place or end.place == "?" else f"{end.why} at {end.place}"


def _name(function: Any) -> str:
    """`addmm`, `library.operator`."""
    packet = getattr(function, "overloadpacket", function)
    return str(packet).removeprefix("aten.")


def _computes(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operator computes with tensors, beyond a single number that has no gradient."""
    if getattr(function, "is_view", False) or _name(function) in _IDLE:
        return False
    leaves = private.pytree.tree_leaves((args, kwargs))
    return any(isinstance(x, torch.Tensor) and (x.requires_grad or x.dim() > 0) for x in leaves)


def _draws(function: Any, result: Any) -> bool:
    """Whether an operator draws random numbers, beyond a single one."""
    tags = getattr(function, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and any(
        isinstance(x, torch.Tensor) and x.numel() > 1 for x in private.pytree.tree_leaves(result)
    )


def _operations(function: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """As in work.py, of an operator that has run."""
    formula = flop_registry.get(getattr(function, "overloadpacket", None))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if str(function).startswith("aten._scaled_dot_product"):
        query, key = args[:2]
        return 4 * query.numel() * key.shape[-2]
    leaves = private.pytree.tree_leaves(result)
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def _place(frame: FrameType | None) -> str:
    """ "function @ file:line" of the user's innermost code within the call; "" = there is none."""
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename) and not code.co_filename.startswith("<"):
            name = _RESUMED.sub(r"\1", code.co_name)
            return f"{name} @ {code.co_filename}:{frame.f_lineno}"
        if code.co_filename.startswith(_OURS) and code.co_filename != __file__:
            return ""
        frame = frame.f_back
    return ""
