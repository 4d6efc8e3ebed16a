"""Rows of outside_rows.py: ends of sequences, patterns of match, objects that answer nothing."""

from __future__ import annotations

from outside_rows import Row

_AT = """
def at(i):
    try:
        return L[i]
    except IndexError:
        return 1.0
"""
_PRODUCT = """
def product():
    found, i = 1.0, 0
    while True:
        try:
            found *= L[i]
        except IndexError:
            return found
        i += 1
"""
_OWN = """
class Own:
    def __init__(self):
        self.kept = [2.0]
    def __getitem__(self, i):
        return self.kept[i]
    def __len__(self):
        return len(self.kept)
L = Own()
def loop():
    found = 1.0
    for element in L:
        found *= element
    return found
"""
_GOT = """
def got():
    try:
        return READ
    except IndexError:
        return 1.0
"""
# Behind the last element of a sequence.
ENDS = {
    "the end of a list": Row("L = [2.0]" + _AT, "at(1)", "L.append(5.0)"),
    "before its beginning": Row("L = [2.0]" + _AT, "at(-2)", "L.insert(0, 5.0)"),
    "the end of a UserList": Row("L = collections.UserList([2.0])" + _AT, "at(1)", "L.append(5.0)"),
    "the end of a deque": Row("L = collections.deque([2.0])" + _AT, "at(1)", "L.append(5.0)"),
    "the end of an inner list": Row("L = [[2.0]]\nL, M = L[0], L" + _AT, "at(1)", "L.append(5.0)"),
    "the end of a list of one's own": Row(
        "class Own(list): pass\nL = Own([2.0])" + _AT, "at(1)", "L.append(5.0)"
    ),
    "a loop until an end": Row("L = [2.0]" + _PRODUCT, "product()", "L.append(5.0)"),
    "an end that is removed": Row("L = [2.0, 5.0]" + _PRODUCT, "product()", "L.pop()"),
    "the end of a class": Row(_OWN + _AT, "at(1)", "L.kept.append(5.0)"),
    "the sum of a class": Row(_OWN, "sum(L)", "L.kept.append(5.0)"),
    "a loop over a class": Row(_OWN, "loop()", "L.kept.append(5.0)"),
    "the numbers of a class": Row(
        _OWN, "sum(i + v for i, v in enumerate(L))", "L.kept.append(5.0)"
    ),
    "an end behind itemgetter()": Row(
        "L = [2.0]" + _GOT.replace("READ", "operator.itemgetter(1)(L)"), "got()", "L.append(5.0)"
    ),
    "an end of an attribute": Row(
        "c = types.SimpleNamespace(of=[2.0])" + _GOT.replace("READ", "c.of[1]"),
        "got()",
        "c.of.append(5.0)",
    ),
}

_CLASS = """
class C:
    __match_args__ = ("mode", "k")
    def __init__(self):
        self.mode, self.k = "small", 2.0
c = C()
"""
_DATA = "@dataclasses.dataclass{}\nclass C:\n    mode: str = 'small'\nc = C()"


def _match(pattern: str, then: str = "2.0", subject: str = "c") -> str:
    return f"""
def matched():
    match {subject}:
        case {pattern}:
            return {then}
        case _:
            return 1.0
"""


def _matches(before: str, pattern: str, change: str, then: str = "2.0", subject: str = "c") -> Row:
    return Row(before + _match(pattern, then, subject), "matched()", change)


_BIG = "c.mode = 'big'"
PATTERNS = {
    "a pattern by name": _matches(_CLASS, "C(mode='big')", _BIG),
    "a pattern by position": _matches(_CLASS, "C('big')", _BIG),
    "a pattern that takes": _matches(_CLASS, "C(k=v)", "c.k = 5.0", "v"),
    "a pattern that takes by position": _matches(_CLASS, "C(_, v)", "c.k = 5.0", "v"),
    "a pattern with a condition": _matches(_CLASS, "C(k=v) if v > 3", "c.k = 5.0"),
    "either of two patterns": _matches(_CLASS, "C(mode='big') | C(mode='huge')", "c.mode = 'huge'"),
    "an attribute that comes later": _matches(_CLASS, "C(late=v)", "c.late = 5.0", "v"),
    "an attribute of the class": _matches(
        "class C: mode = 'small'\nc = C()", "C(mode='big')", "C.mode = 'big'"
    ),
    "names of positions": _matches(_CLASS, "C('small')", "C.__match_args__ = ('k', 'mode')", "2.0"),
    "a pattern of a dataclass": _matches(_DATA.format(""), "C('big')", _BIG),
    "a pattern of slots": _matches(_DATA.format("(slots=True)"), "C('big')", _BIG),
    "a pattern of a namespace": _matches(
        "c = types.SimpleNamespace(mode='small')", "types.SimpleNamespace(mode='big')", _BIG
    ),
    "a pattern in a pattern": _matches(
        _CLASS + "c.inner = C()", "C(inner=C(mode='big'))", "c.inner.mode = 'big'"
    ),
    "a pattern in a list": _matches(_CLASS, "[C(mode='big')]", _BIG, subject="[c]"),
    "a pattern in a dictionary": _matches(_CLASS, "{'a': C(mode='big')}", _BIG, subject="{'a': c}"),
    "a pattern of the module": Row(
        "def mode(net):\n    match net:\n        case nn.Module(mode='big'): return 2.0\n"
        "        case _: return 1.0",
        "mode(self)",
        "net.mode = 'big'",
        "self.mode = 'small'",
    ),
}

_PROXY = """
class Proxy:
    def __getattribute__(self, name):
        raise RuntimeError("working outside of application context")
class Asks:
    @property
    def __class__(self):
        raise RuntimeError("no class")
    def __repr__(self):
        raise RuntimeError("no text")
current, L = Proxy(), [2.0]
def first(*args, **words): return L[0]
"""
_STRANGE = "L[0] = 5.0"
# What raises whatever it is asked, and is only held, compared by identity or handed on.
STRANGERS = {
    "a proxy that exists": Row(_PROXY, "L[0] if globals() else 0", _STRANGE),
    "a proxy in a list": Row(_PROXY + "L += [current, Asks()]", "L[0] * len(L)", _STRANGE),
    "a proxy in a dictionary": Row(
        _PROXY + "D = dict(a=current, b=Asks())", "L[0] * len(list(D.values()))", _STRANGE
    ),
    "a proxy in an object": Row(
        _PROXY + "h = types.SimpleNamespace(of=current)", "L[0] if vars(h) else 0", _STRANGE
    ),
    "a proxy that is None": Row(_PROXY, "L[0] if current is not None else 0", _STRANGE),
    "a proxy that is handed on": Row(
        _PROXY, "first(current, by=Asks()) * first(*[current])", _STRANGE
    ),
    "a proxy that C gets": Row(_PROXY, "L[0] * len(list(zip([current], [Asks()])))", _STRANGE),
    "a proxy in a new tuple": Row(_PROXY, "L[0] * len((current, Asks()))", _STRANGE),
    "a proxy in the module": Row(
        _PROXY,
        "L[0] * len(self.of) * len(self.config.of)",
        "net.of.append(current); net.config.of.append(current)",
        "self.of = [1]; self.config = types.SimpleNamespace(of=[1])",
    ),
    "a proxy that comes later": Row(_PROXY + "D = [1]", "len(D)", "D += [current, Asks()]"),
}
