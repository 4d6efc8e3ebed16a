"""Recomputation: the same bits as the plan that keeps everything, in less memory.

Whatever a plan computes again, it computes with the same kernels from the same operands, so outputs
and gradients are compared bit for bit: of the expected backward, of one that keeps the activations,
and of backwards for other arriving gradients, with dropout where the family has it.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from gradd.spec import CaptureError
from helpers.graphs import captures
from helpers.graphs import engine as E
from helpers.models import families, random_graphs
from helpers.selection import SEED, every_run, one_in

pytestmark = pytest.mark.one_in(16)

ONE = np.ones((), np.float32)
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert_mlm": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
FAMILIES = ("llama", "bert_mlm", "gpt2", "gemma3", "peft_lora_llama")


class Captured:
    """A captured module in training mode, with values for all inputs of its graph."""

    def __init__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        made = captures.capture(module.train(), args, kwargs)
        self.feed = {n: array_of(v) for n, v in made.values.items()}
        self.model = E.Model(made.cap.onnx)
        self.grads = [n for n, v in made.values.items() if v.requires_grad]
        self.outputs = self.model.outputs[:2]

    def plan(self, **options: Any) -> E.Plan:
        return E.Plan(
            self.model, self.feed, self.grads, self.outputs, self.outputs, threads=1, **options
        )

    def info(self, **options: Any) -> E.Info:
        """Of a plan that is gone when this returns."""
        plan = self.plan(**options)
        return E.Info.from_buffer_copy(plan.info)

    def curve(self) -> list[E.Point]:
        curve = self.plan().curve()
        assert curve.model_us > 0
        return list(curve.points[: curve.n])


def array_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(E.BF16)
    return tensor.detach().numpy()


@functools.cache
def family(name: str, half: bool = False, layers: int = 4) -> Captured:
    over: dict[str, Any] = dict.fromkeys(DROPOUT.get(name, ()), 0.2)
    if name != "gemma3":
        over["n_layer" if name == "gpt2" else "num_hidden_layers"] = layers
    module, make_batch = families.build(name, **over)
    return Captured(module.bfloat16() if half else module, (), make_batch(3, 16, 0))


def arriving(outputs: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {n: rng.standard_normal(outputs[n].shape).astype(outputs[n].dtype) for n in names}


def results(of: Captured, plan: E.Plan) -> dict[str, np.ndarray]:
    """All that a run gives: outputs, and gradients of five backwards in turn."""
    found = {}
    for names in (of.outputs[:1], of.outputs[1:], of.outputs):
        for keep in (True, False):
            run = E.Run(plan)
            out = run.forward(of.feed, seed=11)
            found |= {f"{n} {names}": v for n, v in out.items()}
            for turn in range(1 + keep):
                got = run.backward(arriving(out, names), keep=keep and not turn)
                found |= {f"{n} of {names} {keep} {turn}": g for n, g in got.items()}
    return found


def assert_same_bits(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
            continue
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", one_in(2, FAMILIES))
def test_gradients_have_the_same_bits(name: str, half: bool):
    of = family(name, half)
    whole = of.plan()
    want = results(of, whole)
    tried = 0
    for recompute in ("layers", "compromise"):
        plan = of.plan(recompute=recompute)
        assert plan.info.whole_bytes == whole.info.arena_bytes
        assert plan.info.arena_bytes <= whole.info.arena_bytes
        tried += plan.info.recomputed_bytes > 0
        assert_same_bits(results(of, plan), want)
    assert tried, "nothing was computed again"


def trained(of: Captured, plan: E.Plan) -> dict[str, np.ndarray]:
    """Outputs and gradients of a forward and its expected backward."""
    run = E.Run(plan)
    out = run.forward(of.feed, seed=11)
    return out | run.backward(arriving(out, of.outputs[:1]))


@pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", every_run(("llama",), ["llama", "bert_mlm"]))
def test_a_smaller_budget_never_needs_more(name: str, half: bool):
    """50 random budgets: each is met with the same bits, or refused with the smallest that can be.

    It compares the memory that the run asks its device for, not only the number in the plan.
    """
    of = family(name, half)
    taken: list[int] = []
    device = E.Device(1, admit=lambda size: taken.append(size) or 0)
    top, bottom = of.info().arena_bytes, of.curve()[-1].arena_bytes
    want = trained(of, of.plan(on=device))
    assert bottom < top == sum(taken)
    rng = random.Random(f"{SEED} {name} {half}")
    budgets = sorted(rng.randint(int(bottom * 0.8), int(top * 1.1)) for _ in range(50))
    arenas, times, refused = [], [], 0
    for budget in budgets:
        if budget < bottom:
            with pytest.raises(E.EngineError, match=f"can be met is {bottom} bytes") as error:
                of.plan(memory_budget=budget)
            assert error.value.code == "NOMEM"
            refused += 1
            continue
        device.trim()
        taken.clear()
        plan = of.plan(memory_budget=budget, on=device)
        assert_same_bits(trained(of, plan), want)
        assert sum(taken) == plan.info.arena_bytes <= budget
        arenas.append(plan.info.arena_bytes)
        times.append(plan.info.recompute_us)
    assert arenas == sorted(arenas) and times == sorted(times, reverse=True)
    assert 0 < refused < 50 and len(set(arenas)) > 4


@pytest.mark.parametrize("name", one_in(2, FAMILIES))
def test_every_point_of_the_curve_can_be_met(name: str):
    of = family(name)
    points = of.curve()
    assert points[0].arena_bytes == of.info().arena_bytes and points[0].extra_us == 0
    for before, after in zip(points, points[1:], strict=False):
        assert after.arena_bytes < before.arena_bytes
        assert after.extra_us > before.extra_us
    for point in points:
        info = of.info(memory_budget=point.arena_bytes)
        assert info.arena_bytes <= point.arena_bytes
        assert info.recompute_us <= point.extra_us


def test_a_budget_that_is_large_enough_changes_nothing():
    of = family("llama")
    whole = of.info()
    info = of.info(memory_budget=whole.arena_bytes)
    assert info.arena_bytes == whole.arena_bytes and info.saved_bytes == whole.saved_bytes
    assert info.n_launches_backward == whole.n_launches_backward
    assert info.recomputed_bytes == 0 and info.recompute_us == 0


def test_budgets_give_the_same_bits():
    of = family("gpt2")
    want = results(of, of.plan())
    for point in of.curve()[1:]:
        assert_same_bits(results(of, of.plan(memory_budget=point.arena_bytes)), want)


def test_a_plain_plan_recomputes_as_well():
    of = family("bert_mlm", True)
    want = results(of, of.plan(plain=True))
    plan = of.plan(plain=True, recompute="compromise")
    assert plan.info.recomputed_bytes > 0
    assert_same_bits(results(of, plan), want)


def test_half_of_a_deep_model_goes():
    """Of 12 layers with short outputs the activations are nearly all that there is."""
    of = family("llama", layers=12)
    whole = of.info().arena_bytes
    layers, least = of.info(recompute="layers"), of.info(recompute="compromise")
    assert layers.arena_bytes < 0.5 * whole
    assert least.arena_bytes < layers.arena_bytes
    assert layers.recompute_us < 0.4 * layers.model_us


@pytest.mark.parametrize("seed", every_run(range(6), range(200)))
def test_random_programs_have_the_same_bits(seed: int):
    """Views, writes, detached regions: 20 instructions that PyTorch carries out."""
    dtype = torch.bfloat16 if seed % 3 == 2 else torch.float32
    program = random_graphs.Program(seed).to(dtype)
    x = random_graphs.draw_input(seed).to(dtype).requires_grad_()
    try:
        of = Captured(program, (x,), {})
    except CaptureError as error:
        pytest.skip(str(error))
    of.grads.append(of.model.inputs[0])
    whole = of.plan()
    want = results(of, whole)
    for recompute in ("layers", "compromise"):
        assert_same_bits(results(of, of.plan(recompute=recompute)), want)
    least = of.curve()[-1].arena_bytes
    plan = of.plan(memory_budget=least)
    assert plan.info.arena_bytes == least <= whole.info.arena_bytes
    assert_same_bits(results(of, plan), want)


@pytest.mark.nightly
def test_a_deep_model_fits_a_fifth_of_its_memory():
    """The curve of 32 layers ends low, and its end can be planned."""
    of = family("llama", layers=32)
    curve = of.curve()
    info = of.info(memory_budget=curve[-1].arena_bytes)
    assert info.arena_bytes < 0.2 * info.whole_bytes


def test_inference_has_no_budget():
    of = family("llama")
    plan = E.Plan(of.model, of.feed, [], of.outputs, [], memory_budget=1)
    assert plan.info.whole_bytes == 0 and plan.curve().n == 1


def test_bad_options_are_refused():
    of = family("llama")
    with pytest.raises(E.EngineError, match="a memory budget of -1 bytes"):
        of.plan(memory_budget=-1)
