"""Operators of a forward that raise for the call's tensors, as for sizes that do not fit.

Dynamo meets the error in its trace, breaks the graph in front of the operator, and traces each
function on the way there by itself: many times as long as one trace. Nothing of the call has run
when the first trace meets it, so that trace can end, and PyTorch run the call, which raises the
same error.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from gradd import private
from gradd.dynamo import derived

# Of torch up to 2.13; 2.14 traces such an error as an exception of the function.
_WORDS = "RuntimeError when making fake tensor call"


class FailsError(BaseException):
    """Ends a trace; Dynamo handles exceptions of other kinds."""


class _Here(threading.local):
    ends = False  # an error ends the trace of a call


here = _Here()


def end_traces(wanted: Callable[[], bool]) -> None:
    """Ends the traces of calls at such errors, where that is wanted at the time."""
    base = getattr(private.tracer, "__base__", None)
    if not hasattr(base, "call_function"):
        return
    usual = base.call_function

    @functools.wraps(usual)
    def call_function(tracer: Any, *args: Any) -> None:
        try:
            usual(tracer, *args)
        except Exception as error:
            if here.ends and wanted() and _begins(tracer) and str(error).startswith(_WORDS):
                raise FailsError from error
            raise

    base.call_function = call_function


def _begins(tracer: Any) -> bool:
    """Whether a tracer is that of a whole call, of which nothing has run."""
    code = getattr(tracer, "f_code", None)
    names = getattr(code, "co_varnames", ())
    return names[:1] == (derived.ARGUMENT,) and code.co_name.startswith("call_")
