"""Classes, metaclasses, descriptors and modules that get a name later which forward() looked up."""

from __future__ import annotations

import dataclasses
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scaled import Scaled
from torch import nn

from gradd import ORTModule
from gradd.export.guards import lookups

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.ones(2, 3)
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def _fresh(*bases: type, meta: type = type, **attributes: Any) -> type:
    return meta("Fresh", bases, attributes)


def _object(*bases: type, **values: Any) -> Any:
    made = _fresh(*bases)()
    made.__dict__.update(values)
    return made


def _sets(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(owner, name, value)


def _says(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def base_property() -> Pair:
    base = _fresh()
    found = _object(base, y=2.0)
    return lambda: found.y, _sets(base, "y", property(_says(7.0)))


def another_base() -> Pair:
    first, second = _fresh(), _fresh(y=2.0)
    found = _object(first, second)
    return lambda: found.y, _sets(first, "y", 7.0)


def vars_then_property() -> Pair:
    found = _object(y=2.0)
    return lambda: vars(found)["y"] + found.y, _sets(type(found), "y", property(_says(7.0)))


def getter_of_base() -> Pair:
    base = _fresh()
    found = _object(base)
    return lambda: getattr(found, "zz", 1.0), _sets(base, "__getattr__", _says(7.0))


def getter_replaced() -> Pair:
    found = _object()
    type(found).__getattr__ = _says(2.0)
    return lambda: found.zz, _sets(type(found), "__getattr__", _says(7.0))


def getattribute_of_base() -> Pair:
    base = _fresh()
    found = _object(base, y=2.0)
    return lambda: found.y, _sets(base, "__getattribute__", _says(7.0))


def slots_and_getattribute() -> Pair:
    cls = _fresh(__slots__=("y",))
    found = cls()
    found.y = 2.0
    return lambda: found.y, _sets(cls, "__getattribute__", _says(7.0))


def call_of_base() -> Pair:
    base = _fresh()
    found = _object(base)
    return lambda: 1.0 + callable(found), _sets(base, "__call__", _says(7.0))


def call_of_metaclass() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta, y=2.0)
    return lambda: cls().y, _sets(meta, "__call__", lambda *_: types.SimpleNamespace(y=7.0))


def subclass_check() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta)
    return lambda: 1.0 + issubclass(int, cls), _sets(meta, "__subclasscheck__", _says(True))


def instance_check_in_a_tuple() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta)
    return lambda: 1.0 + isinstance(3, (str, cls)), _sets(meta, "__instancecheck__", _says(True))


def instance_check_matched() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta)

    def take() -> float:
        match 3:
            case cls():
                return 2.0
        return 1.0

    return take, _sets(meta, "__instancecheck__", _says(True))


def property_of_meta_base() -> Pair:
    base = _fresh(type)
    meta = _fresh(base)
    cls = _fresh(meta=meta, v=2.0)
    return lambda: cls.v, _sets(base, "v", property(_says(7.0)))


def getattribute_of_meta() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta, v=2.0)
    return lambda: cls.v, _sets(meta, "__getattribute__", _says(7.0))


def getter_of_meta_replaced() -> Pair:
    meta = _fresh(type, __getattr__=_says(2.0))
    cls = _fresh(meta=meta)
    return lambda: cls.zz, _sets(meta, "__getattr__", _says(7.0))


def descriptor_of_class() -> Pair:
    kind = _fresh(__get__=_says(2.0))
    cls = _fresh(v=kind())
    return lambda: cls.v, _sets(kind, "__get__", _says(7.0))


def descriptor_becomes_one() -> Pair:
    kind = _fresh(__float__=_says(2.0))
    found = _object()
    type(found).v = kind()
    return lambda: float(found.v), _sets(kind, "__get__", _says(7.0))


def descriptor_gets_the_upper_hand() -> Pair:
    kind = _fresh(__get__=_says(7.0))
    found = _object(v=2.0)
    type(found).v = kind()
    return lambda: found.v, _sets(kind, "__set__", _says(None))


def descriptor_by_its_base() -> Pair:
    base = _fresh(__get__=_says(2.0))
    found = _fresh(v=_fresh(base)())()
    return lambda: found.v, _sets(base, "__get__", _says(7.0))


def super_between() -> Pair:
    class Top:
        def value(self) -> float:
            return 2.0

    class Middle(Top):
        pass

    class Bottom(Middle):
        def value(self) -> float:
            return super().value()

    found = Bottom()
    return lambda: found.value(), _sets(Middle, "value", _says(7.0))


