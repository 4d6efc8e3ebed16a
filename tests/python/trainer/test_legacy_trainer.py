"""ORTTrainer of ONNX Runtime Training, against loops of plain PyTorch."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import onnx.reference
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd.legacy.checkpoint import (
    experimental_load_checkpoint,
    experimental_load_state_dict,
    experimental_save_checkpoint,
    experimental_state_dict,
)
from gradd.legacy.configs import AdamConfig, LambConfig, OptimizerConfig, SGDConfig
from gradd.legacy.options import ORTTrainerOptions
from gradd.legacy.scalers import DynamicLossScaler
from gradd.legacy.schedules import LinearWarmupLRScheduler
from gradd.legacy.trainer import ORTTrainer

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("shared_daemon")]

AFTER = AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
DESC = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 3])],
}


def _here() -> dict[str, Any]:
    """Options for the device of the tests."""
    return {"device": {"id": str(torch.get_default_device())}}


class Net(nn.Module):
    """Two layers; the second has a buffer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.register_buffer("shift", torch.full((3,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of three classes."""
        return self.second(torch.tanh(self.first(x))) + self.shift


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _batches(count: int, seed: int = 9) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(5 + i % 2, 6, generator=generator) for i in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in draw]


def _trainer(config: OptimizerConfig, model: nn.Module | None = None, **options: Any) -> ORTTrainer:
    given = ORTTrainerOptions({**_here(), **options})
    return ORTTrainer(model or _net(), DESC, config, loss_fn=F.cross_entropy, options=given)


def _same(model: nn.Module, other: nn.Module) -> None:
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=2e-4, atol=2e-6, msg=name)


def _decayed(model: nn.Module) -> tuple[list[str], list[Any], list[Any]]:
    """Names of what decays; these parameters; the others."""
    names = ["first.weight", "second.weight"]
    named = dict(model.named_parameters())
    return names, [named[n] for n in names], [p for n, p in named.items() if n not in names]


def test_a_published_script_runs(tmp_path: Path) -> None:
    import gradd_aliases  # noqa: F401
    import onnxruntime.training  # type: ignore[import-not-found]
    from onnxruntime.training import (  # type: ignore[import-not-found]
        ORTTrainer,
        ORTTrainerOptions,
        amp,
        checkpoint,
        optim,
    )

    onnxruntime.set_seed(1)
    model = _net()
    model_description = {
        "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", 3])],
    }
    names = [n for n, _ in model.named_parameters() if "bias" not in n]
    config = optim.AdamConfig(params=[{"params": names, "lambda_coef": 0.01}], lr=0.03)
    schedule = optim.lr_scheduler.LinearWarmupLRScheduler(40, warmup=0.1)
    options = ORTTrainerOptions({**_here(), "lr_scheduler": schedule})
    trainer = ORTTrainer(model, model_description, config, F.cross_entropy, options)
    losses = []
    for data, targets in _batches(40):
        loss, scores = trainer.train_step(data, targets)
        losses.append(loss.item())
        assert scores.shape == (len(data), 3) and not scores.requires_grad
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    stats = trainer.module.gradd_stats()
    assert stats["forwards"] >= 40 and not stats["in_torch"]
    assert trainer._train_step_info.optimization_step == 40
    assert schedule.get_last_lr()[0] == pytest.approx(0.03 / 36)
    data, targets = _batches(1)[0]
    loss, scores = trainer.eval_step(data, targets)
    torch.testing.assert_close(scores, model(data))
    trainer._train_step_info.fetches = ["scores"]
    assert torch.equal(trainer.eval_step(data), scores)
    trainer.save_checkpoint(str(tmp_path / "it.pt"), {"epoch": 3})
    assert trainer.load_checkpoint(str(tmp_path / "it.pt")) == {"epoch": 3}
    assert isinstance(config, optim._OptimizerConfig)
    assert amp.loss_scaler.LossScaler is amp.LossScaler
    assert checkpoint.experimental_state_dict is experimental_state_dict


@pytest.mark.parametrize("clip", [0.5, 100.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_adam_is_adamw_of_torch_with_clipping(clip: float, accumulation: int) -> None:
    model, plain = _net(), _net()
    names, decayed, rest = _decayed(plain)
    groups = [{"params": names, "lambda_coef": 0.1, "alpha": 0.8}]
    config = AdamConfig(groups, lr=0.02, max_norm_clip=clip)
    trainer = _trainer(config, model, batch={"gradient_accumulation_steps": accumulation})
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1,
                                                 "betas": (0.8, 0.999)}], lr=0.02, eps=1e-8
    )  # fmt: skip
    for i, (x, y) in enumerate(_batches(12), 1):
        found = trainer.train_step(x, y)[0]
        loss = F.cross_entropy(plain(x), y)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-6)
        (loss / accumulation).backward()
        if i % accumulation == 0:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    _same(model, plain)
    assert trainer._train_step_info.optimization_step == 12 // accumulation


def test_decay_after_the_update_and_no_clipping() -> None:
    model, plain = _net(), _net()
    config = AdamConfig(lr=0.02, lambda_coef=0.1, epsilon=1e-3, weight_decay_mode=AFTER,
                        max_norm_clip=1e-3)  # fmt: skip
    trainer = _trainer(config, model, utils={"grad_norm_clip": False})
    moments = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in plain.parameters()}
    for t, (x, y) in enumerate(_batches(8), 1):
        trainer.train_step(x, y)
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for p, (m, v) in moments.items():
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                rate = 0.02 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                p.sub_(rate * m / (v.sqrt() + 1e-3))
                p.sub_(0.02 * 0.1 * p)
    _same(model, plain)


def test_sgd_takes_a_learning_rate_with_each_call() -> None:
    model, plain = _net(), _net()
    trainer = _trainer(SGDConfig(lr=0.5), model)
    for i, (x, y) in enumerate(_batches(6)):
        rate = 0.1 / (i + 1)
        given = [(x, y, torch.tensor([rate])), ([x, y, rate],), (x, y)][i % 3]
        trainer.train_step(*given)
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p.sub_((0.5 if i % 3 == 2 else rate) * p.grad)
    _same(model, plain)
    x, y = _batches(1)[0]
    with pytest.raises(ValueError, match="takes no learning rate"):
        trainer.eval_step(x, y, 0.1)
    with pytest.raises(ValueError, match="or have an lr_scheduler"):
        _trainer(SGDConfig(), lr_scheduler=LinearWarmupLRScheduler(9)).train_step(x, y, 0.1)


def test_accumulated_gradients_are_their_mean() -> None:
    model, plain = _net(), _net()
    trainer = _trainer(SGDConfig(lr=0.5), model, batch={"gradient_accumulation_steps": 3})
    batches = _batches(6)
    for batch in batches:
        trainer.train_step(*batch)
    for three in (batches[:3], batches[3:]):
        plain.zero_grad()
        sum(F.cross_entropy(plain(x), y) / 3 for x, y in three).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p.sub_(0.5 * p.grad)
    _same(model, plain)


def test_a_model_with_its_own_loss_and_inputs_by_name() -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> dict[str, Any]:
            """Scores, and the loss of labels."""
            scores = super().forward(x)
            return {} if label is None else {"loss": F.cross_entropy(scores, label)} | {"s": scores}

    torch.manual_seed(0)
    model, other = WithLoss(), _net()
    trainer = ORTTrainer(model, DESC, LambConfig(lr=0.01), options=ORTTrainerOptions(_here()))
    reference = _trainer(LambConfig(lr=0.01), other)
    for x, y in _batches(5):
        found = trainer.train_step(label=y, x=x)
        expected = reference.train_step(x, label=y)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    _same(model, other)


def test_frozen_weights_stay_and_need_names_of_the_model() -> None:
    model = _net()
    before = copy.deepcopy(model.state_dict())
    frozen = {"frozen_weights": ["first.weight", "shift"]}
    trainer = _trainer(AdamConfig(lr=0.1), model, utils=frozen)
    trainer.train_step(*_batches(1)[0])
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {"first.bias", "second.weight", "second.bias"}
    assert set(trainer.state_dict()["optimizer"]) == moved
    with pytest.raises(ValueError, match="no \\['third'\\]"):
        _trainer(AdamConfig(), utils={"frozen_weights": ["third"]})


def _config(kind: str) -> OptimizerConfig:
    return {"adam": AdamConfig, "lamb": LambConfig, "sgd": SGDConfig}[kind](lr=0.05)


WAYS = [("adam", "dict"), ("adam", "experimental file"), ("lamb", "file")]
WAYS += [("lamb", "experimental"), ("sgd", "file")]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_a_training_continues_from_its_states(kind: str, way: str, tmp_path: Path) -> None:
    trainer, other = _trainer(_config(kind)), _trainer(_config(kind), _net(5))
    batches = _batches(8)
    for batch in batches[:4]:
        trainer.train_step(*batch)
    if way == "dict":
        other.options.batch.gradient_accumulation_steps = 2
        other.train_step(*batches[0])  # whose gradient is of no step
        other.options.batch.gradient_accumulation_steps = 1
        other.load_state_dict(trainer.state_dict())
    elif way == "file":
        trainer.save_checkpoint(tmp_path / "it", {"a": [1, "b"]})
        assert other.load_checkpoint(tmp_path / "it") == {"a": [1, "b"]}
    elif way == "experimental":
        experimental_load_state_dict(other, experimental_state_dict(trainer), strict=True)
    else:
        experimental_save_checkpoint(trainer, str(tmp_path), "p", {"epoch": 1})
        assert experimental_load_checkpoint(other, str(tmp_path), "p") == {"epoch": 1}
    for batch in batches[4:]:
        found, expected = other.train_step(*batch), trainer.train_step(*batch)
        assert torch.equal(found[0], expected[0])
    for name, value in trainer.state_dict(pytorch_format=True).items():
        assert torch.equal(other.state_dict(True)[name], value)
    counted = other._train_step_info.optimization_step
    assert counted == (4 if way.startswith("experimental") else 8)


def test_states_have_the_published_form_and_are_copies() -> None:
    model = _net()
    trainer = _trainer(AdamConfig(lr=0.05), model)
    assert trainer.state_dict()["optimizer"] == {}
    trainer.train_step(*_batches(1)[0])
    state = trainer.state_dict()
    assert state["train_step_info"] == {"optimization_step": 1, "step": 1}
    assert state["trainer_options"]["optimizer_name"] == "AdamOptimizer"
    kept = state["model"]["full_precision"]["first.weight"].clone()
    moments = state["optimizer"]["first.weight"]
    assert set(moments) == {"Moment_1", "Moment_2", "Update_Count"}
    assert moments["Update_Count"].tolist() == [2] and moments["Moment_1"].shape == (8, 6)
    trainer.train_step(*_batches(1)[0])
    assert torch.equal(state["model"]["full_precision"]["first.weight"], kept)
    assert not torch.equal(model.first.weight.cpu(), kept)
    wrong = copy.deepcopy(state)
    wrong["optimizer"]["first.weight"]["Moment_1"] = torch.zeros(2)
    for broken, says in (
        (wrong, "Moment_1 of first.weight has the shape"),
        ({"optimizer": {"third": {}}}, "no parameters \\['third'\\]"),
        ({"model": {"full_precision": {}}}, "Missing key"),
    ):
        with pytest.raises(RuntimeError, match=says):
            trainer.load_state_dict(broken)
    with pytest.raises(ValueError, match="the state is of AdamOptimizer"):
        _trainer(SGDConfig()).load_state_dict(state)
    with pytest.raises(ValueError, match="takes one file"):
        trainer.load_checkpoint("a", "b")


def test_mixed_precision_scales_the_loss_and_leaves_out_what_overflows() -> None:
    model, plain = _net(), _net()
    scaler = DynamicLossScaler(loss_scale=1024.0, up_scale_window=3)
    mixed = {"enabled": True, "loss_scaler": scaler}
    trainer = _trainer(SGDConfig(lr=0.2), model, mixed_precision=mixed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    for x, y in _batches(3):
        found = trainer.train_step(x, y)[0]
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(plain(x), y)
        torch.testing.assert_close(found.float(), loss.detach().float(), rtol=2e-3, atol=2e-3)
        (loss * 1024).backward()
        for p in plain.parameters():
            p.grad /= 1024
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-2, atol=5e-3)
    assert scaler.loss_scale == 2048.0
    before = trainer.state_dict()
    x, y = _batches(1)[0]
    trainer.train_step(torch.full_like(x, 3e38), y)
    info = trainer._train_step_info
    assert not info.all_finite and scaler.loss_scale == 1024.0 and info.optimization_step == 3
    after = trainer.state_dict()
    for name, value in before["model"]["full_precision"].items():
        assert torch.equal(after["model"]["full_precision"][name], value)
    trainer.train_step(x, y)
    assert info.all_finite and info.optimization_step == 4 and info.step == 5


@pytest.mark.slow
def test_the_saved_model_computes_what_the_trained_one_does(tmp_path: Path) -> None:
    model = _net()
    trainer = _trainer(SGDConfig(lr=0.1), model)
    with pytest.raises(RuntimeError, match="before it"):
        trainer.save_as_onnx(str(tmp_path / "early.onnx"))
    trainer.train_step(*_batches(1)[0])
    path = tmp_path / "it.onnx"
    trainer.save_as_onnx(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["it.onnx"] and trainer.module.training
    graph = onnx.load(path).graph
    assert {i.name for i in graph.initializer} >= {n for n, _ in model.named_parameters()}
    dims = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in (*graph.input, *graph.output)]  # fmt: skip
    assert dims == [["batch", 6], ["batch"], [], ["batch", 3]]
    x, y = torch.randn(9, 6), torch.arange(9) % 3  # another size of the batch
    session = onnx.reference.ReferenceEvaluator(str(path))
    loss, scores = session.run(["loss", "scores"], {"x": x.cpu().numpy(), "label": y.cpu().numpy()})
    expected = trainer.eval_step(x, y)
    torch.testing.assert_close(torch.from_numpy(loss), expected[0].cpu(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(scores), expected[1].cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_what_does_not_fit_is_named() -> None:
    config = SGDConfig()
    for model, settings, loss_fn, says in (
        (onnx.ModelProto(), config, None, "got ModelProto"),
        (_net(), {"lr": 1}, None, "optim_config must be"),
        (_net(), config, 3, "loss_fn must be"),
        (_net(), config, nn.Bilinear(2, 2, 1), "loss_fn has parameters"),
        (_net(), config, None, "inputs \\['label'\\], forward"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            ORTTrainer(model, DESC, settings, loss_fn, ORTTrainerOptions(_here()))
    late = {**DESC, "outputs": [("scores", ["batch", 3]), ("loss", [], True)]}
    with pytest.raises(ValueError, match="first output"):
        ORTTrainer(_net(), late, config, F.cross_entropy)
    trainer = _trainer(config)
    x, y = _batches(1)[0]
    for args, kwargs, says in (
        ((x,), {}, "needs the input 'label'"),
        ((x,), {"x": x}, "expected \\['x', 'label'\\]"),
        ((x, y), {"other": y}, "expected"),
        ((x, y, 0.1, 0.2), {}, "expected"),
        ((x, y, y), {}, "3 inputs and .* expected"),
        ((x[:, :4], y), {}, "x has the shape"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=says):
            trainer.train_step(*args, **kwargs)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        trainer.train_step(x.tolist(), y)
    trainer._train_step_info.fetches = ["other"]
    with pytest.raises(ValueError, match="no outputs \\['other'\\]"):
        trainer.eval_step(x, y)
    short = {**DESC, "outputs": [*DESC["outputs"], ("more", [])]}
    with pytest.raises(ValueError, match="returns 2 tensors"):
        ORTTrainer(_net(), short, config, F.cross_entropy, ORTTrainerOptions(_here())).train_step(
            x, y
        )
