"""Masks of torch.nn's transformers: nothing is read out of them while Dynamo traces.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask with the causal one, to attend
without it if they are equal, and Dynamo breaks its graph at the answer: within code of torch.nn,
from which it does not go on. The answer is a hint about speed, and callers may give it themselves
(`is_causal=False`): so do calls that are traced. The mask then counts as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradd.dynamo.tracers import membership

# By the class whose forward asks: the name of the hint, its place among the arguments, and that of
# the mask.
_HINTS: dict[type[nn.Module], tuple[str, int]] = {
    nn.TransformerEncoder: ("is_causal", 3),
    nn.TransformerDecoder: ("tgt_is_causal", 6),
}


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such calls so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """The same call with the hint; None = this one stays."""
    forward = getattr(type(membership.value_of(fn)), "forward", None)
    for cls, (name, place) in _HINTS.items():
        if forward is not cls.forward or len(args) > place:
            continue
        given = kwargs.get(name)
        if given is None or (given.is_python_constant() and given.as_python_constant() is None):
            return fn, args, {**kwargs, name: type(fn.realize()).build(tracer, False)}
    return None
