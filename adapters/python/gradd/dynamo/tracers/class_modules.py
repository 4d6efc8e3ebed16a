"""`type(weight).__module__` in code that Dynamo traces, for classes of torch: a constant.

PEFT asks so whether a weight is quantized, in DoRA and others; Dynamo has no value for it, and
breaks its graph where the text is used.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from typing import Any

from gradd.dynamo.tracers import membership

_LOAD = dis.opmap["LOAD_ATTR"]


def read(wanted: Callable[[], bool]) -> None:
    """Has Dynamo's tracers read it where that is wanted at the time."""
    for table in membership.tables():
        table[_LOAD] = functools.partial(_load, wanted, table[_LOAD])


def _load(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs `variable.name`."""
    if instruction.argval == "__module__" and wanted():
        variable = tracer.stack[-1]
        value = membership.value_of(variable)
        if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
            tracer.popn(1)
            tracer.push(type(variable.realize()).build(tracer, value.__module__))
            return
    usual(tracer, instruction)
