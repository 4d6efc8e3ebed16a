"""Ranks, sizes and element types: those of the trace, those of the graph, and torch's own.

Translations decide by what the trace says of a value. torch's table of decompositions has it wrong
for losses per row; what else is wrong, there or in a translation, is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import inspect

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule
from gradd.graph import rules
from gradd.graph.translation import build, stock
from gradd.spec import CaptureError
from helpers.graphs.captures import Lambda, capture
from helpers.selection import drawn, every_run

pytestmark = pytest.mark.one_in(4)

ROWS, CLASSES = 5, 4


def _nll(scores, y, **options):
    return F.nll_loss(F.log_softmax(scores, 1), y, **options)


LOSSES = {
    "nll": _nll,
    "nll weight": lambda o, y, **k: _nll(o, y, weight=torch.tensor([1.0, 2.0, 0.5, 3.0]), **k),
    "nll ignored": lambda o, y, **k: _nll(o, y, ignore_index=1, **k),
    "ce": F.cross_entropy,
    "ce weight": lambda o, y, **k: F.cross_entropy(o, y, torch.tensor([1.0, 2.0, 0.5, 3.0]), **k),
    "ce ignored": lambda o, y, **k: F.cross_entropy(o, y, ignore_index=1, **k),
    "ce smoothed": lambda o, y, **k: F.cross_entropy(o, y, label_smoothing=0.2, **k),
    "bce": lambda o, y, **k: F.binary_cross_entropy_with_logits(o[:, 0], (y > 1).float(), **k),
    "mse": lambda o, y, **k: F.mse_loss(o[:, 0], y.float(), **k),
    "l1": lambda o, y, **k: F.l1_loss(o[:, 0], y.float(), **k),
    "huber": lambda o, y, **k: F.huber_loss(o[:, 0], y.float(), **k),
    "smooth l1": lambda o, y, **k: F.smooth_l1_loss(o[:, 0], y.float(), **k),
    "kl": lambda o, y, **k: F.kl_div(F.log_softmax(o, 1), F.one_hot(y, CLASSES).float(), **k),
    "poisson": lambda o, y, **k: F.poisson_nll_loss(o[:, 0], y.float(), **k),
    "soft margin": lambda o, y, **k: F.soft_margin_loss(o[:, 0], 2.0 * (y > 1) - 1, **k),
    "hinge": lambda o, y, **k: F.hinge_embedding_loss(o[:, 0], 2 * (y > 1) - 1, **k),
    "ranking": lambda o, y, **k: F.margin_ranking_loss(o[:, 0], o[:, 1], 2.0 * (y > 1) - 1, **k),
    "cosine": lambda o, y, **k: F.cosine_embedding_loss(o, o.flip(0), 2 * (y > 1) - 1, **k),
    "triplet": lambda o, y, **k: F.triplet_margin_loss(o, o.flip(0), o.roll(1, 0), **k),
    "multi label": lambda o, y, **k: F.multilabel_soft_margin_loss(
        o, F.one_hot(y, CLASSES).float(), **k
    ),
}
USES = {
    "exp sum": lambda n: n.exp().sum(),
    "count": lambda n: n.sum() / n.numel() * (n.dim() + 1),
    "rest": lambda n: n[1:].mean(),
    "order": lambda n: n[n.detach().reshape(len(n), -1).sum(1).argsort()].pow(2).sum(),
    "joined": lambda n: torch.cat([n, n * 2]).pow(2).mean(),
    "stacked": lambda n: torch.stack([n.exp().sum(), n.mean()]).sum(),
}
DECOMPOSED = ("plain", "beside a write")


def _module(loss, use, way: str) -> nn.Module:
    def forward(self, x, y):
        if way != "plain":
            self.calls.add_(1)  # torch's decompositions take part
        return use(loss(self.lin(x), y, reduction="none"))

    torch.manual_seed(0)
    calls = {} if way == "plain" else {"calls": torch.zeros(())}
    return Lambda(forward, lin=nn.Linear(3, CLASSES), **calls)


def _data(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (ROWS, *shape)
    y = torch.randint(0, CLASSES, size, generator=generator)
    y.view(-1)[0] = 2  # something is never ignored
    return torch.randn(ROWS, 3, generator=generator), y


def _assert_same(module: nn.Module, args: tuple, monkeypatch) -> None:
    """Results and gradients of the daemon, unchecked by itself, are PyTorch's."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    wrapped = ORTModule(copy.deepcopy(module), strict=True)
    found = []
    for model in (module, wrapped):
        out = model(*args)
        out = list(out) if isinstance(out, (list, tuple)) else [out]
        sum(o.sum() for o in out).backward()
        found.append([*out, *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _cases() -> list[tuple[str, str]]:
    classes = [name for name in LOSSES if name.startswith(("nll", "ce"))]
    return [(n, "plain") for n in LOSSES] + [(n, "beside a write") for n in classes]


@pytest.mark.parametrize("case", every_run(drawn(_cases(), 8), _cases()), ids="-".join)
def test_a_loss_per_row_is_one(case, shared_daemon, monkeypatch):
    name, way = case

    def all_uses(n):
        return [use(n) for use in USES.values()]

    _assert_same(_module(LOSSES[name], all_uses, way), _data(), monkeypatch)


@pytest.mark.parametrize("use", USES)
def test_uses_of_a_loss_per_row(use, shared_daemon, monkeypatch):
    _assert_same(_module(LOSSES["nll"], USES[use], "plain"), _data(), monkeypatch)


@pytest.mark.parametrize(
    "name", every_run(("nll", "ce"), ["nll", "nll weight", "nll ignored", "ce", "ce ignored"])
)
@pytest.mark.parametrize(("shape", "way"), zip([(3,), (3, 2)], DECOMPOSED, strict=True))
def test_a_loss_per_position_is_one(name, shape, way, shared_daemon, monkeypatch):
    def spread(o, y, **options):
        places = torch.linspace(0.5, 1.5, y[0].numel()).reshape(y[0].shape)
        return LOSSES[name](o.reshape(*o.shape, *([1] * len(shape))) * places, y, **options)

    _assert_same(_module(spread, USES["exp sum"], way), _data(*shape), monkeypatch)


def test_operators_called_by_their_schema(shared_daemon, monkeypatch):
    """Where torch's rule in Python takes other arguments than the operator."""
    aten = torch.ops.aten

    def forward(self, x, y):
        h = self.lin(x)
        rows = aten.nll_loss(h, y, None, 0)
        std, mean = aten.std_mean(h, [1], False, True)
        return rows.sum(), std + mean, aten.sub.Scalar(aten.add.Scalar(h, 2.0, 3), 1.0, 2)

    _assert_same(Lambda(forward, lin=nn.Linear(3, CLASSES)), _data(), monkeypatch)


def test_indices_along_the_last_axis(shared_daemon, monkeypatch):
    def forward(self, x, y):
        h = self.lin(x)
        best = torch.gather(h.tanh(), -1, h.topk(3)[1])
        return best, h.gather(-1, h.argsort(-1)), torch.std_mean(h, -1, keepdim=True)[0] + h.norm()

    _assert_same(Lambda(forward, lin=nn.Linear(3, CLASSES)), _data(), monkeypatch)


def test_indices_into_an_axis_of_the_call(shared_daemon, monkeypatch):
    def forward(self, x, y):
        rows = self.lin(x).T.exp()  # its last axis has the size of the call
        return torch.gather(rows, -1, y[None, :].expand(len(rows), -1))

    _assert_same(Lambda(forward, lin=nn.Linear(3, CLASSES)), _data(), monkeypatch)


# --- what may still be wrong ------------------------------------------------------------------

# Positions where torch's rules have other names for the same thing.
_SAME = frozenset(
    {"a", "b", "x", "self", "input", "other", "dim", "dims", "size", "shape", "A", "tensor"}
)
_RENAMED = frozenset(
    {
        *("t", "value", "mat1", "strides", "start", "pred", "lambd", "rate", "low", "high"),
        *("batch_size", "num_channels", "flattened_inner_size", "num_groups", "training"),
        *("scale_h", "scale_w", "scales_w", "elements", "test_elements"),
    }
)


def _misread(target, rule) -> bool:
    known = inspect.signature(rule).parameters
    if any(p.kind.name.startswith("VAR") for p in known.values()):
        return False
    places = [n for n, p in known.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    wanted = [a.name for a in target._schema.arguments if not a.kwarg_only]
    if len(wanted) > len(places):
        return True
    pairs = zip(wanted, places, strict=False)
    return any(a != b and b not in _SAME and b not in _RENAMED for a, b in pairs)


def test_all_rules_that_misread_arguments_are_known():
    found = {
        target
        for target, rule in torch._decomp.decomposition_table.items()
        if hasattr(target, "_schema") and not target._schema.name.endswith("backward")
        if "out" not in [a.name for a in target._schema.arguments] and _misread(target, rule)
    }
    assert found <= set(rules.MISREAD), found - set(rules.MISREAD)


def test_torchs_table_is_left_as_it_was():
    table = dict(torch._decomp.decomposition_table)
    with rules.sound():
        assert not set(rules.MISREAD) & set(torch._decomp.decomposition_table)
    assert torch._decomp.decomposition_table == table


def _refused(module: nn.Module, *args: torch.Tensor) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(module, args)
    assert caught.value.reason == "unsupported_operator", str(caught.value)
    assert "test_loss_types.py:" in str(caught.value)
    return str(caught.value)


def test_a_wrong_rank_of_the_trace_is_refused(monkeypatch):
    monkeypatch.setattr(rules, "sound", contextlib.nullcontext)
    text = _refused(_module(_nll, USES["exp sum"], DECOMPOSED[1]), *_data())
    assert "aten.nll_loss.default" in text and "rank 0" in text
    text = _refused(_module(_nll, lambda n: n, DECOMPOSED[1]), *_data())
    assert "rank 1" in text and "rank 0" in text


WRONG = {
    "rank": lambda x: build.op.Unsqueeze(x, build.ints(0)),
    "size": lambda x: build.op.Concat(x, x, axis=1),
    "elements": lambda x: build.op.Cast(x, to=int(ir.DataType.DOUBLE)),
    "FLOAT": lambda x: build.check_index(build.op.Cast(x, to=int(ir.DataType.INT64)), 9),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("way", DECOMPOSED)
def test_a_wrong_translation_is_refused(what, way, monkeypatch):
    rows = {**stock.own(), "aten::tanh": [lambda before: WRONG[what]]}
    monkeypatch.setattr(stock, "own", lambda: rows)
    table = stock.Table()
    monkeypatch.setattr(stock, "table", lambda: table)
    text = _refused(_module(_nll, lambda n: torch.tanh(n[:, None]), way), *_data())
    assert "aten.tanh.default" in text and what in text
