"""Capture of PyTorch modules as weightless ONNX graphs for the daemon.

    cap = capture(module, args, kwargs)     # slow (seconds), once per capture_key
    key = capture_key(module, args, kwargs) # cheap, every call
    check_dynamic(cap, args, kwargs)        # None, or why sizes need another capture

Pure Python; knows nothing of the daemon. The heavy imports (torch.onnx, onnxscript) happen at
the first capture, not at import.
"""

from __future__ import annotations

from typing import Any

from gradd.export.dims import check_dynamic
from gradd.export.keys import capture_key, form_of, same_but_filled_in
from gradd.schema import as_tensor_leaf, flatten_inputs, is_tensor_leaf, schema_key
from gradd.spec import (
    Capture,
    CaptureError,
    DimRules,
    InputSpec,
    OutputSpec,
    SharedSpec,
)

__all__ = [
    "Capture",
    "CaptureError",
    "DimRules",
    "InputSpec",
    "OutputSpec",
    "SharedSpec",
    "as_tensor_leaf",
    "capture",
    "capture_key",
    "check_dynamic",
    "flatten_inputs",
    "form_of",
    "is_tensor_leaf",
    "op_histogram",
    "same_but_filled_in",
    "schema_key",
]


def capture(
    module: Any, args: tuple, kwargs: dict, *, forward: Any = None, observed: bool = True
) -> Capture:
    """Captures one call of a module; see gradd.export.capturing.capture()."""
    from gradd.export import capturing

    return capturing.capture(module, args, kwargs, forward=forward, observed=observed)


def op_histogram(cap: Capture) -> dict[str, int]:
    """Node types of a capture with their counts, most frequent first."""
    from gradd.export.translation import model_bytes

    return model_bytes.op_histogram(cap.onnx)
