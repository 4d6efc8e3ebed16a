"""gradd sees every write to a dictionary that it compares, in all versions of Python.

Up to Python 3.11 a dictionary has a version of its own; in later ones it names its watchers.
"""

from __future__ import annotations

import os
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradd import ORTModule, private
from gradd.dynamo import guards
from helpers.nets import assert_close

pytestmark = pytest.mark.quick


def _kept() -> dict[str, Any]:
    return {"a": 1, "b": 2}


def _ordered() -> dict[str, Any]:
    return OrderedDict(_kept())


WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another value": lambda d: d.__setitem__("a", 3),
    "a new key": lambda d: d.__setitem__("c", 3),
    "del": lambda d: d.__delitem__("a"),
    "update": lambda d: d.update(a=3),
    "update by a dictionary": lambda d: d.update({"c": 3}),
    "in place or": lambda d: d.__ior__({"c": 3}),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("c", 3),
    "clear": lambda d: d.clear(),
    "cleared and filled": lambda d: (d.clear(), d.update({"a": 1, "b": 5})),
    "many": lambda d: d.update((str(i), i) for i in range(100)),
}


@pytest.mark.parametrize("table", [_kept, _ordered])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_changes_the_version(write: str, table: Callable[[], dict[str, Any]]) -> None:
    found = table()
    version = private.dict_version(found)
    assert private.dict_version(found) == version
    WRITES[write](found)
    assert private.dict_version(found) != version


def test_an_empty_dictionary_that_becomes_the_copy_of_another_one() -> None:
    found: dict[str, Any] = {}
    version = guards.version_of_names(found)
    found.update(_kept())
    assert guards.version_of_names(found) != version


class Plain:
    """An object, whose attributes Python may keep without a dictionary."""

    def __init__(self) -> None:
        self.a, self.b = 1, 2


def _set(target: Any) -> None:
    target.a = 3


def _delete(target: Any) -> None:
    del target.a


def _add(target: Any) -> None:
    target.new = 3


def _through_the_table(target: Any) -> None:
    vars(target)["a"] = 3


def _again(target: Any) -> None:
    for i in range(50):  # until the interpreter has code of its own for it
        target.a = i


@pytest.mark.parametrize("write", [_delete, _add])
def test_names_of_attributes_of_objects(write: Callable[[Any], None]) -> None:
    target = Plain()
    for _ in range(50):
        target.b = 4
    version = guards.version_of_names(vars(target))
    assert guards.version_of_names(vars(target)) == version
    write(target)
    assert guards.version_of_names(vars(target)) != version


@pytest.mark.parametrize("write", [_set, _delete, _add, _through_the_table, _again])
def test_names_of_modules(write: Callable[[Any], None]) -> None:
    target: Any = types.ModuleType("m")
    target.a, target.b = 1, 2
    version = private.dict_version(vars(target))
    write(target)
    assert private.dict_version(vars(target)) != version


def test_globals_that_a_function_writes() -> None:
    names: dict[str, Any] = {"count": 0}
    exec("def step():\n    global count\n    count += 1", names)
    for _ in range(50):
        names["step"]()
    version = private.dict_version(names)
    names["step"]()
    assert private.dict_version(names) != version


@pytest.mark.parametrize("write", [_set, _delete, _add, _again])
def test_attributes_of_classes(write: Callable[[Any], None]) -> None:
    class Own:
        a = 1

    table = guards._dictionary(Own)
    version = private.dict_version(table)
    write(Own)
    assert private.dict_version(guards._dictionary(Own)) != version


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    version = private.dict_version(guards._ENVIRONMENT)
    monkeypatch.setenv("GRADD_TEST_OF_VERSIONS", "1")
    assert private.dict_version(guards._ENVIRONMENT) != version
    assert b"GRADD_TEST_OF_VERSIONS" in guards._ENVIRONMENT
    assert os.environ["GRADD_TEST_OF_VERSIONS"] == "1"


class Scaled(torch.nn.Module):
    """Computes by a method that is replaced, and by an attribute that may be absent."""

    def by(self, x: torch.Tensor) -> torch.Tensor:
        """Is replaced."""
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By the method."""
        return self.by(x)


def test_a_method_that_is_replaced_again_and_again(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may get the address of one that is gone."""
    monkeypatch.setattr(Scaled, "by", Scaled.by)
    model, x = ORTModule(Scaled()), torch.linspace(-1, 1, 6)
    for i in range(1, 7):
        for factor in (-i, i):  # the second one takes the place of one that never ran
            text = f"def by(self, x):\n    return x * {factor}"
            names: dict[str, Any] = {"__name__": __name__}
            exec(text, names)
            Scaled.by = names.pop("by")
        assert_close(model(x), x * i)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_counts_tells_functions_at_one_address_apart(times: int) -> None:
    class Own:
        def by(self) -> int:
            return 0

        def forward(self) -> int:
            return self.by()

    supplement = guards.Supplement([Own()])
    at = id(Own.by)
    for _ in range(times):
        del Own.by
        made = [types.FunctionType((lambda self: 1).__code__, {}) for _ in range(64)]
        same = [f for f in made if id(f) == at]
        Own.by = same[0] if same else made[0]
        del made, same
        assert not supplement.holds()
