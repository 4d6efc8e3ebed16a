"""Random ONNX graphs of convolutions and of what stands around them, over one to three axes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from helpers.graphs.onnx_writer import Writer

Shape = tuple[int, ...]
Value = tuple[str, Shape]


class Spatial:
    """A graph in the making: values [N, C, X...] with their shapes, and inputs for parameters."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.write = Writer()
        self.axes = self.random.choice((1, 2, 2, 2, 3))
        self.inputs: dict[str, Shape] = {}
        sizes = tuple(self.random.choice((4, 5, 6, 8)) for _ in range(self.axes))
        images, channels = self.random.choice((1, 2, 3)), self.some_channels()
        if self.random.random() < 0.5:
            self.values = [self.given(images, channels, *sizes)]
        else:  # channels-last
            x, _ = self.given(images, *sizes, channels)
            perm = [0, self.axes + 1, *range(1, self.axes + 1)]
            self.values = [(self.write("Transpose", x, perm=perm), (images, channels, *sizes))]

    def some_channels(self) -> int:
        return self.random.choice((3, 8, 16, 24))

    def given(self, *shape: int) -> Value:
        name = f"p{len(self.inputs)}"
        self.inputs[name] = shape
        return name, shape

    def ints(self, values: list[int]) -> str:
        return self.write.constant(values, np.int64)

    def add(self, shape: Shape, op: str, *operands: str, **attrs: object) -> Value:
        value = self.write(op, *operands, **attrs), shape
        self.values.append(value)
        return value

    def alike(self, shape: Shape) -> str:
        return self.random.choice([name for name, other in self.values if other == shape])


