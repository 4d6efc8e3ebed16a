"""Random modules of views, aliases, in-place writes and regions with and without gradients.

A program is a list of instructions over a growing list of tensors; each instruction runs with
gradients on, off, or in inference mode. It is drawn from a seed, with shapes followed at drawing,
so a module, its copy in the daemon and its twin in double precision run the same one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS, WIDTH = 4, 6
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One call: `operands` are positions in the list of tensors; results are appended to it."""

    name: str
    run: Callable[..., Any]
    operands: tuple[int, ...]
    region: str
    keeps: bool  # the result is a tensor of its own or another alias, not the written operand


def _linear(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.first(x)


def _parameter(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * module.scale[: x.shape[-1]]


# Name, function of the module and the operands. Bounded, so that twenty of them stay in range.
UNARY = {
    "tanh": lambda m, x: torch.tanh(x),
    "sigmoid": lambda m, x: torch.sigmoid(x),
    "relu": lambda m, x: torch.relu(x),
    "sin": lambda m, x: torch.sin(x),
    "scaled": lambda m, x: x * 0.75,
    "shifted": lambda m, x: x + 0.25,
    "clamp": lambda m, x: x.clamp(-1.5, 1.5),
    "softmax": lambda m, x: x.softmax(-1),
    "gelu": lambda m, x: nn.functional.gelu(x),
    "clone": lambda m, x: x.clone(),
    "centred": lambda m, x: x - x.mean(-1, keepdim=True),
    "parameter": _parameter,
}
BINARY = {
    "add": lambda m, x, y: x + y,
    "sub": lambda m, x, y: x - y,
    "product": lambda m, x, y: torch.tanh(x) * torch.tanh(y),
    "where": lambda m, x, y: torch.where(x > 0.1, x, y),
    "maximum": lambda m, x, y: torch.maximum(x, y),
}
ALIASES = {
    "detach": (lambda m, x: x.detach(), lambda s: s),
    "data": (lambda m, x: x.data, lambda s: s),
    "columns": (lambda m, x: x[..., 1:4], lambda s: (*s[:-1], 3)),
    "rows": (lambda m, x: x[1:], lambda s: (s[0] - 1, *s[1:])),
    "row": (lambda m, x: x[0], lambda s: s[1:]),
    "transposed": (lambda m, x: x.transpose(0, 1), lambda s: (s[1], s[0], *s[2:])),
    "flat": (lambda m, x: x.reshape(-1), lambda s: (_count(s),)),
    "viewed": (lambda m, x: x.unsqueeze(0).squeeze(0), lambda s: s),
    "chunk": (lambda m, x: x.chunk(2, -1)[1], lambda s: (*s[:-1], s[-1] - (s[-1] + 1) // 2)),
}
NEEDS = {"transposed": 2, "row": 2, "rows": 2, "chunk": 2, "columns": 2}
WRITES = {
    "mul_": lambda m, x: x.mul_(0.5),
    "add_": lambda m, x: x.add_(0.25),
    "clamp_": lambda m, x: x.clamp_(-0.5, 0.5),
    "tanh_": lambda m, x: x.tanh_(),
    "relu_": lambda m, x: nn.functional.relu(x, inplace=True),
    "zero_": lambda m, x: x.zero_(),
    "fill": lambda m, x: x.__setitem__((..., 0), 0.5) or x,
    "masked": lambda m, x: x.masked_fill_(x > 0.3, 0.3),
    "parameter_": lambda m, x: x.mul_(m.scale[: x.shape[-1]]),
    "out": lambda m, x: torch.mul(x, 0.5, out=x) if not _grad_of(x) else x.mul_(0.5),
}
WRITES_FROM = {
    "copy_": lambda m, x, y: x.copy_(y),
    "add_from": lambda m, x, y: x.add_(y),
    "assign": lambda m, x, y: x.__setitem__(slice(None), y) or x,
}
REGIONS = {
    "on": torch.enable_grad,
    "off": torch.no_grad,
    "inference": torch.inference_mode,
}


def _grad_of(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled()  # out= refuses operands that require a gradient


def _refuse_overlap(to: torch.Tensor, from_: torch.Tensor) -> None:
    """Raises where the order of elements would decide; torch itself cannot always tell."""
    same_memory = to.untyped_storage().data_ptr() == from_.untyped_storage().data_ptr()
    form = [(t.shape, t.stride(), t.storage_offset()) for t in (to, from_)]
    if same_memory and form[0] != form[1]:
        raise RuntimeError("a tensor is written from another view of its memory")


def _count(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


class Drawn:
    """A program under construction: instructions, and the shape of every tensor so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shapes: list[Shape] = [(ROWS, WIDTH), (ROWS, WIDTH)]  # the input, a layer of it
        self.instructions: list[Instruction] = []

    def undo(self) -> None:
        """Takes the last instruction back."""
        if self.instructions.pop().keeps:
            self.shapes.pop()

    def draw(self) -> None:
        """Appends an instruction, or none if the drawn one does not fit."""
        region = self.random.choices(list(REGIONS), (10, 5, 1))[0]
        kind = self.random.choices("lubawf", (2, 4, 4, 4, 5, 3))[0]
        at = self._recent()
        shape = self.shapes[at]
        if kind == "l" and shape[-1:] == (WIDTH,):
            self._append("linear", _linear, (at,), region, shape)
        elif kind == "u":
            name = self._of(UNARY)
            if name != "parameter" or shape[-1] <= WIDTH:
                self._append(name, UNARY[name], (at,), region, shape)
        elif kind == "a":
            name = self._of(ALIASES)
            if len(shape) >= NEEDS.get(name, 1) and min(shape[:1] + shape[-1:]) >= 3:
                run, form = ALIASES[name]
                self._append(name, run, (at,), region, form(shape))
        elif kind == "w" and at > 0:  # never the input itself
            name = self._of(WRITES)
            if name != "parameter_" or shape[-1] <= WIDTH:
                self._append(name, WRITES[name], (at,), region, None)
        elif kind in "bf":
            self._draw_pair(kind, at, region)

    def _draw_pair(self, kind: str, at: int, region: str) -> None:
        others = [i for i, s in enumerate(self.shapes) if s == self.shapes[at]]
        other = self.random.choice(others)
        if kind == "b":
            name = self._of(BINARY)
            self._append(name, BINARY[name], (at, other), region, self.shapes[at])
        elif at > 0 and other != at:
            name = self._of(WRITES_FROM)
            self._append(name, WRITES_FROM[name], (at, other), region, None)

    def _recent(self) -> int:
        n = len(self.shapes)
        return max(self.random.randrange(n), self.random.randrange(n))

    def _of(self, table: dict) -> str:
        return self.random.choice(list(table))

    def _append(
        self, name: str, run: Callable, operands: tuple[int, ...], region: str, shape: Shape | None
    ) -> None:
        self.instructions.append(Instruction(name, run, operands, region, shape is not None))
        if shape is not None:
            self.shapes.append(shape)

    def __str__(self) -> str:
        lines, n = [], 2
        for i in self.instructions:
            names = ", ".join(f"t{k}" for k in i.operands)
            lines.append(f"{f't{n} = ' if i.keeps else ''}{i.name}({names})  # {i.region}")
            n += i.keeps
        return "\n".join(lines)


class Program(nn.Module):
    """The module of a program: a scalar loss of some of its tensors, and one of them."""

    def __init__(self, seed: int, length: int = 20) -> None:
        super().__init__()
        self.drawn = Drawn(seed)
        self.drawing = True
        self.taken = [1, 1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, 1)
            self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self._draw(length, draw_input(seed))
        self.drawing = False
        self.taken = sorted(self.drawn.random.sample(range(1, len(self.drawn.shapes)), 2))

    def _draw(self, length: int, x: torch.Tensor) -> None:
        """Draws until PyTorch runs it: a write to a tensor that a backward needs is taken back."""
        while len(self.drawn.instructions) < length:
            before = len(self.drawn.instructions)
            self.drawn.draw()
            if len(self.drawn.instructions) > before and run(self, x).error is not None:
                self.drawn.undo()

    def __deepcopy__(self, memo: dict) -> Program:
        twin = Program.__new__(Program)
        nn.Module.__init__(twin)
        for name, value in self.__dict__.items():
            plain = name in ("drawing", "drawn", "taken")
            twin.__dict__[name] = value if plain else copy.deepcopy(value, memo)
        return twin

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [x, self.first(x) * 1.0]
        for step in self.drawn.instructions:
            if self.drawing and step.name in WRITES_FROM:
                _refuse_overlap(*(tensors[i] for i in step.operands))
            with REGIONS[step.region]():
                result = step.run(self, *(tensors[i] for i in step.operands))
            if step.keeps:
                tensors.append(result)
        # Everything counts, as it is in the end; what was made in inference mode is copied first.
        loss = sum(t.clone().float().square().mean() for t in tensors[1:])
        return loss, tensors[self.taken[0]].clone()


@dataclass
class Result:
    """What one side computed; `error` instead if it raised."""

    loss: torch.Tensor | None = None
    output: torch.Tensor | None = None
    grads: dict[str, torch.Tensor | None] | None = None
    buffers: dict[str, torch.Tensor] | None = None
    error: Exception | None = None


def run(module: nn.Module, x: torch.Tensor) -> Result:
    """Forward and backward; PyTorch's own refusals are part of what a program may meet."""
    x = x.detach().clone().requires_grad_()
    named = dict(module.named_parameters())
    for parameter in named.values():
        parameter.grad = None
    try:
        loss, output = module(x)
        if loss.requires_grad:
            loss.backward()
    except Exception as error:
        return Result(error=error)
    grads = {name: p.grad for name, p in named.items()} | {"x": x.grad}
    return Result(loss.detach(), output.detach(), grads, dict(module.named_buffers()))


def exact_twin(module: nn.Module) -> nn.Module:
    """The same module in double precision."""
    return copy.deepcopy(module).double()


def draw_input(seed: int) -> torch.Tensor:
    """[ROWS, WIDTH], f32."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
