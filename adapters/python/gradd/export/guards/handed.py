"""Functions that code in C is handed and calls: keys of sorted(), what map() maps, formats.

No frame shows such calls. Where the elements are at hand (a list, a tuple) each is taken as the
call it is going to be; elsewhere a function that reads one object is taken to read all of it, and
one that reads attributes of whatever it gets is refused by name.
"""

from __future__ import annotations

import _string
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from gradd.export.guards import images, policy
from gradd.export.guards.images import is_a
from gradd.export.guards.reads import Reads
from gradd.export.guards.spots import ABSENT, is_data, static
from gradd.export.guards.taken import VIEWS, own_dict

C_METHODS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType),
)
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType)
# Builtins that call what they are given; the others look at it or keep it.
_CALLERS = frozenset({"map", "filter", "sorted", "min", "max", "iter"})
# Those that call it with what the other arguments hold.
_BY_ELEMENT = _CALLERS | {
    *("sort", "filterfalse", "takewhile", "dropwhile", "groupby", "starmap", "accumulate", "reduce")
}
# Functions and methods elsewhere that only keep what they are given.
_KEEPERS = frozenset({"partial", "ref", "ReferenceType", "chain", "repeat", "cycle", "product"})
# Read attributes, or more, of whatever object they get.
_READERS = frozenset(
    {
        *("getattr", "hasattr", "setattr", "delattr", "vars", "dir", "__getattribute__"),
        *("__getattr__", "__get__", "__set__", "__setattr__", "__delattr__", "__reduce_ex__"),
        *("__reduce__", "__getstate__", "attrgetter", "methodcaller", "call"),
    }
)
_LISTED = (list, tuple, str, range, set, frozenset, dict, *VIEWS)
_MANY = 100  # elements that are looked at one by one


def is_called(value: Any) -> bool:
    """True for what may be called out of sight."""
    kind = type(value)
    if kind in _BUILTINS or kind in C_METHODS or kind in _GETTERS:
        return True
    return kind.__name__ in ("partial", "method", "type", "_lru_cache_wrapper") or (
        kind is types.FunctionType and not policy.is_recorded(value.__code__)
    )


