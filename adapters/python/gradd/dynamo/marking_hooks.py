"""Forward hooks that only make an output require a gradient.

transformers and PEFT put such a hook on the embeddings of a frozen model with adapters, so that
checkpoints have an argument with a gradient. TorchDynamo breaks a graph whose results depend on
such an output. gradd's graphs contain the body of a checkpoint and need no such argument, so the
hook is traced as a no-op; where PyTorch calls it, it works as before.
"""

from __future__ import annotations

import types
import weakref

import torch

from gradd.module_tables import FORWARD_HOOKS

_known: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def leave_out(module: torch.nn.Module) -> bool:
    """Tells Dynamo of the hooks of a module and its children; whether there were new ones."""
    found = {
        hook
        for child in module.modules()
        for hook in vars(child)[FORWARD_HOOKS].values()
        if _only_marks(hook) and hook not in _known
    }
    for hook in found:
        torch.compiler.substitute_in_graph(hook, skip_signature_check=True)(_nothing)
    _known.update(found)
    return bool(found)


def number(module: torch.nn.Module) -> int:
    """Of forward hooks of a module and its children."""
    return sum(len(vars(child)[FORWARD_HOOKS]) for child in module.modules())


class Embeddings:
    """The forward hooks of embeddings, which a second training may add to."""

    def __init__(self, hooks: list[dict[int, object]]) -> None:
        """Args:
        hooks: Of each embedding.
        """
        self._hooks = hooks
        self._known = self._now()

    @classmethod
    def of(cls, module: torch.nn.Module) -> Embeddings | None:
        """Those of a module and its children, if it has embeddings."""
        embeddings = (m for m in module.modules() if isinstance(m, torch.nn.Embedding))
        hooks = [vars(m)[FORWARD_HOOKS] for m in embeddings]
        return cls(hooks) if hooks else None

    def changed(self) -> bool:
        """Whether the hooks have changed since the last query: called in each call."""
        before, self._known = self._known, self._now()
        return self._known != before

    def _now(self) -> list[list[int]]:
        return list(map(list, self._hooks))


def _only_marks(hook: object) -> bool:
    """Whether a hook has the code of one of those below."""
    return isinstance(hook, types.FunctionType) and _content(hook) in _MARKING


def _content(function: types.FunctionType) -> tuple[object, ...]:
    code = function.__code__
    return code.co_code, code.co_names, code.co_consts, code.co_argcount


def _marks(module: object, args: object, output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _marks_by_default(module: object, args: object, output: torch.Tensor) -> None:
    output.requires_grad_()


_MARKING = {
    _content(_marks),
    _content(_marks_by_default),
    _content(lambda module, args, output: output.requires_grad_(True)),
    _content(lambda module, args, output: output.requires_grad_()),
}


def _nothing(module: object, args: object, output: object) -> None:
    pass
