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
