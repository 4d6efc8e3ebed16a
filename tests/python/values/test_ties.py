"""Which of equal elements topk() and sort() take, and in what order: exactly as torch's do.

torch calls that undefined, but its CPU kernels are plain algorithms, and the element that is taken
gets the gradient: zeros behind a ReLU, scores of a router in bf16. The engine's operators are
compared place by place, over sizes around the thresholds of the algorithms and data that reaches
their limits of depth; then modules, with their gradients.
"""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto
from torch import nn

from gradd import ORTModule
from helpers.graphs import engine as E
from helpers.graphs.captures import Lambda
from helpers.graphs.onnx_writer import Writer
from helpers.selection import SEED, every_run

NUMBER = random.Random(SEED).randrange(1 << 30)
INF, NAN = float("inf"), float("nan")
KINDS = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}
# The cutoffs of introselect (3) and introsort (16), of a partial sort (64 k), of blocks (256).
SIZES = (1, 2, 3, 4, 5, 8, 15, 16, 17, 18, 33, 63, 64, 65, 128, 129, 255, 256, 257, 640, 1000)


def _killer(n: int) -> torch.Tensor:
    """Musser's sequence: every median of three is among the smallest that are left."""
    out = torch.arange(n) // 2 * 2 + 1
    half = n // 2
    for i in range(1, half + 1):
        if i % 2:
            out[i - 1], out[i] = i, half + i
        out[half + i - 1] = 2 * i
    return out


