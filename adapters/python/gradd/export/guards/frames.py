"""What an interpreter frame holds that Python does not show: its operands, function and cells.

A tracer that asks for an event per instruction is called before each one. The operands of that
instruction lie on the frame's stack, whose place in memory is known for each supported version of
CPython. Nothing is written, and supported() proves with a known function that what is read is what
runs; elsewhere nothing here is used.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
from types import FrameType
from typing import Any

_FRAME = 24  # of PyFrameObject: its _PyInterpreterFrame
_TOP = 64  # of _PyInterpreterFrame: number of places in use
_PLACES = 72  # the places: locals, cells, stack
_FUNCTION = {(3, 11): 0, (3, 12): 16, (3, 13): 16}.get(sys.version_info[:2], -1)
_INSTRUCTION = 2  # bytes of an instruction
_WORD = ctypes.sizeof(ctypes.c_void_p)
_address = ctypes.c_void_p.from_address
_object = ctypes.py_object.from_address
_number = ctypes.c_int.from_address

NULL = type("Null", (), {"__repr__": lambda self: "NULL"})()


def peek(frame: FrameType, depth: int) -> Any:
    """The operand at this depth of the stack (1: the top), or NULL."""
    places = _address(id(frame) + _FRAME).value
    top = _number(places + _TOP).value
    try:
        return _object(places + _PLACES + _WORD * (top - depth)).value
    except ValueError:
        return NULL


def names_of_call(frame: FrameType) -> tuple[str, ...]:
    """Names of the keyword arguments of the call that a frame is about to make."""
    code, at = frame.f_code, frame.f_lasti
    raw = code.co_code
    if raw[at] == dis.opmap.get("CALL_KW"):
        return peek(frame, 1)
    if at >= _INSTRUCTION and raw[at - _INSTRUCTION] == dis.opmap.get("KW_NAMES"):
        return code.co_consts[raw[at - _INSTRUCTION + 1]]
    return ()


def cell(frame: FrameType, index: int) -> Any:
    """The cell at this place among the locals, or NULL."""
    places = _address(id(frame) + _FRAME).value
    try:
        return _object(places + _PLACES + _WORD * index).value
    except ValueError:
        return NULL


def function(frame: FrameType) -> Any:
    """The function that the frame runs, or NULL."""
    places = _address(id(frame) + _FRAME).value
    try:
        return _object(places + _FUNCTION).value
    except ValueError:
        return NULL


def _probe() -> Any:
    kept = ["cell"]

    def known(first: Any, second: Any) -> Any:
        return max(first, second) + kept[0]

    return known


@functools.lru_cache(maxsize=1)
def supported() -> bool:
    """True if operands can be read in this interpreter, which is tried out once."""
    if _FUNCTION < 0 or sys.implementation.name != "cpython" or _WORD != 8:
        return False
    known = _probe()
    seen: list[tuple] = []

    def event(frame: FrameType, kind: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if kind == "opcode":
            seen.append((frame.f_lasti, peek(frame, 1)))
        elif kind == "call":
            seen.append(("function", function(frame)))
        elif kind == "return":
            seen.append(("cell", cell(frame, 2)))
        return event

    before = sys.gettrace()
    sys.settrace(event)
    try:
        known("a", "b")
    finally:
        sys.settrace(before)
    tops = [value for _, value in seen]
    expected = [known, "b", max, known.__closure__[0]]
    return all(any(value is e for value in tops) for e in expected) and seen[0][1] is known
