"""Networks that read what belongs to a class, a function or a view: more cases of outside_cases.

Methods of tensors and of helpers, bases, dictionaries and classes that are exchanged as a whole,
defaults, partial objects, read-only mappings and views of dictionaries.
"""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from outside_cases import Base, Change, _setter, case
from torch import nn
from torch.nn import functional as F


class Again(Base):
    """Copied by being made again: what it holds cannot be copied, or has to stay the same."""

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return type(self)()


# ---- methods of tensors ----


def _method(name: str, function: Any, cls: type = torch.Tensor) -> Change:
    return lambda net: setattr(cls, name, function)


def _forget(name: str) -> Change:
    return lambda net: name in torch.Tensor.__dict__ and delattr(torch.Tensor, name)


@case(
    "a method that tensors are given",
    _method("gradd_own", lambda t: t * 3),
    _method("gradd_own", property(lambda t: lambda: t * 4)),
    _method("gradd_own", lambda t: t * 3),
)
class OwnMethod(Base):
    def __init__(self):
        super().__init__()
        torch.Tensor.gradd_own = lambda t: torch.tanh(t)

    def forward(self, x):
        return self.lin(x).gradd_own()


@case(
    "a method by a dynamic name",
    _method("gradd_dynamic", lambda t: t * 3),
    _method("gradd_dynamic", lambda t: t * 4),
)
class DynamicMethod(Base):
    def __init__(self):
        super().__init__()
        torch.Tensor.gradd_dynamic = lambda t: torch.tanh(t)

    def forward(self, x):
        y = operator.methodcaller("gradd_dynamic")(self.lin(x))
        return torch.Tensor.gradd_dynamic(getattr(y, "gradd_dynamic")())  # noqa: B009


@case(
    "a method that tensors get late", _method("gradd_late", lambda t: t * 3), _forget("gradd_late")
)
class LateMethod(Base):
    def forward(self, x):
        y = self.lin(x)
        return y.gradd_late() if hasattr(y, "gradd_late") else y


@case(
    "an attribute of all parameters",
    _method("gradd_scale", 3.0, nn.Parameter),
    _method("gradd_scale", 4.0, nn.Parameter),
)
class OfParameters(Base):
    def forward(self, x):
        return self.lin(x) * getattr(nn.Parameter, "gradd_scale", 1.0)


# ---- methods of helpers ----


class Scale:
    factor = 2.0

    def __rmul__(self, y):
        return y * self.factor

    def __getitem__(self, key):
        return self.factor

    def __len__(self):
        return 2

    def __bool__(self):
        return True

    def __enter__(self):
        return 1.0

    def __exit__(self, *args):
        pass

    def __float__(self):
        return 1.0

    def __neg__(self):
        return 1.0

    def __contains__(self, key):
        return True

    def __iter__(self):
        return iter((1.0, 2.0))

    def __lt__(self, other):
        return True

    def __index__(self):
        return 0

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 7

    def __call__(self, y):
        return y * 2


SCALE = Scale()


@case("an operator", _setter(Scale, "__rmul__", lambda self, y: y - 1))
class Operator(Base):
    def forward(self, x):
        return self.lin(x) * SCALE


SPECIAL: dict[str, tuple[Callable, Any]] = {
    "__getitem__": (lambda: SCALE[0], lambda self, key: 5.0),
    "__len__": (lambda: len(SCALE), lambda self: 5),
    "__bool__": (lambda: 2.0 if SCALE else 3.0, lambda self: False),
    "__float__": (lambda: float(SCALE), lambda self: 5.0),
    "__neg__": (lambda: -SCALE, lambda self: 5.0),
    "__contains__": (lambda: 2.0 if 1 in SCALE else 3.0, lambda self, key: False),
    "__iter__": (lambda: sum(SCALE), lambda self: iter((5.0,))),
    "__index__": (lambda: (2.0, 3.0)[SCALE], lambda self: 1),
    "__eq__": (lambda: 2.0 if [1].count(SCALE) else 3.0, lambda self, other: False),
    "__call__": (lambda: sum(map(SCALE, [1.0])), lambda self, y: y * 5),
    "__lt__": (lambda: 2.0 if SCALE < 1 else 3.0, lambda self, other: False),
}


