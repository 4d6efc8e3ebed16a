"""Forward hooks that only make an output require a gradient.

transformers and PEFT put such a hook on the embeddings of a frozen model with adapters, so that
checkpoints have an argument with a gradient. TorchDynamo breaks a graph whose results depend on
such an output. gradd's graphs contain the body of a checkpoint and need no such argument, so the
hook is traced as a no-op; where PyTorch calls it, it works as before.

Each `gradient_checkpointing_enable()` of transformers adds another one. TRL's trainers call it in
every step, and Dynamo compares the number of hooks. Calls see one of several that follow each
other, which has the effect of all.
"""

from __future__ import annotations

import types
import weakref

import torch

from gradd.dynamo.tracers import output_hooks
from gradd.graph.locations import is_users
from gradd.module_tables import FORWARD_HOOKS

_Hooks = dict[int, object]
_Hidden = tuple[_Hooks, _Hooks, set[int]]  # hooks, what they were, and what was taken out
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
    """Of forward hooks of a module and its children that do more, and were there before a trace."""
    return len(_that_do_more(module))


def said(module: torch.nn.Module) -> str:
    """The first of these that is a user's function, for messages; "" = there is none."""
    for hook in _that_do_more(module):
        code = getattr(hook, "__code__", None)
        if code is not None and is_users(code.co_filename):
            return f"{code.co_name} @ {code.co_filename}:{code.co_firstlineno}"
    return ""


def _that_do_more(module: torch.nn.Module) -> list[object]:
    hooks = (hook for child in module.modules() for hook in vars(child)[FORWARD_HOOKS].values())
    return [h for h in hooks if not (_only_marks(h) or h in output_hooks.traced)]


class Embeddings:
    """The forward hooks of embeddings, which a second training, or a step, may add to."""

    def __init__(self, hooks: list[_Hooks]) -> None:
        """Args:
        hooks: Of each embedding.
        """
        self._hooks = hooks
        self._all: list[list[int]] = []
        self._seen: list[list[int]] = []  # by calls
        self._repeated: list[tuple[_Hooks, set[int]]] = []
        self.changed()

    @classmethod
    def of(cls, module: torch.nn.Module) -> Embeddings | None:
        """Those of a module and its children, if it has embeddings."""
        embeddings = (m for m in module.modules() if isinstance(m, torch.nn.Embedding))
        hooks = [vars(m)[FORWARD_HOOKS] for m in embeddings]
        return cls(hooks) if hooks else None

    def changed(self) -> bool:
        """Whether what calls see has changed since the last query: called in each call."""
        now = list(map(list, self._hooks))
        if now == self._all:
            return False
        before, self._all, self._repeated = self._seen, now, []
        for hooks in self._hooks:
            if repeated := _repeated(hooks):
                self._repeated.append((hooks, repeated))
        hidden = {id(hooks): repeated for hooks, repeated in self._repeated}
        self._seen = [
            [key for key in hooks if key not in hidden.get(id(hooks), ())] for hooks in self._hooks
        ]
        return self._seen != before

    def hide(self) -> list[_Hidden]:
        """Takes repeated hooks out, for a call; show() puts them back."""
        found: list[_Hidden] = []
        for hooks, repeated in self._repeated:
            found.append((hooks, dict(hooks), repeated))
            for key in repeated:
                hooks.pop(key, None)
        return found


def show(hidden: list[_Hidden]) -> None:
    """Puts hooks back in their order; what the call has added or removed stays so."""
    for hooks, before, repeated in hidden:
        now = dict(hooks)
        hooks.clear()
        hooks.update((k, hook) for k, hook in before.items() if k in repeated or k in now)
        hooks.update(now)


def _repeated(hooks: _Hooks) -> set[int]:
    """Keys of hooks that mark what the one before them has marked."""
    found, marked = set(), False
    for key, hook in hooks.items():
        marks = _only_marks(hook)
        if marks and marked:
            found.add(key)
        marked = marks
    return found


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
