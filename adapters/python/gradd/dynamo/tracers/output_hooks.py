"""Forward hooks with which transformers collects hidden states and attentions.

The first call that asks for them, as that of a classifier of sounds or a backbone of images does,
installs them under a lock, where Dynamo breaks the graph. Here they are installed while Dynamo
traces that call: what it has yet to trace has them.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable

import torch

from gradd.module_tables import FORWARD_HOOKS

traced: weakref.WeakSet[types.FunctionType] = (
    weakref.WeakSet()
)  # hooks that are in the graph of their first call
_MODULE, _FUNCTION = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"


def install_in_traces() -> None:
    """Tells Dynamo how they are installed, once transformers is there."""
    install = getattr(sys.modules.get(_MODULE), _FUNCTION, None)
    if install is not None:
        _tell(install)


@functools.cache
def _tell(install: Callable[[torch.nn.Module], None]) -> None:
    @torch.compiler.assume_constant_result
    def now(model: torch.nn.Module) -> None:
        before = _hooks(model)
        install(model)
        traced.update(_hooks(model) - before)

    def in_a_trace(model: torch.nn.Module) -> None:
        now(model)

    torch.compiler.substitute_in_graph(install, skip_signature_check=True)(in_a_trace)


def _hooks(model: torch.nn.Module) -> set[types.FunctionType]:
    """The functions among those of a module and its children."""
    hooks = (hook for child in model.modules() for hook in vars(child)[FORWARD_HOOKS].values())
    return {hook for hook in hooks if isinstance(hook, types.FunctionType)}
