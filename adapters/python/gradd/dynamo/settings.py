"""Settings of Dynamo that apply only while it compiles for gradd.

Outside, the settings of the process apply: other uses of torch.compile keep theirs.
"""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config
from torch.backends import mha

import gradd
from gradd import private
from gradd.dynamo import packing
from gradd.dynamo.guards import Supplement
from gradd.dynamo.tracers import (
    causal_hints,
    class_modules,
    failures,
    leaves,
    log_probs,
    logged,
    loggers,
    membership,
    neftune,
    readings,
    warned,
)
from gradd.graph import recurrent, rules, scans
from gradd.memory import watch

RECOMPILES = 64  # of one function; then Dynamo runs it in PyTorch
_WANTED: dict[str, Any] = {
    # Hooks that are put on a submodule, or taken off, are another graph.
    "skip_nnmodule_hook_guards": False,
    # A frame that Dynamo fails at runs in PyTorch; code that has run before it does not run again.
    "suppress_errors": True,
    # Whole numbers of modules that change, as counters do, become inputs as those of others do.
    "allow_unspec_int_on_nn_module": True,
    # LSTM, GRU and RNN become nodes of the graph; without it they and all behind them are cut off.
    "allow_rnn": True,
    # NumPy draws its own random numbers, between two graphs; Dynamo would draw them with torch.
    "use_numpy_random_stream": True,
    # DDP would split graphs by its buckets, and their losses from their heads.
    "optimize_ddp": False,
    # Of a node's symbolic sizes it makes everything twice: a fifth of the first call of two layers.
    "fake_tensor_cache_enabled": False,
}
# Dynamo would tell a profiler when it fetches the arguments of a graph: 10 us of a call.
if hasattr(config, "record_runtime_overhead"):
    _WANTED["record_runtime_overhead"] = False
_PARAMETERS = inspect.signature(torch.compile).parameters


def of_function() -> dict[str, Any]:
    """Arguments of torch.compile: a cache of its own, and so many graphs in it."""
    wanted = {"isolate_recompiles": True, "recompile_limit": RECOMPILES}
    return wanted if wanted.keys() <= _PARAMETERS.keys() else {}


if not of_function():  # torch 2.11
    _WANTED |= {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": 16 * RECOMPILES}


_OPEN_SIZES = "capture_dynamic_output_shape_ops"


def _variable(name: str) -> ContextVar[Any] | None:
    """The variable of a Dynamo setting in a thread; None = only an attribute (torch 2.11)."""
    found = getattr(private.settings.get(name), "user_override", None)
    return found if isinstance(found, ContextVar) else None


# The variables that hold settings: Dynamo's own access to all of ours takes 40 us of a call.
_VARIABLES = {name: _variable(name) for name in (*_WANTED, _OPEN_SIZES)}
_FAST = all(_VARIABLES.values())
# Each call sets and resets them: functions of C in a loop of C.
_SET, _RESET = ContextVar.set, ContextVar.reset
_ALL = list(_VARIABLES.values())
_VALUES = tuple(_WANTED.values())


# What asks for the setting of torch.backends.mha.
_ATTENTION = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
)
_RAISES = ("when making fake tensor call", "Tensor device mismatch")  # in the words of torch


_OWN = str(Path(gradd.__file__).parent)
_LINES = 256  # that are remembered