def module_getter() -> Pair:
    module = types.ModuleType("m")
    module.__getattr__ = _says(2.0)
    return lambda: module.zz, _sets(module, "__getattr__", _says(7.0))


def module_gets_what_was_computed() -> Pair:
    module = types.ModuleType("m")
    module.__getattr__ = _says(2.0)
    return lambda: module.zz, _sets(module, "zz", 7.0)


def module_of_another_class() -> Pair:
    module = types.ModuleType("m")
    module.y = 2.0
    other = _fresh(types.ModuleType, y=property(_says(7.0)))
    return lambda: module.y, _sets(module, "__class__", other)


def class_of_module_gets_a_property() -> Pair:
    cls = _fresh(types.ModuleType)
    module = cls("m")
    module.y = 2.0
    return lambda: module.y, _sets(cls, "y", property(_says(7.0)))


def class_of_module_gets_a_getter() -> Pair:
    cls = _fresh(types.ModuleType)
    module = cls("m")
    return lambda: hasattr(module, "zz") + 1.0, _sets(cls, "__getattr__", _says(7.0))


def written_by_a_property() -> Pair:
    cls = _fresh()

    def take() -> float:
        found = cls()
        found.y = 2.0
        return found.__dict__.get("y", 7.0)

    return take, _sets(cls, "y", property(_says(1.0), lambda *_: None))


def written_by_setattr() -> Pair:
    cls = _fresh()

    def take() -> float:
        found = cls()
        found.y = 2.0
        return found.__dict__.get("y", 7.0)

    return take, _sets(cls, "__setattr__", _says(None))


def missing_key() -> Pair:
    cls = _fresh(dict)
    table = cls()

    def take() -> float:
        try:
            return table["a"]
        except KeyError:
            return 1.0

    return take, _sets(cls, "__missing__", _says(7.0))


def element_of_a_list() -> Pair:
    cls = _fresh(list)
    values = cls([1.0])
    return lambda: values[0], _sets(cls, "__getitem__", _says(7.0))


def class_with_brackets() -> Pair:
    cls = _fresh(__class_getitem__=classmethod(_says(2.0)))
    return lambda: cls[3], _sets(cls, "__class_getitem__", classmethod(_says(7.0)))


def base_of_a_new_class() -> Pair:
    cls = _fresh()

    def take() -> float:
        class Local(cls):
            v = 2.0

        return Local.v

    return take, _sets(cls, "__init_subclass__", classmethod(lambda c: setattr(c, "v", 7.0)))


def name_in_a_new_class() -> Pair:
    kind = _fresh(__get__=_says(2.0))

    def take() -> float:
        class Local:
            v = kind()

        return Local.v

    return take, _sets(kind, "__set_name__", lambda _, owner, name: setattr(owner, name, 7.0))


def _number(name: str, ask: Callable[[Any], Any], value: Any) -> Callable[[], Pair]:
    def make() -> Pair:
        cls = _fresh(__float__=_says(2.25), __index__=_says(2))
        found = cls()
        return lambda: ask(found), _sets(cls, name, _says(value))

    make.__name__ = f"number{name}"
    return make


def array_of_a_subclass() -> Pair:
    cls = _fresh(np.ndarray)
    array = np.ones(3).view(cls)
    return lambda: float(np.add(array, 1)[0]), _sets(cls, "__array_ufunc__", _array)


def _array(*args: Any, **kwargs: Any) -> np.ndarray:
    return np.full(3, 7.0)


def function_of_torch() -> Pair:
    cls = _fresh()
    found = cls()

    def take() -> float:
        try:
            return torch.add(found, 1)
        except TypeError:
            return 1.0

    return take, _sets(cls, "__torch_function__", classmethod(lambda *_, **words: 7.0))


def deleted_and_defined() -> Pair:
    cls = _fresh(y=2.0, z=1.0)
    found = cls()

    def change() -> None:
        del cls.z
        cls.__getattribute__ = _says(7.0)

    return lambda: found.y, change


def default_of_a_field() -> Pair:
    @dataclasses.dataclass
    class Settings:
        scale: float = 2.0

    found = Settings()
    return lambda: found.scale, _sets(Settings, "scale", property(_says(7.0)))


def mapping_spread() -> Pair:
    cls = _fresh(keys=lambda _: ["value"], __getitem__=_says(2.0))
    found = cls()
    return lambda: dict(**found)["value"], _sets(cls, "__getitem__", _says(7.0))