def _conv(g: Spatial, x: str, shape: Shape) -> None:
    channels, out, taps = shape[1], g.some_channels(), g.random.choice((1, 2, 3))
    stride, pad = g.random.choice((1, 1, 2)), g.random.choice((0, 1))
    group = g.random.choice((1, 1, 2, channels)) if channels % 2 == 0 else 1
    out = out if group == 1 else channels
    sizes = tuple((n + 2 * pad - taps) // stride + 1 for n in shape[2:])
    if min(sizes) < 1:
        return
    operands = [x, g.given(out, channels // group, *[taps] * g.axes)[0]]
    if g.random.random() < 0.5:
        operands.append(g.given(out)[0])
    attrs = {"pads": [pad] * 2 * g.axes, "strides": [stride] * g.axes, "group": group}
    g.add((shape[0], out, *sizes), "Conv", *operands, **attrs)


def _pointwise(g: Spatial, x: str, shape: Shape) -> None:
    out = g.some_channels()
    operands = [x, g.given(out, shape[1], *[1] * g.axes)[0], g.given(out)[0]]
    g.add((shape[0], out, *shape[2:]), "Conv", *operands[: g.random.choice((2, 3))])


def _transposed(g: Spatial, x: str, shape: Shape) -> None:
    stride = g.random.choice((1, 2))
    operands = [x, g.given(shape[1], 8, *[2] * g.axes)[0], g.given(8)[0]]
    sizes = tuple((n - 1) * stride + 2 for n in shape[2:])
    if max(sizes) < 20:
        operands = operands[: g.random.choice((2, 3))]
        g.add((shape[0], 8, *sizes), "ConvTranspose", *operands, strides=[stride] * g.axes)


def _bend(g: Spatial, x: str, shape: Shape) -> None:
    g.add(shape, g.random.choice(("Relu", "Tanh", "Sigmoid")), x)


def _spread(g: Spatial, x: str, shape: Shape) -> None:
    ones = [1] * g.axes
    of = g.random.choice(
        ((shape[1], *ones), (1, shape[1], *ones), shape[-1:], (shape[0], 1, *ones))
    )
    g.add(shape, g.random.choice(("Add", "Mul", "Sub")), *g.random.sample([x, g.given(*of)[0]], 2))


def _join(g: Spatial, x: str, shape: Shape) -> None:
    if g.random.random() < 0.5:
        g.add(shape, g.random.choice(("Add", "Mul")), x, g.alike(shape))
        return
    like = [v for v in g.values if len(v[1]) == len(shape) and v[1][2:] == shape[2:]]
    other, its = g.random.choice(like)
    axis = g.random.choice((1, 1 - len(shape)))
    g.add((shape[0], shape[1] + its[1], *shape[2:]), "Concat", x, other, axis=axis)


def _choose(g: Spatial, x: str, shape: Shape) -> None:
    g.add(shape, "Where", g.write("Greater", x, g.alike(shape)), g.alike(shape), x)


def _norm(g: Spatial, x: str, shape: Shape) -> None:
    vectors = [g.given(shape[1])[0] for _ in range(4)]
    g.add(shape, "BatchNormalization", x, *vectors, training_mode=1)


def _split(g: Spatial, x: str, shape: Shape) -> None:
    parts = [shape[1] // 2, shape[1] - shape[1] // 2]
    names = g.write("Split", x, g.ints(parts), outs=2, axis=1)
    g.values += [(n, (shape[0], c, *shape[2:])) for n, c in zip(names, parts, strict=True)]


def _pad(g: Spatial, x: str, shape: Shape) -> None:
    front = [0, g.random.choice((0, 1)), *(g.random.choice((0, 1, -1)) for _ in shape[2:])]
    behind = [0, 0, *(g.random.choice((0, 2)) for _ in shape[2:])]
    sizes = tuple(n + a + b for n, a, b in zip(shape, front, behind, strict=True))
    if max(sizes[2:]) < 20 and min(sizes) > 0:
        g.add(sizes, "Pad", x, g.ints(front + behind), mode=g.random.choice(("constant", "edge")))


def _pool(g: Spatial, x: str, shape: Shape) -> None:
    attrs = {"kernel_shape": [2] * g.axes, "strides": [g.random.choice((1, 2))] * g.axes}
    if min(shape[2:]) < 2:
        return
    sizes = tuple((n - 2) // attrs["strides"][0] + 1 for n in shape[2:])
    g.add((*shape[:2], *sizes), g.random.choice(("MaxPool", "AveragePool")), x, **attrs)


def _gate(g: Spatial, x: str, shape: Shape) -> None:
    mean = g.write("GlobalAveragePool", x)
    weight = g.given(shape[1], shape[1], *[1] * g.axes)[0]
    g.add(shape, "Mul", x, g.write("Sigmoid", g.write("Conv", mean, weight)))


def _reduce(g: Spatial, x: str, shape: Shape) -> None:
    axes = g.random.choice(([1], list(range(2, len(shape))), [2], [0, 1], [-1]))
    op = g.random.choice(("ReduceMean", "ReduceSum", "ReduceMax"))
    keep = g.random.choice((0, 1))
    folded = {a % len(shape) for a in axes}
    kept = tuple(n for i, n in enumerate(shape) if i not in folded)
    if keep:
        g.add(shape, "Add", x, g.write(op, x, g.ints(axes)))
    else:
        g.add(kept, op, x, g.ints(axes), keepdims=0)


def _turn(g: Spatial, x: str, shape: Shape) -> None:
    rank = len(shape)
    x = g.write("Transpose", x, perm=[0, *range(2, rank), 1])
    if g.random.random() < 0.5:
        x = g.write("Tanh", x)
    g.add(shape, "Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])


def _resize(g: Spatial, x: str, shape: Shape) -> None:
    sizes = [*shape[:2], *(n + 1 for n in shape[2:])]
    mode = g.random.choice(("nearest", "linear"))
    if max(sizes[2:]) < 20:
        g.add(tuple(sizes), "Resize", x, "", "", g.ints(sizes), mode=mode)


def _softmax(g: Spatial, x: str, shape: Shape) -> None:
    g.add(shape, "Softmax", x, axis=1)


STEPS: list[Callable[[Spatial, str, Shape], None]] = [
    *[_conv] * 9, *[_pointwise] * 2, _transposed, _bend, _bend, _spread, _join, _join, _choose,
    _norm, _norm, _split, _pad, _pool, _pool, _gate, _reduce, _turn, _resize, _softmax,
]  # fmt: skip


def build(seed: int) -> tuple[Writer, dict[str, Shape], str]:
    """A graph, the shapes of its inputs by name, and its output, a sum of bent values."""
    g = Spatial(seed)
    for _ in range(g.random.randint(4, 14)):
        spatial = [v for v in g.values[-4:] if len(v[1]) == 2 + g.axes]
        if spatial:
            g.random.choice(STEPS)(g, *g.random.choice(spatial))
    sums = []
    for name, shape in [*g.random.sample(g.values, min(2, len(g.values))), g.values[-1]]:
        weight = g.given(*(n if i == 1 else 1 for i, n in enumerate(shape)))[0]
        weighted = g.write("Mul", g.write("Tanh", name), weight)
        sums.append(g.write("ReduceSum", weighted, keepdims=0))
    return g.write, g.inputs, g.write("Sum", *sums)
