"""Captures under autocast: every cast that torch makes is a node of the graph, and no other.

The graph is evaluated by torch's own operators (onnx_eval), in bf16 as in the module, and
differentiated by autograd. Where both do the same operations in the same order the bits agree;
attention differs, because torch's kernel rounds less than the decomposed form.
"""

from __future__ import annotations

from typing import Any

import models
import onnx
import onnx_eval
import pytest
import torch
import torch.nn.functional as F
from captured import Lambda, feeds, leaves_of
from selection import every_run
from torch import nn

from gradd import export

FLOAT, BFLOAT16 = 1, 16


def cast(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return torch.autocast("cpu", dtype, **options)


def nodes(cap: export.Capture) -> list[onnx.NodeProto]:
    return list(onnx.ModelProto.FromString(cap.onnx).graph.node)


def casts(cap: export.Capture, name: str) -> list[int]:
    """Element types that a value is cast to."""
    found = [n for n in nodes(cap) if n.op_type == "Cast" and n.input[0] == name]
    return [a.i for n in found for a in n.attribute if a.name == "to"]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance of two tensors, relative to the length of the second."""
    return float((got.double() - want.double()).norm() / (want.double().norm() + 1e-30))


def check(module: nn.Module, args: tuple = (), kwargs: dict | None = None, bound: float = 0.0):
    """Captures a call under autocast; compares outputs, their types, and gradients."""
    kwargs = kwargs or {}
    with cast():
        cap = export.capture(module, args, kwargs)
        want = leaves_of(module(*args, **kwargs))
    values = feeds(module, cap, args, kwargs)
    got = onnx_eval.evaluate(cap.onnx, values)
    module.zero_grad()
    outputs = []
    for spec in cap.outputs:
        mine, theirs = got[spec.name], want[spec.leaf]
        assert mine.dtype == theirs.dtype, f"{spec.name} is {mine.dtype}, not {theirs.dtype}"
        assert relative(mine.detach(), theirs.detach()) <= bound, spec.name
        outputs.append((mine, theirs))
    sum(t.float().sum() for _, t in outputs).backward()
    sum(m.float().sum() for m, _ in outputs).backward()
    for name, param in module.named_parameters():
        mine = values[name].grad if name in values else None
        if param.grad is None:
            assert mine is None, f"{name} has no gradient in PyTorch"
        elif mine is None:
            assert float(param.grad.abs().max()) == 0.0, f"{name} has no gradient in the graph"
        else:
            assert mine.dtype == param.grad.dtype
            assert relative(mine, param.grad) <= bound, f"gradient of {name}"
    return cap


X = torch.linspace(-1, 1, 24).reshape(6, 4)
FORMS = {
    "linear": lambda s, x: s.lin(x),
    "linear_of_bf16": lambda s, x: s.lin(x.bfloat16()),
    "mixed": lambda s, x: s.lin(x) * x + x * 2.5 + s.lin(x) * 1.5,
    "norm_of_bf16": lambda s, x: s.norm(s.lin(x)),
    "norm_of_f32": lambda s, x: s.norm(x) + s.lin(x),
    "softmax_in_f32": lambda s, x: torch.softmax(s.lin(x) * 9, -1, dtype=torch.float32) ** 2,
    "softmax": lambda s, x: torch.softmax(s.lin(x) * 9, -1) ** 2,
    "sum_in_f32": lambda s, x: s.lin(x).sum(0, dtype=torch.float32),
    "einsum": lambda s, x: torch.einsum("ij,kj->ik", x, s.lin.weight),
    "concat": lambda s, x: torch.concat([x, s.lin(x)]),
    "stack": lambda s, x: torch.stack([x, s.lin(x)]),
    "where": lambda s, x: torch.where(x > 0, s.lin(x), x),
    "bmm": lambda s, x: torch.bmm(x.reshape(2, 3, 4), s.lin(x).reshape(2, 3, 4).transpose(1, 2)),
    "addmm": lambda s, x: torch.addmm(s.lin.bias, x, s.lin.weight),
    "gelu": lambda s, x: F.gelu(s.lin(x)),
    "cross_entropy": lambda s, x: F.cross_entropy(s.lin(x), torch.arange(6) % 4),
    "nll": lambda s, x: F.nll_loss(torch.log_softmax(s.lin(x), -1), torch.arange(6) % 4),
    "mse": lambda s, x: F.mse_loss(s.lin(x), x),
}


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_casts_are_those_of_torch(form):
    torch.manual_seed(0)
    module = Lambda(lambda s, x: FORMS[form](s, x), lin=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    check(module, (X,), bound=2e-2)


def test_regions_without_autocast_are_respected():
    """Nested regions, with no_grad inside and around them, in every order."""

    def forward(self, x):
        h = self.a(x)
        with cast(enabled=False):
            full = self.b(h.float())
            with torch.no_grad():
                stopped = self.b(h.float())
        with torch.no_grad():
            half = self.a(h)
            with cast(enabled=False):
                again = self.a(half.float())
                with cast():
                    inner = self.b(again)
        return (h + half).sum(), full + stopped, again, inner * h

    torch.manual_seed(1)
    module = Lambda(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    cap = check(module, (X,), bound=2e-2)
    assert [o.dtype for o in cap.outputs] == ["bf16", "f32", "f32", "bf16"]
    assert any(n.op_type == "StopGradient" for n in nodes(cap))


@pytest.mark.quick
def test_each_weight_is_cast_once():
    def forward(self, x):
        return self.lin(self.lin(x)) + self.lin(x)

    with cast():
        cap = export.capture(Lambda(forward, lin=nn.Linear(4, 4)), (X,), {})
    assert casts(cap, "lin.weight") == casts(cap, "lin.bias") == [BFLOAT16]


def test_no_grad_first_keeps_the_gradient():
    """The cast of a weight under no_grad must not be the one that the other use gets."""

    def forward(self, x):
        with torch.no_grad():
            fixed = self.lin(x)
        return (self.lin(x) * fixed).sum()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    check(module, (X,), bound=2e-2)
    assert float(module.lin.weight.grad.abs().max()) > 0


def test_capture_leaves_autocast_as_it_was():
    module = Lambda(lambda s, x: s.lin(x), lin=nn.Linear(4, 4))
    with cast():
        export.capture(module, (X,), {})
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        assert module(X).dtype is torch.bfloat16
    plain = export.capture(module, (X,), {})
    assert not any(n.op_type == "Cast" for n in nodes(plain))


@pytest.mark.parametrize(
    "family",
    every_run(("llama",), ("llama", "gemma2", "gpt2", "bert_cls", "peft_lora_llama")),
)
def test_families(family):
    module, make_batch = models.build(family)
    with cast():
        cap = export.capture(module, (), make_batch(2, 8, 0))
    for name in cap.params:
        assert casts(cap, name) in ([], [BFLOAT16]), f"{name} is cast more than once"
    outputs = {o.name: o.dtype for o in cap.outputs}
    assert outputs["loss"] == "f32" and outputs["logits"] == "bf16"
