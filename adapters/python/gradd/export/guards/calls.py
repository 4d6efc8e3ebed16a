"""Calls of what is written in C, or of code that is not recorded: what they take from outside.

Python code that is recorded speaks for itself. Of everything else only the arguments are seen, so
it has to be known: policy.py lists what reads nothing but its arguments. Functions that read
attributes or items by name are taken as the reads they are.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import gc
import inspect
import io
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gradd.export.guards import handed, images, locks, methods, policy, tracing
from gradd.export.guards.arguments import asked_of
from gradd.export.guards.contexts import Contexts
from gradd.export.guards.images import is_a
from gradd.export.guards.imports import Imports
from gradd.export.guards.lookups import IN_C, borrowed
from gradd.export.guards.reads import Reads
from gradd.export.guards.spots import ABSENT, static
from gradd.export.guards.taken import own_dict
from gradd.export.guards.tensor_reads import LAYOUT
from gradd.export.random_draws import others_may_draw

_BY_KEY = frozenset(
    {
        *("get", "pop", "setdefault", "__getitem__", "__contains__", "__setitem__"),
        *("__delitem__", "__missing__"),
    }
)
# Methods of `object` that look at a whole object, as copy does, and those that look at none of it.
_OF_WHOLE = frozenset({"__reduce_ex__", "__reduce__", "__getstate__", "__dir__", "__sizeof__"})
_OF_IDENTITY = frozenset({"__hash__", "__eq__", "__ne__", "__repr__", "__str__", "__format__"})
# Methods of containers that look at none of the elements.
_STORING = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "update", "setdefault", "add"),
        *(
            "get",
            "pop",
            "popleft",
            "popitem",
            "keys",
            "values",
            "items",
            "copy",
            "clear",
            "reverse",
        ),
        *("rotate", "move_to_end", "fromkeys", "__getitem__", "__setitem__", "__delitem__"),
        *("__len__", "__iter__", "__reversed__", "__init__", "__copy__", "__missing__"),
    }
)
_NOT_USED = frozenset(
    {"type", "isinstance", "issubclass", "callable", "id", "super", "object", "print"}
)
_SCREENS = (sys.stdout, sys.stderr)
_SHARING = frozenset({"from_numpy", "as_tensor", "asarray"})  # tensors over an array's memory
_FIELDS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_CACHED = type(functools.lru_cache(len))
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_GRAD_FLAGS = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
_HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_STEPPING = ("torch.optim.", "torch.amp.grad_scaler")
# What a graph, which draws numbers of its own, cannot carry.
_SEEDING = frozenset(
    {"manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng"}
)


class Calls:
    """Looks at calls and notes what they read."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._names: Callable[[], tuple[str, ...]] = tuple
        reads.call = self._hidden
        self.contexts = Contexts(reads.answer)
        self.imports = Imports(reads)

    def called_with(self, function: Any, args: list, names: Callable[[], tuple]) -> None:
        """called(), where names() gives those of the keyword arguments."""
        self._names = names
        try:
            self.called(function, args)
        finally:
            self._names = tuple  # which leads to the frame of the call

    def _hidden(self, function: Any, args: list) -> None:
        """A call that no instruction shows: without arguments by name."""
        before, self._names = self._names, tuple
        try:
            self.called(function, args)
        finally:
            self._names = before

    def called(self, function: Any, args: list) -> None:
        """function(*args) is about to run; keyword arguments are at the end of `args`."""
        kind = type(function)
        asked = methods.of_builtin(function, args)
        if asked:
            self._reads.operated(asked, *args)
        if is_code_in_c(function, kind):
            self._in_hands(function, args)
            if getattr(function, "__name__", "") not in _NOT_USED:
                self._reads.converted(args)
            if policy.is_maker(function):
                self._reads.made_of(args)
        if kind is types.MethodType:
            self.called(function.__func__, [function.__self__, *args])
        elif kind is types.FunctionType:
            if not policy.is_recorded(function.__code__):
                self._reads.converted(args)
                self._not_recorded(function, args)
        elif kind is types.BuiltinFunctionType:
            self._builtin(function, args)
        elif kind is types.MethodWrapperType:
            self._method(function.__self__, function.__name__, args)
        elif kind in handed.C_METHODS:
            if args:
                self._method(args[0], function.__name__, args[1:])
        elif is_a(function, type):
            self._made(function, args)
        else:
            self._object(function, kind, args)

    def _in_hands(self, function: Any, args: list) -> None:
        """Arguments that code in C may call."""
        for one in args:
            if is_a(static(type(one), "__call__"), types.FunctionType):
                self._reads.of_class(type(one), "__call__")
        if not any(map(handed.is_called, args)):
            return
        names, self._names = self._names(), tuple
        try:
            handed.in_hands(self._reads, function, args, len(names), self.called)
        finally:
            self._names = lambda: names

    def _use_all(self, args: list) -> None:
        for value in args:
            self._reads.use(value)

    def _take_all(self, args: list) -> None:
        for value in args:
            self._reads.whole(value)

    def _object(self, function: Any, kind: type, args: list) -> None:
        """Calls of instances."""
        reads = self._reads
        if kind is functools.partial:
            reads.use(function)
            names = (*self._names(), *function.keywords)
            self._names = lambda: names
            self.called(function.func, [*function.args, *args, *function.keywords.values()])
        elif is_a(static(kind, "__call__"), types.FunctionType):
            reads.of_class(kind, "__call__")
            reads.library_object(function)
            if is_a(function, torch.nn.Module):
                reads.attribute(function, "forward")
        elif borrowed(kind, "__call__") is not ABSENT:
            reads.hidden_call(function, "__call__", *args)
        elif kind in (operator.attrgetter, operator.itemgetter):
            self._getter(function, args)
        elif kind.__name__ == "cython_function_or_method":
            owner = getattr(function, "__self__", None)
            owner = args[0] if owner is None and args else owner
            self._method(owner, function.__name__, args)
        elif kind is operator.methodcaller:
            self._method_called(function, args[0])
        elif is_a(function, weakref.ref):
            reads.behind(function)
        elif kind is _CACHED:
            self._use_all(args)
            reads.cached(function, args, self._names())
        elif policy.is_value(kind) or kind.__module__.startswith("torch"):
            self._use_all(args)
        else:
            self._take_all(args)
            reads.blank(f"calls a {kind.__module__}.{kind.__qualname__}", function)

    def _method_called(self, caller: operator.methodcaller, owner: Any) -> None:
        made, values = caller.__reduce__()
        if type(made) is functools.partial:  # with arguments by name
            values = (*made.args, *values, *made.keywords.values())
        name, *args = values
        self._reads.attribute(owner, name)
        found = static(type(owner), name)
        if type(found) in handed.C_METHODS:
            self._method(owner, name, args)
        elif is_a(found, types.FunctionType):
            self.called(found, [owner, *args])
        elif is_a(value := handed.followed(owner, name), IN_C):
            self.called(value, args)

    def _getter(self, function: Any, args: list) -> None:
        for name in function.__reduce__()[1]:
            if type(function) is operator.itemgetter:
                self._reads.subscript(args[0], name)
                continue
            owner = args[0]
            for part in name.split("."):
                self._reads.attribute(owner, part)
                owner = getattr(owner, part, None)

    def _made(self, cls: type, args: list) -> None:
        """A class is called."""
        if cls.__name__ in _NOT_USED and cls.__module__ == "builtins":
            if cls is type and len(args) == 1:
                self._reads.kind_of(args[0])
            return
        if cls is map and args[0] is type:
            self._reads.blank("maps type() over values; ask isinstance()")
        if cls is torch.set_grad_enabled and args[:1] == [True]:
            self._flag(torch.is_grad_enabled, "torch", "is_grad_enabled")  # it may stay on
        if policy.is_opener(cls):
            self._reads.blank(f"makes a {cls.__module__}.{cls.__qualname__}")
        if cls.__flags__ & (1 << 9) and not policy.is_of_arrays(cls):
            for name in ("__init__", "__new__"):
                self._reads.of_class(cls, name)
            self._reads.made_by(cls, args)
            self._reads.special(type(cls), "__call__")
        if policy.is_shallow(cls.__module__, cls.__name__):
            self._use_all(args)
        else:
            self._take_all(args)

    def _not_recorded(self, function: types.FunctionType, args: list) -> None:
        inner = inspect.unwrap(function)
        name = getattr(inner, "__name__", "")  # a decorated object may have none
        if name in _HOOKING and args and is_a(args[0], torch.Tensor):
            self._reads.effect(f"calls {name}() of a tensor", reason="backward_hooks")
        # A step of a user's class is wrapped by torch; what a scaler does leads to steps.
        homes = (getattr(inner, "__module__", ""), function.__globals__.get("__name__", ""))
        stepping = any(str(home).startswith(_STEPPING) for home in homes)
        if stepping or name.startswith("clip_grad"):
            self._reads.effect(f"calls {name}(), which writes to gradients or parameters")
        if name in _SEEDING and str(getattr(inner, "__module__", "")).startswith("torch"):
            self._reads.drawn(f"calls torch.{name}()")
        if not policy.is_array_code(function.__code__):
            self._of_quiet(function, args)
            return
        # Of the code, not of what it wraps: torch.no_grad() makes functions under others' names.
        module = function.__globals__.get("__name__", "")
        name = function.__code__.co_name
        if tracing.of_function(module, name) and self._reads.asks_tracer(f"calls {name}()"):
            return
        given = getattr(inner, "__qualname__", ".")
        if "." not in given and policy.is_setter(module, given):
            self._reads.setting(f"calls {module}.{given}()")
        if name in _GRAD_FLAGS or not args and policy.is_flag(module, name):
            self._flag(function, module, name)
        elif not policy.is_pure(module or "torch", name):
            self._reads.blank(f"calls {module}.{name}()")
        self._take_arrays(module, name, args)

    def _of_quiet(self, function: types.FunctionType, args: list) -> None:
        """Functions of the standard library that are not recorded."""
        module, name = function.__globals__.get("__name__", ""), function.__code__.co_name
        if not policy.is_standard(module):
            return
        self._take_all(args)
        if self.imports.called(function, args, self._names()):
            return
        if policy.is_setter(module, name):
            self._reads.setting(f"calls {module}.{function.__qualname__}()")
        elif policy.is_elsewhere(module, name):
            self._reads.blank(f"calls {module}.{function.__qualname__}()")
        elif policy.is_asked(module, name):
            self._ask(function, f"{module}.{function.__qualname__}", args)
        elif module == "inspect" and args and "." not in function.__qualname__:
            self._inspected(name, args)

    def _inspected(self, name: str, args: list) -> None:
        """A function of inspect looks at its first argument."""
        owner = getattr(args[0], "__func__", args[0])
        if name == "getattr_static" and len(args) > 1:
            self._reads.attribute(args[0], args[1])
        elif name == "signature" and is_a(owner, types.FunctionType):
            for field in ("__defaults__", "__kwdefaults__"):
                self._reads.field(owner, field)
        elif not policy.is_quiet_look(name):
            self._reads.blank(f"calls inspect.{name}()")

    def _ask(self, function: Any, label: str, args: list) -> None:
        """A function that reads a state of the process: it is called again at every call."""
        names = self._names()
        first = len(args) - len(names)
        words = dict(zip(names, args[first:], strict=True))
        owner = args[0] if first and not is_a(args[0], images.PLAIN) else function
        rest = args if owner is function else args[1:]
        if not all(is_a(value, images.PLAIN) for value in rest):
            self._reads.blank(f"calls {label}() with objects", owner)
            return
        ask = functools.partial(function, *args[:first], **words)
        text = f"{label}({', '.join(map(images.short, rest))})"
        self._reads.answer(ask, text, by=owner)

    def _flag(self, function: Any, module: str, name: str) -> None:
        if name in _GRAD_FLAGS:
            self._reads.grad_mode = True
        label = f"{module}.{name}()"
        if name == "is_grad_enabled":
            self._reads.answer(function, label, self._reads.gradients)
        else:
            self._reads.answer(function, label)

    def _take_arrays(self, module: str, name: str, args: list) -> None:
        for value in args:
            if is_a(value, torch.Tensor) and module.startswith("numpy"):
                self._reads.tensors.taken(value)
                self._reads.tensors.exposed(value)
            elif is_a(value, np.ndarray) and name in _SHARING:
                self._reads.array(value, taken=False)
            else:
                self._reads.library_object(value)
                self._reads.use(value)

    # ---- functions and methods in C ----

    def _builtin(self, function: Any, args: list) -> None:
        owner, name = function.__self__, function.__name__
        plain = owner is None or is_a(owner, types.ModuleType)
        if not plain and not type(owner).__module__.startswith("pybind11"):
            self._method(owner, name, args)
            return
        module = function.__module__ or getattr(owner, "__name__", "builtins")
        if module == "builtins" and self._by_name(function, name, args):
            return
        self._reads.layout |= LAYOUT & {name}
        if args and is_a(args[0], torch.Tensor) and asked_of(args[0], name):
            self._reads.attribute(args[0], name)
        if tracing.of_function(module, name) and self._reads.asks_tracer(f"calls {name}()"):
            return
        if name in policy.TYPES_OF_AUTOCAST:
            self._reads.cast(policy.TYPES_OF_AUTOCAST[name] or args[0])
        elif name in _GRAD_FLAGS or not args and policy.is_flag(module, name):
            self._flag(function, module, name)
        elif policy.is_asked(module, name):
            self._ask(function, f"{module}.{name}", args)
        elif policy.is_setter(module, name):
            self._reads.setting(f"calls {module}.{name}()")
        elif name == "_getframe" and args and args[0] != 0:
            self._reads.blank("looks at the frames of its callers")
        elif not policy.is_pure(module, name):
            self._reads.blank(f"calls {module}.{name}()")
        if policy.is_shallow(module, name):
            self._take_arrays(module, name, args)
        else:
            self._take_all(args)

    def _by_name(self, function: Any, name: str, args: list) -> bool:
        """Builtins that read or write one attribute, and those that look at nothing."""
        reads = self._reads
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(args) > 1:
            if is_a(args[1], str):
                if name in ("setattr", "delattr"):
                    reads.stored(*args[:3])
                else:
                    reads.attribute(args[0], args[1])
        elif name in ("vars", "dir") and args:
            reads.attribute(args[0], "__dict__")
            if name == "dir" and (table := own_dict(args[0])) is not None:
                reads.contents(table)
        elif name == "next" and args:
            reads.use(args[0])
        elif name == "callable" and args:
            reads.kind_of(args[0])
            reads.special(type(args[0]), "__call__")
        elif name == "print":
            for file in (a for a in args if is_a(a, io.IOBase) and a not in _SCREENS):
                self._take_all([a for a in args if a is not file])
                reads.blank(f"prints to a {type(file).__name__}", file)
        elif name == "__build_class__":
            names = self._names()
            reads.defines(args[2 : len(args) - len(names)])
            reads.defines(args[len(args) - len(names) :])
        elif name == "__import__":
            return self.imports.called(function, args, self._names())
        elif name in ("globals", "locals", "vars", "dir"):
            return True
        elif name in ("isinstance", "issubclass") and len(args) > 1:
            if name == "isinstance":
                reads.kind_of(args[0])
                self.marked(args[0], args[1])
            self.of_kind(args[0] if name == "issubclass" else type(args[0]), args[1])
        else:
            return name in _NOT_USED
        return True

    def marked(self, value: Any, asked: Any) -> None:
        """torch tells buffers, and parameters of other classes, by a mark on the tensor."""
        if not is_a(value, torch.Tensor):
            return
        for cls in _classes(asked):
            if is_a(cls, type) and issubclass(cls, torch.nn.Buffer):
                self._reads.attribute(value, "_is_buffer")
            elif is_a(cls, type) and issubclass(cls, torch.nn.Parameter) and not is_a(value, cls):
                self._reads.attribute(value, "_is_param")

    def of_kind(self, kind: Any, asked: Any) -> None:
        """Abstract classes of users: a class may be registered with one that it is no part of."""
        if is_a(kind, type) and not issubclass(kind, torch.Tensor):
            self._reads.bases(kind)
            self._reads.looked_up(kind, "__class__")
        for cls in _classes(asked):
            self._reads.checked(cls)
            if tracing.is_stand_in(cls):
                self._reads.asks_tracer(f"asks whether a tensor is a {cls.__name__}")
            if cls in _SYMBOLS and kind in images.NUMBERS:
                self._reads.asks_tracer(f"asks whether a number is a {cls.__name__}")
            if is_a(cls, abc.ABCMeta) and not policy.is_standard(cls.__module__):
                if is_a(kind, type) and not issubclass(kind, cls):
                    ask = functools.partial(issubclass, kind, cls)
                    label = f"{kind.__qualname__} is a {cls.__qualname__}"
                    self._reads.answer(ask, label, by=cls)

    def _method(self, owner: Any, name: str, args: list) -> None:
        reads = self._reads
        if is_a(owner, torch.Tensor):
            self._of_tensor(owner, name, args)
        elif is_a(owner, torch.Generator):
            reads.use(owner)
        elif is_a(owner, (np.random.Generator, np.random.RandomState)):
            kept = owner is getattr(np.random.mtrand, "_rand", None) and not others_may_draw()
            if not kept or name == "get_state":
                reads.drawn(f"draws from a numpy {type(owner).__name__}", owner)
            self._take_arrays("numpy", name, args)  # shuffle() and `out` write into them
        elif name in ("__getattribute__", "__setattr__", "__delattr__", "__getattr__"):
            if args and is_a(args[0], str):
                if is_a(owner, (type, types.ModuleType, super)):
                    reads.attribute(owner, args[0])
                elif name == "__setattr__" and args[0] == "__dict__":
                    reads.stored(owner, *args[:2])
                else:
                    reads.generic(owner, args[0])
        elif is_a(owner, types.GetSetDescriptorType) and name in ("__set__", "__delete__"):
            self._reads.stored(args[0], owner.__name__, *args[1:2])
        elif name == "__get__" and is_a(owner, property):
            reads.getter(owner, args[0])
        elif name == "__get__" and is_a(owner, _FIELDS):
            reads.attribute(args[0], owner.__name__)
        elif is_a(owner, type):
            if not policy.is_pure_of_class(owner, name):
                reads.blank(f"calls {owner.__module__}.{owner.__qualname__}.{name}()")
            if name != "__new__":  # which takes its arguments as they are
                self._use_all(args)
        elif is_a(owner, images.CONTAINERS):
            self._of_container(owner, name, args)
        elif type(owner) is types.MappingProxyType:
            self._through(owner, name, args)
        elif is_a(owner, contextvars.ContextVar):
            if name == "reset":
                reads.effect(f"resets {owner.name!r}, a context variable", *args[:1])
            self.contexts.called(owner, name)
        elif is_a(owner, np.ndarray):
            if name == "resize":  # its memory may move, and others may look at it
                reads.effect("resizes a numpy array", owner)
            elif name == "setflags":
                reads.attribute(owner, "flags")
            reads.array(owner)
            self._take_arrays("numpy", name, args)
        elif is_a(owner, random.Random):
            kept = owner is random._inst and not others_may_draw()  # as it is (random_draws.py)
            if not kept or name == "getstate":
                reads.drawn("draws from a random.Random", owner)
            if name == "seed" and (not args or args[0] is None) and owner is not random._inst:
                reads.drawn("makes a random.Random without a seed")
            return  # a trace that draws from these is refused
        elif name in ("__init__", "__new__", "__init_subclass__"):
            self._use_all(args)
        elif name == "__next__":
            reads.use(owner)
        elif is_a(owner, weakref.ref) and name == "__call__":
            reads.behind(owner)
        elif is_a(owner, locks.KINDS):
            self._of_lock(owner, name, args)
        elif type(owner) is _CACHED and name in ("cache_info", "cache_clear"):
            reads.blank(f"calls {name}() of {getattr(owner, '__qualname__', 'a cache')}", owner)
        elif policy.is_value(type(owner)) or is_a(owner, policy.IMMUTABLE):
            if is_a(owner, str) and name in ("format", "format_map", "__mod__"):
                reads.operated(methods.TEXT, *args)
                self._formatted(owner, name, args)
            reads.use(owner)
            self._take_all(args)
        elif name in _OF_WHOLE and static(type(owner), name) is static(object, name):
            reads.fields(owner)
        elif name in _OF_IDENTITY and static(type(owner), name) is static(object, name):
            return
        else:
            kind = type(owner)
            self._take_all(args)
            reads.blank(f"calls {kind.__module__}.{kind.__qualname__}.{name}()", owner)

    def _formatted(self, text: str, name: str, args: list) -> None:
        names = self._names()
        first = len(args) - len(names)
        if name == "format":
            words = dict(zip(names, args[first:], strict=True))
            handed.formatted(self._reads, text, args[:first], words)
        elif name == "format_map" and args:
            handed.formatted(self._reads, text, [], args[0])

    def _through(self, proxy: types.MappingProxyType, name: str, args: list) -> None:
        """A method of a read-only view is that of the mapping behind it."""
        behind = gc.get_referents(proxy)[0]
        if is_a(behind, images.CONTAINERS):
            self._of_container(behind, name, args)
        else:
            self._reads.attribute(behind, name)  # its frames show what it reads

    def _of_tensor(self, tensor: torch.Tensor, name: str, args: list) -> None:
        if name in LAYOUT or asked_of(tensor, name):
            self._reads.attribute(tensor, name)
        if name == "requires_grad_":
            self._reads.flagged(tensor, args[0] if args else True)
        elif name in ("__setattr__", "__delattr__"):
            self._reads.stored(tensor, *args[:2])
        elif name == "retain_grad" and not tensor.is_leaf:
            self._reads.effect("calls retain_grad() of a result")
        self._use_all([tensor, *args])

    def _of_lock(self, lock: Any, name: str, args: list) -> None:
        if name == "locked":
            self._reads.locked(lock)
        elif name in ("_is_owned", "_recursion_count"):
            if not self._reads.locks.held(lock):  # else it tells what forward() did
                self._reads.answer(getattr(lock, name), f"{name}() of a lock", by=lock)
        elif name == "acquire" and args:  # may give up, and says so
            self._reads.blank("tries to acquire a lock", lock)
        elif name in ("acquire", "__enter__"):
            self._reads.locks.acquired(lock)
        elif name in ("release", "__exit__") and not self._reads.locks.released(lock):
            self._reads.effect("releases a lock that it has not acquired", lock)

    def _of_container(self, owner: Any, name: str, args: list) -> None:
        self._reads.operated(methods.KEYED, *args)
        if name not in _STORING:
            self._take_all([owner, *args])
        if is_a(owner, set) and name == "pop":  # an equal set may give another element
            self._reads.blank("takes an element out of a set", owner)
        if is_a(owner, dict) and name in _BY_KEY and args:
            label = f"[{images.short(args[0])}] of a dict"
            self._reads.item(owner, args[0], label, self._reads.by(owner))
            self._use_all(args[1:])
        else:
            self._reads.contents(owner)
            self._use_all(args)


def _classes(asked: Any) -> Iterator[Any]:
    """The classes that isinstance() is asked about, in tuples and unions."""
    if is_a(asked, types.UnionType):
        asked = asked.__args__
    if is_a(asked, tuple):
        for one in asked:
            yield from _classes(one)
    else:
        yield asked


def is_code_in_c(function: Any, kind: type) -> bool:
    """True for what runs without a frame, as far as a look at its class says."""
    if kind in (types.FunctionType, types.MethodType):
        return False
    if issubclass(kind, type):
        return static(function, "__init__") is object.__init__ or not is_a(
            static(function, "__init__"), types.FunctionType
        )
    return not is_a(static(kind, "__call__"), types.FunctionType)
