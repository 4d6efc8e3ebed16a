"""Random networks that read changing state: sources, ways of reading, and changes are combined.

A network is a piece of source text, so that a failure can be printed and run again. `V` in a change
stands for a new value, `N` everywhere for the number of the source.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """A piece of state: how it is made, the ways of reading it, and what changes it.

    `kind` is "number", "tensor" or "function"; a setup that begins with "self." belongs into the
    constructor, and a change with "net." is applied to each copy of the network.
    """

    setup: str
    reads: tuple[str, ...]
    changes: tuple[str, ...]
    kind: str = "number"


_HELPER = """
class HN:
    kind = 1.5
    def __init__(self): self.a = 1.5
    @property
    def p(self): return self.a * 2
    def __getattr__(self, name):
        if name == "dynamic": return self.a + 1
        raise AttributeError(name)
"""
_CELL = """
def makeN():
    c = 1.5
    def get(): return c
    def put(v):
        nonlocal c
        c = v
    return get, put
getN, putN = makeN()
"""
SOURCES = (
    Source("GN = 1.5", ("GN", "globals()['GN']"), ("GN = V",)),
    Source(
        "GN = 2",
        ("(3.0 if type(GN) is float else 0.5)", "{int: 2, float: 3, bool: 4}[type(GN)]"),
        ("GN = V",),
    ),
    Source(
        "DN = {'k': 1.5}",
        ("DN.get('k', 0.5)", "(DN['k'] if 'k' in DN else 2.5)", "sum(DN.values(), 0.5)"),
        ("DN['k'] = V", "DN = {'k': V}", "DN.pop('k', None)", "DN['z'] = V", "DN.update(k=V)"),
    ),
    Source(
        "LN = [[1.5, 2.0], 3.0]",
        ("LN[0][1]", "sum(LN[0])", "(len(LN[0]) + LN[-1])", "min(*LN[0], 9)"),
        ("LN[0][1] = V", "LN[0].append(V)", "LN[0] = [V, 1.0]", "LN[-1] = V", "LN[0].reverse()"),
    ),
    Source("class KN: a = 1.5", ("KN.a", "KN().a", "getattr(KN, 'a')"), ("KN.a = V",)),
    Source(
        f"{_HELPER}\nhN = HN()",
        ("hN.a", "hN.p", "hN.dynamic", "hN.kind", "vars(hN)['a']", "getattr(hN, 'b', 0.5)"),
        ("hN.a = V", "HN.p = property(lambda s: V)", "hN = HN(); hN.a = V", "HN.kind = V")
        + ("hN.kind = V", "hN.b = V", "hN.__dict__['a'] = V"),
    ),
    Source("class SN:\n    __slots__ = ('a',)\nsN = SN(); sN.a = 1.5", ("sN.a",), ("sN.a = V",)),
    Source(_CELL, ("getN()",), ("putN(V)",)),
    Source(
        "def fN(a=1.5, *, b=1.0): return a * b",
        ("fN()",),
        ("fN.__defaults__ = (V,)", "fN.__kwdefaults__ = {'b': V}", "fN = lambda: V"),
    ),
    Source(
        "os.environ['GRADD_RN'] = '1.5'",
        ("float(os.environ['GRADD_RN'])", "float(os.getenv('GRADD_RN', '2'))"),
        ("os.environ['GRADD_RN'] = str(float(V))",),
    ),
    Source("cN = contextvars.ContextVar('cN', default=1.5)", ("cN.get()",), ("cN.set(V)",)),
    Source(
        "pN = Point(1.5, 2.0)",
        ("pN.a", "pN[1]", "(lambda a, b: a + b)(*pN)"),
        ("pN = Point(V, 1.0)", "pN = pN._replace(b=V)"),
    ),
    Source(
        "@dataclasses.dataclass\nclass ON:\n    a: float = 1.5\noN = ON()",
        ("oN.a", "dataclasses.asdict(oN)['a']", "ON().a"),
        ("oN.a = V", "oN = ON(V)", "ON.a = V"),
    ),
    Source("self.mN = 1.5", ("self.mN", "getattr(self, '_mN'[1:])"), ("net.mN = V",)),
    Source("self.oN = [1.5, {'a': 2.0}]", ("self.oN[1]['a']",), ("net.oN[1]['a'] = V",)),
    Source("PN = functools.partial(pow, 1.5)", ("PN(2)",), ("PN = functools.partial(pow, V)",)),
    Source(
        "tN = types.SimpleNamespace(a=types.SimpleNamespace(b=1.5))",
        ("tN.a.b", "operator.attrgetter('a.b')(tN)"),
        ("tN.a.b = V", "tN.a = types.SimpleNamespace(b=V)"),
    ),
    Source(
        "EN = {'s'}", ("(2.0 if 's' in EN else 0.5)", "len(EN)"), ("EN.discard('s')", "EN.add(V)")
    ),
    Source(
        "FN = {'f': lambda y: y * 1.5}",
        ("FN['f'](y)",),
        ("FN['f'] = lambda y: y * V", "FN['f'] = torch.tanh"),
        "function",
    ),
    Source(
        "TN = torch.tensor(1.5)",
        ("TN", "(TN * 2)", "TN.detach()", "TN.data"),
        ("TN.fill_(V)", "TN.data.fill_(V)", "TN = torch.tensor(float(V))", "TN.numpy().fill(V)"),
        "tensor",
    ),
    Source(
        "WN = [torch.ones(4), torch.full((4,), 1.5)]",
        ("WN[1]", "sum(WN)", "torch.stack(WN).mean(0)"),
        ("WN[1].fill_(V)", "WN[1] = torch.full((4,), float(V))", "WN.append(torch.ones(4) * V)"),
        "tensor",
    ),
    Source(
        "XN = torch.tensor(1.5)",
        ("float(XN)", "XN.item()"),
        ("XN.fill_(V)", "XN = torch.tensor(2 * V)"),
    ),
    Source(
        "AN = np.full(4, 1.5, np.float32)",
        ("torch.from_numpy(AN)", "torch.as_tensor(AN)", "torch.tensor(AN)"),
        ("AN.fill(V)", "AN[2] = V", "AN = np.full(4, V, np.float32)"),
        "tensor",
    ),
    Source(
        "AN = np.full(4, 1.5)",
        ("float(AN[2])", "float(AN.sum())", "len(AN)"),
        ("AN[2] = V", "AN *= 2"),
    ),
)
_ANY = (
    "y = y * (E)",
    "y = y + (E)",
    "y = y * [(E) for _ in range(2)][1]",
    "y = y * (lambda: E)()",
    "y = scaled(y, E)",
    "y = y * dict(a=E)['a']",
    "y = y * (*[E],)[0]",
    "try:\n    y = y * (E)\nexcept ValueError:\n    pass",
    "with contextlib.nullcontext(E) as w:\n    y = y * w",
)
_NUMBERS = (
    "if (E) > 1.0:\n    y = y * 2",
    "y = y * max(E, 0.5)",
    "w = E\ny = y * float(f'{w}' == '2') + w",
    "for _ in range(int(E) % 3):\n    y = y + 1",
    "w = E\ny = y * w if w else y",
    "y = y * math.sqrt(abs(E))",
    "match E:\n    case 2:\n        y = y * 3\n    case _:\n        y = y * 0.5",
)
_VALUES = ("0.5", "1.0", "2", "2.0", "True", "3", "0.0", "-0.0", "1.5", "1")
_PRELUDE = """
import contextlib, contextvars, collections, dataclasses, functools, math, operator, os, types
import numpy as np, torch
from torch import nn
Point = collections.namedtuple("Point", "a b")
def scaled(y, by): return y * by
"""
_NETWORK = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
SELF
    def forward(self, x):
        y = self.lin(x)
BODY
        return y
"""


