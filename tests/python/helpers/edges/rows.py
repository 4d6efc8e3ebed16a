"""Torch's operations on edge data: the form of a row of the table, the data, and how it is run.

A row is captured once, on ordinary data; then edge data of the same sizes arrive. Forward and
gradients must be those of eager torch: NaN and infinities in the same places, values within a
tolerance of the largest finite one. The rows themselves are in the other files of this folder, one
file per theme.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from helpers.edges import row_notes

INF, NAN = float("inf"), float("nan")


@dataclass
class Row:
    """One operation of the table.

    Attributes:
        name: Unique; test ids and messages use it.
        function: Of the inputs, to a tensor or a tuple of tensors.
        inputs: One text per input: sizes ("3,4"), with a letter in front for what it holds: none
            for any float, p probabilities, q positive, n any float without a gradient, b
            booleans, iN: integers below N, t: targets of 1 and -1, u: probabilities without a
            gradient.
        rtol: Relative tolerance of fp32.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...] = ("3,4",)
    rtol: float = 1e-4


def row(name: str, function: Callable[..., Any], *inputs: str, **options: Any) -> Row:
    """A row; inputs default to one of [3, 4]."""
    return Row(name, function, inputs or ("3,4",), **options)


# --- data ------------------------------------------------------------------------------------


def _pick(values: list[float], shape: list[int], gen: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]


def _placed(value: list[float], shape: list[int], gen: torch.Generator) -> torch.Tensor:
    out = torch.randn(shape, generator=gen)
    where = torch.rand(shape, generator=gen) < 0.2
    if shape and out.numel():
        where.view(-1)[int(torch.randint(out.numel(), (), generator=gen))] = True
    return torch.where(where, _pick(value, shape, gen), out)


def _rows(shape: list[int], gen: torch.Generator) -> torch.Tensor:
    out = torch.randn(shape, generator=gen)
    return out[:1].expand(shape).contiguous() if shape else out


def _flat(shape: list[int], gen: torch.Generator) -> torch.Tensor:
    out = torch.randn(shape, generator=gen)
    return out[..., :1].expand(shape).contiguous() if shape else out


_BOUNDS = [-20.0, -6.0, -3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0]
DATA: dict[str, Callable[[list[int], torch.Generator], torch.Tensor]] = {
    "ordinary": lambda s, g: torch.randn(s, generator=g),
    "zeros": lambda s, g: torch.zeros(s),
    "ties": lambda s, g: _pick([-1.0, 0.0, 1.0], s, g),
    "rows": _rows,
    "flat": _flat,
    "halves": lambda s, g: torch.randint(-8, 9, s, generator=g) / 2,
    "bounds": lambda s, g: _pick(_BOUNDS, s, g),
    "constant": lambda s, g: torch.full(s, 0.7),
    "x60": lambda s, g: torch.randn(s, generator=g) * 60,
    "1e5": lambda s, g: torch.randn(s, generator=g) * 1e5,
    "1e-22": lambda s, g: torch.randn(s, generator=g) * 1e-22,
    "inf": lambda s, g: _placed([INF, -INF], s, g),
    "nan": lambda s, g: _placed([NAN], s, g),
}
# Another size of the first axis, and so another capture: not among the kinds of one run.
EMPTY = "empty"


def _shape(spec: str) -> list[int]:
    return [int(n) for n in spec.lstrip("tpuqnb").rpartition(":")[2].split(",") if n]


