"""Which spots an instruction reads: attributes, items, cells and contents of outside objects.

Everything is found out without running code of the user: classes are searched statically, and what
properties, __getattr__ and the like do shows when their own frames run. Whether a spot was there
before the call is decided afterwards (recorder.py); here every spot is noted once, with the value
of its first read.
"""

from __future__ import annotations

import _thread
import collections
import functools
import gc
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gradd.export.attributes import FILLED_IN, HARMLESS
from gradd.export.freeze import TABLES
from gradd.export.guards import images, memory, policy, tracing
from gradd.export.guards.arguments import (
    Fact,
    is_fact,
)
from gradd.export.guards.images import is_a
from gradd.export.guards.locks import Locks
from gradd.export.guards.lookups import Lookups, borrowed, is_fixed
from gradd.export.guards.methods import TEXT, TensorMethods, of_code, operands
from gradd.export.guards.spots import (
    ABSENT,
    Answer,
    Bases,
    Cell,
    Class,
    Field,
    Item,
    Locked,
    Member,
    Spot,
    is_data,
    static,
)
from gradd.export.guards.taken import SIMPLE, STORAGE_KINDS, Taken, own_dict
from gradd.export.guards.tensor_reads import ACCUMULATED, ASK, TensorReads
from gradd.export.guards.tensors import Tensors
from gradd.spec import CaptureError

