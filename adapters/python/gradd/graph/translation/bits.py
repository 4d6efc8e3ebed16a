"""Translations of operations on bits: of integers, and of booleans, for which they are logic.

A number may stand in place of either operand. Shifts are torch's: by as many bits as there are, or
by a negative number, they leave 0, or the sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import cast, first_of, op, scalar, typed
from gradd.spec import CaptureError

_aten = torch.ops.aten
_BOOL = ir.DataType.BOOL
_INTS = (ir.DataType.INT32, ir.DataType.INT64)


def _kind(value: Any) -> ir.DataType | None:
    return None if isinstance(value, (bool, int)) else value.dtype


def _alike(name: str, a: Any, b: Any) -> tuple[Any, Any, ir.DataType]:
    """Both operands in the type that torch computes in, and that type."""
    kinds = [kind for kind in (_kind(a), _kind(b)) if kind is not None]
    whole = any(isinstance(v, int) and not isinstance(v, bool) for v in (a, b))
    wanted = max(kinds, key=(_BOOL, *_INTS).index) if set(kinds) <= {_BOOL, *_INTS} else None
    if wanted is None:
        raise CaptureError("unsupported_operator", f"{name} of {kinds[0]}; cast to int32 or int64")
    if wanted == _BOOL and whole:
        wanted = ir.DataType.INT64

    def one(value: Any) -> Any:
        if isinstance(value, (bool, int)):
            return scalar(value, wanted)
        return typed(cast(value, wanted), wanted, list(value.shape))

    return one(a), one(b), wanted


def _bitwise(name: str) -> Callable:
    def translate(a: Any, b: Any) -> Any:
        a, b, kind = _alike(f"bitwise_{name.lower()}", a, b)
        return typed(getattr(op, name if kind == _BOOL else f"Bitwise{name}")(a, b), kind)

    return translate


def bitwise_not(x: Any) -> Any:
    if x.dtype == _BOOL:
        return op.Not(x)
    if x.dtype not in _INTS:
        raise CaptureError("unsupported_operator", f"bitwise_not of {x.dtype}; cast to int32")
    return op.BitwiseNot(x)


def _shift(direction: str) -> Callable:
    def translate(a: Any, b: Any) -> Any:
        a, b, kind = _alike(f"shift {direction.lower()}", a, b)
        if kind == _BOOL:
            raise CaptureError("unsupported_operator", "shifts of booleans; cast to int32")
        return typed(first_of("com.gradd", f"Shift{direction}", a, b), kind)

    return translate


def table() -> dict[Any, Callable]:
    rows: dict[Any, Callable] = {_aten.bitwise_not.default: bitwise_not}
    for name in ("And", "Or", "Xor"):
        packets = (f"bitwise_{name.lower()}", f"__{name.lower()}__")
        rows |= _rows(packets, _bitwise(name))
    for direction, short in (("Left", "l"), ("Right", "r")):
        packets = (f"bitwise_{direction.lower()}_shift", f"__{short}shift__")
        rows |= _rows(packets, _shift(direction))
    return rows


def _rows(packets: tuple[str, str], translate: Callable) -> dict[Any, Callable]:
    found = [getattr(_aten, packet) for packet in packets]
    return {
        getattr(packet, overload): translate
        for packet in found
        for overload in packet.overloads()
        if not overload.endswith("out")
    }
