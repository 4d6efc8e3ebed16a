"""Parts of ONNX Runtime Training around ORTTrainer, by their formulas; none needs a daemon."""

from __future__ import annotations

import copy
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradd.legacy import custom_gradients
from gradd.legacy.configs import AdamConfig, LambConfig, SGDConfig, make_optimizer
from gradd.legacy.fp16 import FP16_Optimizer, all_finite
from gradd.legacy.lamb import Lamb
from gradd.legacy.model_desc import ModelDescription
from gradd.legacy.options import ORTTrainerOptions
from gradd.legacy.samplers import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from gradd.legacy.scalers import DynamicLossScaler, LossScaler
from gradd.legacy.schedules import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    LRScheduler,
    PolyWarmupLRScheduler,
)
from gradd.legacy.trainer import TrainStepInfo

# ---- schedules ----

WARM = [0.0, 0.05, 0.1, 0.15]  # four of 20 steps to 0.2
CASES = [
    ("constant", ConstantWarmupLRScheduler(20, 0.2), lambda t: 0.2),
    ("linear", LinearWarmupLRScheduler(20, 0.2), lambda t: 0.2 * max(0, 20 - t) / 16),
    (
        "cosine",
        CosineWarmupLRScheduler(20, warmup=0.2),
        lambda t: 0.1 * (1 + math.cos(math.pi * (t - 4) / 16)),
    ),
    (
        "waves",
        CosineWarmupLRScheduler(20, 1.5, 0.2),
        lambda t: 0.1 * (1 + math.cos(3 * math.pi * (t - 4) / 16)),
    ),
    (
        "poly",
        PolyWarmupLRScheduler(20, 0.01, 2.0, 0.2),
        lambda t: 0.19 * (1 - (t - 4) / 16) ** 2 + 0.01 if t <= 20 else 0.01,
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("schedule", "formula"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_schedules_follow_their_formulas(schedule: LRScheduler, formula: Any) -> None:
    info = TrainStepInfo(SGDConfig(lr=0.2))
    assert schedule.get_last_lr() == []
    found = []
    for info.optimization_step in range(24):
        found += schedule.step(info)
        assert schedule.get_last_lr() == found[-1:]
    assert found == pytest.approx(WARM + [formula(t) for t in range(4, 24)])


@pytest.mark.quick
def test_schedules_refuse_what_makes_no_schedule() -> None:
    for kind in (ConstantWarmupLRScheduler, LinearWarmupLRScheduler, CosineWarmupLRScheduler):
        with pytest.raises(ValueError, match="total_steps"):
            kind(0)
        with pytest.raises(ValueError, match="warmup"):
            kind(10, warmup=1.0)
    with pytest.raises(ValueError, match="lr_end"):
        PolyWarmupLRScheduler(10, 0.5, warmup=0.0).get_lr(TrainStepInfo(SGDConfig(lr=0.1)))
    with pytest.raises(NotImplementedError):
        LRScheduler().get_lr(TrainStepInfo(SGDConfig()))


# ---- optimizers and their settings ----


def _lamb(w: torch.Tensor, gradients: list[torch.Tensor], **s: Any) -> torch.Tensor:
    """The algorithm of the paper, in double precision."""
    w = w.double()
    m = v = torch.zeros_like(w)
    for t, g in enumerate((g.double() for g in gradients), 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        corrected = (1 - 0.9**t, 1 - 0.99**t) if s["bias_correction"] else (1.0, 1.0)
        r = m / corrected[0] / ((v / corrected[1]).sqrt() + 1e-6) + s["weight_decay"] * w
        lengths = float((w * w).sum()) ** 0.5, float((r * r).sum()) ** 0.5
        ratio = min(max(lengths[0] / lengths[1], s["ratio_min"]), s["ratio_max"])
        w = w - 0.03 * (ratio if min(lengths) > 0 else 1.0) * r
    return w


@pytest.mark.quick
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (0.5, 0.7), (3.0, 9.0)])
def test_lamb_follows_the_paper(bias_correction: bool, limits: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(7, 5, generator=generator), torch.zeros(4), torch.tensor(2.0)]
    gradients = [[torch.randn(p.shape, generator=generator) for _ in range(6)] for p in start]
    settings = {"bias_correction": bias_correction, "weight_decay": 0.1}
    settings |= {"ratio_min": limits[0], "ratio_max": limits[1]}
    params = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = Lamb(params, lr=0.03, betas=(0.9, 0.99), eps=1e-6, **settings)
    for step in zip(*gradients, strict=True):
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for p, s, g in zip(params, start, gradients, strict=True):
        torch.testing.assert_close(p.double(), _lamb(s, g, **settings), rtol=2e-5, atol=1e-6)


@pytest.mark.quick
def test_lamb_steps_where_a_norm_is_zero_and_loads_its_state() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = Lamb([p], lr=0.5)
    p.grad = torch.tensor([1.0, -2.0, 0.0])
    assert optimizer.step(lambda: 7) == 7
    expected = -0.5 * 0.1 * p.grad / (math.sqrt(0.001) * p.grad.abs() + 1e-6)
    torch.testing.assert_close(p.detach(), expected)
    other = Lamb([torch.nn.Parameter(p.detach().clone())], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0]["params"][0].grad = p.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(p, other.param_groups[0]["params"][0])


@pytest.mark.quick
def test_settings_of_groups_reach_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    named = {n: torch.nn.Parameter(torch.ones(2)) for n in ("a", "b", "c")}
    config = LambConfig(
        [{"params": ["b", "none"], "alpha": 0.5, "lambda_coef": 0.25}], lr=0.1, max_norm_clip=3.0
    )
    with caplog.at_level(logging.WARNING, "gradd"):
        first, second = make_optimizer(config, named).param_groups
    assert "none" in caplog.text
    assert first["params"] == [named["a"], named["c"]] and second["params"] == [named["b"]]
    assert (first["betas"], second["betas"]) == ((0.9, 0.999), (0.5, 0.999))
    assert (first["weight_decay"], second["weight_decay"]) == (0.0, 0.25)
    assert second["lr"] == 0.1 and second["max_norm_clip"] == 3.0 and second["eps"] == 1e-6
    adam = AdamConfig(weight_decay_mode=AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE, epsilon=0.5)
    assert adam.epsilon == 0.5 and adam.name == "AdamOptimizer" and adam.lr == 0.001
    assert make_optimizer(adam, named).adam_w_mode == 1
    assert type(make_optimizer(SGDConfig(lr=2.0), named)) is torch.optim.SGD


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SGDConfig([{"params": ["a"], "lr": 1.0}]), "must be empty"),
        (lambda: AdamConfig([{"params": ["a"], "lr": 1.0}]), "'lr' of a group"),
        (lambda: AdamConfig([{"params": ["a"], "ratio_min": 1.0}]), "ratio_min"),
        (lambda: AdamConfig([{"params": "a"}]), "list of names"),
        (lambda: AdamConfig(alpha=-1.0), "alpha"),
        (lambda: AdamConfig(lr="a"), "'lr' must be a number, got 'a'"),  # type: ignore[arg-type]
        (lambda: AdamConfig([{"params": ["a"], "beta": -1.0}]), "beta"),
        (lambda: LambConfig(max_norm_clip=0.0), "max_norm_clip"),
        (lambda: LambConfig(do_bias_correction=1), "do_bias_correction"),
        (lambda: AdamConfig([{"params": ["a"], "weight_decay_mode": 1}]), "same for all"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make()


# ---- options, description, scalers ----


@pytest.mark.quick
def test_options_have_defaults_and_name_what_they_lack(caplog: pytest.LogCaptureFixture) -> None:
    options = ORTTrainerOptions()
    assert options.batch.gradient_accumulation_steps == 1 and options.lr_scheduler is None
    assert options.utils.grad_norm_clip and options.distributed.world_size == 1
    assert options.device.id == ("cuda" if torch.cuda.is_available() else "cpu")
    options.utils.frozen_weights.append("mine")
    assert not ORTTrainerOptions().utils.frozen_weights
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "gradd"):
        given = {"device": {"id": "cpu", "mem_limit": 5}, "graph_transformer": {}}
        assert ORTTrainerOptions(given).device.id == "cpu"
    assert "without effect here: device.mem_limit" in caplog.text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batches": {}}, "unknown option batches"),
        ({"batch": {"size": 1}}, "unknown option batch.size"),
        ({"batch": 3}, "batch must be a dict"),
        ({"batch": {"gradient_accumulation_steps": 0}}, "at least 1"),
        ({"batch": {"gradient_accumulation_steps": 1.5}}, "must be int"),
        ({"mixed_precision": {"enabled": 1}}, "must be bool"),
        ({"mixed_precision": {"loss_scaler": LossScaler(2.0)}}, "needs mixed_precision.enabled"),
        ({"lr_scheduler": 0.1}, "must be a LRScheduler"),
        ({"distributed": {"world_size": 2}}, "DistributedDataParallel"),
        ({"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}, "stage=1 is not supp"),
        ({"_internal_use": {"extra_postprocess": print}}, "change the torch module"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ORTTrainerOptions(given)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"inputs": []}, "'inputs' and 'outputs'"),
        ({"inputs": [["x", []]], "outputs": []}, "must be a tuple"),
        ({"inputs": [("x", [1.5])], "outputs": []}, "numbers and names"),
        ({"inputs": [("x", []), ("x", [])], "outputs": [("l", [], True)]}, "twice"),
        ({"inputs": [("x", [])], "outputs": [("y", [])]}, "exactly one output"),
        ({"inputs": [], "outputs": [("a", [], True), ("b", [], True)]}, "exactly one output"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelDescription(given)


@pytest.mark.quick
def test_description_checks_shapes_of_a_call() -> None:
    described = ModelDescription(
        {
            "inputs": [("x", ["batch", 3]), ("label", ["batch"])],
            "outputs": [("loss", [1], True), ("y", ["batch", 2])],
        }
    )
    x, label, loss, y = torch.ones(4, 3), torch.ones(4), torch.ones(()), torch.ones(4, 2)
    described.check([x, label], [loss, y])
    described.check([x], [None, y])
    for inputs, outputs, says in (
        ([x[:, :2], label], [loss, y], "x has the shape"),
        ([x, label[:3]], [loss, y], "label has the shape .* with {'batch': 4}"),
        ([x, label], [loss, y[:1]], "y has the shape"),
        ([x, label], [torch.ones(2), y], "loss has the shape"),
        ([x[0], label], [loss, y], "x has the shape"),
    ):
        with pytest.raises(ValueError, match=says):
            described.check(inputs, outputs)
    with pytest.raises(ValueError, match="passed by name"):
        described.check_forward(lambda other: None, True)
    described.check_forward(lambda **kwargs: None, True)


@pytest.mark.quick
def test_dynamic_loss_scale() -> None:
    scaler = DynamicLossScaler(
        loss_scale=8.0, up_scale_window=2, min_loss_scale=4.0, max_loss_scale=16.0
    )
    info = TrainStepInfo(SGDConfig())
    found = []
    for info.all_finite in (True, True, True, True, True, False, True, False, False, False):
        found.append(scaler.update(info))
    assert found == [8.0, 16.0, 16.0, 16.0, 16.0, 8.0, 8.0, 4.0, 4.0, 4.0]
    scaler.reset()
    assert scaler.loss_scale == 8.0
    with pytest.raises(ValueError, match="positive"):
        scaler.loss_scale = 0.0


# ---- FP16_Optimizer ----

FINITE = [torch.ones(3), torch.full((2, 2), 1e38), torch.zeros(0)]
BAD = [torch.tensor([1.0, math.inf]), torch.tensor([math.nan]), torch.tensor([-math.inf, 0.0])]


@pytest.mark.quick
def test_all_finite() -> None:
    assert all_finite([]) and all_finite([None]) and all_finite([None, *FINITE])
    assert all_finite([torch.full((9,), 60000.0, dtype=torch.float16)])
    for bad in BAD:
        assert not all_finite([*FINITE[:2], bad, None])
        assert not all_finite([bad.half()])


class _Zero:
    """As much of DeepSpeed's ZeRO optimizer as its overflow check uses."""

    def __init__(self, gradients: Any) -> None:
        self.averaged_gradients = gradients

    def has_overflow_serial(self, params: Any, is_grad_list: bool = False) -> bool:
        raise AssertionError("not replaced")

    has_overflow_partitioned_grads_serial = has_overflow_serial


def _with_gradient(gradient: torch.Tensor | None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(1 if gradient is None else gradient.shape))
    p.grad = gradient
    return p


@pytest.mark.quick
@pytest.mark.parametrize("wrapped", [False, True])
def test_fp16_optimizer_finds_what_overflows_in_deepspeed(wrapped: bool) -> None:
    for gradients, overflow in ((FINITE, False), *(([*FINITE[:1], b], True) for b in BAD)):
        for kept in ([gradients, None], {0: [None, *gradients]}):
            zero = _Zero(kept)
            given = SimpleNamespace(optimizer=zero) if wrapped else zero
            assert FP16_Optimizer(given) is given
            params = [_with_gradient(g) for g in [None, *gradients]]
            for flag in (
                zero.has_overflow_serial(params),
                zero.has_overflow_serial(gradients, True),
                zero.has_overflow_partitioned_grads_serial(),
            ):
                assert flag.byte().tolist() == [overflow] == torch.ByteTensor([flag]).tolist()


@pytest.mark.quick
def test_fp16_optimizer_of_megatron_and_apex() -> None:
    megatron = SimpleNamespace(
        _check_overflow=None, clip_master_grads=lambda *a: 1.5, overflow=False,
        fp16_groups=[[_with_gradient(FINITE[0])]], fp32_from_fp32_groups=[[_with_gradient(BAD[0])]],
    )  # fmt: skip
    megatron._check_overflow = lambda: None
    FP16_Optimizer(megatron, get_tensor_model_parallel_rank=lambda: 0)
    assert megatron._check_overflow() is True and megatron.overflow is True
    megatron.fp32_from_fp32_groups = []
    assert megatron._check_overflow() is False and megatron.overflow is False
    assert megatron.clip_master_grads() == 1.5

    params = [[_with_gradient(torch.ones(2)), _with_gradient(None)] for _ in range(3)]
    kinds = ("all_fp16_params", "all_fp32_from_fp32_params", "all_fp32_from_fp16_params")
    apex = SimpleNamespace(
        _amp_stash=SimpleNamespace(**dict(zip(kinds, params, strict=True))),
        _amp_lazy_init=lambda: None,
    )
    FP16_Optimizer(apex)
    apex.zero_grad(set_to_none=False)
    assert [None if p[0].grad is None else p[0].grad.tolist() for p in params] == [
        [0.0, 0.0], [0.0, 0.0], None,
    ]  # fmt: skip
    apex.zero_grad()
    assert all(p.grad is None for group in params for p in group)


@pytest.mark.quick
def test_fp16_optimizer_leaves_optimizers_of_torch_as_they_are() -> None:
    optimizer = torch.optim.SGD([_with_gradient(torch.ones(1))], lr=1.0)
    before = set(vars(optimizer))
    assert FP16_Optimizer(optimizer) is optimizer and set(vars(optimizer)) == before


# ---- samplers ----


@pytest.mark.quick
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sampler_balances(
    drop_last: bool, shuffle: bool, group_size: int | None, world_size: int
) -> None:
    lengths = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 1]
    ranks = [
        LoadBalancingDistributedSampler(
            lengths, lambda x: x, world_size, r, shuffle, group_size, drop_last=drop_last
        )
        for r in range(world_size)
    ]
    share = len(lengths) // world_size
    share += 0 if drop_last or len(lengths) % world_size == 0 else 1
    dealt = [list(s) for s in ranks]
    assert [len(d) for d in dealt] == [len(s) for s in ranks] == [share] * world_size
    assert len({i for d in dealt for i in d}) == min(len(lengths), share * world_size)
    runs = list(zip(*dealt, strict=True))
    if group_size is None:  # neighbours in the sorted order are dealt together
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        order += order[: share * world_size - len(order)] if not drop_last else []
        expected = [
            tuple(order[i : i + world_size]) for i in range(0, share * world_size, world_size)
        ]
        assert (sorted(runs) if shuffle else runs) == (sorted(expected) if shuffle else expected)
    else:
        order = [i for run in runs for i in run][: len(lengths)]
        first = [i for i in order if i // group_size == order[0] // group_size]
        assert order[: len(first)] == first == sorted(first, key=lambda i: lengths[i])
    if shuffle:
        again = [list(s) for s in ranks]
        for s in ranks:
            s.set_epoch(1)
        assert again == dealt and [list(s) for s in ranks] != dealt


@pytest.mark.quick
def test_sampler_asks_for_each_complexity_once_and_may_be_less_strict() -> None:
    asked: list[int] = []

    def cost(x: int) -> int:
        asked.append(x)
        return x

    data = list(range(100))
    sampler = LoadBalancingDistributedSampler(data, cost, 2, 0, shuffle=False, random_level=1.0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first and first != data[::2] and asked == data
    assert sorted(i for run in sampler.runs() for i in run) == data
    for wrong in ({"rank": 2}, {"random_level": 1.5}):
        with pytest.raises(ValueError):
            LoadBalancingDistributedSampler(data, cost, **{"world_size": 2, "rank": 0, **wrong})


@pytest.mark.quick
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sampler_gives_each_process_as_many_batches(drop_last: bool) -> None:
    lengths = [1] * 6 + [5] * 5

    def batches(indices: list[int]) -> list[list[int]]:
        """Batches of at most 6 units."""
        found: list[list[int]] = [[]]
        for i in indices:
            if sum(lengths[j] for j in found[-1]) + lengths[i] > 6:
                found.append([])
            found[-1].append(i)
        return found

    kinds = [
        LoadBalancingDistributedBatchSampler(
            LoadBalancingDistributedSampler(lengths, lambda x: x, 2, r), batches, drop_last
        )
        for r in range(2)
    ]
    own = [batches(list(k.sampler)) for k in kinds]
    count = (min if drop_last else max)(map(len, own))
    assert [len(k) for k in kinds] == [count, count]
    for k, all_of_it in zip(kinds, own, strict=True):
        assert list(k) == (all_of_it + all_of_it)[:count]
        k.set_epoch(3)
        assert (
            list(k) == batches(list(k.sampler))[: len(k)] + list(k)[len(batches(list(k.sampler))) :]
        )
    with pytest.raises(ValueError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(
            LoadBalancingDistributedSampler(lengths, lambda x: x, 2, 0, drop_last=True), batches
        )


# ---- gradients by name ----


@pytest.mark.quick
def test_a_registered_gradient_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    def gradient() -> list[Any]:
        raise AssertionError("is not called")

    key = ("org.pytorch.aten", "ATen", "aten::sinc", "")
    registry = custom_gradients.CustomGradientRegistry
    with caplog.at_level(logging.WARNING, "gradd"):
        assert custom_gradients.register_gradient(*key)(gradient) is gradient
        registry.register(key[0], key[1], key[2:], gradient)
        registry.register_custom_stop_gradient_edges([0], *key)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 3 and all("aten::sinc" in s and "has no effect" in s for s in said)
    with pytest.raises(TypeError, match="must be texts, got"):
        custom_gradients.register_gradient("a", 1)  # type: ignore[arg-type]