_IGNORED = FILLED_IN | HARMLESS | {"training"}
# Values in a module's own dictionary of which capture_key() sees every change by identity.
_IN_KEY = (str, type(None), types.FunctionType, types.BuiltinFunctionType, type, torch.dtype)
_UNWATCHED = (
    "and nobody could tell when that gives something else; do it outside of forward() and pass "
    "the result as a tensor"
)
_TRACED = (
    "which is something else while a call is captured: decide by it outside of forward(), or ask "
    "for sizes, types and isinstance()"
)
_DRAWN = (
    "and its numbers would stay those of the capture; draw with torch, without a generator or seed "
    "of its own, or outside of forward()"
)
_UNDONE = "which a graph does not do; do it outside of forward()"
_SET = (
    "a state of the process, which a graph would leave as it is: set it outside of forward(), or "
    "in a with statement"
)
_KEPT = "which a capture would keep alive: hold it by a reference, or read it outside of forward()"
_OF_PLACE = frozenset({"__class__", "__dict__", "__weakref__"})  # asked by other means
# What lives anyway, or is asked by itself.
_NO_OBJECTS = (
    *(type, types.FunctionType, types.ModuleType),
    *(weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)
_CLASS = object.__dict__["__class__"]
_OF_PYBIND = "instancemethod"
_NO_METHODS = frozenset({*SIMPLE, list, tuple, dict, set, frozenset, types.FunctionType})
_OF_FRAME = frozenset({"f_locals", "f_lineno", "f_lasti"})
_FIXED = (
    *(types.CodeType, types.FrameType, types.TracebackType, types.MappingProxyType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)


class Abandoned(BaseException):
    """Ends a recorded forward before it takes or writes what nobody could put back.

    No Exception, so that a forward which catches those does not swallow it.
    """


_asked = weakref.ref.__call__  # a subclass may answer something else


def _lives(reference: weakref.ref) -> bool:
    return _asked(reference) is not None


def _plainly(owner: Any, name: str) -> Any:
    return images.plain(getattr(owner, name, ABSENT))


class _Ages:
    """Tells objects that were there before the call from those that it has made.

    Inside Recorder.ageing() what is new is the collector's youngest generation.
    """

    def __init__(self) -> None:
        self._old_iterators: set[int] | None = None

    def is_old(self, value: Any) -> bool:
        """True also for what the collector does not track: nobody knows its age."""
        if not gc.is_tracked(value):
            return True
        if static(type(value), "__next__") is ABSENT:
            return not any(o is value for o in gc.get_objects(generation=0))
        if self._old_iterators is None:  # loops ask often: one look at all objects
            found: dict[type, bool] = {}
            self._old_iterators = set()
            for o in (*gc.get_objects(generation=1), *gc.get_objects(generation=2)):
                kind = type(o)
                known = found.get(kind)
                if known is None:
                    known = found[kind] = static(kind, "__next__") is not ABSENT
                if known:
                    self._old_iterators.add(id(o))
        return id(value) in self._old_iterators


class Reads(Taken, Lookups, TensorReads):
    """The spots read so far.

    Attributes:
        spots: By kind, owner and key.
        blanks: What cannot be watched: the refusal, and the object whose age decides if it
            matters.
        arrays_taken: Ids of numpy arrays whose values Python has taken.
        grad_mode: forward() has asked whether gradients are recorded.
        gradients: Whether they were, before forward() switched them itself.
        layout: By which names forward() has asked how tensors lie in memory.
        facts: What else it has asked the call's tensors, see arguments.py.
        of_tree: Attributes of the module and its submodules: id of the instance dictionary and
            name; WHOLE stands for all of them.
        methods: The methods of tensors that it uses.
        locks: The locks that it holds.
        ageless: Ids of owners of spots that the collector did not track when they were first read.
            A dictionary of plain values is one; it looks new once something else is put into it.
        asking: Globals of code that asks type() for the class of a number, by id.
        where: Place in the user's code that runs now, for messages.
    """

    def __init__(self, module: torch.nn.Module, tensors: Tensors, passed: Iterable[Any]) -> None:
        """Args:
        module: The module, whose structure is part of capture_key().
        tensors: Watches the tensors.
        passed: Containers that belong to the call.
        """
        self.spots: dict[tuple, Spot] = {}
        self.blanks: list[tuple[CaptureError, Any]] = []
        self.arrays_taken: set[int] = set()
        self.whole_ones: set[int] = set()  # ids of containers that whole() has gone through
        self.grad_mode = False
        self.gradients = torch.is_grad_enabled()
        self._casts = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda")}  # before the call
        self.layout: set[str] = set()
        self.facts: set[str] = set()
        self.of_tree: set[tuple[int, str]] = set()
        self.ageless: set[int] = set()
        self.asking: dict[int, dict] = {}
        self.cold = False  # a cache has kept what this forward made: the next one finds it there
        self.where = ""
        self._ages = _Ages()
        self.tensors = tensors
        self.methods, self.locks = TensorMethods(), Locks()
        self._passed = list(passed)  # keeps ids from being used again
        self.skipped = {id(v) for v in self._passed}
        self.tree = {id(m) for m in module.modules()}
        self._tree_dicts = {id(m.__dict__) for m in module.modules()}
        self._written: set[tuple] = set()
        self._hidden: set[tuple[int, str]] = set()  # special methods that are looked at now
        self._cached: list[tuple[Any, list, dict]] = []
        self._late: dict[tuple[int, str], tuple] = {}
        self._facts: dict[tuple[int, str], tuple[weakref.ref, Any]] = {}
        self.weak: dict[int, weakref.ref] = {}  # found behind weak references, by id
        self._owners: dict[int, Any] = {}  # id of an instance dictionary -> the object
        self._parameters: dict[int, tuple[dict, str]] = {}
        for sub in module.modules():
            self.skipped.update(id(sub.__dict__[t]) for t in TABLES if t in sub.__dict__)
            for name, tensor in sub._parameters.items():
                self._parameters[id(tensor)] = (sub._parameters, name)

    def clear(self) -> None:
        """Lets go of everything: a suspended generator may hold its tracer for ever."""
        for held in (
            self.spots,
            self.blanks,
            self._passed,
            self._owners,
            self._parameters,
            self._cached,
            self._late,
        ):
            held.clear()
        del self.tensors

    def blank(self, text: str, by: Any = None) -> None:
        """Notes something that cannot be watched, before it happens.

        Raises:
            Abandoned: It is something of outside: the capture is refused for it anyway, and an
                iterator, a generator of random numbers or a file is still as it was.
        """
        self._refuse("outside_state", text, _UNWATCHED, by)

    def asks_tracer(self, text: str) -> bool:
        """What answers otherwise while torch traces; torch's own code may ask it.

        The forward goes on: its result may say more, and nothing is lost.

        Returns:
            True if the capture is going to be refused for it.
        """
        place = self.where.partition(" @ ")[2]
        if policy.is_torch_file(place) or policy.is_standard_file(place):
            return False
        if tracing.FOR_TRACERS in place:
            return False
        text = f"forward() {text} ({self.where}), {_TRACED}"
        self.blanks.append((CaptureError("outside_state", text), None))
        return True

    def drawn(self, text: str, by: Any = None) -> None:
        """The same for random numbers other than those of torch's default generator."""
        self._refuse("python_random", text, _DRAWN, by)

    def setting(self, text: str) -> None:
        """The same for a state of the process that forward() sets; torch's contexts end it."""
        if not policy.is_torch_file(self.where.partition(" @ ")[2]):
            self._refuse("outside_written", text, _SET, None)

    def _refuse(self, reason: str, text: str, why: str, by: Any) -> None:
        self.blanks.append((CaptureError(reason, f"forward() {text} ({self.where}), {why}"), by))
        if by is None or self._ages.is_old(by):
            raise Abandoned

    def _add(self, spot: Spot) -> None:
        self.spots[(spot.KIND, id(spot.owner), spot.key)] = spot
        if spot.by is spot.owner and not gc.is_tracked(spot.by):
            self.ageless.add(id(spot.by))

    # ---- kinds of spots ----

    def item(self, table: Any, key: Any, label: str, by: Any = None) -> None:
        """An entry of a dictionary or list, or its absence."""
        if id(table) in self._tree_dicts:
            self.of_tree.add((id(table), key))
        place = ("item", id(table), key)
        if place in self.spots or id(table) in self.skipped or place in self._written:
            return
        if ("contents", id(table), None) in self.spots:
            return  # as they were; a method may have changed them meanwhile
        self._key(table, key)
        try:
            value = dict.get(table, key, ABSENT) if is_a(table, dict) else table[key]
        except IndexError:  # a loop may end there
            value = ABSENT
        except TypeError:
            return
        if id(table) in self._tree_dicts:
            known = is_a(value, _IN_KEY) or id(value) in self.tree
            if type(value) is types.BuiltinFunctionType and value.__self__ is not None:
                known = is_a(value.__self__, types.ModuleType)  # it leads to what it reads
            if key in _IGNORED or key in TABLES or known:
                return
        elif key in FILLED_IN:
            return
        by = self._owners.get(id(table), by)
        self._add(Item(table, key, value, label, by))

    def later(self, table: dict, key: str, label: str, wanted: str = "", by: Any = None) -> None:
        """An entry that this read may make itself, as an import does; what it is then counts.

        Args:
            table: The dictionary.
            key: The name in it.
            label: As of item().
            wanted: What forward() does, for the refusal if there is no entry afterwards either.
            by: As of item().
        """
        if key in table:
            self.item(table, key, label, by)
        else:
            self._late.setdefault((id(table), key), (table, key, label, by, wanted, self.where))

    def note_late(self) -> None:
        """The forward is over: the spots of later(), and the facts of tensors."""
        for (_, asked), (reference, value) in self._facts.items():
            if (tensor := reference()) is not None:
                self._add(Fact(tensor, asked, value, f"{asked} of a tensor of outside"))
        for table, key, label, by, wanted, where in self._late.values():
            if key in table or not wanted:
                self.item(table, key, label, by)
            else:
                text = f"forward() {wanted} ({where}), which is not there, {_UNWATCHED}"
                self.blanks.append((CaptureError("outside_state", text), None))

    def of_class(self, cls: type, name: str) -> None:
        """An attribute of a class."""
        if ("class", id(cls), name) in self.spots or name in ("__class__", "__dict__"):
            return
        if issubclass(cls, torch.Tensor):
            self.methods.use(name)
        if is_fixed(cls) or issubclass(cls, torch.Tensor):
            return
        self.bases(cls)
        self.looked_up(cls, name)  # it may be defined nearer than it was
        value = static(cls, name)
        if value is not ABSENT:
            self._add(Class(cls, name, value, f"{cls.__qualname__}.{name}"))

    def bases(self, cls: type) -> None:
        """What a class inherits from."""
        if ("bases", id(cls), cls.__bases__) not in self.spots and not is_fixed(cls):
            spot = Bases(cls, cls.__bases__, None, f"the bases of {cls.__qualname__}")
            spot.value = spot.now()
            self._add(spot)

    def shape(self, owner: Any, kind: type, table: dict | None) -> None:
        """Which dictionary an object has, and which class: either may be exchanged."""
        if is_fixed(kind) and kind is not types.FunctionType or id(owner) in self.tree:
            return
        if table is not None and type(static(kind, "__dict__")) is types.GetSetDescriptorType:
            self.field(owner, "__dict__")
        self.kind_of(owner)

    def kind_of(self, owner: Any) -> None:
        """Of which class an object is."""
        kind = type(owner)
        if is_fixed(kind) or id(owner) in self.tree or issubclass(kind, (torch.Tensor, type)):
            return
        if static(kind, "__class__") is _CLASS:
            self.field(owner, "__class__")

    def operated(self, names: Iterable[str], *values: Any) -> None:
        """The classes of operands are asked for methods with these names."""
        for value in values:
            self.of_strange(value, names)
        for value in (found for v in values for found in operands(v)):
            kind = type(value)
            if TEXT[0] in names and tracing.has_text(value):
                self.asks_tracer("makes a text of a tensor or its class")
            if kind in _NO_METHODS:
                continue
            if is_a(value, torch.Tensor):
                for name in names:
                    self.methods.use(name)
                if "__len__" in names:
                    self.tensors.note(value)
                    self._of_foreign(value, "size")
            elif not (is_fixed(kind) or policy.is_of_arrays(kind)):
                others = [v for v in values if v is not value]
                for name in names:
                    self.of_class(kind, name)
                    self.hidden_call(value, name, *others)
                self.converted([value])

    def of_torch(self, code: types.CodeType, table: dict) -> None:
        """A function of torch runs that nobody records: what it calls by name."""
        for name in code.co_names:
            value = table.get(name)
            if callable(value) and not is_a(value, type):
                self.item(table, name, f"{table.get('__name__')}.{name}")
            if "torch" in code.co_names and callable(torch.__dict__.get(name)):
                self.item(torch.__dict__, name, f"torch.{name}")
            if hasattr(torch.Tensor, name):
                self.methods.use(name)
        for name in of_code(code):
            self.methods.use(name)

    def watch_methods(self) -> None:
        """The forward is over: spots for the methods of tensors."""
        for spot in self.methods.spots():
            self._add(spot)

    def field(self, owner: Any, name: str) -> None:
        """An attribute that is kept in C."""
        if ("field", id(owner), name) not in self.spots:
            value = getattr(owner, name, ABSENT)
            self._add(Field(owner, name, value, f"{type(owner).__name__}.{name}"))

    def cell(self, cell: Any, label: str) -> None:
        """A variable of an enclosing function."""
        if is_a(cell, types.CellType) and ("cell", id(cell), None) not in self.spots:
            spot = Cell(cell, None, None, f"the variable {label} of an enclosing function")
            spot.value = spot.now()
            self._add(spot)

    def answer(self, question: Any, label: str, value: Any = ASK, by: Any = None) -> None:
        """What a harmless function says; it is asked, unless the answer is given."""
        key = ("answer", id(question if by is None else by), label)
        if key in self.spots:
            return
        if value is ASK:
            try:
                value = question()
            except Exception:  # for a device that is not there
                return
            if is_a(value, torch.Tensor):
                return
        self.spots[key] = Answer(question, label, value, label, by)

    def locked(self, lock: Any) -> None:
        """A lock is asked whether it is taken."""
        spot = Locked(lock.locked, None, lock.locked(), "a lock is locked", lock)
        self.spots.setdefault(("answer", id(lock), None), spot)

    def _belongs(self, table: dict, owner: Any) -> None:
        """An instance dictionary is as old as its object, but for one that it was given."""
        if self._owners.get(id(table)) is not table:
            self._owners[id(table)] = owner

    def library_object(self, value: Any) -> None:
        """All attributes of an object whose methods are code of torch or numpy."""
        if policy.is_whole(type(value)) and (table := own_dict(value)) is not None:
            self._belongs(table, value)
            self.contents(table)

    def behind(self, reference: weakref.ref) -> None:
        """A weak reference is asked for its object."""
        self.answer(functools.partial(_lives, reference), "a weak reference lives", by=reference)
        found = _asked(reference)
        if found is None or id(found) in self.tree or is_a(found, _NO_OBJECTS):
            return
        if not (is_a(found, torch.Tensor) and self.tensors.is_own(found)):
            self.weak[id(found)] = reference

    def kept_alive(self, spots: Iterable[Spot], tensors: Iterable[int]) -> list[CaptureError]:
        """A refusal if spots hold what forward() has found behind a weak reference.

        Args:
            spots: The spots that a capture is going to hold.
            tensors: Ids of tensors that it uses, or whose values it compares.
        """
        found = {number: ref for number, ref in self.weak.items() if _lives(ref)}
        if not found:
            return []
        names = {**found, **{id(own_dict(_asked(ref))): ref for ref in found.values()}}
        held = {id(part) for spot in spots for part in (spot.owner, spot.by, spot.value)}
        held |= {id(spot.owner.base) for spot in spots if is_a(spot.owner, np.ndarray)}
        for number in names.keys() & (held | set(tensors)) - {id(None)}:
            kind = type(_asked(names[number])).__qualname__
            text = f"forward() reads a {kind} behind a weak reference, {_KEPT}"
            return [CaptureError("outside_state", text)]
        return []

    def _told(self, owner: Any, name: str) -> None:
        """An attribute that code which is not recorded computes."""
        value = getattr(owner, name, None)
        if is_a(value, SIMPLE):
            label = f"{getattr(owner, '__name__', type(owner).__qualname__)}.{name}"
            self.answer(functools.partial(getattr, owner, name), label, value, owner)

    def _computed(self, owner: Any, name: str, found: property) -> None:
        """A property: the frame of its getter shows what it reads, if that is recorded."""
        if type(found.fget).__name__ == _OF_PYBIND:  # stands for a field of an object of C++
            self.in_c(owner, name)
            return
        if static(type(found), "__get__") is not property.__get__ or found.fget is None:
            self.got(found, owner, type(owner))
            return
        if self.getter(found, owner) or policy.is_recorded(found.fget.__code__):
            return
        if policy.is_whole(type(owner)) and own_dict(owner):
            self.library_object(owner)
        elif not is_a(owner, torch.nn.Module):
            self._told(owner, name)

    def in_c(self, owner: Any, name: str) -> None:
        """An attribute that code in C computes: compared at every call, if that is possible."""
        kind = type(owner)
        if policy.is_value(kind) and kind is not types.FunctionType or name in _OF_PLACE:
            return
        value = getattr(owner, name, ABSENT)
        if images.alike(value, getattr(owner, name, ABSENT)):
            self.field(owner, name)
            return
        ask = functools.partial(_plainly, owner, name)
        if images.plain(value) is ABSENT:
            self.blank(f"reads .{name} of a {kind.__qualname__}, another object each time", owner)
        else:
            self.answer(ask, f"{kind.__qualname__}.{name}", by=owner)

    def cached(self, function: Any, args: list, names: tuple[str, ...]) -> None:
        """A call of what functools.lru_cache has wrapped: ask_cached() asks it again."""
        first = len(args) - len(names)
        self._cached.append((function, args[:first], dict(zip(names, args[first:], strict=True))))

    def ask_cached(self, young: set[int]) -> None:
        """What the cache says for arguments that a later call can give again.

        When the forward is done: the answers are there, so that nothing runs.
        """
        for function, args, words in self._cached:
            values = (*args, *words.values())
            known = all(is_a(v, (*images.PLAIN, float)) or id(v) not in young for v in values)
            if not known or id(function) in young:
                continue
            ask = functools.partial(function, *args, **words)
            name = getattr(function, "__qualname__", "a cached function")
            said = ask()
            self.cold |= id(said) in young
            self.answer(ask, f"{name}({', '.join(map(images.short, values))})", said, function)
        self._cached.clear()

    # ---- attributes ----

    def stored(self, owner: Any, name: str, value: Any = ABSENT) -> None:
        """owner.name is set to `value`, or deleted: its value from before counts.

        Of the module's own attributes capture() itself sees that, and says it better.
        """
        if not is_a(owner, (torch.Tensor, types.ModuleType, type)):
            self.stores(type(owner), name)
            self.set_through(owner, name, value)
            if name == "__dict__" and is_a(value, dict):
                self._owners[id(value)] = value  # of whose age it may be, whoever shows it
        if id(owner) in self.tree:
            self._written.add(("item", id(own_dict(owner)), name))
            self.of_tree.add((id(own_dict(owner)), name))
        elif policy.is_setting(owner, name):
            where = getattr(owner, "__name__", type(owner).__qualname__)
            self.setting(f"sets {where}.{name}")
        elif not is_a(owner, torch.Tensor):
            self.attribute(owner, name)
        elif name == "data":
            self.blank("assigns to .data of a tensor", owner)
        elif name == "requires_grad":
            self.flagged(owner, value)
        elif name in ACCUMULATED:
            self.effect(f"writes .{name} of a tensor", owner)
        elif is_fact(name) and not self.tensors.is_made(owner):
            self.blank(f"writes .{name} of a tensor that it has not made", owner)

    def effect(self, text: str, by: Any = None, reason: str = "outside_written") -> None:
        """Notes what forward() is about to do beside computing results, see blank().

        Raises:
            Abandoned: See there.
        """
        self._refuse(reason, text, _UNDONE, by)

    def attribute(self, owner: Any, name: str) -> None:
        """owner.name is read, written or deleted."""
        kind = type(owner)
        if is_a(owner, torch.Tensor):
            self._of_tensor(owner, name)
        elif is_a(owner, types.ModuleType):
            self._of_python_module(owner, name)
        elif is_a(owner, type):
            self._of_type(owner, name)
        elif kind is super:
            self._of_super(owner, name)
        elif memory.is_buffer(owner):
            self.memory(owner)
        elif kind in _FIXED:
            if name == "f_back":
                self.blank("looks at the frames of its callers")
            elif name in _OF_FRAME and owner.f_trace is None:  # none that is recorded
                self.blank(f"reads .{name} of a frame from outside")
        elif kind is types.CellType:
            self.cell(owner, name)
        else:
            self._of_object(owner, kind, name)

    def _of_object(self, owner: Any, kind: type, name: str) -> None:
        if is_a(owner, np.ndarray):
            self._of_array(owner, name)
        elif is_a(owner, (np.void, np.flatiter)):
            self.use(owner)
        elif name == "args" and is_a(owner, BaseException):
            self.field(owner, name)
        if is_a(static(kind, "__getattribute__"), types.FunctionType):
            self.of_class(kind, "__getattribute__")  # its own frame shows what it reads
        elif borrowed(kind, "__getattribute__") is not ABSENT:
            self.hidden_call(owner, "__getattribute__", name)
            self.hidden_call(owner, "__getattr__", name)
        elif kind is types.MethodType and static(kind, name) is ABSENT:
            self.attribute(owner.__func__, name)
        elif issubclass(kind, _thread._local):
            self.field(owner, name)
        elif kind in weakref.ProxyTypes:
            self.blank(f"reads .{name} through a weak proxy", owner)
        else:
            self.generic(owner, name)

    def generic(self, owner: Any, name: str) -> None:
        """What object.__getattribute__ reads."""
        kind, table = type(owner), own_dict(owner)
        if id(owner) in self.tree:
            self.of_tree.add((id(table), name))
        found = static(kind, name)
        self.of_object(kind, name)
        self.shape(owner, kind, table)
        if name == "__dict__" and table is not None:
            self._belongs(table, owner)
            return
        if found is not ABSENT and is_data(found):
            self.of_class(kind, name)
            if is_a(found, types.MemberDescriptorType):
                self.field(owner, name)
            elif is_a(found, types.GetSetDescriptorType):
                self.in_c(owner, name)
            elif is_a(found, property):
                self._computed(owner, name, found)
            else:
                self.got(found, owner, kind)
            self.hidden_call(owner, "__getattr__", name)  # if there is nothing
            return
        label = f"{kind.__qualname__}.{name}"
        if table is not None and name in table:
            self.item(table, name, label, owner)
            if found is not ABSENT:  # something else there might go first
                self.of_class(kind, name)
            return
        tree = id(owner) in self.tree
        if found is not ABSENT:
            if table is not None and not tree:
                self.item(table, name, label, owner)
            self.of_class(kind, name)
            self.got(found, owner, kind)
            return
        if is_a(owner, torch.nn.Module) and self._of_module(owner, name):
            return
        if table is not None:
            self.item(table, name, label, owner)
        self.of_class(kind, name)
        getter = static(kind, "__getattr__")
        if getter is not ABSENT:
            self.of_class(kind, "__getattr__")
            self.hidden_call(owner, "__getattr__", name)
            if is_a(getter, types.FunctionType) and policy.is_array_code(getter.__code__):
                if not policy.is_recorded(getter.__code__):
                    self._told(owner, name)

    def _of_module(self, owner: torch.nn.Module, name: str) -> bool:
        """Parameters, buffers and submodules; those of the tree are in the key."""
        for table in ("_parameters", "_buffers", "_modules"):
            held = owner.__dict__.get(table, {})
            if name in held:
                if id(owner) not in self.tree:
                    self.item(held, name, f"{type(owner).__qualname__}.{name}", owner)
                return True
        return False

    # ---- identity ----

    def compared(self, a: Any, b: Any, identity: bool = False) -> None:
        """`a is b`, `a == b` and the like: which tensor, or which class of tensors."""
        if is_a(a, torch.Tensor) and is_a(b, torch.Tensor):
            for tensor in (a, b):
                self._told_apart(tensor)
        elif is_a(a, type) and issubclass(a, torch.Tensor):
            self._by_class(b)
        elif identity and type(a) is int and type(b) is int:
            self._numbers_by_identity()

    def _numbers_by_identity(self) -> None:
        """A size is another object in a trace; nobody else should ask."""
        if not policy.is_library(self.where.partition(" @ ")[2]):
            self.blank("compares numbers by identity (is); compare them with ==")

    def _told_apart(self, tensor: torch.Tensor) -> None:
        """Of a call's tensors and the module's own the key says which are one."""
        self.tensors.note(tensor)
        if self.tensors.is_foreign(tensor):
            self.blank("compares a tensor from outside by identity", tensor)

    def _by_class(self, cls: Any) -> None:
        """A trace runs on tensors of other classes, for which isinstance() alone is right."""
        if is_a(cls, type) and issubclass(cls, torch.Tensor):
            self.blank(f"decides by type() of a {cls.__name__}; ask isinstance()")

    def _key(self, container: Any, key: Any) -> None:
        """A tensor, its id or its class is looked for in a container."""
        if is_a(key, torch.Tensor) or type(key) is int and self.tensors.is_id(key):
            if id(container) not in self.skipped:
                self.blank("looks for a tensor among the keys of a container", container)
        else:
            self._by_class(key)

    # ---- items ----

    def subscript(self, container: Any, key: Any) -> None:
        """container[key] is read, written or deleted."""
        kind = type(container)
        if is_a(container, torch.Tensor):
            self.tensors.note(container)
            self.use(key)
            self.made_of(key if is_a(key, tuple) else [key])
        elif kind is types.MappingProxyType:
            self.subscript(gc.get_referents(container)[0], key)
        elif is_a(container, (np.ndarray, np.void, np.flatiter, *STORAGE_KINDS)):
            self.use(container)
        elif memory.is_memory(container):
            self.memory(container)
        elif is_a(static(kind, "__getitem__"), types.FunctionType):
            self.of_class(kind, "__getitem__")
            self.library_object(container)
            if policy.is_whole(kind):
                self.use(key)
        elif is_a(container, type):
            self._of_type(container, "__class_getitem__")
            found = borrowed(container, "__class_getitem__")
            if found is not ABSENT and not is_a(found, classmethod):
                self.call(found, [key])
        elif is_a(container, dict):
            self.special(kind, "__missing__")
            self.hidden_call(container, "__missing__", key)
            self.item(container, key, f"[{images.short(key)}] of a dict", self.by(container))
            if is_a(container, collections.defaultdict):
                self.of_class(kind, "__missing__")
        elif is_a(container, images.CONTAINERS):
            if is_a(key, int):
                self.item(container, key, f"element {key} of a {kind.__name__}")
            else:
                self.contents(container)
        elif not is_a(container, (str, bytes, tuple, range, type, types.GenericAlias)):
            if not policy.is_of_arrays(kind):
                self.blank(f"reads an element of a {kind.__name__}", container)

    def contains(self, container: Any, key: Any) -> None:
        """key in container."""
        if type(container) is types.MappingProxyType:
            self.contains(gc.get_referents(container)[0], key)
        elif is_a(container, dict):
            if not is_a(static(type(container), "__contains__"), types.FunctionType):
                self.item(container, key, f"[{images.short(key)}] of a dict", self.by(container))
        elif is_a(container, set):
            self._key(container, key)
            if ("member", id(container), key) not in self.spots:
                self._add(Member(container, key, key in container, f"{images.short(key)} in a set"))
        else:
            self.whole(container)
            self.whole(key)
            if is_a(container, (list, tuple)):
                for element in container:
                    self.compared(element, key)
