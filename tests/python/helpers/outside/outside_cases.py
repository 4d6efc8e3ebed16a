"""Networks that read state from outside their arguments, parameters and buffers, by class of state.

Each case is a network and changes; a change is applied to the network under test and to its eager
copy, so a change of shared state has to give the same when it is applied twice.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Base(nn.Module):
    """A linear layer; what comes after it differs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.lin = nn.Linear(4, 4)


Change = Callable[[Any], Any]
CASES: dict[str, tuple[Callable[[], nn.Module], list[Change]]] = {}


def case(name: str, *changes: Change) -> Callable[[type], type]:
    """Registers a network with its changes."""

    def register(kind: type) -> type:
        CASES[name] = (kind, list(changes))
        return kind

    return register


def _setter(owner: Any, name: str, value: Any) -> Change:
    return lambda net: setattr(owner, name, value)


def _global(name: str, value: Any) -> Change:
    return lambda net: globals().__setitem__(name, value)


class Settings:
    """An object in a global."""

    def __init__(self) -> None:
        self.scale, self.deep = 1.0, {"inner": [1.0, 2.0]}


ALPHA = 1.0
FLAG = 1
TABLE: dict[str, Any] = {"alpha": 1.0, "deep": {"list": [1.0, 2.0]}}
SETTINGS = Settings()
NAMES = {"relu"}
PLAIN = torch.ones(4)
ARRAY = np.ones(4, dtype=np.float32)
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)
LOCAL = threading.local()
LOCAL.factor = 1.0


@case("a global", _global("ALPHA", 3.0), _global("ALPHA", 1.0))
class Global(Base):
    def forward(self, x):
        return self.lin(x) * ALPHA


@case("a number of another type", _global("FLAG", 1.0), _global("FLAG", True))
class TypeOfNumber(Base):
    def forward(self, x):
        return self.lin(x) * {int: 2.0, float: 3.0, bool: 5.0}[type(FLAG)]


ZERO = 0.0


@case("the sign of zero", _global("ZERO", -0.0))
class SignOfZero(Base):
    def forward(self, x):
        return self.lin(x) * (2.0 if str(ZERO).startswith("-") else 3.0)


@case(
    "a dictionary",
    lambda n: TABLE.update(alpha=3.0),
    lambda n: TABLE["deep"]["list"].__setitem__(1, 7.0),
    lambda n: TABLE.update(extra=2.0),
    lambda n: TABLE.pop("extra", None),
)
class Dictionary(Base):
    def forward(self, x):
        more = TABLE["extra"] if "extra" in TABLE else TABLE.get("missing", 1.0)
        return self.lin(x) * TABLE["alpha"] * TABLE["deep"]["list"][1] * more


@case(
    "an object",
    _setter(SETTINGS, "scale", 3.0),
    lambda n: SETTINGS.deep["inner"].append(4.0),
    lambda n: SETTINGS.deep.update(inner=[2.0]),
    _global("SETTINGS", Settings()),
)
class Object(Base):
    def forward(self, x):
        return self.lin(x) * SETTINGS.scale * sum(SETTINGS.deep["inner"])


@case("an element of a set", lambda n: NAMES.discard("relu"), lambda n: NAMES.add("relu"))
class SetElement(Base):
    def forward(self, x):
        y = self.lin(x)
        return torch.relu(y) if "relu" in NAMES else y


def _closure() -> tuple[Callable[[], nn.Module], list[Change]]:
    box, q = [1.0], 1.0

    def set_q(net: Any) -> None:
        nonlocal q
        q = 4.0

    def inner(y):
        return y * q

    class Closure(Base):
        def forward(self, x):
            return inner(self.lin(x) * box[0] * q)

    return Closure, [lambda n: box.__setitem__(0, 3.0), set_q]


CASES["a closure"] = _closure()


@case(
    "a class attribute",
    lambda n: setattr(ClassAttribute, "alpha", 3.0),
    lambda n: setattr(Parent, "beta", 2.0),
    lambda n: setattr(ClassAttribute, "beta", 5.0),
)
class ClassAttribute(Base):
    alpha = 1.0

    def forward(self, x):
        return self.lin(x) * self.alpha * type(self).alpha * Parent.beta * self.gamma()

    def gamma(self):
        return getattr(self, "beta", 1.0)


class Parent:
    beta = 1.0


class Helper(Parent):
    def __init__(self) -> None:
        self.alpha, self.items = 1.0, [1.0]

    @property
    def doubled(self) -> float:
        return 2 * self.alpha

    def __getattr__(self, name: str) -> Any:
        if name == "dynamic":
            return self.items[0]
        raise AttributeError(name)


def _new_helper(net: Any) -> None:
    net.helper = Helper()
    net.helper.alpha = 5.0


