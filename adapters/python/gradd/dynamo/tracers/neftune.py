"""NEFTune's noise on embeddings: traced as numbers that a graph draws.

The hook of transformers computes the bound of the noise in a tensor and draws between two tensors,
which reads them: Dynamo breaks the graph there. The bound follows from sizes, so a graph serves all
lengths.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradd.dynamo.tracers import membership

MODULE, NAME = "transformers.integrations.neftune", "neftune_post_forward_hook"


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such calls so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)


def noisy(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
    """What the hook of transformers gives.

    Args:
        module: An embedding with `neftune_noise_alpha`.
        output: Its result, [N, L, H].

    Returns:
        In training the result with noise of at most alpha / sqrt(L H), equally distributed.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023.
    """
    if not module.training:
        return output
    bound = module.neftune_noise_alpha / math.sqrt(output.size(1) * output.size(2))
    return output + (torch.rand_like(output) * 2 - 1) * bound


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """The same call of `noisy`; None = this one stays."""
    hook = getattr(sys.modules.get(MODULE), NAME, None)
    own = getattr(hook, "__module__", None) == MODULE  # not replaced by a script
    if not own or membership.value_of(fn) is not hook:
        return None
    return type(fn.realize()).build(tracer, noisy), args, kwargs