def _special(name: str) -> None:
    ask, other = SPECIAL[name]

    @case(f"the special method {name}", _setter(Scale, name, other))
    class Special(Base):
        def forward(self, x):
            return self.lin(x) * ask()


for _name in SPECIAL:
    _special(_name)


GET = operator.methodcaller("gradd_called")
NAMED = operator.attrgetter("named")


class Named:
    named = 2.0


NAMED_ONES = [Named()]


@case(
    "a method that map() calls",
    _method("gradd_called", lambda t: t * 3),
    _setter(Named, "named", 5.0),
    lambda n: setattr(NAMED_ONES[0], "named", 7.0),
)
class Mapped(Base):
    def __init__(self):
        super().__init__()
        torch.Tensor.gradd_called = lambda t: torch.tanh(t)

    def forward(self, x):
        first = sorted([(2, 1), (1, 2)], key=operator.itemgetter(1), reverse=True)[0][0]
        return sum(map(GET, [self.lin(x)])) * first * sum(map(NAMED, NAMED_ONES))


@case(
    "the name of a class and of a function",
    _setter(Named, "__name__", "Longer"),
    _setter(_method, "__name__", "longer_than_that"),
)
class Names(Base):
    def forward(self, x):
        return self.lin(x) * len(Named.__name__) * len(_method.__name__)


@case("a special method of with", _setter(Scale, "__enter__", lambda self: 5.0))
class With(Base):
    def forward(self, x):
        with SCALE as factor:
            return self.lin(x) * factor


# ---- bases, classes and dictionaries that are exchanged ----


class Relu:
    def act(self, x):
        return torch.relu(x)


class Sin:
    def act(self, x):
        return torch.sin(x)


class Acting(Relu, Base):
    def forward(self, x):
        return self.act(self.lin(x))


case("bases of the module", _setter(Acting, "__bases__", (Sin, Base)))(Acting)


class Inner(Relu, nn.Module):
    def forward(self, x):
        return self.act(x)


@case("bases of a submodule", _setter(Inner, "__bases__", (Sin, nn.Module)))
class Outer(Base):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.lin(x))


class Tool(Relu):
    pass


class Tool2(Sin):
    pass


class Called(Relu):
    def act(self, x):
        return super().act(x)


class Plain(Relu):
    pass


class Matched(Relu):
    pass


TOOL, CALLED, PLAIN, MOVED, MATCHED = Tool(), Called(), Plain(), Tool2(), Matched()


@case("bases of a helper", _setter(Tool, "__bases__", (Sin,)))
class WithTool(Base):
    def forward(self, x):
        return TOOL.act(self.lin(x))


@case("bases behind super()", _setter(Called, "__bases__", (Sin,)))
class WithSuper(Base):
    def forward(self, x):
        return CALLED.act(self.lin(x))


@case("bases that isinstance() asks", _setter(Plain, "__bases__", (Sin,)))
class WithKind(Base):
    def forward(self, x):
        return self.lin(x) * (2.0 if isinstance(PLAIN, Relu) else 3.0)


@case("bases that a pattern asks", _setter(Matched, "__bases__", (Sin,)))
class WithPattern(Base):
    def forward(self, x):
        match MATCHED:
            case Relu():
                return self.lin(x) * 2.0
            case _:
                return self.lin(x) * 3.0


@case("the class of a helper", _setter(MOVED, "__class__", Tool))
class WithMoved(Base):
    def forward(self, x):
        return MOVED.act(self.lin(x))


HELPER = Relu()
HELPER.k = 1.0


@case(
    "the dictionary of an object",
    _setter(HELPER, "__dict__", {"k": 3.0}),
    _setter(HELPER, "__dict__", {"k": 1.0}),
)
class Exchanged(Base):
    def forward(self, x):
        return self.lin(x) * HELPER.k


