"""Random networks of convolutions, norms, pools, resampling, recurrences, scans and grouped sums.

A network is a list of steps over a growing list of tensors [N, C, X...] or [N, T, F], drawn from a
seed. A step is kept if PyTorch runs it, so the tables below need not know what fits. Integers come
from the network's input alone: its twin in double precision has the same ones.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LARGEST = 4000  # elements of a tensor
Step = Callable[..., torch.Tensor]  # of the network's input and the operands


@dataclass(frozen=True)
class Layer:
    """One step: `run` reads the tensors at `operands`; `module` has its parameters, if any."""

    name: str
    run: Step
    operands: tuple[int, ...]
    module: int | None


class Draw:
    """Random options for a step that reads a tensor of `shape`."""

    def __init__(self, source: random.Random, shape: tuple[int, ...]) -> None:
        self.of = source.choice
        self.shape, self.axes = shape, len(shape) - 2
        self.rows, self.channels = shape[0], shape[1]

    def each(self, *options: int) -> tuple[int, ...]:
        return tuple(self.of(options) for _ in range(self.axes))

    def named(self, prefix: str) -> Any:
        """ "Conv" for three axes is nn.Conv3d."""
        return getattr(nn, f"{prefix}{self.axes}d")

    def groups(self) -> int:
        return self.of([g for g in (1, 1, 1, 2, 3, self.channels) if self.channels % g == 0])


def _conv(d: Draw) -> nn.Module:
    groups = d.groups()
    out = groups * d.of((1, 2, 3)) if groups > 1 else d.of((2, 3, 4, 8))
    same = d.of((True, False, False, False))
    return d.named("Conv")(
        d.channels,
        out,
        d.each(1, 2, 3),
        stride=1 if same else d.each(1, 1, 2, 3),
        padding="same" if same else d.each(0, 1, 2),
        dilation=d.each(1, 1, 2),
        groups=groups,
        bias=d.of((True, False)),
        padding_mode=d.of(("zeros", "zeros", "reflect", "replicate", "circular")),
    )


def _transposed(d: Draw) -> nn.Module:
    groups = d.groups()
    return d.named("ConvTranspose")(
        d.channels,
        groups * d.of((1, 2)),
        d.each(1, 2, 3),
        stride=d.each(1, 2, 3),
        padding=d.each(0, 0, 1),
        output_padding=d.each(0, 0, 1),
        dilation=d.each(1, 1, 2),
        groups=groups,
        bias=d.of((True, False)),
    )


def _batch_norm(d: Draw) -> nn.Module:
    return d.named("BatchNorm")(
        d.channels,
        affine=d.of((True, False)),
        momentum=d.of((0.1, 0.5, None)),
        track_running_stats=d.of((True, True, False)),
    )


def _instance_norm(d: Draw) -> nn.Module:
    return d.named("InstanceNorm")(
        d.channels, affine=d.of((True, False)), track_running_stats=d.of((True, False))
    )


def _group_norm(d: Draw) -> nn.Module:
    return nn.GroupNorm(d.groups(), d.channels, affine=d.of((True, False)))


def _layer_norm(d: Draw) -> nn.Module:
    last = d.shape[-d.of((1, 1, 2)) :]
    return d.of((nn.LayerNorm, nn.RMSNorm))(last)


def _max_pool(d: Draw) -> nn.Module:
    return d.named("MaxPool")(
        d.each(1, 2, 3), d.each(1, 2), d.each(0, 1), d.each(1, 1, 2), ceil_mode=d.of((True, False))
    )


def _average_pool(d: Draw) -> nn.Module:
    given = {"ceil_mode": d.of((True, False)), "count_include_pad": d.of((True, False))}
    if d.axes > 1:
        given["divisor_override"] = d.of((None, None, 3))
    return d.named("AvgPool")(d.each(1, 2, 3), d.each(1, 2), d.each(0, 1), **given)


def _adaptive(d: Draw) -> nn.Module:
    return d.named(d.of(("AdaptiveAvgPool", "AdaptiveMaxPool")))(d.each(1, 2, 3, 5))


def _norm_pool(d: Draw) -> Step:
    size, stride = d.of((1, 2, 3)), d.of((1, 2, None))
    pool = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}[d.axes]
    return lambda given, x: pool(x.square() + 0.1, 2.0, size, stride, ceil_mode=False)


def _unpooled(d: Draw) -> Step:
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[d.axes]
    back = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[d.axes]

    def run(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y, places = pool(x, 2, return_indices=True)
        return back(torch.sin(y), places, 2, output_size=x.shape)

    return run


def _interpolate(d: Draw) -> Step:
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[d.axes]
    mode = d.of(("nearest", "nearest-exact", *smooth, *smooth))
    options: dict[str, Any] = {"mode": mode}
    if mode in smooth:
        options["align_corners"] = d.of((True, False))
    if d.axes == 2 and mode in smooth:
        options["antialias"] = d.of((True, False))
    if d.of((True, False)):
        options["size"] = d.each(2, 3, 5, 8)
    else:
        options["scale_factor"] = tuple(d.of((0.5, 0.7, 1.5, 2.0)) for _ in range(d.axes))
        options["recompute_scale_factor"] = d.of((None, True))
    return lambda given, x: F.interpolate(x, **options)


def _grid_sample(d: Draw) -> Step:
    mode = d.of(("bilinear", "bilinear", "bicubic") if d.axes == 2 else ("bilinear",))
    padding, corners = d.of(("zeros", "border", "reflection")), d.of((True, False))
    size = (d.rows, d.channels, *d.each(2, 4))

    def run(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        n = d.axes
        turned = torch.tanh(x.flatten(1)[:, : n * (n + 1)]).reshape(-1, n, n + 1)
        grid = F.affine_grid(turned * 0.9 + 0.05, list(size), align_corners=corners)
        return F.grid_sample(x, grid, mode, padding, align_corners=corners)

    return run


def _pad(d: Draw) -> Step:
    widths = [d.of((0, 1, 2, -1)) for _ in range(2 * d.axes)]
    mode = d.of(("constant", "reflect", "replicate", "circular"))
    return lambda given, x: F.pad(x, widths, mode)


def _shuffled(d: Draw) -> Step:
    if d.of((True, False)):
        return lambda given, x: F.pixel_shuffle(x, 2)
    return lambda given, x: F.pixel_unshuffle(x, 2)


def _folded(d: Draw) -> Step:
    sizes = {
        "kernel_size": d.each(1, 2, 3),
        "padding": d.each(0, 1),
        "stride": d.each(1, 2),
        "dilation": d.each(1, 1, 2),
    }
    form = d.shape[2:]
    return lambda given, x: F.fold(torch.sin(F.unfold(x, **sizes)), form, **sizes)


def _bent(d: Draw) -> Step:
    bend = d.of((F.relu, F.gelu, F.silu, F.hardswish, torch.tanh, F.elu, F.softplus, F.mish))
    return lambda given, x: bend(x)


def _parted(d: Draw) -> Step:
    axis = d.of((1, -1))
    return lambda given, x: F.glu(x, axis)


def _moved(d: Draw) -> Step:
    axis, by = d.of((1, 2, -1)), d.of((1, 2))
    turns: tuple[Step, ...] = (
        lambda given, x: x.transpose(1, axis).contiguous(),
        lambda given, x: x.roll(by, axis),
        lambda given, x: x.flip(axis),
        lambda given, x: x.flatten(2).transpose(1, 2),
        lambda given, x: x - x.mean(axis, keepdim=True),
        lambda given, x: x * torch.sigmoid(x.mean(tuple(range(2, x.dim())), keepdim=True)),
        lambda given, x: F.local_response_norm(x, 3),
        lambda given, x: x.unsqueeze(-1),
    )
    if d.axes == 2:
        last = torch.channels_last
        turns = (*turns, *[lambda given, x: x.contiguous(memory_format=last)] * 2)
    return d.of(turns)


def _paired(d: Draw) -> Step:
    axis = d.of((1, -1))
    joins: tuple[Step, ...] = (
        lambda given, x, y: x + y,
        lambda given, x, y: torch.tanh(x) * torch.tanh(y),
        lambda given, x, y: torch.where(x > 0.1, x, y),
        lambda given, x, y: torch.cat((x, y), axis),
        lambda given, x, y: F.scaled_dot_product_attention(x, y, y),
    )
    return d.of(joins)


def _scanned(d: Draw) -> Step:
    axis = d.of((1, 2, -1))
    scans: tuple[Step, ...] = (
        lambda given, x: torch.tanh(x.cumsum(axis)),
        lambda given, x: (1.0 + 0.5 * torch.tanh(x)).cumprod(axis),
        lambda given, x: torch.tanh(torch.logcumsumexp(x, axis)),
        lambda given, x: torch.cummax(x, axis).values,
        lambda given, x: torch.sort(x, axis).values,
        lambda given, x: torch.topk(x, 1, axis).values,
    )
    return d.of(scans)


def _counted(d: Draw) -> Step:
    """Weights from a histogram of the input, as mixtures of experts balance their load."""
    return lambda given, x: x * (torch.histc(given.flatten(), 4, -2.0, 2.0) / 10.0).mean()


def _solved(d: Draw) -> Step:
    upper, unit = d.of((True, False)), d.of((True, False))

    def run(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        n = min(x.shape[-1], 4)
        left = torch.tanh(x[..., :1, :n].mT @ x[..., :1, :n]) * 0.3
        left = left + torch.eye(n, dtype=x.dtype)
        right = x[..., :n].mT
        return torch.linalg.solve_triangular(left, right, upper=upper, unitriangular=unit)

    return run


class Recurrent(nn.Module):
    """The outputs of a recurrent layer with its last states added, so that both count."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        kind = d.of((nn.LSTM, nn.GRU, nn.RNN))
        options = {"num_layers": d.of((1, 2)), "bias": d.of((True, False))}
        options |= {"bidirectional": d.of((True, False)), "batch_first": d.of((True, False))}
        if kind is nn.LSTM:
            options["proj_size"] = d.of((0, 0, 2))
        if kind is nn.RNN:
            options["nonlinearity"] = d.of(("tanh", "relu"))
        self.cell = kind(d.shape[-1], d.of((3, 4)), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, last = self.cell(x)
        states = last if isinstance(last, tuple) else (last,)
        return torch.tanh(y + sum(state.mean() for state in states))


class Experts(nn.Module):
    """Rows to experts, in groups of which one is empty. Products of groups take widths of 8."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.turned = d.of((True, False))
        self.into = nn.Linear(d.shape[-1], 8)
        self.weights = nn.Parameter(torch.randn(3, 8, 8) * 8**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.into(x).flatten(0, -2)
        ends = [len(rows) // 3, len(rows) // 3, len(rows)]
        weights = self.weights.mT if self.turned else self.weights
        if x.dtype is not torch.bfloat16 or not hasattr(
            F, "grouped_mm"
        ):  # torch compiles it for no other
            starts = [0, *ends[:-1]]
            parts = [rows[a:b] @ w for a, b, w in zip(starts, ends, weights, strict=True)]
            return torch.cat(parts).unflatten(0, x.shape[:-1])
        offs = torch.tensor(ends, dtype=torch.int32)
        return F.grouped_mm(rows, weights, offs=offs).unflatten(0, x.shape[:-1])


class Bags(nn.Module):
    """An EmbeddingBag by integers that the input gives; its sums weight the rows."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, d.shape[-1], mode=d.of(("sum", "mean", "max")))

    def forward(self, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        places = (given.detach().flatten(1)[:, :6] * 2).long().clamp(0, 4)
        bags = self.bag(places)
        return x * torch.tanh(bags).reshape(-1, *[1] * (x.dim() - 2), x.shape[-1])


# How often, name, smallest and largest number of axes behind channels, what makes the step.
Kind = tuple[int, str, int, int, Callable[[Draw], Any]]
KINDS: list[Kind] = [
    (8, "conv", 1, 3, _conv),
    (3, "transposed", 1, 3, _transposed),
    (3, "batch norm", 1, 3, _batch_norm),
    (1, "instance norm", 1, 3, _instance_norm),
    (2, "group norm", 1, 3, _group_norm),
    (1, "layer norm", 1, 3, _layer_norm),
    (3, "max pool", 1, 3, _max_pool),
    (2, "average pool", 1, 3, _average_pool),
    (2, "adaptive pool", 1, 3, _adaptive),
    (1, "norm pool", 1, 3, _norm_pool),
    (1, "unpool", 1, 3, _unpooled),
    (3, "interpolate", 1, 3, _interpolate),
    (1, "grid sample", 2, 3, _grid_sample),
    (2, "pad", 1, 3, _pad),
    (1, "shuffle", 2, 2, _shuffled),
    (1, "fold", 2, 2, _folded),
    (4, "bend", 1, 3, _bent),
    (1, "part", 1, 3, _parted),
    (5, "move", 1, 3, _moved),
    (5, "pair", 1, 3, _paired),
    (3, "scan", 1, 3, _scanned),
    (1, "count", 1, 3, _counted),
    (1, "solve", 1, 2, _solved),
    (4, "recurrent", 1, 1, Recurrent),
    (1, "experts", 1, 3, Experts),
    (1, "bags", 1, 3, Bags),
]


class Network(nn.Module):
    """A network of a seed: a scalar loss of all its tensors, and one of them."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, length: int = 7) -> None:
        super().__init__()
        self.dtype = dtype
        self.random = random.Random(seed)
        self.steps: list[Layer] = []
        self.layers = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Parameter(torch.rand(self._form()[1]).to(dtype) + 0.5)
            self._draw(length)

    def _form(self) -> tuple[int, ...]:
        source = random.Random(self.random.random())
        if not hasattr(self, "form"):
            axes = source.choice((1, 1, 2, 2, 3))
            sizes = [source.choice((4, 5, 6, 7)) for _ in range(axes)]
            self.form = (source.choice((1, 2, 3)), source.choice((2, 4, 6, 8)), *sizes)
        return self.form

    def given(self) -> torch.Tensor:
        """The input."""
        generator = torch.Generator().manual_seed(sum(self.form))
        return torch.randn(self.form, generator=generator).to(self.dtype)

    def _begin(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first.reshape(-1, *[1] * (x.dim() - 2))

    def _draw(self, length: int) -> None:
        x = self.given()
        tensors = [self._begin(x).detach()]
        tries = 0
        while len(self.steps) < length and tries < 40 * length:
            tries += 1
            at = max(self.random.randrange(len(tensors)) for _ in range(2))
            made = self._one(tensors, at)
            result = made and self._result(made, x, tensors)
            if result is not None:
                self.steps.append(made[0])
                self.layers.extend(made[1])
                tensors.append(result)

    def _one(self, tensors: list[torch.Tensor], at: int) -> tuple[Layer, list[nn.Module]] | None:
        weights = [kind[0] for kind in KINDS]
        _, name, least, most, make = self.random.choices(KINDS, weights)[0]
        shape = tuple(tensors[at].shape)
        operands = (at,)
        if name == "pair":
            alike = [i for i, t in enumerate(tensors) if t.shape == tensors[at].shape]
            operands = (at, self.random.choice(alike))
        if not least <= len(shape) - 2 <= most:
            return None
        try:
            step = make(Draw(self.random, shape))
        except (ValueError, RuntimeError):  # options that exclude each other
            return None
        if isinstance(step, nn.Module):
            return Layer(name, step, operands, len(self.layers)), [step.to(self.dtype)]
        return Layer(name, step, operands, None), []

    def _result(self, made: Any, x: torch.Tensor, tensors: list) -> torch.Tensor | None:
        """None where PyTorch refuses the step, or it gives too much, nothing, or infinities."""
        layer, modules = made
        operands = [tensors[i] for i in layer.operands]
        try:
            run = modules[0] if modules else layer.run
            result = self._call(layer, run, x, operands).detach()
        except (ValueError, RuntimeError, IndexError, NotImplementedError, TypeError):
            return None
        good = 0 < result.numel() <= LARGEST and 3 <= result.dim() <= 5
        if good and bool(result.isfinite().all()) and float(result.abs().max()) < 50.0:
            return result
        return None

    @staticmethod
    def _call(layer: Layer, run: Any, x: torch.Tensor, operands: list) -> torch.Tensor:
        if layer.module is None or layer.name == "bags":
            return run(x, *operands)
        return run(*operands)

    def _runs(self) -> Iterator[tuple[Layer, Any]]:
        for layer in self.steps:
            yield layer, layer.run if layer.module is None else self.layers[layer.module]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [self._begin(x)]
        for layer, run in self._runs():
            tensors.append(self._call(layer, run, x, [tensors[i] for i in layer.operands]))
        return sum(t.float().sin().square().mean() for t in tensors), tensors[-1]

    def __str__(self) -> str:
        lines = [f"t0 = x {self.form}"]
        for n, (layer, run) in enumerate(self._runs(), 1):
            operands = ", ".join(f"t{i}" for i in layer.operands)
            text = run if isinstance(run, nn.Module) else inspect.getclosurevars(run).nonlocals
            lines.append(f"t{n} = {layer.name}({operands}) {text}")
        return "\n".join(lines)
