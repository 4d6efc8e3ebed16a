"""Guards that gradd checks before a call in addition to Dynamo's.

Dynamo keeps a method of a class as it was when it traced a call, and reads the environment once.
gradd compares the functions and descriptors of the classes that a call can reach, their bases,
functions of torch, hooks of all modules, modules that code imports, the type of autocast, the
process and the environment. Comparing a class's data is left to Dynamo: with a counter on a class,
every call would see another version.

All of this is stored in dictionaries. A call compares their versions, which change with every
write; it looks at the entries of a dictionary only if its version has changed.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import types
import weakref
from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch.nn import functional

from gradd import module_tables, private
from gradd.graph.locations import is_installed
from gradd.memory import devices
from gradd.module_tables import HOOKS_OF_ALL

_NOT_USERS = {"torch", "numpy", "gradd", *sys.stdlib_module_names} - {"__main__"}
_FUNCTIONS = (types.FunctionType, classmethod, staticmethod, property)
_CLASSES = 128  # whose dictionaries are compared in each call
_CODES = 1000  # functions whose code is compared
_VISITED = 20_000  # objects that are looked at to find them
_ELEMENTS = 100  # of one container
# Of type itself: a metaclass may answer for its classes.
_MRO = vars(type)["__mro__"].__get__
_TABLE = vars(type)["__dict__"].__get__
_CODE = attrgetter("__code__")
_OF_TORCH = (torch.Tensor, torch.nn.Parameter, torch.nn.Module)
_OF_DYNAMO = ("__init__", "__setstate__")  # of Module, which it replaces in its first call
_ENVIRONMENT = getattr(os.environ, "_data", os.environ)
_OFTEN = 3
_ASKING = {"KeyError", "AttributeError", "LookupError", "Exception", "__dict__", "vars"}
_HISTORY = {"grad_fn", "is_leaf"}  # of a tensor
_HOLDERS = 128  # dictionaries of objects that are compared where code asks in such ways
_BUILTINS = frozenset(vars(builtins))
# From Python 3.12 on torch is not told of every write: not of those to attributes that an object
# keeps beside its dictionary, and not when an empty one becomes a copy of another one.
version_of_names = private.dict_version if sys.version_info < (3, 12) else tuple
_Holder = Callable[[], dict[Any, Any]]
_values: defaultdict[Any, set[Any]] = defaultdict(set)  # that a variable has had, a few of them


class Supplement:
    """The state of all that at one moment.

    Attributes:
        asks_history: Code asks tensors whether they are results, which Dynamo takes for constant.
    """

    def __init__(self, roots: Iterable[Any], before: Supplement | None = None) -> None:
        """Args:
        roots: The entry points of a call: modules, and functions.
        before: That of older graphs, which may apply again.
        """
        self._reached = found = _Reached(roots, before._reached if before else None)
        self._names, self._imports = found.names, found.imports
        self._builtins = sorted(found.names & _BUILTINS)
        self.asks_history = not found.names.isdisjoint(_HISTORY)
        functions = [f for ref in found.functions if (f := ref()) is not None]
        self._plain = [f for f in functions if not _holds_others(f)]
        self._devices = devices.types()
        self._closures = [(weakref.ref(f), f.__code__) for f in functions if _holds_others(f)]
        self._holders = found.holders if found.asks else []
        self._classes = (*found.classes, *_OF_TORCH)
        self._tables = [
            *((_dictionary(cls), self._of_class) for cls in found.classes),
            *((_dictionary(cls), self._of_torch) for cls in _OF_TORCH),
            (vars(functional), self._of_class),
            (vars(torch), lambda table: list(map(table.get, _CALLED))),
            (vars(builtins), lambda table: list(map(table.get, ("__import__", *self._builtins)))),
            *((table, self._over_builtins) for table in found.globals.values()),
            (sys.modules, self._of_modules),
            (_ENVIRONMENT, dict),
        ]
        self._hooks = any(HOOKS_OF_ALL)
        if self._hooks:  # else it is enough that there are none
            self._tables += ((hooks, tuple) for hooks in HOOKS_OF_ALL)
        self._dictionaries = [table for table, _ in self._tables]
        self._versions: list[Any] = list(map(private.dict_version, self._dictionaries))
        self._versions += self._versions_of_holders()
        self._seen = [self._found(i) for i in range(len(self._versions))]
        self._rest = self._rest_now()
        self._process = os.getpid()

    @property
    def classes(self) -> tuple[type, ...]:
        """Those that a call can reach."""
        return self._classes

    @property
    def names(self) -> set[str]:
        """All that stand in the code of users that a call can reach."""
        return self._names

    def holds(self) -> bool:
        if any(HOOKS_OF_ALL) is not self._hooks:
            return False
        versions = list(map(private.dict_version, self._dictionaries))
        if self._holders:
            versions += self._versions_of_holders()
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            for i in [i for i, (now, before) in enumerate(pairs) if now != before]:
                found = self._found(i)
                environment = i < len(self._tables) and self._tables[i][0] is _ENVIRONMENT
                if environment and self._is_noise(found, self._seen[i]):
                    self._seen[i] = found
                if found != self._seen[i]:
                    return False
            self._versions = versions
        try:
            rest = [*map(_MRO, self._classes), *map(_CODE, self._plain)]
            rest += map(torch.get_autocast_dtype, self._devices)  # _rest_now(), without a call
            if rest != self._rest or os.getpid() != self._process:
                return False
            for ref, code in self._closures:
                if (function := ref()) is not None and function.__code__ is not code:
                    return False
            return True
        except Exception:  # an object that cannot be compared counts as changed
            return False

    def changed(self) -> str:
        """Of a state that does not hold: what differs now, as `Net.forward`; "" = unknown."""
        for i, before in enumerate(self._seen):
            now = self._found(i)
            if now == before:
                continue
            if isinstance(now, dict):
                names = {k for k in now.keys() | before.keys() if now.get(k) != before.get(k)}
            else:
                names = set(now) ^ set(before)
            texts = sorted(os.fsdecode(n) for n in names if isinstance(n, (str, bytes)))
            if texts:
                return self._owner_of(i) + texts[0]
        functions = [*self._plain, *(f for ref, _ in self._closures if (f := ref()) is not None)]
        codes = [*self._rest[len(self._classes) :], *(code for _, code in self._closures)]
        for function in functions:
            if function.__code__ not in codes:
                return f"the code of {function.__qualname__}"
        return ""

    def _owner_of(self, i: int) -> str:
        if i < len(self._classes):
            return f"{self._classes[i].__qualname__}."
        environment = i < len(self._tables) and self._tables[i][0] is _ENVIRONMENT
        return "the environment variable " if environment else "the name "

    def _is_noise(self, now: dict[Any, Any], before: dict[Any, Any]) -> bool:
        """Whether all variables that have changed have had many values, and no code names them.

        Libraries may read any; one that a script sets in every step is for its other processes.
        """
        changed = {name for name, _ in now.items() ^ before.items()}
        noise = True
        for name in changed:
            if len(_values[name]) <= _OFTEN:
                _values[name].add(now.get(name))
            named = (os.fsdecode(name) if isinstance(name, bytes) else name) in self._names
            noise = noise and not named and len(_values[name]) > _OFTEN
        return noise

    def _versions_of_holders(self) -> list[Any]:
        return [version_of_names(holder()) for holder in self._holders]

    def _found(self, i: int) -> Any:
        """The compared part of a dictionary: one of the tables, or of the holders behind them."""
        if i < len(self._tables):
            table, what_counts = self._tables[i]
            return what_counts(table)
        return self._names & dict.keys(self._holders[i - len(self._tables)]())

    def _rest_now(self) -> list[Any]:
        """The compared state outside of dictionaries."""
        return [
            *map(_MRO, self._classes),
            *map(_CODE, self._plain),
            *map(torch.get_autocast_dtype, self._devices),
        ]

    def _of_class(self, table: dict[str, Any]) -> dict[str, Any]:
        """The compared part of the dictionary of a class: its functions and its names."""
        return {
            name: _itself(value) if _is_function(value) else 0
            for name, value in list(table.items())  # threads may write
            if name in self._names or _is_function(value)
        }

    def _of_torch(self, table: dict[str, Any]) -> dict[str, Any]:
        """Of a class of torch the data as well, which Dynamo takes for constant."""
        return {
            name: _itself(value)
            for name, value in list(table.items())
            if (name in self._names or _is_function(value)) and name not in _OF_DYNAMO
        }

    def _over_builtins(self, table: dict[str, Any]) -> list[str]:
        """Names of builtins that globals have as well."""
        return [name for name in self._builtins if name in table]

    def _of_modules(self, table: dict[str, Any]) -> dict[str, Any]:
        """Modules that code may import by name."""
        return {name: _itself(table[name]) for name in self._imports if name in table}


def _itself(value: Any) -> tuple[int, Any]:
    """A key that equals one object only, and keeps it: another one might get its address."""
    return id(value), value


def _holds_others(function: types.FunctionType) -> bool:
    """Whether a function has a closure, which may keep a module or a tensor alive."""
    return not {*function.__code__.co_freevars} <= {"__class__"}


def _dictionary(cls: type) -> dict[str, Any]:
    """The dictionary of a class, behind Python's read-only view of it."""
    return next(d for d in gc.get_referents(_TABLE(cls)) if isinstance(d, dict))


