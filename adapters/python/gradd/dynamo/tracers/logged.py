"""Lines of Dynamo's logs that are off: Dynamo does not look for the functions that they name.

For each operator it makes the text of a line in its log `trace_call`, and takes apart each source
file of which it traces a function: 3 % of the first call of a Llama.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from gradd import private

# Names of modules of torch, with those of their logs: TORCH_LOGS="trace_call,trace_source".
_LOGS = ("torch._dynamo.output_graph.__trace_call", "torch._dynamo.symbolic_convert.__trace_source")


def leave_out(wanted: Callable[[], bool]) -> None:
    """Has Dynamo make no such texts where that is wanted at the time, and no log is on."""
    base = getattr(private.tracer, "__base__", None)
    usual = getattr(base, "get_line_of_code_header", None)
    if usual is None:
        return
    logs = tuple(map(logging.getLogger, _LOGS))

    @functools.wraps(usual)
    def get_line_of_code_header(tracer: Any, lineno: int | None = None) -> str:
        if wanted() and not any(log.isEnabledFor(logging.DEBUG) for log in logs):
            return ""
        return usual(tracer, lineno)

    base.get_line_of_code_header = get_line_of_code_header
