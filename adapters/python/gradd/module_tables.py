"""Finds where a torch.nn.Module keeps its parameters, buffers, submodules and hooks.

The names of these tables are read from a fresh module, because torch does not document them.
"""

from __future__ import annotations

import inspect

import torch

_fresh = vars(torch.nn.Module())
# Parameters, buffers, submodules; tables of hooks remember their order by a class of their own.
NAMES = tuple(name for name, table in _fresh.items() if type(table) is dict)
# With the names of buffers that are not saved, and hooks of state dicts.
SHARED = (
    *(*NAMES, *(name for name, table in _fresh.items() if type(table) is set)),
    *(name for name in _fresh if "state_dict" in name),
)


def _forward_hooks() -> str:
    def hook(module: object, args: object, output: object) -> None:
        pass

    module = torch.nn.Module()
    module.register_forward_hook(hook)
    tables = ((name, t) for name, t in vars(module).items() if isinstance(t, dict))
    return next(name for name, table in tables if hook in table.values())


FORWARD_HOOKS = _forward_hooks()
# What a call of a module looks at before it calls forward(): tables of hooks, and what compile()
# has left.
BEFORE_FORWARD = (
    *(
        name
        for name, table in _fresh.items()
        if isinstance(table, dict) and name not in NAMES and name not in SHARED
    ),
    *(name for name, value in vars(torch.nn.Module).items() if value is None and "call" in name),
)
# Hooks of all modules, which Dynamo does not guard: one that comes late would not run.
HOOKS_OF_ALL = tuple(
    table
    for name, table in vars(torch.nn.modules.module).items()
    if isinstance(table, dict) and not name.startswith("__")
)
_OF_CALLS = ("call", "forward")
_STEPS = {
    name: function
    for name, function in vars(torch.nn.Module).items()
    if inspect.isfunction(function) and name.startswith("_") and not name.startswith("__")
    if not any(word in name for word in _OF_CALLS)
}


def _submodules() -> str:
    child = torch.nn.Module()
    parent = vars(torch.nn.ModuleList([child]))
    return next(name for name in NAMES if child in parent[name].values())


SUBMODULES = _submodules()


def holding(module: torch.nn.Module, key: str) -> dict[str, torch.Tensor]:
    """The table of a module that has a tensor of its own under a name."""
    tables = (vars(module)[name] for name in NAMES)
    return next(table for table in tables if isinstance(table.get(key), torch.Tensor))


def replaced_steps(cls: type[torch.nn.Module]) -> list[str]:
    """What a class does in another way of its own when the module around it is moved or loaded.

    nn.Module's methods for that call the ones of the submodules.
    """
    return [name for name, function in _STEPS.items() if getattr(cls, name) is not function]