def instance_check_in_a_union() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta)
    union = cls | str
    return lambda: 1.0 + isinstance(3, union), _sets(meta, "__instancecheck__", _says(True))


def instance_check_in_a_nested_tuple() -> Pair:
    meta = _fresh(type)
    cls = _fresh(meta=meta)
    return lambda: 1.0 + isinstance(3, ((cls,), str)), _sets(meta, "__instancecheck__", _says(True))


def _module(cls: type) -> nn.Module:
    made = cls()
    made.k = 2.0
    made.register_buffer("b", torch.tensor(2.0))
    return made


def property_of_a_module() -> Pair:
    cls = _fresh(nn.Module)
    found = _module(cls)
    return lambda: found.k, _sets(cls, "k", property(_says(7.0)))


def buffer_behind_a_class_attribute() -> Pair:
    cls = _fresh(nn.Module)
    found = _module(cls)
    return lambda: found.b, _sets(cls, "b", 7.0)


CASES = [
    *(base_property, another_base, vars_then_property, getter_of_base, getter_replaced),
    *(getattribute_of_base, slots_and_getattribute, call_of_base, call_of_metaclass),
    *(subclass_check, instance_check_in_a_tuple, instance_check_matched),
    *(property_of_meta_base, getattribute_of_meta, getter_of_meta_replaced),
    *(descriptor_of_class, descriptor_becomes_one, descriptor_gets_the_upper_hand),
    *(descriptor_by_its_base, super_between, module_getter, module_gets_what_was_computed),
    *(module_of_another_class, class_of_module_gets_a_property, class_of_module_gets_a_getter),
    *(written_by_a_property, written_by_setattr),
    *(default_of_a_field, mapping_spread, instance_check_in_a_union),
    instance_check_in_a_nested_tuple,
    *(missing_key, element_of_a_list, class_with_brackets, base_of_a_new_class),
    *(name_in_a_new_class, array_of_a_subclass, function_of_torch, deleted_and_defined),
    _number("__float__", math.sqrt, 9.0),
    _number("__floor__", lambda o: float(math.floor(o)), 7),
    _number("__index__", lambda o: float(operator.index(o)), 7),
    _number("__float__", lambda o: torch.full((1,), float(o)), 7.0),
    *(property_of_a_module, buffer_behind_a_class_attribute),
]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_name_that_is_defined_later_is_seen(make: Callable[[], Pair]) -> None:
    found = []
    for wrap in (ORTModule, lambda module: module):
        take, change = make()
        module, values = wrap(Scaled(take)), []
        for step in range(4):
            if step == 2:
                change()
            values.append(module(X).tolist())
        found.append(values)
        if wrap is ORTModule:
            # A class that hides its dictionary cannot be looked into afterwards.
            refused = {"outside_state"} if make is getattribute_of_meta else set()
            assert set(module.gradd_stats()["fallbacks"]) == refused
    assert found[0] == found[1]
    assert found[0][2] != found[0][1]


class Own(nn.Module):
    """The wrapped module itself, with an attribute, a layer and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.k = 2.0
        self.register_buffer("b", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.k * self.b


@pytest.mark.parametrize("name", ["k", "b", "layer"])
def test_the_class_of_the_wrapped_module_gets_a_property(name: str) -> None:
    found = []
    for wrap in (ORTModule, lambda module: module):
        cls = _fresh(Own)
        module = wrap(cls())
        values = [module(X).tolist()]
        other = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(other.weight)
        setattr(cls, name, property(_says(other if name == "layer" else 7.0)))
        found.append([*values, module(X).tolist()])
    assert found[0] == found[1]


def test_names_that_nobody_looked_up_are_no_change() -> None:
    found = _object(y=2.0)
    module = ORTModule(Scaled(lambda: found.y), strict=True)
    for number in range(4):
        module(X)
        setattr(type(found), f"other{number}", 1.0)
    assert module.gradd_stats()["captures"] == 1
    type(found).y = property(_says(7.0))
    assert module(X).tolist() == [[21.0, 21.0], [21.0, 21.0]]


def test_a_name_in_the_place_of_another() -> None:
    cls = _fresh(other=1.0)
    names = lookups.Names(cls)
    names.key.add("y")
    del cls.other
    cls.y = 2.0
    assert names.value != names.now()
    assert not names.same()
    names.put_back()
    assert not hasattr(cls, "y")
    assert names.same()
