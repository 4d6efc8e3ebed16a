"""Rules for types and sizes that torch lacks, without which Dynamo cannot trace an operator."""

from __future__ import annotations

from typing import Any

import torch

_MASKED = (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)


def _quantised(x: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def give() -> None:
    """Registers those of fake quantisation, where torch has none."""
    for name in _MASKED:
        found = getattr(torch.ops.aten, name, None)
        if found is not None and not found.default.has_kernel_for_dispatch_key("Meta"):
            torch.library.register_fake(f"aten::{name}", _quantised)