def _levels(count: int):
    return lambda n: torch.randint(-(count // 2), count - count // 2, (n,))


PATTERNS = {
    "two levels": _levels(2),
    "five levels": _levels(5),
    "many levels": _levels(3000),
    "equal": lambda n: torch.full((n,), 3),
    "sorted": torch.arange,
    "reversed": lambda n: n - torch.arange(n),
    "steps": lambda n: torch.arange(n) // 7,
    "steps down": lambda n: -(torch.arange(n) // 5),
    "saw": lambda n: torch.arange(n) % 7,
    "organ pipe": lambda n: torch.minimum(torch.arange(n), n - torch.arange(n)),
    "valley": lambda n: -torch.minimum(torch.arange(n), n - torch.arange(n)),
    "mostly zeros": lambda n: torch.randint(-9, 3, (n,)).clamp(min=0),
    "killer": _killer,
    "killer with ties": lambda n: _killer(n) // 3,
    "killer down": lambda n: -_killer(n),
}
SPECIAL = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0])


def _rows(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One row of each pattern, and again with NaN, infinities and zeros of both signs."""
    torch.manual_seed(seed)
    rows = torch.stack([make(n) for make in PATTERNS.values()]).to(dtype)
    if not dtype.is_floating_point:
        return rows
    places = torch.rand(rows.shape) < 0.3
    special = SPECIAL[torch.randint(len(SPECIAL), rows.shape)].to(dtype)
    return torch.cat([rows, torch.where(places, special, rows)])


def _numpy(x: torch.Tensor) -> np.ndarray:
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _run(w: Writer, x: torch.Tensor, names: list[str], threads: int) -> list[torch.Tensor]:
    array = _numpy(x)
    model = E.Model(w.proto({"x": array.shape}, names, kind=KINDS[x.dtype]))
    plan = E.Plan(model, {"x": array}, [], names, [], threads=threads)
    out = E.Run(plan).forward({"x": array})
    values = out[names[0]]
    if x.dtype == torch.bfloat16:
        values = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        values = torch.from_numpy(values)
    return [values, torch.from_numpy(out[names[1]])]


def _topk(x: torch.Tensor, k: int, axis: int, threads: int = 1, **flags: bool) -> list:
    w = Writer()
    number = w.constant([k], np.int64)
    given = {name: int(flag) for name, flag in flags.items()}
    names = w("TorchTopK", "x", number, outs=2, domain="com.gradd", axis=axis, **given)
    return _run(w, x, names, threads)


def _sort(x: torch.Tensor, axis: int, descending: bool, threads: int = 1) -> list:
    w = Writer()
    flags = {"axis": axis, "descending": int(descending)}
    return _run(w, x, w("TorchSort", "x", outs=2, domain="com.gradd", **flags), threads)


def _assert_same(got: list, want, what: str) -> None:
    assert torch.equal(got[1], want[1]), f"GRADD_DRAW={SEED} places differ: {what}"
    same = (got[0] == want[0]) | (got[0].isnan() & want[0].isnan())
    assert bool(same.all()), f"GRADD_DRAW={SEED} values differ: {what}"


def _compare(n: int, draw: random.Random) -> None:
    dtype = draw.choice(list(KINDS))
    x = _rows(n, dtype, draw.randrange(1 << 30))
    axis = draw.choice((0, 1, 1))
    x = x.t().contiguous() if axis == 0 else x
    few, any_k = draw.randint(1, max(1, n // 64)), draw.randint(1, n)
    for k in {few, any_k, min(n, n // 64 + 1), min(n, draw.randint(1, 8)), n}:
        flags = {"largest": draw.random() < 0.6, "sorted": draw.random() < 0.6}
        what = f"topk {k} of {n}, {dtype}, axis {axis}, {flags}"
        _assert_same(_topk(x, k, axis, **flags), x.topk(k, axis, **flags), what)
    down = draw.random() < 0.5
    what = f"sort of {n}, {dtype}, axis {axis}, descending {down}"
    _assert_same(_sort(x, axis, down), x.sort(axis, descending=down), what)


@pytest.mark.quick
@pytest.mark.parametrize("n", SIZES)
def test_same_choice_at_thresholds(n):
    draw = random.Random(f"{SEED} {n}")
    for _ in range(4):
        _compare(n, draw)


def test_same_choice_at_drawn_sizes():
    draw = random.Random(f"{SEED} drawn")
    for _ in range(20):
        _compare(draw.randint(1, 3000), draw)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_same_choice_at_many_sizes(part):
    draw = random.Random(f"{SEED} nightly {part}")
    for _ in range(300):
        _compare(draw.choice([draw.randint(1, 3000), draw.randint(1, 300), *SIZES]), draw)
    _compare(draw.randint(20000, 70000), draw)


@pytest.mark.quick
def test_neighbours_in_64_bits_are_not_equal():
    for x in (
        torch.tensor([2**62, 2**62 + 1, -(2**63), 2**63 - 1, -(2**63) + 1] * 9),
        torch.tensor([1.0, 1.0 + 2**-52, -1.0, -1.0 - 2**-52, 5e-324, -5e-324] * 9).double(),
    ):
        _assert_same(_topk(x, 20, 0), x.topk(20, 0), str(x.dtype))
        _assert_same(_topk(x, 20, 0, largest=False), x.topk(20, 0, largest=False), str(x.dtype))
        _assert_same(_sort(x, 0, True), x.sort(0, descending=True), str(x.dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("shape", [(32767,), (32768,), (1, 40000)])
def test_large_vectors_of_integers_are_sorted_stably(dtype, shape):
    torch.manual_seed(NUMBER)
    x = torch.randint(-4, 5, shape).to(dtype)
    for down in (False, True):
        _assert_same(_sort(x, -1, down), x.sort(-1, descending=down), f"{dtype} {shape} {down}")


def test_threads_do_not_matter():
    x = torch.randint(0, 4, (33, 5, 700)).float()
    for axis, k in ((0, 7), (1, 3), (2, 10), (2, 40)):
        want = x.topk(k, axis)
        for threads in (1, 2, 5, 64):
            _assert_same(_topk(x, k, axis, threads), want, f"{threads} threads, axis {axis}")
            _assert_same(_sort(x, axis, False, threads), x.sort(axis), f"sort, {threads} threads")


# --- modules ---------------------------------------------------------------------------------

MODULES = {
    "topk": lambda x: x.topk(5),
    "topk of few": lambda x: x.topk(1),
    "topk smallest": lambda x: x.topk(5, largest=False),
    "topk unsorted": lambda x: x.topk(9, sorted=False),
    "topk unsorted smallest": lambda x: x.topk(40, largest=False, sorted=False),
    "topk of rows": lambda x: x.topk(3, 0),
    "topk of half": lambda x: x.topk(x.shape[1] // 2, 1),
    "topk behind relu": lambda x: x.relu().topk(70),
    "topk of a scalar": lambda x: x.sum().topk(1),
    "sort": lambda x: x.sort(1),
    "sort down": lambda x: x.sort(1, descending=True),
    "sort of rows": lambda x: x.sort(0),
    "sort stable": lambda x: torch.sort(x, stable=True, dim=1),
    "sort stable is False": lambda x: torch.sort(x, stable=False, dim=1, descending=True),
    "argsort": lambda x: x.gather(1, x.abs().argsort(1)),
    "argsort stable": lambda x: x.gather(1, torch.argsort(x.abs(), dim=1, stable=True)),
    "msort": lambda x: torch.msort(x.t()),
    "quantile": lambda x: x.quantile(0.3, 1),
    "nanquantile": lambda x: x.nanquantile(0.7, 1, interpolation="nearest"),
}

EVERY_RUN = ("topk", "topk unsorted", "topk behind relu", "sort down", "sort stable", "quantile")


def _results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    weights = torch.arange(1.0, out[0].numel() + 1).reshape(out[0].shape)
    (out[0] * weights).sum().backward()
    return [*out, x.grad]


@pytest.mark.parametrize("name", every_run(EVERY_RUN, MODULES))
def test_gradients_go_to_the_same_elements(name, shared_daemon, monkeypatch):
    if "quantile" in name and torch.__version__ >= "2.14":
        pytest.skip("this torch does not take the first of equal elements")
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")

    def forward(self, x):
        out = MODULES[name](x * self.one.weight[0, 0])
        return tuple(out) if isinstance(out, tuple) else out

    modules = [Lambda(forward, one=nn.Linear(1, 1)) for _ in range(2)]
    for module in modules:
        nn.init.ones_(module.one.weight)
    wrapped = ORTModule(modules[1], strict=True)
    torch.manual_seed(NUMBER)
    for rows in (6, 40):
        x = torch.randint(-3, 4, (rows, 150)).float()
        for got, want in zip(_results(wrapped, x), _results(modules[0], x), strict=True):
            assert torch.equal(got, want)


class Router(nn.Module):
    """Experts chosen in bf16, where equal scores are common."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 32, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        scores = self.score(x).div(0.125).round().mul(0.125)
        weights, experts = scores.topk(4, dim=-1, sorted=False)
        return weights.softmax(-1, dtype=torch.float32), experts


def test_a_router_in_bf16_sends_tokens_to_the_same_experts(shared_daemon):
    torch.manual_seed(NUMBER)
    module = Router()
    x = torch.randint(-2, 3, (50, 8)).bfloat16()
    with torch.no_grad():
        module.score.weight.copy_(torch.randint(-2, 3, (32, 8)) / 4)
    want = module(x)
    got = ORTModule(module, strict=True)(x)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])