# ---- functions ----


def keyed(y, *, k=1.0):
    return y * k


def marked(y):
    return y * marked.k


marked.k = 1.0


@case(
    "keyword defaults",
    lambda n: keyed.__kwdefaults__.update(k=4.0),
    _setter(keyed, "__kwdefaults__", {"k": 7.0}),
    lambda n: keyed.__kwdefaults__.update(k=2.0),
)
class KeywordDefaults(Base):
    def forward(self, x):
        return keyed(self.lin(x))


@case(
    "the dictionary of a function",
    _setter(marked, "k", 3.0),
    _setter(marked, "__dict__", {"k": 5.0}),
    lambda n: marked.__dict__.update(k=7.0),
)
class Marked(Base):
    def forward(self, x):
        return marked(self.lin(x))


SPREAD = [1.0, 2.0]


def _product(*numbers):
    return functools.reduce(operator.mul, numbers)


@case(
    "a list that is spread",
    lambda n: SPREAD.__setitem__(0, 3.0),
    lambda n: SPREAD.__setitem__(slice(2, None), [5.0]),
)
class Spread(Base):
    def forward(self, x):
        return self.lin(x) * _product(*SPREAD)


PART = functools.partial(lambda y, k: y * k, k=2.0)


@case(
    "another function in a partial",
    lambda n: PART.__setstate__((lambda y, k: y - k, (), {"k": 2.0}, {})),
    lambda n: PART.__setstate__((lambda y, k: y - k, (), {"k": 3.0}, {})),
    lambda n: PART.keywords.update(k=4.0),
)
class Partial(Base):
    def forward(self, x):
        return PART(self.lin(x))


@case("a builtin", lambda n: setattr(builtins, "pow", lambda a, b: 7.0))
class Builtin(Base):
    def forward(self, x):
        return self.lin(x) * pow(2.0, 3.0)


@case("a function that torch calls", _setter(F, "softsign", torch.tanh))
class CalledByTorch(Base):
    def forward(self, x):
        return nn.Softsign()(self.lin(x))


@case(
    "a function that a function of torch calls", _setter(torch, "layer_norm", lambda y, *a: y * 2)
)
class CalledByFunction(Base):
    def forward(self, x):
        return F.layer_norm(self.lin(x), (4,)) * torch.arange(4.0)


# ---- tensors in containers, in another form ----

HELD = {"list": [torch.ones(4)], "tuple": (torch.ones(4),), "dict": {"a": torch.ones(4)}}


def _first(name: str) -> torch.Tensor:
    return next(iter(HELD[name].values() if name == "dict" else HELD[name]))


def _resized(name: str) -> None:
    @case(
        f"a tensor of a {name} that is resized",
        lambda n: _first(name).resize_(1).fill_(3.0),
        lambda n: _first(name).resize_(3, 4).fill_(2.0),
        lambda n: setattr(_first(name), "data", torch.full((4,), 5.0)),
    )
    class Resized(Base):
        def forward(self, x):
            held = HELD[name].values() if name == "dict" else HELD[name]
            return self.lin(x) * sum(held)


for _name in HELD:
    _resized(_name)


# ---- read-only mappings and views ----

