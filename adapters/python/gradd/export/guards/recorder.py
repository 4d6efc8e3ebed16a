"""Recording what one forward() takes from outside, instruction by instruction.

A tracer of this thread is called before every instruction of recorded code (policy.py) and reads
its operands (frames.py): a global's dictionary, the object whose attribute is read, the function
that is called. reads.py and calls.py note the spots. Objects that were born during the call are
told from those of outside by the garbage collector's youngest generation, which keeps everything
new while collections are off.

Other threads are neither recorded nor disturbed. A tracer that was there before (a debugger, a
measurement of coverage) is put back afterwards and misses this one call.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from gradd.export.guards import frames, images, memory, methods, policy
from gradd.export.guards.calls import Calls, is_code_in_c
from gradd.export.guards.images import is_a
from gradd.export.guards.instructions import readings
from gradd.export.guards.reads import Reads
from gradd.export.guards.spots import Answer, Spot, static
from gradd.export.guards.taken import VIEWS
from gradd.export.guards.tensors import Tensors
from gradd.spec import CaptureError

_OF_RANGE = type(iter(range(0)))
_IMPORT = builtins.__import__
_NUMBERS = (int, float, bool)
_EFFECTS = frozenset({"zero_grad", "requires_grad_"})  # methods of modules that write to tensors
# What holds objects that a reader gets at: found by the collector's own means.
_THROUGH = (
    *(functools.partial, types.MappingProxyType, types.MethodType, types.BuiltinFunctionType),
    *(types.MethodWrapperType, *VIEWS),
)
_CALL = 14  # bytes from the beginning of a call to the instruction behind it, at most
_MANY = 4000  # spots after which those in objects of the call itself are sorted out


class Recorder:
    """Records one call; see the top of this file.

    Attributes:
        reads: What was read.
        failure: Why the recording is not complete, if it is not.
        disturbed: Another thread has collected garbage: it may be complete the next time.
    """

    def __init__(self, module: torch.nn.Module, tensors: Tensors, passed: list) -> None:
        """Args:
        module: The module whose forward runs.
        tensors: Watches the tensors.
        passed: Containers that belong to the call.
        """
        self.reads = Reads(module, tensors, passed)
        self.failure: BaseException | str | None = None
        self.disturbed = False
        self._calls = Calls(self.reads)
        self._tracers: dict[int, tuple[CodeType, Any]] = {}
        self._handlers = {
            name.removeprefix("_on_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_on_")
        }
        self._standard: set[int] = set()  # codes of the standard library and its like
        self._before = 0
        self._aside_depth = 0
        self._thread = threading.get_ident()
        self._reversed: tuple[CodeType | None, int] = (None, 0)
        self._in_c: dict[int, int] = {}  # frame that calls code in C -> where

    @contextlib.contextmanager
    def ageing(self) -> Iterator[None]:
        """Inside, what was born since stays the youngest generation. Around recording()."""
        collecting = gc.isenabled()
        gc.collect(1)
        gc.disable()
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            if collecting:
                gc.enable()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what this thread runs is recorded."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _collected(self, phase: str, info: dict) -> None:
        if threading.get_ident() == self._thread:
            self.failure = self.failure or "forward() collects garbage"
        else:
            self.disturbed = True

    # ---- frames ----

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._aside_depth:
            return None
        if policy.is_aside(code):
            return self._aside(frame)
        known = self._tracers.get(id(code))
        if known is None:
            known = self._tracers[id(code)] = (code, self._tracer_of(code))
            if methods.is_between(code):
                self.reads.of_torch(code, frame.f_globals)
        tracer = known[1]
        if tracer is None or self._is_of_torch(frame, code):
            return None
        try:
            if code.co_filename == policy.MODULE_FILE and self._is_of_tree(frame, code):
                return None
            self._function(frames.function(frame), code)
        except Exception as error:
            self.failure = self.failure or error
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return tracer

    def _aside(self, frame: FrameType) -> Any:
        """What runs at an import or below a message is no part of the forward."""
        frame.f_trace_lines = False
        self._aside_depth += 1

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return":
                self._aside_depth -= 1
            return trace

        return trace

    def _is_of_torch(self, frame: FrameType, code: CodeType) -> bool:
        """What torch makes from text, and the standard library where torch calls it."""
        if id(code) in self._standard and frame.f_back is not None:
            return frame.f_back.f_trace is None  # through other parts of the library, too
        return policy.is_generated(code, frame.f_globals)

    def _is_of_tree(self, frame: FrameType, code: CodeType) -> bool:
        """torch's own handling of a module's call and attributes: the key covers it."""
        owner = frame.f_locals.get("self")
        if owner is None or id(owner) not in self.reads.tree:
            return False
        if code.co_name in _EFFECTS:
            return False
        if code.co_name == "_wrapped_call_impl":
            self.reads.attribute(owner, "forward")
        return True

    def _function(self, function: Any, code: CodeType) -> None:
        """Defaults of a function, and the code of what a user may edit while it runs."""
        if id(code) in self._standard or getattr(function, "__code__", None) is not code:
            return
        reads = self.reads
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                reads.field(function, name)
        table = function.__kwdefaults__ or {}
        for key in table:
            label = f"the default of {key} of {function.__qualname__}()"
            reads.item(table, key, label, function)
        if not policy.is_library(code.co_filename):
            reads.field(function, "__code__")

    def _tracer_of(self, code: CodeType) -> Any:
        if not policy.is_recorded(code):
            return None
        if policy.is_quiet_caller(code.co_filename):
            self._standard.add(id(code))
        table, handlers = readings(code), self._handlers
        where = f"{code.co_name}() @ {code.co_filename}"
        reads = self.reads
        returns = not code.co_flags & inspect.CO_GENERATOR

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return" and returns and self._is_in_c(frame.f_back):
                try:
                    reads.whole(argument)
                except Exception as error:
                    self.failure = self.failure or error
            if event == "opcode" and handlers:
                reading = table.get(frame.f_lasti)
                if reading is not None:
                    try:
                        reads.where = f"{where}:{frame.f_lineno}"
                        handlers[reading[0]](frame, reading[1])
                    except Exception as error:
                        self.failure = self.failure or error
            return trace

        return trace

    def _is_in_c(self, frame: FrameType | None) -> bool:
        """True if a frame is in the middle of a call of code in C."""
        at = self._in_c.get(id(frame))
        return at is not None and frame is not None and 0 <= frame.f_lasti - at <= _CALL

    # ---- instructions ----

    def _on_load_global(self, frame: FrameType, name: str) -> None:
        if id(frame.f_code) in self._standard:
            return
        table = frame.f_globals
        if name in table or not policy.is_library(frame.f_code.co_filename):
            self.reads.item(table, name, f"the global {name}")
        if name not in table:
            self.reads.item(frame.f_builtins, name, f"the builtin {name}")
        if len(self.reads.spots) - self._before > _MANY:
            self.forget_young()

    def _on_store_global(self, frame: FrameType, name: str) -> None:
        if id(frame.f_code) not in self._standard:  # memos of the standard library
            self.reads.item(frame.f_globals, name, f"the global {name}")

    def _on_import_name(self, frame: FrameType, name: str) -> None:
        if id(frame.f_code) in self._standard:
            return
        names, level = frame.f_globals, frames.peek(frame, 2)
        self.reads.item(frame.f_builtins, "__import__", "the builtin __import__")
        self._calls.imports.statement(names, name, level)
        function = frame.f_builtins.get("__import__")
        if function is not _IMPORT:
            self._calls.called(function, [name, names, {}, frames.peek(frame, 1), level])

    def _on_import_from(self, frame: FrameType, name: str) -> None:
        module = frames.peek(frame, 1)
        self.reads.attribute(module, name)
        self._calls.imports.fallback(module, name)

    def _on_store_name(self, frame: FrameType, _: int) -> None:
        """In the body of a class, which tells what it holds its name there."""
        self.reads.special(type(frames.peek(frame, 1)), "__set_name__")

    def _on_cell(self, frame: FrameType, index: int) -> None:
        names = frame.f_code.co_freevars
        if names:
            place = index - self._first_free(frame.f_code)
            if place >= 0:
                self.reads.cell(frames.cell(frame, index), names[place])

    @staticmethod
    def _first_free(code: CodeType) -> int:
        own = set(code.co_varnames)
        return code.co_nlocals + sum(name not in own for name in code.co_cellvars)

    def _on_load_attr(self, frame: FrameType, name: str) -> None:
        self.reads.attribute(frames.peek(frame, 1), name)

    def _on_load_super(self, frame: FrameType, name: str) -> None:
        self.reads.attribute(super(frames.peek(frame, 2), frames.peek(frame, 1)), name)

    def _on_store_attr(self, frame: FrameType, name: str) -> None:
        self.reads.stored(frames.peek(frame, 1), name, frames.peek(frame, 2))

    def _on_delete_attr(self, frame: FrameType, name: str) -> None:
        self.reads.stored(frames.peek(frame, 1), name)

    def _on_load_item(self, frame: FrameType, _: int) -> None:
        self._item_of(frames.peek(frame, 2), frames.peek(frame, 1), methods.GOT)

    def _on_store_item(self, frame: FrameType, _: int) -> None:
        self._item_of(frames.peek(frame, 2), frames.peek(frame, 1), methods.SET)

    def _on_delete_item(self, frame: FrameType, _: int) -> None:
        """In a list all that follows moves."""
        container = frames.peek(frame, 2)
        if is_a(container, (list, collections.deque)):
            self.reads.contents(container)
        self._on_store_item(frame, _)

    def _item_of(self, container: Any, key: Any, names: tuple[str, ...]) -> None:
        self.reads.operated(names, container)
        self.reads.operated(methods.KEYED, key)
        self.reads.subscript(container, key)
        if is_a(container, collections.defaultdict) and not dict.__contains__(container, key):
            self.reads.field(container, "default_factory")
            self._calls.called(container.default_factory, [])

    def _on_contains(self, frame: FrameType, _: int) -> None:
        self.reads.operated(methods.HELD, frames.peek(frame, 1), frames.peek(frame, 2))
        self.reads.contains(frames.peek(frame, 1), frames.peek(frame, 2))

    def _on_enter(self, frame: FrameType, _: int) -> None:
        self.reads.operated(methods.ENTERED, frames.peek(frame, 1))
        self.reads.locks.entered(frames.peek(frame, 1))

    def _on_match_class(self, frame: FrameType, count: int) -> None:
        """`case cls(...)` with `count` patterns by position, which the class names."""
        subject, cls, names = (frames.peek(frame, depth) for depth in (3, 2, 1))
        self.reads.kind_of(subject)
        self._calls.marked(subject, cls)
        self._calls.of_kind(type(subject), cls)
        if type(cls) is type and cls not in type(subject).__mro__:
            return
        if count:
            self.reads.attribute(cls, "__match_args__")
            given = static(cls, "__match_args__")
            names = (*(given[:count] if type(given) is tuple else ()), *names)
        for name in names:
            self.reads.attribute(subject, name)

    def _on_format(self, frame: FrameType, flags: int) -> None:
        """`f"{value!r:spec}"`; what it is shown as is above the value."""
        value = frames.peek(frame, 2 if flags & 4 or sys.version_info >= (3, 13) else 1)
        self.reads.operated(methods.TEXT, value)
        self.reads.whole(value)

    def _on_use_one(self, frame: FrameType, instruction: str) -> None:
        value = frames.peek(frame, 1)
        names = methods.of_instruction(instruction)
        self.reads.operated(names, value)
        if names is methods.TEXT:
            self.reads.whole(value)
        # Nobody knows how old iterators of ranges are, but that reversed() has made this one.
        made, at = self._reversed
        if type(value) is _OF_RANGE and made is frame.f_code and 0 < frame.f_lasti - at <= _CALL:
            return
        self.reads.use(value)

    def _on_identity(self, frame: FrameType, _: int) -> None:
        self.reads.compared(frames.peek(frame, 2), frames.peek(frame, 1), identity=True)

    def _on_compare(self, frame: FrameType, _: int) -> None:
        self._on_use_two(frame, _)
        a, b = frames.peek(frame, 2), frames.peek(frame, 1)
        self.reads.operated(methods.COMPARED, a, b)
        self.reads.whole(a)
        self.reads.whole(b)
        if is_a(a, type):
            self.reads.compared(a, b)

    def _on_operate(self, frame: FrameType, number: int) -> None:
        a, b = frames.peek(frame, 2), frames.peek(frame, 1)
        text = type(a) is str  # text % values
        self.reads.operated(methods.TEXT if text else methods.of_operator(number), a, b)
        self._on_use_two(frame, number)
        if text or type(a) is bytes:
            self.reads.whole(b)

    def _on_use_two(self, frame: FrameType, _: int) -> None:
        self.reads.use(frames.peek(frame, 1))
        self.reads.use(frames.peek(frame, 2))

    def _on_merge(self, frame: FrameType, _: int) -> None:
        """`f(**mapping)` and `{**mapping}` ask any mapping for its keys."""
        self.reads.special(type(frames.peek(frame, 1)), "keys", "__getitem__", "__iter__")
        self._on_use_two(frame, _)

    def _on_use_third(self, frame: FrameType, _: int) -> None:
        self.reads.operated(methods.SET, frames.peek(frame, 3))
        self.reads.use(frames.peek(frame, 3))

    def _on_call(self, frame: FrameType, count: int, keywords: int = 0) -> None:
        first, second = (frames.peek(frame, count + n + keywords) for n in (2, 1))
        args = [frames.peek(frame, i + keywords) for i in range(count, 0, -1)]
        if sys.version_info >= (3, 13):
            function, owner = first, second
        elif first is frames.NULL:
            function, owner = second, frames.NULL
        else:
            function, owner = first, second
        if function is reversed:
            self._reversed = (frame.f_code, frame.f_lasti)
        if function is type and count == 1 and type(args[0]) in _NUMBERS:
            if not policy.is_standard_file(frame.f_code.co_filename):
                self.reads.asking[id(frame.f_globals)] = frame.f_globals
        values = args if owner is frames.NULL else [owner, *args]
        self._note_call(frame, function)
        self._calls.called_with(function, values, lambda: frames.names_of_call(frame))

    def _note_call(self, frame: FrameType, function: Any) -> None:
        if is_code_in_c(function, type(function)):
            self._in_c[id(frame)] = frame.f_lasti
        else:
            self._in_c.pop(id(frame), None)

    def _on_call_keywords(self, frame: FrameType, count: int) -> None:
        self._on_call(frame, count, 1)

    def _on_call_spread(self, frame: FrameType, flags: int) -> None:
        named = flags & 1
        args = frames.peek(frame, 1 + named)
        # f(*elements) gives what it has as it is: a list, a view of a dictionary.
        self.reads.operated(methods.of_instruction("GET_ITER"), args)
        self.reads.use(args)
        values = list(args) if is_a(args, (tuple, list, *VIEWS)) else []
        words = frames.peek(frame, 1) if named else None
        if is_a(words, dict):
            values += dict.values(words)
        names = tuple(words) if is_a(words, dict) else ()
        self._note_call(frame, frames.peek(frame, 2 + named))
        self._calls.called_with(frames.peek(frame, 2 + named), values, lambda: names)

    # ---- afterwards ----

    def settle(self, young: set[int]) -> None:
        """The forward is over: notes the spots that show only now."""
        self._calls.contexts.settle()
        self.reads.ask_cached(young)
        self.reads.note_late()
        self.reads.watch_methods()

    def close(self) -> None:
        """Nothing is needed any more. Frames that live on may still hold a tracer of this call."""
        self._tracers.clear()
        self._handlers.clear()
        self.reads.clear()

    @staticmethod
    def young() -> set[int]:
        """Ids of what was born since ageing() was entered and lives."""
        return {id(o) for o in gc.get_objects(generation=0)}

    def forget_young(self) -> None:
        """Lets go of spots in objects that the call itself has made."""
        young = self.young() - self.reads.ageless
        spots = self.reads.spots
        for key, spot in list(spots.items()):
            if id(spot.by) in young and not is_a(spot.by, np.ndarray):
                del spots[key]
        self._before = len(spots)

    def spots(self) -> list[Spot]:
        """The spots of outside, in the order of reading. To be called inside ageing().

        The collector does not track dictionaries of plain values, nor arrays: such an object was
        there before only if another spot leads to it.
        """
        self.forget_young()
        kept, doubtful, ageless = [], [], self.reads.ageless
        for spot in self.reads.spots.values():
            unsure = id(spot.by) in ageless or is_a(spot.by, np.ndarray)
            (doubtful if unsure and not isinstance(spot, Answer) else kept).append(spot)
        reached: dict[int, Any] = {}
        new = kept
        while new:
            for spot in new:
                _reach(spot.value, reached)
                _reach(spot.owner, reached, 1)
            arrays = [v for v in reached.values() if is_a(v, np.ndarray)]
            new, old = [], doubtful
            doubtful = []
            for spot in old:
                known = id(spot.by) in reached or memory.overlaps(spot.by, arrays)
                (new if known else doubtful).append(spot)
            kept = kept + new
        found = set(map(id, kept))
        return [spot for spot in self.reads.spots.values() if id(spot) in found]

    def unseen(self, young: set[int]) -> list[CaptureError]:
        """The refusals of what cannot be watched, unless it is about something young."""
        return [error for error, by in self.reads.blanks if by is None or id(by) not in young]


def _reach(value: Any, found: dict[int, Any], depth: int = 3) -> None:
    """What hangs on a value through plain containers, by id."""
    found[id(value)] = value
    if not depth:
        return
    if is_a(value, np.flatiter):
        found[id(value.base)] = value.base
    if is_a(value, _THROUGH):
        value = gc.get_referents(value)
    if is_a(value, dict):
        value = list(dict.values(value)) if len(value) < 4096 else ()
    elif not is_a(value, (list, tuple, set, frozenset, *images.CONTAINERS)):
        return
    for element in value:
        if not is_a(element, (*images.PLAIN, float)):
            _reach(element, found, depth - 1)