class _Short(logging.Filter):
    """Dynamo's message about code that it fails at, in one line.

    Its own lines are a traceback, whose frames handlers of logs may keep alive, and the model with
    them. There is none about an operator that raises, as for sizes, indices or devices that do not
    fit: PyTorch raises the same when it runs, and the lines before would be about functions that no
    user knows. Dynamo tries again in each call, and its line is said once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not _is_applied():
            return True
        if logging.getLogger(record.name).isEnabledFor(logging.INFO):  # TORCH_LOGS asks for more
            return True
        if not record.name.startswith("torch._dynamo"):
            return False
        (what, *_), (why, *_) = record.getMessage().splitlines(), f"{error}\n".splitlines()
        if _OWN in what:  # it tries the user's code next, alone
            return False
        if any(words in why for words in _RAISES) or isinstance(error, IndexError):
            return False
        record.msg, record.args = "%s: %s", (what.strip(), why)
        record.exc_info = record.exc_text = None
        if (line := record.getMessage()) in self._lines:
            return False
        if len(self._lines) < _LINES:
            self._lines.add(line)
        return True


class _Said(logging.Filter):
    """Dynamo's advice at a call of item(): gradd's own warning of the break names the line."""

    def filter(self, record: logging.LogRecord) -> bool:
        asked = logging.getLogger(record.name).isEnabledFor(logging.INFO)
        return asked or not _is_applied()


_ours = threading.local()


def _is_applied() -> bool:
    return getattr(_ours, "applied", False)


recurrent.shorten(_is_applied)
scans.substitute(_is_applied)
membership.compare(_is_applied)
leaves.mark(_is_applied)
failures.end_traces(_is_applied)
packing.substitute(_is_applied)
readings.substitute(_is_applied)
causal_hints.substitute(_is_applied)
class_modules.read(_is_applied)
log_probs.substitute(_is_applied)
neftune.substitute(_is_applied)
warned.substitute(_is_applied)
logged.leave_out(_is_applied)
loggers.substitute(_is_applied)
rules.give_missing()
# Code that Dynamo has compiled calls it, and it would compile, and count, it as well.
watch.Watched.__get__ = torch.compiler.disable(watch.Watched.__get__)  # type: ignore
# Names of modules of torch, whose loggers these are: with other names their lines come as they are.
for _name in ("torch._dynamo.convert_frame", "torch._subclasses.fake_tensor"):
    logging.getLogger(_name).addFilter(_Short())
logging.getLogger("torch._dynamo.variables.tensor").addFilter(_Said())
# What torch warns of while a graph is made, or checked, Dynamo's trace has warned of.
warnings.filterwarnings("ignore", module=r"gradd\.(dynamo\.lower|check\.modes)$")


class Applied:
    """Context in which Dynamo has our settings."""

    __slots__ = ("_before", "_fused", "_open_sizes")
    _before: list[Any]

    def __init__(self, open_sizes: bool = False, attends: bool = True) -> None:
        """Args:
        open_sizes: Sizes that depend on data, as of x[mask], break no graph.
        attends: The code may ask whether attention of torch.nn may be fused; see attends().
        """
        self._open_sizes = open_sizes
        self._fused = attends

    def __enter__(self) -> None:
        _ours.applied = True
        # Attention of torch.nn in eval mode would be one operator that no other back end has.
        if self._fused:
            self._fused = mha.get_fastpath_enabled()
            if self._fused:
                mha.set_fastpath_enabled(False)
        if _FAST:
            values = (*_VALUES, True) if self._open_sizes else _VALUES
            self._before = list(map(_SET, _ALL, values))
            return
        wanted = dict(_WANTED)
        if self._open_sizes:
            wanted[_OPEN_SIZES] = True
        self._before = [(name, getattr(config, name)) for name in wanted]
        for name, value in wanted.items():
            setattr(config, name, value)

    def __exit__(self, *exc: object) -> None:
        _ours.applied = False
        if self._fused:
            mha.set_fastpath_enabled(True)
        if _FAST:
            list(map(_RESET, _ALL, self._before))
            return
        for name, before in self._before:
            setattr(config, name, before)


def attends(module: torch.nn.Module, state: Supplement) -> bool:
    """Whether a call may ask torch if it may fuse attention.

    Args:
        module: It, and its children.
        state: What else the call can reach.
    """
    kinds = {*map(type, module.modules()), *state.classes}
    return mha.get_fastpath_enabled.__name__ in state.names or any(
        issubclass(kind, _ATTENTION) for kind in kinds
    )