class Network:
    """A random network and its changes.

    Attributes:
        text: Its source.
        changes: What changes its state, in order.
    """

    def __init__(self, seed: int, n_changes: int) -> None:
        rng = random.Random(seed)
        chosen = [rng.choice(SOURCES) for _ in range(rng.randint(1, 3))]
        setup, own, body, changes = [], [], [], []
        for number, source in enumerate(chosen):
            name = f"{seed}_{number}"
            place = own if source.setup.startswith("self.") else setup
            place.append(_numbered(source.setup, name))
            read = _numbered(rng.choice(source.reads), name)
            if source.kind == "function":
                body.append(f"y = {read}")
            else:
                forms = _ANY + (_NUMBERS if source.kind == "number" else ())
                body.append(_put(rng.choice(forms), read))
            changes += [_numbered(c, name) for c in source.changes]
        text = _NETWORK.replace("SELF", textwrap.indent("\n".join(own), " " * 8))
        text = text.replace("BODY", textwrap.indent("\n".join(body), " " * 8))
        self.text = "\n".join([_PRELUDE, *setup, text])
        self.changes = [
            re.sub(r"\bV\b", rng.choice(_VALUES), rng.choice(changes)) for _ in range(n_changes)
        ]
        self.names: dict[str, Any] = {"__name__": __name__}
        exec(self.text, self.names)

    def change(self, number: int, nets: tuple) -> None:
        """Applies one change; what belongs to a network is applied to each of them."""
        text = self.changes[number]
        for net in nets if "net." in text else nets[:1]:
            self.names["net"] = net
            exec(text, self.names)
        self.names.pop("net", None)


def _put(form: str, read: str) -> str:
    """E, where it stands alone, is the reading expression."""
    return re.sub(r"\bE\b", lambda _: read, form)


def _numbered(text: str, name: str) -> str:
    """N after a lower or upper case letter, and at the end of GRADD_R, is the number."""
    out = []
    for i, c in enumerate(text):
        before, after = text[i - 1 : i], text[i + 1 : i + 2]
        is_place = c == "N" and before.isalpha() and not (after.isalpha() and after.islower())
        out.append(name if is_place else c)
    return "".join(out)
