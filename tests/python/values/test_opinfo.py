"""Every operator of torch's list (OpInfo), on torch's own samples: right, or in PyTorch by name.

Results and gradients are compared with f64 and may be twice as far from it as PyTorch's own in the
type of the test (four times, where few numbers leave it to chance), in the norm of each tensor;
what is finite there is finite here. In `make nightly` alone: to import the list closes the global
flags of torch.backends for the process.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gradd import ORTModule

if "GRADD_NIGHTLY" not in os.environ:
    pytest.skip("only in make nightly: it closes flags of torch", allow_module_level=True)
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [pytest.mark.usefixtures("shared_daemon"), pytest.mark.nightly]

SAMPLES = 7  # of each operator
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Random numbers; memory that is not initialised; complex numbers and other layouts.
LEFT_OUT = (
    r"rand|bernoulli|multinomial|dropout|exponential|cauchy|normal(?!ize)|geometric|rrelu|uniform"
    r"|multi_head_attention|empty|as_strided_partial|linalg|svd|fft|stft|complex|polar|sparse"
    r"|jiterator"
)
# PyTorch composes it in f32 where its fused kernel does not apply (docs/numbers.md).
COMPOSED = {"nn.functional.scaled_dot_product_attention"}


def _name(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


KNOWN = {_name(op): op for op in op_db if not re.search(LEFT_OUT, op.name)}
CASES = [(name, str(dtype).removeprefix("torch.")) for name in KNOWN for dtype in ROUNDING]


class Call(nn.Module):
    """A sample's call as a module of its tensors."""

    def __init__(self, op: Any, sample: tuple, exact: torch.dtype | None = None) -> None:
        super().__init__()
        self.op = op
        self.leaves, self.spec = pytree.tree_flatten(sample)
        if exact:  # a type among the arguments, too
            self.leaves = [exact if _is_type(x) else x for x in self.leaves]
        self.places = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, options = pytree.tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **options)

    def tensors(self, dtype: torch.dtype | None, gradients: bool) -> list[torch.Tensor]:
        """Copies of the sample's."""
        found = [self.leaves[i].detach().clone() for i in self.places]
        cast = [x.to(dtype) if dtype and x.is_floating_point() else x for x in found]
        return [x.requires_grad_(gradients and x.is_floating_point()) for x in cast]


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, torch.dtype) and leaf in ROUNDING


def _run(module: nn.Module, tensors: list[torch.Tensor], dtype: torch.dtype) -> dict:
    """Results and gradients by name; the weights of the results are exact in the type."""
    result = module(*tensors)
    outs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    found = {f"result {i}": x.detach() for i, x in enumerate(outs)}
    roots = [x for x in outs if x.is_floating_point() and x.requires_grad]
    gen = torch.Generator().manual_seed(1)
    weights = [torch.rand(x.shape, generator=gen) + 0.25 for x in roots]
    if roots:
        torch.autograd.backward(
            roots, [w.to(dtype).to(x.dtype) for w, x in zip(weights, roots, strict=True)]
        )
    grads = {f"gradient {i}": x.grad for i, x in enumerate(tensors)}
    return found | {name: g.detach() for name, g in grads.items() if g is not None}


def _difference(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> str:
    """In words, or nothing."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
    if not theirs.is_floating_point() or exact.shape != theirs.shape:
        return "" if torch.equal(ours, theirs) else "differs"
    a, b, e = ours.double(), theirs.double(), exact.double()
    finite = b.isfinite() & e.isfinite()
    squares = e[finite] ** 2
    # So few count that PyTorch's may be near by chance.
    few = squares.sum() ** 2 <= 16 * (squares**2).sum()
    own_steps = 2 if theirs.dtype is torch.float32 else 0.5  # exp and powers of another library
    rounding = ROUNDING.get(theirs.dtype, 0.0) * (8 if few else own_steps)
    if not a[finite].isfinite().all():
        return f"{int((~a[finite].isfinite()).sum())} numbers are not finite"
    if (b.isnan() & e.isnan() & ~a.isnan()).any():
        return "a number in the place of NaN"
    off, own = ((x - e)[finite].norm() for x in (a, b))
    near = (4 if few else 2) * own + rounding * e[finite].norm() + 1e-7
    return "" if off <= near else f"off by {off:.3g}, PyTorch by {own:.3g}"


def _compare(op: Any, sample: tuple, dtype: torch.dtype) -> str:
    gradients = op.supports_autograd
    plain, exact = Call(op.op, sample), Call(op.op, sample, torch.float64)
    try:
        theirs = _run(plain, plain.tensors(None, gradients), dtype)
        want = _run(exact, exact.tensors(torch.float64, gradients), dtype)
    except Exception:  # PyTorch itself refuses some in halves, or in f64
        return ""
    model = ORTModule(Call(op.op, sample))
    ours = _run(model, plain.tensors(None, gradients), dtype)
    if model.gradd_stats()["fallbacks"]:
        return ""
    for name, tensor in theirs.items():
        missing = name not in ours
        if missing and not tensor.count_nonzero():
            continue  # none instead of zeros
        text = "is missing" if missing else _difference(ours[name], tensor, want[name])
        if text:
            return f"{name}: {text}"
    return ""


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_operator_of_torch(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")  # the capture alone has to be right
    name, dtype = case[0], getattr(torch, case[1])
    op = KNOWN[name]
    if name in COMPOSED or not op.supports_dtype(dtype, "cpu"):
        pytest.skip("PyTorch has no such operator in this type, or composes it otherwise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        wrong = []
        for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
            call = (sample.input, sample.args, sample.kwargs)
            tensors = [x for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]
            real = all(x.layout is torch.strided and not x.is_complex() for x in tensors)
            if real and any(x.is_floating_point() for x in tensors):
                text = _compare(op, call, dtype)
                wrong += [f"{call}: {text}"] * bool(text)
    assert not wrong, "\n".join(wrong)
