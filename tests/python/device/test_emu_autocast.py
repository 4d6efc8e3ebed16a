"""Autocast on a GPU: casts are those of CUDA's kernels, and the daemon makes the same.

PyTorch's side runs under the same autocast, on tensors of the same device.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from gradd import ORTModule
from gradd.optim import AdamWMode, FusedAdam
from helpers import emu_torch
from helpers.graphs.captures import Lambda
from helpers.models.families import build
from helpers.selection import one_in

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = {"bf16": BF16, "f16": F16}
BOUND = {BF16: 2e-2, F16: 4e-3}
X = torch.linspace(-1, 1, 24).reshape(6, 4)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, 2, 3, 4)


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(6, device=x.device) % 4


def _nested(s: Any, x: torch.Tensor) -> list[torch.Tensor]:
    h = s.lin(x)
    with torch.autocast(x.device.type, enabled=False):
        full = s.lin(h.float())
        with torch.no_grad(), torch.autocast(x.device.type):
            inner = s.lin(full)
    return [h, full, inner, h * full]


def _of_the_cpu(s: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", BF16):
        h = s.lin(x)
        with torch.autocast(x.device.type, enabled=False):
            full = s.lin(x)
    return [h, full]


FORMS = {
    "linear": lambda s, x: s.lin(x),
    "linear of halves": lambda s, x: s.lin(s.lin(x)),
    "mixed": lambda s, x: s.lin(x) * x + x * 2.5 + s.lin(x) * 1.5,
    "layer norm": lambda s, x: s.norm(s.lin(x)),
    "rms norm": lambda s, x: F.rms_norm(s.lin(x), (4,)),
    "softmax": lambda s, x: torch.softmax(s.lin(x) * 9, -1),
    "log softmax": lambda s, x: torch.log_softmax(s.lin(x), -1),
    "softmax of a type": lambda s, x: torch.softmax(s.lin(x), -1, dtype=s.lin(x).dtype),
    "sum": lambda s, x: s.lin(x).sum(),
    "sum of rows": lambda s, x: s.lin(x).sum(-1, keepdim=True),
    "sum of a type": lambda s, x: s.lin(x).sum(0, dtype=s.lin(x).dtype),
    "mean": lambda s, x: s.lin(x).mean(-1),
    "prod": lambda s, x: s.lin(x).prod(-1),
    "cumsum": lambda s, x: s.lin(x).cumsum(0),
    "norm": lambda s, x: s.lin(x).norm(),
    "norm of rows": lambda s, x: s.lin(x).norm(dim=-1),
    "normalize": lambda s, x: F.normalize(s.lin(x)),
    "pow": lambda s, x: s.lin(x).pow(2) + s.lin(x) ** 3,
    "rsqrt": lambda s, x: torch.rsqrt(s.lin(x).square() + 1),
    "exp and log": lambda s, x: torch.log(torch.exp(s.lin(x)) + 1) + torch.log1p(s.lin(x) ** 2),
    "softplus": lambda s, x: F.softplus(s.lin(x)),
    "logsumexp": lambda s, x: torch.logsumexp(s.lin(x), -1),
    "reciprocal": lambda s, x: (s.lin(x) + 4).reciprocal(),
    "einsum": lambda s, x: torch.einsum("ij,kj->ik", x, s.lin.weight),
    "tensordot": lambda s, x: torch.tensordot(x, s.lin.weight, 1),
    "tensordot of halves": lambda s, x: torch.tensordot(s.lin(x), s.lin(x).t(), 1),
    "inner": lambda s, x: torch.inner(x, s.lin.weight),
    "bilinear": lambda s, x: F.bilinear(x, s.lin(x), s.lin.weight.reshape(1, 4, 4)),
    "bmm": lambda s, x: torch.bmm(x.reshape(2, 3, 4), s.lin(x).reshape(2, 4, 3)),
    "addmm": lambda s, x: torch.addmm(s.lin.bias, x, s.lin.weight),
    "attention": lambda s, x: F.scaled_dot_product_attention(*[_heads(s.lin(x))] * 3),
    "concat": lambda s, x: torch.concat([x, s.lin(x)]),
    "stack": lambda s, x: torch.stack([x, s.lin(x)]),
    "where": lambda s, x: torch.where(x > 0, s.lin(x), x),
    "addcmul": lambda s, x: torch.addcmul(x, s.lin(x), s.lin(x)),
    "scatter_add": lambda s, x: x.scatter_add(0, (x > 0).long(), s.lin(x)),
    "gelu": lambda s, x: F.gelu(s.lin(x)),
    "cross entropy": lambda s, x: F.cross_entropy(s.lin(x), _classes(x)),
    "nll": lambda s, x: F.nll_loss(torch.log_softmax(s.lin(x), -1), _classes(x)),
    "mse": lambda s, x: F.mse_loss(s.lin(x), x),
    "l1": lambda s, x: F.l1_loss(s.lin(x), x),
    "bce": lambda s, x: F.binary_cross_entropy_with_logits(s.lin(x), x.abs()),
    "square": lambda s, x: s.lin(x).square(),
    "norm of numpy's kind": lambda s, x: torch.linalg.norm(s.lin(x), dim=-1),
    "special softmax": lambda s, x: torch.special.log_softmax(s.lin(x), -1),
    "distance": lambda s, x: F.pairwise_distance(s.lin(x), x),
    "cosine": lambda s, x: F.cosine_similarity(s.lin(x), x),
    "nested": _nested,
    "autocast for the CPU": _of_the_cpu,
}


class Forms(nn.Module):
    """Each form with layers of its own: one graph for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forms = nn.ModuleDict(
            {
                name: Lambda(form, lin=nn.Linear(4, 4), norm=nn.LayerNorm(4))
                for name, form in FORMS.items()
            }
        )

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: form(x) for name, form in self.forms.items()}


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / (want.norm() + 1e-30))


