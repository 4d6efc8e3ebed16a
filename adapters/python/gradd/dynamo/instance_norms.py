"""Instance norms that keep running statistics: their writes as operators of their own.

torch's operator writes to the statistics, but neither its schema nor its decomposition says so. In
a graph of Dynamo the function of this file takes its place: the same results, and statistics that
are computed from the input and copied to the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.nn import functional

_FIRST = ("input", "running_mean", "running_var")
_AFFINE, _REST = ("weight", "bias"), ("use_input_stats", "momentum", "eps", "cudnn_enabled")
_NAMES = {  # of the arguments, in order
    functional.instance_norm: (*_FIRST, *_AFFINE, *_REST),
    torch.instance_norm: (_FIRST[0], *_AFFINE, *_FIRST[1:], *_REST),
}


def replace(graph: torch.fx.Graph) -> int:
    """Replaces the norms of a graph that write to statistics; returns how many there were."""
    found = 0
    for node in graph.nodes:
        if node.target not in _NAMES:
            continue
        given = dict(zip(_NAMES[node.target], node.args, strict=False)) | node.kwargs
        given.pop("cudnn_enabled", None)
        if given.pop("use_input_stats", True) and None not in map(given.get, _FIRST):
            node.args, node.kwargs = tuple(given.pop(name) for name in _FIRST), given
            node.target = instance_norm
            found += 1
    return found


def instance_norm(
    input: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, **options: Any
) -> torch.Tensor:
    """functional.instance_norm() of a training, where statistics are kept.

    Those of an instance are mixed in, and the means over the instances stay.
    """
    y = functional.instance_norm(input, **options)
    momentum = options.get("momentum", 0.1)
    known = input.detach().to(running_mean.dtype).flatten(2)
    spread, mean = torch.var_mean(known, 2)  # of the variance the unbiased one
    for kept, now in ((running_mean, mean), (running_var, spread)):
        kept.copy_(((1.0 - momentum) * kept + momentum * now).mean(0))
    return y
