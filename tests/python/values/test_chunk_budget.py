"""Chunks of a head's loss under a memory budget: shorter where that is the cheapest way to fit."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer

EARLY, DENSE = 4, 2  # GRADD_PLAN_EARLY, GRADD_PLAN_DENSE_LOSS
ROWS, K, V = 1500, 64, 3000
ONE = np.ones((), np.float32)


class Head:
    """Two layers, a head and its loss, with values for all inputs."""

    def __init__(self, half: bool, rows: int = ROWS, k: int = K, v: int = V) -> None:
        w = Writer()
        x = "x"
        for _ in range(2):
            x = w("Tanh", w("MatMul", x, "a"))
        z = w("MatMul", x, w("Transpose", "w", perm=[1, 0]))
        z = w("Cast", z, to=TensorProto.FLOAT) if half else z
        self.loss = w("SoftmaxCrossEntropyLoss", z, "y", ignore_index=-100, reduction="mean")
        shapes = {"x": (rows, k), "a": (k, k), "w": (v, k), "y": (rows,)}
        kind = {"kind": TensorProto.BFLOAT16} if half else {}
        self.model = E.Model(w.proto(shapes, [self.loss], ints=("y",), **kind))
        rng = np.random.default_rng(rows + v)
        self.feed: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) / (1 if name == "x" else np.sqrt(k))
            self.feed[name] = values.astype(E.BF16 if half else np.float32)
        self.feed["y"] = np.where(rng.random(rows) < 0.2, -100, rng.integers(0, v, rows))

    def plan(self, wanted: tuple[str, ...] = ("x", "a", "w"), flags: int = EARLY, **o: Any):
        given = {"parameters": ["a", "w"]} if flags & EARLY else {}
        names = [self.loss]
        return E.Plan(
            self.model, self.feed, list(wanted), names, names, flags=flags, threads=1, **given, **o
        )

    def info(self, **options: Any) -> E.Info:
        return E.Info.from_buffer_copy(self.plan(**options).info)

    def results(self, plan: E.Plan) -> dict[str, np.ndarray]:
        run = E.Run(plan)
        early = run.give()
        out = run.forward(self.feed)
        grads = run.backward({self.loss: ONE}, into=early)
        return {n: np.array(v) for n, v in (out | grads).items()}


@functools.cache
def head(half: bool) -> Head:
    return Head(half)


KINDS = pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])


@KINDS
@pytest.mark.quick
def test_budgets_reach_far_below_the_logits_of_one_chunk(half: bool):
    of = head(half)
    whole = of.info().arena_bytes
    curve = of.plan().curve()
    points = list(curve.points[: curve.n])
    assert points[-1].arena_bytes < 0.4 * whole
    for before, after in zip(points, points[1:], strict=False):
        assert after.arena_bytes < before.arena_bytes and after.extra_us > before.extra_us


@KINDS
def test_a_smaller_budget_never_needs_more(half: bool):
    of = head(half)
    curve = of.plan().curve()
    top, bottom = curve.points[0].arena_bytes, curve.points[curve.n - 1].arena_bytes
    rng = random.Random(5)
    budgets = sorted(rng.randint(int(0.8 * bottom), int(1.1 * top)) for _ in range(50))
    arenas, times = [], []
    for budget in budgets:
        if budget < bottom:
            with pytest.raises(E.EngineError, match=f"can be met is {bottom} bytes"):
                of.plan(memory_budget=budget)
            continue
        info = of.info(memory_budget=budget)
        assert info.arena_bytes <= budget
        arenas.append(info.arena_bytes)
        times.append(info.recompute_us)
    assert arenas == sorted(arenas) and times == sorted(times, reverse=True)
    assert len(set(arenas)) > 3


@KINDS
@pytest.mark.quick
def test_results_agree_up_to_rounding_and_with_themselves_bit_for_bit(half: bool):
    of = head(half)
    want = of.results(of.plan())
    curve = of.plan().curve()
    for point in curve.points[1 : curve.n]:
        plan = of.plan(memory_budget=point.arena_bytes)
        got, again = of.results(plan), of.results(of.plan(memory_budget=point.arena_bytes))
        for name, value in want.items():
            a, b = got[name].astype(float), value.astype(float)
            scale = np.abs(b).max()
            assert np.abs(a - b).max() <= (8e-3 if half else 2e-6) * scale, name
            assert got[name].tobytes() == again[name].tobytes(), name


@KINDS
def test_policies_leave_chunks_and_bits_alone(half: bool):
    of = head(half)
    want = of.results(of.plan())
    for policy in ("layers", "compromise"):
        got = of.results(of.plan(recompute=policy))
        for name, value in want.items():
            assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("wanted", [("x",), ("w",), ("x", "a")])
@pytest.mark.parametrize("early", [0, EARLY])
def test_frozen_parts_and_gradients_in_the_arena(wanted: tuple[str, ...], early: int):
    of = head(True)
    whole = of.info(wanted=wanted, flags=early).arena_bytes
    curve = of.plan(wanted=wanted, flags=early).curve()
    least = curve.points[curve.n - 1].arena_bytes
    assert least < 0.8 * whole
    assert of.info(wanted=wanted, flags=early, memory_budget=least).arena_bytes == least


@pytest.mark.parametrize("seed", range(12))
def test_chunks_take_no_more_than_whole_logits(seed: int):
    """Of random sizes, with and without memory of the caller for the head's gradient."""
    rng = random.Random(seed)
    of = Head(seed % 2 > 0, rng.randint(20, 3000), rng.choice([8, 64, 200]), rng.randint(50, 4000))
    for flags in (0, EARLY):
        chunked, dense = (of.info(flags=flags | more).arena_bytes for more in (0, DENSE))
        assert chunked <= dense
