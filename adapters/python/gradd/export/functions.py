"""Custom autograd Functions in a graph that PyTorch recorded, however they were reached.

A Function kept in an attribute, called through a partial or from a compiled helper leaves the same
node behind: its backward is Python that no captured graph holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# torch.cond and its like: what they become is captured, or refused by its own name.
_OWN = "torch._higher_order_ops"


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes behind these tensors, each once."""
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        nodes += more


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in whose `.grad` a backward from these outputs would write."""
    nodes = (node for node in nodes_of(outputs) if hasattr(node, "variable"))
    return list({id(node.variable): node.variable for node in nodes}.values())


def custom_functions(outputs: Iterable[torch.Tensor]) -> list[str]:
    """Qualified names ("module.Class") of the autograd Functions on which these tensors depend.

    Args:
        outputs: Results of a forward in PyTorch, with gradients enabled.

    Returns:
        Each name once, sorted; empty if every node is torch's own.
    """
    found = set()
    for node in nodes_of(outputs):
        if not isinstance(node, BackwardCFunction):
            continue
        kind = getattr(node, "_forward_cls", type(node))
        if not kind.__module__.startswith(_OWN):
            found.add(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(found)