def _is_function(value: Any) -> bool:
    return isinstance(value, _FUNCTIONS) or hasattr(type(value), "__get__")


# Functions of torch.nn.functional call others of torch by their names, behind Dynamo's back.
_IN_FUNCTIONAL = {
    n for f in vars(functional).values() if hasattr(f, "__code__") for n in f.__code__.co_names
}
_CALLED = _IN_FUNCTIONAL & {
    n for n, f in vars(torch).items() if callable(f) and not isinstance(f, type)
}


class _Reached:
    """Classes of users that a call can get at, the next ones first.

    Attributes:
        classes: In the order in which they were found.
        names: All that stand in the code that was found.
        imports: Names of modules that the code may import.
        globals: Of the code, by id.
        functions: Of users, whose code may be exchanged, as a reload in a notebook does.
        asks: Whether code may ask for a name or a key that is not there, in a way that Dynamo does
            not guard.
        holders: Give the dictionaries of objects, and dictionaries of plain values.
    """

    def __init__(self, roots: Iterable[Any], before: _Reached | None = None) -> None:
        self.classes: dict[type, None] = {}
        self.names: set[str] = set()
        self.imports: set[str] = set()
        self.globals: dict[int, dict[str, Any]] = {}
        self.functions: dict[weakref.ref[types.FunctionType], None] = {}
        self.asks = False
        self.holders: list[_Holder] = []
        self._kept: list[Any] = []  # so that ids stay theirs
        self._queue: deque[Any] = deque(roots)
        seen: set[int] = set()
        while self._queue and len(seen) < _VISITED and len(self.classes) < _CLASSES:
            value = self._queue.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            self._kept.append(value)
            try:
                if not issubclass(type(value), _PLAIN):
                    self._queue.extend(self._next(value))
            except Exception:  # it answers questions with errors, as proxies do: a dead end
                continue
        del self._kept, self._queue
        if before is not None:
            self._add(before)

    def _add(self, before: _Reached) -> None:
        """Adds the objects that were reached for other graphs, within the same bounds."""
        self.names |= before.names
        self.imports |= before.imports
        self.globals.update(before.globals)
        self.asks = self.asks or before.asks
        for mine, theirs, most in (
            (self.classes, before.classes, _CLASSES),
            (self.functions, before.functions, _CODES),
        ):
            mine.update(dict.fromkeys(islice(theirs, max(most - len(mine), 0))))

    def _next(self, value: Any) -> Iterator[Any]:
        """Objects that one leads to, by its type: a proxy may warn if isinstance() is used."""
        cls = type(value)
        if issubclass(cls, types.FunctionType):
            if is_users(value) and not _is_installed(value):
                yield from self._of_function(value)
        elif issubclass(cls, type):
            yield from self._of_class(value)
        elif issubclass(cls, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif issubclass(cls, (classmethod, staticmethod)):
            yield value.__func__
        elif issubclass(cls, property):
            yield from (value.fget, value.fset)
        elif issubclass(cls, dict):
            yield from islice(dict.values(value), _ELEMENTS)
        elif issubclass(cls, (list, tuple, set, frozenset, deque)):
            yield from islice(iter(value), _ELEMENTS)
        if not issubclass(cls, (type, types.FunctionType)):
            self._note(value)
            yield cls
            yield from _attributes(value)

    def _note(self, value: Any) -> None:
        """Keeps where names of an object may be looked for."""
        self.asks = self.asks or issubclass(type(value), ChainMap)
        if len(self.holders) < _HOLDERS:
            self.holders += _holders(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        if len(self.functions) < _CODES:
            self.functions[weakref.ref(function)] = None
        names = set(_names_in(function.__code__))
        self.names |= names
        self.asks = self.asks or not names.isdisjoint(_ASKING)
        given = function.__globals__
        self.globals[id(given)] = given
        for name in names & given.keys():
            yield from self._named(given[name], names)
        package = given.get("__package__")
        imports = names | {f"{package}.{name.lstrip('.')}" for name in names if package}
        self.imports |= imports
        for name in imports & sys.modules.keys():
            yield from self._named(sys.modules[name], names)
        for cell in function.__closure__ or ():
            try:
                yield from self._named(cell.cell_contents, names)
            except ValueError:  # an empty one
                pass
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield getattr(function, "__wrapped__", None)

    def _named(self, value: Any, names: Collection[str]) -> Iterator[Any]:
        """What code gets at by a name: an object, or of a module what it takes from there."""
        if not issubclass(type(value), types.ModuleType):
            yield value
        elif is_users(value):
            yield type(value)
            yield from (vars(value)[n] for n in names & vars(value).keys())

    def _of_class(self, cls: type) -> Iterator[Any]:
        if cls in self.classes or cls in _OF_TORCH:
            return
        if is_users(cls) or issubclass(cls, torch.nn.Module):
            self.classes[cls] = None
        if not is_users(cls):
            return
        yield from _MRO(cls)
        yield type(cls)
        if not _is_installed(cls):
            yield from _TABLE(cls).values()


_NUMBERS = (type(None), bool, int, float, str, bytes)
_PLAIN = (*_NUMBERS, torch.Tensor, torch.dtype, torch.device)


def _names_of(value: Any) -> dict[str, Any]:
    """The dictionary of an object, even if its class overrides attribute access."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return table if isinstance(table, dict) else {}


def _holders(value: Any) -> Iterator[_Holder]:
    """Functions for the dictionaries of an object; they keep no module, and no tensor, alive."""
    if issubclass(type(value), dict):
        if all(issubclass(type(v), _NUMBERS) for v in islice(dict.values(value), _ELEMENTS)):
            yield lambda: value
        return
    if not type(value).__dictoffset__:
        return
    try:
        this = weakref.ref(value)
    except TypeError:  # a SimpleNamespace
        this = lambda: value  # noqa: E731
    yield lambda: _names_of(this())
    if issubclass(type(value), torch.nn.Module):
        yield from (partial(_part_of, this, name) for name in module_tables.NAMES)


def _part_of(this: Callable[[], Any], name: str) -> dict[str, Any]:
    return _names_of(this()).get(name, {})


def _attributes(value: Any) -> Iterator[Any]:
    """The values that an object holds."""
    yield from list(_names_of(value).values())
    for cls in type(value).__mro__:
        for name in _slots(cls):
            member = vars(cls).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(value)
                except AttributeError:
                    pass


def _slots(cls: type) -> Collection[str]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names in code and in the code within: of globals, attributes, and texts that may be some."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _names_in(value)
        elif isinstance(value, str):
            yield value


def is_users(value: Any) -> bool:
    """Whether a class, a function or a module is not one of torch, numpy, gradd or Python."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return not isinstance(name, str) or name.partition(".")[0] not in _NOT_USERS


def _is_installed(value: Any) -> bool:
    """Whether a library's folder holds its source: code of libraries does not change by itself."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return is_installed(file)