_NOT_CUDAS = {"attention", "nested", "autocast for the CPU"}


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("half", one_in(2, HALVES))
def test_casts_are_those_of_torch(half: str) -> None:
    theirs = Forms().to("emu")
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    sides = []
    for model in (ours, theirs):
        with torch.autocast("emu", HALVES[half]):
            found = model(X.to("emu"))
        for value in pytree.tree_leaves(found):
            if value.requires_grad:  # the sum of what a norm gives has no gradient but rounding
                weights = torch.linspace(0.5, 1.5, value.numel()).view_as(value).to("emu")
                (value.float() * weights).sum().backward(retain_graph=True)
        sides.append(found)
    wrong = []
    for name in FORMS:
        pairs = zip(*(pytree.tree_leaves(side[name]) for side in sides), strict=True)
        for mine, plain in pairs:
            off = _relative(mine, plain)
            if mine.dtype is not plain.dtype or off > BOUND[HALVES[half]]:
                wrong.append(f"{name}: {mine.dtype}, torch {plain.dtype}, {off:.1e} off")
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None and _relative(q.grad, p.grad) > 2 * BOUND[HALVES[half]]:
            wrong.append(f"{name}: gradient {_relative(q.grad, p.grad):.1e} off")
    assert not wrong


class _Steps(TorchDispatchMode):
    """Notes operators behind autocast, with the types that each reads and is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "aten":
            read = [t.dtype for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.noted.append((func, read, (kwargs or {}).get("dtype")))
        return func(*args, **(kwargs or {}))


class _Parts:
    """A linear layer and a norm without values."""

    def __init__(self, device: str) -> None:
        weight, bias = torch.empty(4, 4, device=device), torch.empty(4, device=device)
        self.lin = functools.partial(F.linear, weight=weight, bias=bias)
        self.lin.weight, self.lin.bias = weight, bias
        self.norm = functools.partial(F.layer_norm, normalized_shape=(4,), weight=bias, bias=bias)


def _steps(device: str, form: Any) -> list[Any]:
    """What autocast for a device does in a form, without such a device."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _Steps() as steps:
        parts = _Parts(device)
        x = torch.empty(6, 4, device=device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, BF16)
        steps.noted.clear()
        try:
            form(parts, x)
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
    return steps.noted