PROXIES: dict[str, Callable[[Any], float]] = {
    "an item": lambda m: m["k"],
    "get()": lambda m: m.get("k", 2.0),
    "get() of what comes later": lambda m: m.get("late", 2.0),
    "in": lambda m: 2.0 if "late" in m else 3.0,
    "a loop": lambda m: sum(m[k] for k in m),
    "items()": lambda m: sum(v for _, v in m.items()),
    "values()": lambda m: sum(m.values()),
    "len()": len,
    "spread": lambda m: sum(dict(**m).values()),
    "spread in a dictionary": lambda m: sum({**m}.values()),
    "spread in a call": lambda m: _summed(**m),
    "a copy": lambda m: sum(dict(m).values()),
    "copy()": lambda m: sum(m.copy().values()),
    "or": lambda m: sum((m | {}).values()),
    "text": lambda m: float(len(f"{m}")),
    "a stored method": lambda m: m.__getitem__("k"),
}
VIEWS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "values": ("values", sum),
    "items": ("items", lambda v: sum(b for _, b in v)),
    "keys": ("keys", lambda v: float(len(v))),
    "a list of values": ("values", lambda v: list(v)[0]),
    "in keys": ("keys", lambda v: 2.0 if "late" in v else 3.0),
    "in values": ("values", lambda v: 2.0 if 4.0 in v else 3.0),
    "in items": ("items", lambda v: 2.0 if ("k", 4.0) in v else 3.0),
    "unpacked": ("values", lambda v: (lambda first, *rest: first)(*v)),
    "a set": ("keys", lambda v: float(len(v & {"k", "late"}))),
    "isdisjoint()": ("keys", lambda v: 2.0 if v.isdisjoint(["late"]) else 3.0),
    "its mapping": ("keys", lambda v: v.mapping["k"]),
}


def _summed(**numbers: float) -> float:
    return sum(numbers.values())


def _watched(name: str, make: Callable[[dict], Any], take: Callable[[Any], float]) -> None:
    """In an attribute, a closure and a class, over a dictionary that nothing else leads to."""
    table, own = {"k": 1.0}, {"k": 1.0}
    other = make(table)

    def back(net: Any) -> None:
        for t in (table, own):
            t.clear()
            t["k"] = 1.0

    @case(
        name,
        lambda n: [t.update(k=4.0) for t in (table, own)],
        lambda n: [t.update(late=7.0) for t in (table, own)],
        back,
    )
    class Watched(Again):
        of_class = make(own)

        def __init__(self):
            super().__init__()
            self.seen = make(table)

        def forward(self, x):
            y = self.lin(x) * take(self.seen)
            return y * take(other) * take(self.of_class)


for _name, _take in PROXIES.items():
    _watched(f"a read-only mapping: {_name}", types.MappingProxyType, _take)
for _name, (_view, _take) in VIEWS.items():
    _watched(f"a view: {_name}", operator.methodcaller(_view), _take)
_watched("a stored get()", lambda t: t.get, lambda get: get("k"))
_watched("a stored item", lambda t: functools.partial(operator.getitem, t), lambda get: get("k"))


# ---- functions and methods of torch that are replaced: the function that reads them ----

FUNCTIONS: dict[str, tuple[Any, Callable]] = {
    "relu": (F, lambda y: F.relu(y)),
    "silu": (F, lambda y: F.silu(y)),
    "softmax": (F, lambda y: F.softmax(y, -1)),
    "normalize": (F, lambda y: F.normalize(y)[:, 0]),
    "mse_loss": (F, lambda y: F.mse_loss(y, y * 0.5)),
    "pad": (F, lambda y: F.pad(y, (1, 1))),
    "gelu": (F, lambda y: F.gelu(y)),
    "exp": (torch, lambda y: torch.exp(y)),
    "split": (torch.functional, lambda y: torch.functional.split(y, 2, 1)[0]),
}
METHODS: dict[str, Callable] = {
    "sigmoid": lambda y: y.sigmoid(),
    "mean": lambda y: torch.Tensor.mean(y) * y,
    "tanh": lambda y: F.tanhshrink(y),
    "__add__": lambda y: y + y,
    "__radd__": lambda y: sum([1.0 * y.sum(), 1.0]) + y * 0,
    "__mul__": lambda y: functools.reduce(operator.mul, [y, y]),
    "__iadd__": lambda y: operator.iadd(y * 1, y),
    "__matmul__": lambda y: y @ y.t(),
    "__neg__": lambda y: -y,
    "__getitem__": lambda y: y[0],
    "__abs__": lambda y: abs(y),
    "__gt__": lambda y: y * (y > 0),
    "T": lambda y: y.T,
}
