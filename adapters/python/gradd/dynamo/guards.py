"""What gradd compares before a call in addition to Dynamo's guards.

Dynamo takes a method of a class as it was when it traced a call, and reads the environment once.
Compared here, by identity, are the functions and descriptors of the classes of a module, of its
submodules and of the objects that they hold, those of torch.Tensor, and the environment. A class's
data is Dynamo's to compare: a counter on a class would be another version in every call.
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_NOT_USERS = ("torch.", "builtins.", "abc.", "typing.", "collections.", "enum.", "numpy.")
_FUNCTIONS = (types.FunctionType, classmethod, staticmethod, property)


class Supplement:
    """The state of all that at one moment."""

    def __init__(self, roots: Iterable[Any]) -> None:
        """Args:
        roots: Modules, and functions whose closure holds some.
        """
        kinds = dict.fromkeys(k for root in roots for k in _kinds(root))
        self._tables = [vars(k) for k in (*kinds, torch.Tensor)]
        self._values = [list(table.values()) for table in self._tables]
        self._data = getattr(os.environ, "_data", os.environ)
        self._known = dict(self._data)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if self._data != self._known:
            return False
        for i, table in enumerate(self._tables):
            known = self._values[i]
            if len(table) == len(known) and all(map(operator.is_, table.values(), known)):
                continue
            if _functions(table.values()) != _functions(known):
                return False
            self._values[i] = list(table.values())
        return True


def _functions(values: Iterable[Any]) -> list[int]:
    return [id(v) for v in values if isinstance(v, _FUNCTIONS) or hasattr(type(v), "__get__")]


def _kinds(root: Any) -> Iterator[type]:
    if not isinstance(root, torch.nn.Module):
        return
    for module in root.modules():
        yield from filter(_is_users, type(module).__mro__)
        for value in vars(module).values():
            if not isinstance(value, (torch.Tensor, torch.nn.Module)):
                yield from filter(_is_users, type(value).__mro__)


def _is_users(kind: type) -> bool:
    return not f"{kind.__module__}.".startswith(_NOT_USERS)
