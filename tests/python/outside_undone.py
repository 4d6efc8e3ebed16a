"""What a forward() may do to things of outside, as rows of text: trials of it leave no trace.

A row is what stands in the user's module, statements of forward() that may set `y`, which the
result is multiplied by, and an expression that tells the state of outside afterwards.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from nets import assert_close

from gradd import ORTModule

_PRELUDE = """
import array, bisect, collections, contextlib, copy, functools, heapq, operator, random, threading
import numpy as np
import torch
from torch import nn
"""
_NETWORK = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x):
        y = 1.0
        BODY
        return self.lin(x) * y
"""
CALLS = 4


@dataclass(frozen=True)
class Deed:
    """A network that does something outside of it.

    Attributes:
        before: What stands in its module; `net` is the network once it is made.
        does: The statements in forward(), in one line.
        tells: An expression for the state that it leaves.
        reasons: How the refusal may be named; empty: whatever happens has to be right.
    """

    before: str
    does: str
    tells: str
    reasons: tuple[str, ...] = ()

    def run(self, wrap: Any) -> tuple[list, Any]:
        """Results and states of some steps of training, and the network."""
        names: dict[str, Any] = {"__name__": __name__}
        exec(_PRELUDE, names)
        exec(_NETWORK.replace("BODY", self.does), names)
        torch.manual_seed(0)
        names["np"].random.seed(0)
        names["random"].seed(0)
        plain = names["net"] = names["Net"]()
        exec(self.before, names)
        net, found = wrap(plain), []
        for _ in range(CALLS):
            plain.zero_grad()
            out = net(torch.ones(2, 4))
            out.sum().backward()
            found.append((out.detach(), copy.deepcopy(_plain(eval(self.tells, names)))))
        del names["net"]  # whoever keeps the class keeps these names
        return found, net


def _plain(state: Any) -> Any:
    """A state in a form that compares; classes of tensors count."""
    if isinstance(state, (list, tuple)):
        return [_plain(part) for part in state]
    if isinstance(state, torch.Tensor):
        return (type(state).__name__, state.size(), state.stride(), state.tolist())
    return state.tolist() if hasattr(state, "tolist") else state


def follow(deed: Deed) -> None:
    """Compares what gradd's calls leave with what PyTorch's leave.

    Raises:
        AssertionError: They differ, or the refusal has another name.
    """
    expected, _ = deed.run(lambda net: net)
    found, net = deed.run(ORTModule)
    for number, (ours, eager) in enumerate(zip(found, expected, strict=True)):
        assert ours[1] == eager[1], f"the state after call {number}"
        assert_close(ours[0], eager[0], f"call {number}")
    stats = net.gradd_stats()
    if deed.reasons:
        assert stats["captures"] == 0 and set(stats["fallbacks"]) <= set(deed.reasons), stats


def deeds(
    before: str, bodies: tuple[str, ...], tells: str, reasons: tuple[str, ...] = ()
) -> list[Deed]:
    """Deeds with the same beginning and end."""
    return [Deed(before, does, tells, reasons) for does in bodies]


_LEAF = "p = torch.tensor([2., 3.], requires_grad=True)"
_PROBE = "probe = nn.Linear(2, 1); opt = torch.optim.Adam(probe.parameters())"
_TRAINED = _PROBE + "; probe(torch.ones(1, 2)).sum().backward()"
_MINE = """
class Mine(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None: p.data.add_(p.grad, alpha=-0.1)
"""
_DONE = ("outside_written", "outside_state", "func_transform", "export_failed", "backward_hooks")
BACKWARDS = [
    *deeds(
        _LEAF,
        (
            "(p * 3).sum().backward()",
            "(p * p).sum().backward(); y = p.grad.sum()",
            "torch.autograd.backward([(p * 3).sum()])",
            "torch.autograd.backward((p * p).sum(), inputs=[p])",
            "operator.methodcaller('backward')((p * 3).sum())",
            "[*map(torch.Tensor.backward, [(p * 3).sum()])]",
            "functools.partial((p * p).sum().backward)()",
            "(p * 3).sum().backward(create_graph=True)",
            "(p * x.sum()).sum().backward()",
            "self.lin(x).sum().backward()",
            "(self.lin.weight * 3).sum().backward()",
            "((p * p).sum() + (self.lin.weight * 3).sum()).backward()",
            "y = torch.autograd.grad((p * p).sum(), p)[0].sum()",
            "y = torch.autograd.grad((p * 3).sum(), p)[0].sum()",
            "y = torch.func.grad(lambda v: (v * v).sum())(p.detach()).sum()",
            "y = torch.autograd.functional.jacobian(lambda v: v * v, p.detach()).sum()",
            "p.register_hook(lambda g: g * 2); (p * 3).sum().backward()",
            "p.register_post_accumulate_grad_hook(lambda q: None); (p * 3).sum().backward()",
            "p.grad = torch.ones(2)",
            "setattr(p, 'grad', torch.ones(2))",
            "torch.Tensor.grad.__set__(p, torch.ones(2))",
            "p.grad = None if p.grad is not None else torch.ones(2)",
            "(p * 3).grad_fn.next_functions[0][0](torch.ones(2))",
            "torch.autograd.Variable._execution_engine.run_backward("
            "((p * 3).sum(),), (torch.ones(()),), False, False, (), True, True)",
        ),
        "p.grad, [q.grad for q in net.parameters()]",
        _DONE,
    ),
    *deeds(
        _LEAF + "; (p * 2).sum().backward()",
        (
            "p.grad.zero_()",
            "p.grad.add_(1)",
            "torch._foreach_add_([p.grad], 1)",
            "y = float(p.grad.sum()); (p * 3).sum().backward()",
            "p.grad = p.grad * 2",
            "del p.grad",
            "y = float(p.grad.sum())",
            "y = p.grad.sum()",
            "y = 2.0 if p.grad is None else 3.0",
        ),
        "p.grad, [q.grad for q in net.parameters()]",
        _DONE,
    ),
    *deeds(
        _TRAINED,
        (
            "opt.step()",
            "opt.zero_grad()",
            "opt.zero_grad(set_to_none=False)",
            "probe.zero_grad()",
            "operator.methodcaller('step')(opt)",
            "operator.methodcaller('zero_grad')(opt)",
            "[*map(torch.optim.Adam.zero_grad, [opt])]",
            "nn.utils.clip_grad_norm_(probe.parameters(), 0.1)",
            "opt.zero_grad(); probe(torch.ones(1, 2)).square().sum().backward(); opt.step()",
            "opt.step(lambda: probe(torch.ones(1, 2)).sum())",
        ),
        "[q.grad for q in probe.parameters()], [*probe.parameters()], len(opt.state)",
        _DONE,
    ),
    *deeds(
        f"{_MINE}\nprobe = nn.Linear(2, 1); opt = Mine(probe.parameters(), {{}})\n"
        "probe(torch.ones(1, 2)).sum().backward()",
        ("opt.step()", "operator.methodcaller('step')(opt)", "[*map(Mine.step, [opt])]"),
        "[q.grad for q in probe.parameters()], [*probe.parameters()]",
        _DONE,
    ),
]
