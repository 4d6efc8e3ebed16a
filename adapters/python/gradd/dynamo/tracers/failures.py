"""Operators of a forward that raise for the call's tensors, as for sizes that do not fit.

Dynamo meets the error in its trace, breaks the graph in front of the operator, and traces each
function on the way there by itself: many times as long as one trace. Nothing of the call has run
when the first trace meets it, so that trace can end, and PyTorch run the call, which raises the
same error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradd import private
from gradd.dynamo import derived

# Of torch up to 2.13; 2.14 traces such an error as an exception of the function.
_WORDS = "RuntimeError when making fake tensor call"


class FailsError(BaseException):
    """Ends a trace; Dynamo handles exceptions of other kinds."""


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
            if wanted() and str(error).startswith(_WORDS) and _may_end(tracer):
                raise FailsError from error
            raise

    base.call_function = call_function


def _may_end(tracer: Any) -> bool:
    """Whether a tracer is that of a whole call, of which nothing has run, and its module allows."""
    known = getattr(getattr(tracer, "f_locals", {}).get(derived.ARGUMENT), "derivation", None)
    begins = known is not None and tracer.f_code.co_name.startswith("call_")
    return begins and known.ends()
