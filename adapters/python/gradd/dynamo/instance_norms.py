"""Instance norms that keep running statistics: their writes as operators of their own.

torch's operator writes to the statistics, but neither its schema nor its decomposition says so. In
a graph of Dynamo the function of this file takes the place of functional.instance_norm(): the same
results, and statistics that are computed from the input and copied to the buffers.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.nn import functional

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")


def replace(graph: torch.fx.Graph) -> int:
    """Replaces the norms of a graph that write to statistics; returns how many there were."""
    found = [n for n in graph.nodes if n.target is functional.instance_norm and _remembers(n)]
    for node in found:
        node.target = instance_norm
    return len(found)


def _remembers(node: torch.fx.Node) -> bool:
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    kept = given.get("running_mean") is not None and given.get("running_var") is not None
    return kept and bool(given.get("use_input_stats", True))


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """functional.instance_norm() of a training, where statistics are kept.

    Those of an instance are mixed in, and the means over the instances stay.
    """
    del use_input_stats
    y = functional.instance_norm(input, None, None, weight, bias, True, momentum, eps)
    known = input.detach().to(running_mean.dtype).flatten(2)
    spread, mean = torch.var_mean(known, 2)  # of the variance the unbiased one
    for kept, now in ((running_mean, mean), (running_var, spread)):
        kept.copy_(((1.0 - momentum) * kept + momentum * now).mean(0))
    return y
