"""Settings of Dynamo that hold while it compiles for gradd, and no longer.

They are those of the process outside: other uses of torch.compile keep theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from gradd.dynamo import private

RECOMPILES = 64  # of one function; then Dynamo runs it in PyTorch
_WANTED: dict[str, Any] = {
    # Hooks that are put on a submodule, or taken off, are another graph.
    "skip_nnmodule_hook_guards": False,
    # DDP would split graphs by its buckets, and their losses from their heads.
    "optimize_ddp": False,
    # A frame that Dynamo fails at runs in PyTorch; what has run before it is not run again.
    "suppress_errors": True,
    "recompile_limit": RECOMPILES,
    "accumulated_recompile_limit": 16 * RECOMPILES,
}


class _Loggers(list):
    """Functions of loggers that break no graph: what they say is said while one is made.

    A list, and an empty one, for torch 2.11 writes its settings into a log, as JSON.
    """

    def __init__(self, more: Collection[Any]) -> None:
        super().__init__()
        kind = logging.Logger
        names = ("debug", "info", "warning", "error", "warning_once", "info_once")
        own = {getattr(kind, name) for name in names if hasattr(kind, name)}  # transformers' too
        self._functions = own.union(more)

    def __contains__(self, function: object) -> bool:
        return function in self._functions


class Applied:
    """Context in which Dynamo has our settings."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        config = private.dynamo_config
        self._before = {name: getattr(config, name) for name in _WANTED}
        for name, value in _WANTED.items():
            setattr(config, name, value)
        self._before["ignore_logging_functions"] = config.ignore_logging_functions
        config.ignore_logging_functions = _Loggers(config.ignore_logging_functions)

    def __exit__(self, *exc: object) -> None:
        for name, value in self._before.items():
            setattr(private.dynamo_config, name, value)