def calls(function: Any) -> bool:
    """True for code in C that may call its arguments."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    if owner is not None and not is_a(owner, types.ModuleType):
        return name == "sort" or not (
            is_a(owner, images.CONTAINERS) or policy.is_value(type(owner))
        )
    if module == "builtins":
        return name in _CALLERS
    if type(function) in C_METHODS:
        return name == "sort"
    return name not in _KEEPERS and module.partition(".")[0] not in ("torch", "numpy")


def _rows(function: Any, called: Any, args: list, named: int) -> list[tuple] | None:
    """What the calls of an argument get, or None where nobody can tell before."""
    name = getattr(function, "__name__", "")
    rest = [a for a in args if a is not called]
    if name not in _BY_ELEMENT:
        return None
    if name == "iter":
        return [()]
    if name in ("min", "max") and len(args) - named > 1:
        return [(value,) for value in args[: len(args) - named]]
    if name == "sort":
        owner = getattr(function, "__self__", None)
        rest = [owner if is_a(owner, list) else args[0]]
    if name in ("reduce", "accumulate"):
        return _chained(called, rest)
    if not rest or not all(is_a(it, _LISTED) for it in rest[: None if name == "map" else 1]):
        return None
    if name == "map":
        return list(itertools.islice(zip(*rest, strict=False), _MANY + 1))
    if name == "starmap":
        rows = list(rest[0])
        return rows if all(type(row) is tuple for row in rows) else None
    return [(value,) for value in itertools.islice(rest[0], _MANY + 1)]


def _chained(called: Any, rest: list) -> list[tuple] | None:
    """reduce(getattr, names, owner): attribute by attribute."""
    if called is not getattr or not all(is_a(it, _LISTED) for it in rest[:1]):
        return None
    names = list(rest[0])
    owner = rest[1] if len(rest) > 1 else names.pop(0)
    rows = []
    for name in names:
        rows.append((owner, name))
        owner = followed(owner, name)
    return rows if ABSENT not in [row[0] for row in rows] else None


def followed(owner: Any, name: Any) -> Any:
    """The value of an attribute that no code of a user computes, or ABSENT."""
    kind, table = type(owner), own_dict(owner)
    if is_a(static(kind, "__getattribute__"), types.FunctionType):
        return ABSENT
    found = static(kind, name)
    if type(found) is types.MemberDescriptorType:
        return getattr(owner, name, ABSENT)
    if is_data(found):
        return ABSENT
    if table is not None and name in table:
        return table[name]
    if table is not None and is_a(table.get("_modules"), dict) and name in table["_modules"]:
        return table["_modules"][name]
    return ABSENT if hasattr(type(found), "__get__") else found


def in_hands(
    reads: Reads, function: Any, args: list, named: int, call: Callable[[Any, list], None]
) -> None:
    """Code in C gets args, the last `named` of them by name, and may call some of them.

    Args:
        reads: Where reads are noted.
        function: The code in C.
        args: Its arguments.
        named: How many of them have names.
        call: Looks at a call, see Calls.called().
    """
    if not calls(function):
        return
    for one in args:
        if is_called(one):
            rows = _rows(function, one, args, named)
            if rows is None or len(rows) > _MANY:
                _any_call(reads, one, call)
            else:
                for row in rows:
                    call(one, list(row))


def _any_call(reads: Reads, function: Any, call: Callable[[Any, list], None]) -> None:
    """A call with arguments that nobody knows."""
    kind = type(function)
    inner = function
    while type(inner).__name__ == "partial":
        inner = inner.func
    if type(inner) in (operator.attrgetter, operator.methodcaller) or (
        getattr(inner, "__name__", "") in _READERS and not is_a(inner, types.FunctionType)
    ):
        name = getattr(inner, "__name__", type(inner).__name__)
        reads.blank(f"hands {name}() to code in C, which calls it")
        return
    owner = getattr(inner, "__self__", None)
    bound = owner is not None and not is_a(owner, types.ModuleType)
    if type(inner) in _BUILTINS and is_a(owner, images.CONTAINERS):
        reads.whole(owner)
    elif type(inner) in _BUILTINS and is_a(owner, str):
        named = inner.__name__ in ("format", "format_map")
        if named and any(set(".[") & set(field) for field in fields(owner)):
            reads.blank("hands a format with attributes to code in C, which calls it")
    elif type(inner) in _BUILTINS and bound or kind is types.MethodType:
        call(inner, [])


def fields(text: str) -> Iterator[str]:
    """The names of the fields in a format, those in widths and the like included."""
    for _, field, spec, _ in _string.formatter_parser(text):
        if field is not None:
            yield field
            yield from fields(spec)


def formatted(reads: Reads, text: str, args: list, words: dict[str, Any]) -> None:
    """text.format(*args, **words): the attributes and items that the text names."""
    numbers = itertools.count()
    try:
        names = list(fields(text))
    except ValueError:  # format() says so
        return
    for field in names:
        first, rest = _string.formatter_field_name_split(field)
        key = next(numbers) if first == "" else first
        if type(key) is int:
            owner = args[key] if key < len(args) else ABSENT
        else:
            reads.item(words, key, f"[{images.short(key)}] of a dict")
            owner = words.get(key, ABSENT) if is_a(words, dict) else ABSENT
        for is_attribute, name in rest:
            if owner is ABSENT:
                reads.blank(f"formats {{{field}}}, of which code in C reads attributes")
                return
            if is_attribute:
                reads.attribute(owner, name)
                owner = followed(owner, name)
            else:
                reads.subscript(owner, name)
                owner = owner[name] if type(owner) in (dict, list, tuple) else ABSENT
        if owner is not ABSENT:
            reads.whole(owner)
