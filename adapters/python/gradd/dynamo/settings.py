"""Settings of Dynamo that hold while it compiles for gradd, and no longer.

They are those of the process outside: other uses of torch.compile keep theirs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection
from typing import Any

import torch

from gradd.dynamo import private

RECOMPILES = 64  # of one function; then Dynamo runs it in PyTorch
_WANTED: dict[str, Any] = {
    # Hooks that are put on a submodule, or taken off, are another graph.
    "skip_nnmodule_hook_guards": False,
    # A frame that Dynamo fails at runs in PyTorch; what has run before it is not run again.
    "suppress_errors": True,
}
# DDP would split graphs by its buckets, and their losses from their heads.
_DISTRIBUTED: dict[str, Any] = {**_WANTED, "optimize_ddp": False}
_PARAMETERS = inspect.signature(torch.compile).parameters


def of_function() -> dict[str, Any]:
    """Arguments of torch.compile: a cache of its own, and so many graphs in it."""
    wanted = {"isolate_recompiles": True, "recompile_limit": RECOMPILES}
    return wanted if wanted.keys() <= _PARAMETERS.keys() else {}


if not of_function():  # torch 2.11
    for table in (_WANTED, _DISTRIBUTED):
        table |= {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": 16 * RECOMPILES}


_LOGGING = ("debug", "info", "warning", "error", "warning_once", "info_once")  # transformers' too


class _Loggers(list):
    """Functions of loggers that break no graph: what they say is said while one is made.

    A list, and an empty one, for torch 2.11 writes its settings into a log, as JSON.
    """

    def __init__(self, more: Collection[Any]) -> None:
        super().__init__()
        self._more = more

    def __contains__(self, function: object) -> bool:
        own = (getattr(logging.Logger, name, None) for name in _LOGGING)
        return function in own or function in self._more


class Applied:
    """Context in which Dynamo has our settings."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        config = private.dynamo_config
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        wanted = _DISTRIBUTED if distributed else _WANTED
        self._before = {name: getattr(config, name) for name in wanted}
        for name, value in wanted.items():
            setattr(config, name, value)
        self._before["ignore_logging_functions"] = config.ignore_logging_functions
        config.ignore_logging_functions = _Loggers(config.ignore_logging_functions)

    def __exit__(self, *exc: object) -> None:
        for name, value in self._before.items():
            setattr(private.dynamo_config, name, value)
