"""The instructions of a code object that read something, by their place in the bytecode.

One table says what each instruction means to the recorder; what is not in it moves values around
that have been looked at already. Names differ a little between versions of CPython; those that a
version does not have are ignored.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType

_JUMPS = ("POP_JUMP_FORWARD_IF_", "POP_JUMP_BACKWARD_IF_", "POP_JUMP_IF_")
_KINDS = {
    "load_global": ("LOAD_GLOBAL", "LOAD_NAME"),
    "store_global": ("STORE_GLOBAL", "DELETE_GLOBAL"),
    "store_name": ("STORE_NAME",),
    "cell": (
        *("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"),
        *("STORE_DEREF", "DELETE_DEREF"),
    ),
    "load_attr": ("LOAD_ATTR", "LOAD_METHOD"),
    "import_name": ("IMPORT_NAME",),
    "import_from": ("IMPORT_FROM",),
    "load_super": ("LOAD_SUPER_ATTR",),
    "store_attr": ("STORE_ATTR",),
    "delete_attr": ("DELETE_ATTR",),
    "load_item": ("BINARY_SUBSCR",),
    "store_item": ("STORE_SUBSCR",),
    "delete_item": ("DELETE_SUBSCR",),
    "contains": ("CONTAINS_OP",),
    "format": ("FORMAT_VALUE", "FORMAT_WITH_SPEC"),
    "use_third": ("BINARY_SLICE", "STORE_SLICE"),
    "identity": ("IS_OP",),
    "compare": ("COMPARE_OP",),
    "operate": ("BINARY_OP",),
    "enter": ("BEFORE_WITH",),
    "match_class": ("MATCH_CLASS",),
    "use_two": ("MATCH_KEYS",),
    "merge": ("DICT_UPDATE", "DICT_MERGE"),
    "use_one": (
        *("GET_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE", "GET_LEN"),
        *("FORMAT_SIMPLE", "CONVERT_VALUE", "TO_BOOL", "GET_YIELD_FROM_ITER"),
        *("UNARY_NOT", "UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT", "MATCH_SEQUENCE"),
        *("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "MATCH_MAPPING"),
        *(f"{jump}{value}" for jump in _JUMPS for value in ("TRUE", "FALSE")),
    ),
    "call": ("PRECALL",) if sys.version_info < (3, 12) else ("CALL",),
    "call_keywords": ("CALL_KW",),
    "call_spread": ("CALL_FUNCTION_EX",),
}
_BY_CODE = {
    dis.opmap[name]: (kind, name) for kind, names in _KINDS.items() for name in names
    if name in dis.opmap
}  # fmt: skip
_SHIFTED = {"LOAD_GLOBAL": 1}  # low bits of the argument that are not part of the number
if sys.version_info >= (3, 12):
    _SHIFTED |= {"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2}
_NAMED = frozenset(
    {
        *("load_global", "store_global", "load_attr", "load_super", "store_attr", "delete_attr"),
        *("import_name", "import_from"),
    }
)  # the number is one of co_names

# What it means, and the name or number that it carries; for "use_one" the instruction's own name.
Reading = tuple[str, object]


def readings(code: CodeType) -> dict[int, Reading]:
    """Offset of each instruction that reads (or writes) something -> what it does."""
    found: dict[int, Reading] = {}
    raw = code.co_code
    begin = extended = 0
    for at in range(0, len(raw), 2):
        if not extended:
            begin = at
        argument = raw[at + 1] | extended
        if raw[at] == dis.EXTENDED_ARG:
            extended = argument << 8
            continue
        extended = 0
        known = _BY_CODE.get(raw[at])
        if known is not None:
            kind, name = known
            argument >>= _SHIFTED.get(name, 0)
            carried = code.co_names[argument] if kind in _NAMED else argument
            reading = (kind, name if kind == "use_one" else carried)
            # An event comes at the first word of the instruction, prefixes included.
            found[begin] = found[at] = reading
    return found