def _one(
    spec: str, shape: list[int], kind: str, gen: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    letter = spec[0] if spec[:1].isalpha() else ""
    if letter == "i":
        limit = int(spec[1:].partition(":")[0])
        if kind in ("zeros", "constant"):  # one index again and again
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randint(limit, shape, generator=gen)
    if letter == "b":
        if kind in ("zeros", "inf"):
            return torch.full(shape, kind == "inf")
        return torch.rand(shape, generator=gen) < 0.5
    raw = DATA.get(kind, DATA["ordinary"])(shape, gen)
    if letter == "t":
        return torch.where(raw > 0, 1.0, -1.0).to(dtype)
    if letter in ("p", "u"):
        raw = torch.sigmoid(raw) if kind != "ties" else raw.clamp(0, 1)
    elif letter == "q":
        raw = raw.abs()
    raw = raw.to(dtype)
    return raw if letter in ("n", "u") else raw.requires_grad_()


def arguments(row: Row, kind: str, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Inputs of a row; the same for the same arguments.

    "empty" is a batch without rows: the first axis of the first input is taken for that of the
    batch, and for that of every input which has the same size.
    """
    gen = torch.Generator().manual_seed(zlib.crc32(f"{row.name} {kind} {seed}".encode()))
    shapes = [_shape(spec) for spec in row.inputs]
    if kind == EMPTY:
        batch = shapes[0][:1]
        shapes = [[0, *s[1:]] if s[:1] == batch and batch else s for s in shapes]
    pairs = zip(row.inputs, shapes, strict=True)
    return [_one(spec, shape, kind, gen, dtype) for spec, shape in pairs]


# --- running ---------------------------------------------------------------------------------


class Alone(nn.Module):
    """The operation as a module; a weight lets the wrapper know it as one that is trained."""

    def __init__(self, row: Row, decomposed: bool = False) -> None:
        super().__init__()
        self.function = row.function
        if decomposed:
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args: torch.Tensor) -> Any:
        if hasattr(self, "calls"):
            self.calls.add_(1)  # an in-place operation makes the exporter decompose
        out = self.function(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else out


def _tensors(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _results(module: Any, args: list[torch.Tensor]) -> tuple[list, list]:
    given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    outs = _tensors(module(*given))
    wanted = [a for a in given if a.requires_grad]
    floats = [o for o in outs if o.is_floating_point() and o.requires_grad]
    if not floats or not wanted:
        return [o.detach() for o in outs], [None] * len(wanted)
    seeds = [(torch.arange(float(o.numel())).reshape(o.shape) % 7 + 1).to(o.dtype) for o in floats]
    grads = torch.autograd.grad(floats, wanted, seeds, allow_unused=True)
    return [o.detach() for o in outs], list(grads)


def _differs(got: Any, want: Any, rtol: float, floor: float) -> str | None:
    if got is None or want is None:
        other = got if want is None else want
        if other is None or not bool((other != 0).any()):
            return None
        return f"{_text(got)} for {_text(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    a, b = got.double(), want.double()
    odd = ~torch.isfinite(b)
    same_odd = torch.equal(torch.nan_to_num(a[odd], 1.5), torch.nan_to_num(b[odd], 1.5))
    scale = float(b[~odd].abs().max()) if bool((~odd).any()) else 0.0
    near = bool(((a - b).abs()[~odd] <= rtol * scale + floor).all())
    if same_odd and near:
        return None
    return f"{_text(got)} for {_text(want)}"


def _largest(args: list[torch.Tensor]) -> float:
    finite = [a.detach().double().nan_to_num(0, 0, 0).abs().max() for a in args if a.numel()]
    return max((float(v) for v in finite), default=0.0)


def _text(t: Any) -> str:
    return "None" if t is None else str([float(f"{v:.5g}") for v in t.flatten()[:8].tolist()])


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Without the self-check, which would move a module that differs to PyTorch."""
    before = os.environ.get("GRADD_SELF_CHECK")
    os.environ["GRADD_SELF_CHECK"] = "0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.pop("GRADD_SELF_CHECK")
        if before is not None:
            os.environ["GRADD_SELF_CHECK"] = before


# Of tolerances, and differences that do not count, in parts of the largest input.
_FINER = {torch.float64: 1e-8}
_COARSE = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
_UNIT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}


def compare(
    row: Row,
    dtype: torch.dtype = torch.float32,
    kinds: Any = None,
    decomposed: bool = False,
    train: bool = True,
) -> list[str]:
    """Runs a row on all kinds of data.

    Args:
        row: The row.
        dtype: Of the float inputs.
        kinds: Keys of DATA; None = all.
        decomposed: Capture it by way of torch's decomposition, as beside an in-place operation.
        train: False for values alone, in eval mode and without gradients.

    Returns:
        One line per difference; empty if the row is right.

    Raises:
        CaptureError: The operation is refused.
    """
    from gradd import ORTModule

    found: list[str] = []
    rtol = row.rtol * _FINER.get(dtype, 1)
    if dtype in _COARSE:
        rtol = max(row.rtol, _COARSE[dtype])
    plain = Alone(row).train(train)
    with _unchecked(), torch.set_grad_enabled(train):
        wrapped = ORTModule(Alone(row, decomposed).train(train), strict=True)
        for kind in kinds or DATA:
            if kind in row_notes.SKIP.get(row.name, ()):
                continue
            args = arguments(row, kind, dtype)
            args = args if train else [a.detach() for a in args]
            try:
                want = _results(plain, args)
            except (RuntimeError, IndexError, ValueError):
                continue  # torch refuses such data
            got = _results(wrapped, args)
            unit = row_notes.NOISE.get(row.name, 1.0) * _UNIT[dtype]
            largest = _largest(args)
            floors = {"value": unit * largest, "gradient": unit * max(1.0, largest)}
            for what, mine, right in zip(("value", "gradient"), got, want, strict=True):
                for i, (a, b) in enumerate(zip(mine, right, strict=True)):
                    text = _differs(a, b, rtol, floors[what])
                    if text is not None:
                        found.append(f"{row.name} {dtype} {kind}: {what} {i}: {text}")
    return found
