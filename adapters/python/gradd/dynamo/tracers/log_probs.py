"""TRL's log-probabilities of labels, of a head and its loss: traced as what they are.

`ChunkedLogProbFunction` multiplies in pieces, into parts of one buffer, at which Dynamo breaks the
graph; its backward makes them again. Both are a product, a softmax and what is read of them, with
their derivatives, and so are one graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gradd.dynamo.tracers import membership

MODULE, NAME = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"
_Five = tuple[torch.Tensor, *tuple[torch.Tensor | None, ...]]


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such calls so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *given: Any,
    **named: Any,
) -> _Five:
    """What the function of TRL gives, by its arguments.

    Args:
        hidden: [N, H].
        weight: Of the head, [V, H].
        bias: Of the head, [V].
        targets: [N], from 0 to V - 1.
        given: The other arguments, as `_scaled` has them, by position.
        named: The same by name.

    Returns:
        Five results of [N], None if not asked for: log-probabilities of the targets, entropy, the
        logarithm of the sum of squared probabilities, mean logit, whether the target is the argmax.
    """
    z, outputs = _scaled(_logits(hidden, weight, bias), *given, **named)
    known = z.detach()
    entropy = squares = mean = top = None
    if "entropy" in outputs:
        entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    if "log_sum_sq_probs" in outputs:
        squares = (2 * known).logsumexp(-1) - 2 * known.logsumexp(-1)
    if "mean_logits" in outputs:
        mean = known.mean(-1)
    if "is_top1" in outputs:
        top = known.argmax(-1) == targets
    return -F.cross_entropy(z, targets, reduction="none"), entropy, squares, mean, top


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    operands = (hidden, weight, bias)
    return F.linear(*(x if x is None else x.to(dtype) for x in operands)).float()


def _scaled(
    logits: torch.Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Logits as the softmax takes them, and the names of the results."""
    z = logits if logit_scale == 1 else logits * logit_scale
    if final_logit_softcapping is not None:
        z = final_logit_softcapping * torch.tanh(z / final_logit_softcapping)
    return z if temperature == 1 else z * (1 / temperature), outputs


# Of the function's forward(): another version of TRL may compute something else.
_PARAMETERS = (
    *("ctx", *list(inspect.signature(log_probs).parameters)[:4]),
    *list(inspect.signature(_scaled).parameters)[1:],
)


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """The same call of `log_probs`; None = this one stays."""
    owner, name = membership.method(fn)
    if name != "apply" or not _is_known(getattr(owner, "__dict__", {}).get("fn_cls")):
        return None
    return type(fn).build(tracer, log_probs), args, kwargs


def _is_known(function: Any) -> bool:
    if function is None or function is not getattr(sys.modules.get(MODULE), NAME, None):
        return False
    both = (function.forward, function.backward)
    if any(getattr(one, "__module__", None) != MODULE for one in both):  # replaced by a script
        return False
    return tuple(inspect.signature(function.forward).parameters) == _PARAMETERS