def test_the_kernels_are_those_of_cuda() -> None:
    """torch's CPU build has the autocast kernels of CUDA as well."""

    def kernels(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    of_cuda = {name for name in kernels("AutocastCUDA") if "cudnn" not in name}
    assert len(of_cuda) > 70 and kernels("AutocastPrivateUse1") == of_cuda


# A CPU build has no attention for CUDA, and torch.autocast("cuda") does nothing there.
@pytest.mark.parametrize("name", one_in(5, sorted(FORMS.keys() - _NOT_CUDAS)))
def test_casts_are_those_of_cuda(name: str) -> None:
    found = _steps("emu", FORMS[name])
    assert found == _steps("cuda", FORMS[name])


def _in_half(model: nn.Module, half: torch.dtype, batch: dict[str, torch.Tensor]) -> Any:
    with torch.autocast("emu", half):
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


class Mlp(nn.Module):
    """Two layers, attention over the rows, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 5)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Inputs of 12 features, and classes."""
        h = F.gelu(self.norm(self.first(x)))
        h = h + torch.softmax(h @ h.t() / 5, -1) @ h
        return F.cross_entropy(self.last(h), labels)


def _features(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 12, generator=generator)
    return {"x": x, "labels": torch.randint(5, (6,), generator=generator)}


def _on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to("emu") for name, value in batch.items()}


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("family", "half"),
    [
        *(("mlp", "bf16"), ("mlp", "f16")),
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in itertools.product(("llama", "gpt2", "bert_cls"), HALVES)
        ),
    ],
)
def test_models_train_as_in_torch(family: str, half: str) -> None:
    torch.manual_seed(2)
    if family == "mlp":
        model, batch = Mlp(), _features
    else:
        model, make = build(family)
        batch = lambda step: make(2, 9, step)  # noqa: E731
    exact, theirs, ours = (copy.deepcopy(model).to("emu") for _ in range(3))
    for one in (exact, theirs, ours):
        if isinstance(one, PreTrainedModel):
            one.tie_weights()  # which .to() has parted: there it makes new parameters
    wrapped = ORTModule(ours, strict=True)
    sides = {"exact": exact, "theirs": theirs, "ours": wrapped}
    rounding = torch.finfo(HALVES[half]).eps
    for step in range(2):
        losses, grads = {}, {}
        for name, side in sides.items():
            data = _on_device(batch(step))
            loss = side(**data) if name == "exact" else _in_half(side, HALVES[half], data)
            loss = getattr(loss, "loss", loss)
            loss.backward()
            losses[name] = loss.detach().cpu().double()
            parameters = [p for p in side.parameters() if p.grad is not None]
            grads[name] = torch.cat([p.grad.cpu().double().flatten() for p in parameters])
            with torch.no_grad():
                for p in parameters:
                    p -= 0.1 * p.grad
            side.zero_grad()
        for found in (losses, grads):
            off, own = (_relative(found[side], found["exact"]) for side in ("ours", "theirs"))
            assert off <= 2 * max(own, rounding), f"step {step}: {off:.1e} off, PyTorch {own:.1e}"
    stats = wrapped.gradd_stats()
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {} and stats["self_checks"] > 0


@pytest.mark.usefixtures("daemon")
def test_a_call_follows_the_autocast_around_it() -> None:
    """One for the CPU says nothing about tensors of a GPU."""
    theirs = nn.Linear(4, 4).to("emu")
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x = X.to("emu")
    around = [("emu", BF16), ("emu", F16), ("cpu", BF16), ("emu", BF16)]
    for device, dtype in around:
        with torch.autocast(device, dtype):
            mine, plain = ours(x), theirs(x)
        assert mine.dtype is plain.dtype is (dtype if device == "emu" else F32)
        assert torch.equal(mine, plain) or _relative(mine, plain) <= torch.finfo(plain.dtype).eps
    assert ours(x).dtype is F32
    assert ours.gradd_stats()["fallbacks"] == {}


@pytest.mark.usefixtures("daemon")
def test_a_part_on_the_cpu_has_the_autocast_of_the_cpu() -> None:
    def forward(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.lin(x).float().cpu()
        with torch.autocast("cpu", F16):
            half = h @ h.t()
        return [h @ h.t(), half, self.lin(half.to(x.device) @ x)]

    torch.manual_seed(1)
    theirs = Lambda(forward, lin=nn.Linear(4, 4).to("emu"))
    ours = ORTModule(copy.deepcopy(theirs))
    with torch.autocast("emu", BF16):
        pairs = list(zip(ours(X.to("emu")), theirs(X.to("emu")), strict=True))
    assert [mine.dtype for mine, _ in pairs] == [F32, F16, BF16]
    for mine, plain in pairs:
        assert mine.dtype is plain.dtype and _relative(mine, plain) <= BOUND[BF16]
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == {} and stats["parts_in_torch"].keys() == {"device"}


@pytest.mark.usefixtures("daemon")
def test_the_default_type_may_change() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type):
            return self.lin(x)

    ours = ORTModule(Lambda(forward, lin=nn.Linear(4, 4).to("emu")), strict=True)
    before = torch.get_autocast_dtype("emu")
    try:
        for dtype in (BF16, F16, BF16):
            torch.set_autocast_dtype("emu", dtype)
            assert ours(X.to("emu")).dtype is dtype
    finally:
        torch.set_autocast_dtype("emu", before)


OPTIMIZERS = {
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH, eps=1e-8),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
}


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaler_skips_the_steps_that_torch_skips(name: str) -> None:
    """Some losses are too large for gradients in f16."""
    torch.manual_seed(2)
    theirs = Mlp().to("emu")
    ours = copy.deepcopy(theirs)
    scales: list[list[float]] = []
    for model, kind in ((theirs, "AdamW"), (ours, name)):
        wrapped = ORTModule(model, strict=True) if model is ours else model
        optimizer = OPTIMIZERS[kind](model.parameters())
        scaler = torch.amp.GradScaler("emu", init_scale=2.0**8, growth_interval=2)
        scales.append([])
        for step in range(6):
            loss = _in_half(wrapped, F16, _on_device(_features(step)))
            scaler.scale(loss * (1e30 if step in (2, 3) else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1] and len(set(scales[0])) > 2
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert _relative(p, q) <= 2e-2