@case(
    "a helper object",
    lambda n: setattr(n.helper, "alpha", 3.0),
    lambda n: n.helper.items.__setitem__(0, 2.0),
    lambda n: setattr(n.helper, "dynamic", 7.0),
    lambda n: setattr(Parent, "beta", 3.0),
    _new_helper,
)
class WithHelper(Base):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, x):
        h = self.helper
        return self.lin(x) * h.doubled * h.dynamic * h.beta


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


SLOTTED = Slotted()


@case("an object with slots", _setter(SLOTTED, "factor", 2.0))
class WithSlots(Base):
    def forward(self, x):
        return self.lin(x) * SLOTTED.factor


def scaled(y: torch.Tensor, by: float = 1.0, *, more: float = 1.0) -> torch.Tensor:
    return y * by * more


@case(
    "default arguments",
    lambda n: setattr(scaled, "__defaults__", (3.0,)),
    lambda n: setattr(scaled, "__kwdefaults__", {"more": 2.0}),
)
class Defaults(Base):
    def forward(self, x):
        return scaled(self.lin(x))


def memory(y: torch.Tensor, kept: list = [1.0]) -> torch.Tensor:  # noqa: B006
    return y * kept[0]


@case("a mutable default", lambda n: memory.__defaults__[0].__setitem__(0, 3.0))
class MutableDefault(Base):
    def forward(self, x):
        return memory(self.lin(x))


class Mode(enum.Enum):
    SMALL = 1.0
    LARGE = 3.0


MODE = Mode.SMALL


@case("an enumeration", _global("MODE", Mode.LARGE))
class Enumeration(Base):
    def forward(self, x):
        return self.lin(x) * MODE.value * (2.0 if MODE is Mode.LARGE else 1.0)


@case(
    "the environment",
    lambda n: os.environ.update(GRADD_TEST_K="2"),
    lambda n: os.environ.pop("GRADD_TEST_K", None),
)
class Environment(Base):
    def forward(self, x):
        factor = float(os.environ.get("GRADD_TEST_K", "1"))
        return self.lin(x) * factor * (2.0 if os.getenv("GRADD_TEST_K") else 1.0)


@case("a context variable", lambda n: CONTEXT.set(3.0))
class Context(Base):
    def forward(self, x):
        return self.lin(x) * CONTEXT.get()


@case("a thread's own variable", _setter(LOCAL, "factor", 3.0))
class ThreadLocal(Base):
    def forward(self, x):
        return self.lin(x) * LOCAL.factor


@dataclasses.dataclass
class Options:
    factor: float = 1.0
    sizes: tuple = (1.0, 2.0)


OPTIONS = Options()


@case("a dataclass", _setter(OPTIONS, "factor", 3.0), _setter(OPTIONS, "sizes", (1.0, 3.0)))
class Dataclass(Base):
    def forward(self, x):
        return self.lin(x) * OPTIONS.factor * OPTIONS.sizes[1]


@case(
    "a method of the class",
    lambda n: setattr(Methods, "f", lambda self, y: y * 3),
    lambda n: setattr(Methods, "g", staticmethod(lambda y: y * 5)),
    lambda n: setattr(Methods, "h", classmethod(lambda cls, y: y * 7)),
    lambda n: setattr(Methods, "forward", lambda self, x: self.lin(x) * 11),
)
class Methods(Base):
    def f(self, y):
        return y * 2

    @staticmethod
    def g(y):
        return y * 2

    @classmethod
    def h(cls, y):
        return y * 2

    def forward(self, x):
        return self.h(self.g(self.f(self.lin(x))))


@case("the forward of a submodule", lambda n: setattr(n.act, "forward", torch.tanh))
class SubForward(Base):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.lin(x))


@case("a function of torch", lambda n: setattr(F, "softsign", torch.tanh))
class Patched(Base):
    def forward(self, x):
        return F.softsign(self.lin(x))


def _twice(y: torch.Tensor) -> torch.Tensor:
    return y * 2


FUNCTIONS: dict[str, Any] = {"act": _twice, "part": functools.partial(scaled, by=2.0)}


@case(
    "functions in a dictionary",
    lambda n: FUNCTIONS.update(act=torch.relu),
    lambda n: FUNCTIONS.update(part=functools.partial(scaled, by=3.0)),
    lambda n: FUNCTIONS["part"].keywords.update(by=4.0),
)
class Functions(Base):
    def forward(self, x):
        return FUNCTIONS["part"](FUNCTIONS["act"](self.lin(x)))


@case(
    "an attribute by a dynamic name",
    _global("ALPHA", 5.0),
    lambda n: setattr(n, "which", "tanh"),
    lambda n: setattr(types_of, "scale", 4.0),
)
class Dynamic(Base):
    def __init__(self):
        super().__init__()
        self.which = "relu"

    def forward(self, x):
        y = getattr(torch, self.which)(self.lin(x)) * globals()["ALPHA"]
        return y * vars(types_of)["scale"] * types_of.__dict__["scale"]


