"""Names of torch that its documentation does not show: what each is for, and what goes without it.

Nothing else in gradd.dynamo imports such a name. A test imports each by itself, so that a version
of torch without it says which one is missing. Attributes that Dynamo leaves on its graphs
(`_dynamo_source`, `compile_subgraph_reason`) and sizes (`SymInt.node`) have no name to import.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# Modes that Dynamo writes into its graphs as calls: without them, regions have no marks.
from torch._C import TensorBase, _set_grad_enabled

# The version of a dictionary: without it, each call would compare all values.
from torch._C._dynamo.guards import dict_version

# Recording operators before autograd and autocast: without these three, torch's own tracer, which
# takes ten times as long.
from torch._dispatch.python import enable_python_dispatcher

# Sizes above 1 as symbols from the first call on; without it, a second size compiles again.
from torch._dynamo import config as dynamo_config  # settings.py: hooks would not be guarded
from torch._dynamo import maybe_mark_dynamic

# Dynamo's lock: without it, two threads could wait for each other in a self-check.
from torch._dynamo.convert_frame import compile_lock

# Side effects of a traced function: without it, self-checks never run the user's own forward.
from torch._dynamo.symbolic_convert import InstructionTranslator

# What Dynamo could not trace, and how often: without it, messages name no cause.
from torch._dynamo.utils import counters as dynamo_counters

# Functions of NumPy in a graph, whose names do not say what they write: it would be lost.
from torch._dynamo.utils import (
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)

# Graphs with writes in place, taken apart by torch.export: without it they run in PyTorch.
from torch._export.verifier import TrainingIRVerifier
from torch._guards import tracing  # the same: Dynamo has another fake mode for back ends

# Operators whose arguments are graphs (checkpoints, custom Functions): they would not be told.
from torch._ops import HigherOrderOperator

# Tells tensors without values from constants.
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer

# Hooks of all modules, which Dynamo does not guard: one that comes late would not run.
from torch.nn.modules import module as _modules

# Arithmetic of sizes as nodes: without it, sizes that are computed from others run in PyTorch.
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

# That of Tensor is watched for writes: without it, a look at the generator takes twice as long.
numpy_of = TensorBase.numpy
NUMPY = (numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper)
HOOKS_OF_ALL = tuple(
    table
    for name, table in vars(_modules).items()
    if name.startswith("_global_") and name.endswith("_hooks")
)

__all__ = [
    "HOOKS_OF_ALL",
    "NUMPY",
    "FakeTensor",
    "HigherOrderOperator",
    "InstructionTranslator",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "PythonReferenceAnalysis",
    "TrainingIRVerifier",
    "_enter_autocast",
    "_enter_inference_mode",
    "_exit_autocast",
    "_exit_inference_mode",
    "_set_grad_enabled",
    "compile_lock",
    "dict_version",
    "dynamo_config",
    "dynamo_counters",
    "enable_python_dispatcher",
    "maybe_mark_dynamic",
    "numpy_of",
    "sympy_interp",
    "tracing",
    "variable_of",
]


def variable_of(name: str) -> ContextVar[Any] | None:
    """What holds a setting of Dynamo in a thread; None = only its attribute does (torch 2.11)."""
    entry = getattr(dynamo_config, "_config", {}).get(name)
    found = getattr(entry, "user_override", None)
    return found if isinstance(found, ContextVar) else None
