"""Names of torch that its documentation does not show: each with what it is for.

Nothing else in gradd.dynamo imports such a name. A test imports each by itself, so that a version
of torch without it says which one is missing.
"""

from __future__ import annotations

from torch._C import _set_grad_enabled
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._export.verifier import TrainingIRVerifier
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "FakeTensor",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "PythonReferenceAnalysis",
    "TrainingIRVerifier",
    "_enter_autocast",
    "_enter_inference_mode",
    "_exit_autocast",
    "_exit_inference_mode",
    "_set_grad_enabled",
    "dynamo_config",
    "enable_python_dispatcher",
    "sympy_interp",
    "tracing",
]