types_of = types.SimpleNamespace(scale=1.0)


@case(
    "an attribute of another type",
    lambda n: setattr(n, "k", 2.0),
    lambda n: setattr(n, "k", True),
    lambda n: setattr(n, "k", 2),
)
class TypedAttribute(Base):
    def __init__(self):
        super().__init__()
        self.k = 2

    def forward(self, x):
        return self.lin(x) * (3.0 if isinstance(self.k, float) else self.k)


@case(
    "a tensor in a global",
    lambda n: PLAIN.fill_(2.0),
    lambda n: PLAIN.data.fill_(3.0),
    lambda n: PLAIN.numpy().fill(4.0),
    _global("PLAIN", torch.full((4,), 5.0)),
)
class GlobalTensor(Base):
    def forward(self, x):
        return self.lin(x) * PLAIN


@case(
    "a tensor in an attribute",
    lambda n: n.t.fill_(2.0),
    lambda n: n.t.data.fill_(3.0),
    lambda n: n.v.numpy().fill(5.0),
    lambda n: setattr(n, "t", torch.tensor(4.0)),
    lambda n: n.list[0].fill_(3.0),
    lambda n: n.list.__setitem__(0, torch.ones(4) * 7),
)
class AttributeTensor(Base):
    def __init__(self):
        super().__init__()
        self.t, self.v, self.list = torch.tensor(1.0), torch.ones(4), [torch.ones(4)]

    def forward(self, x):
        return sum([self.lin(x) * self.t + self.v, *self.list])


@case(
    "the value of a tensor",
    lambda n: n.n.fill_(3),
    lambda n: n.l.numpy().fill(4.0),
)
class TensorValue(Base):
    def __init__(self):
        super().__init__()
        self.n, self.l = torch.tensor(2), torch.ones(2)

    def forward(self, x):
        return self.lin(x) * int(self.n) * self.l.tolist()[1]


@case(
    "a numpy array",
    lambda n: n.v.fill(3.0),
    lambda n: setattr(n, "v", np.full(4, 4.0, dtype=np.float32)),
    lambda n: ARRAY.fill(2.0),
    lambda n: n.w.__setitem__(1, 5.0),
)
class Array(Base):
    def __init__(self):
        super().__init__()
        self.v, self.w = np.ones(4, dtype=np.float32), np.ones(4)

    def forward(self, x):
        y = self.lin(x) * torch.from_numpy(self.v) + torch.as_tensor(ARRAY)
        return y * float(self.w[1]) + torch.tensor(self.w, dtype=torch.float32)


def _freeze(net: Any) -> None:
    (net.module if hasattr(net, "module") else net).lin.weight.requires_grad_(False)


@case("requires_grad of a parameter", _freeze)
class Frozen(Base):
    def forward(self, x):
        return self.lin(x) * (2.0 if self.lin.weight.requires_grad else 1.0)


QUEUE = collections.deque([1.0, 2.0])
COUNTS: collections.Counter = collections.Counter(a=1)
ORDER = collections.OrderedDict(a=1.0, b=2.0)


@case(
    "containers of collections",
    lambda n: QUEUE.__setitem__(0, 4.0),
    lambda n: COUNTS.__setitem__("a", 3),
    lambda n: ORDER.__setitem__("b", 5.0),
    lambda n: ORDER.move_to_end("b", last=False),
)
class Collections(Base):
    def forward(self, x):
        first = next(iter(ORDER.values()))
        return self.lin(x) * sum(QUEUE) * COUNTS["a"] * first * len(ORDER)


class Counted:
    """Everything by special methods."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, y: Any) -> Any:
        return y * self.value

    def __float__(self) -> float:
        return self.value

    def __len__(self) -> int:
        return int(self.value)

    def __enter__(self) -> float:
        return self.value

    def __exit__(self, *args: Any) -> None:
        pass

    def __iter__(self) -> Any:
        yield self.value


COUNTED = Counted()


@case("special methods", _setter(COUNTED, "value", 3.0))
class Special(Base):
    def forward(self, x):
        with COUNTED as factor:
            y = COUNTED(self.lin(x)) * float(COUNTED) * len(COUNTED) * factor
        return y * sum(COUNTED)


PLAIN_DTYPE = torch.float32


@case("an element type", _global("PLAIN_DTYPE", torch.float64))
class ElementType(Base):
    def forward(self, x):
        return self.lin(x).to(PLAIN_DTYPE).float() * (PLAIN_DTYPE.itemsize / 4)


MODULES = [nn.Hardtanh(-1.0, 1.0)]


@case(
    "a module in a list",
    lambda n: setattr(MODULES[0], "max_val", 0.25),
    lambda n: MODULES.__setitem__(0, nn.ReLU()),
)
class ModuleInList(Base):
    def forward(self, x):
        return MODULES[0](self.lin(x))
