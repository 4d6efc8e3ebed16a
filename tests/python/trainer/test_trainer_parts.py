"""Parts of a trainer's model that its loss calls by themselves run in the daemon, counted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from gradd import progress
from gradd.spec import CaptureError
from optimum.gradd import accelerate
from optimum.gradd.parts import Parts

pytestmark = pytest.mark.usefixtures("daemon")


class Autoencoder(nn.Module):
    """A call computes all; a loss may ask its parts instead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.steps = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.decoder = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of six features, and the same again."""
        code = self.encoder(x)
        for step in self.steps:
            code = code + torch.tanh(step(code))
        return self.decoder(code)


class ByParts(Trainer):
    """Asks parts, and the whole as well."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Of what is given back, with a penalty on the code."""
        code = model.encoder(inputs["x"])
        given = self.model.decoder(model.steps[0](code))  # type: ignore[union-attr, index]
        loss = nn.functional.mse_loss(given, inputs["x"]) + code.square().mean()
        loss = loss + nn.functional.mse_loss(model(inputs["x"]), inputs["x"])
        return (loss, {"given": given}) if return_outputs else loss


class Spectral(nn.Module):
    """A part that the daemon does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.last = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The singular values of all codes, beside each."""
        code = self.encoder(x)
        return self.last(code) + torch.linalg.svdvals(code).sum()


class Nested(nn.Module):
    """Has a part whose parts are not asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Spectral()
        self.decoder = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of it."""
        return self.decoder(self.inner(x))


class Inner(Trainer):
    """Asks one part alone."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Of the part's result."""
        loss = nn.functional.mse_loss(model.inner(inputs["x"]), inputs["x"])
        return (loss, {}) if return_outputs else loss


class Deep(Trainer):
    """Asks parts of a part, one of them late."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Of a code and what is made of it."""
        code = model.inner.encoder(inputs["x"])
        if self.state.global_step >= 2:
            code = model.inner.last(code)
        loss = code.square().mean()
        return (loss, {}) if return_outputs else loss


def _trainer(folder: Path, model: nn.Module, kind: type[Trainer] = ByParts) -> Any:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-2,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows: Any = [{"x": row} for row in x]
    return kind(model=model, args=args, train_dataset=rows)


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_parts_run_in_the_daemon(tmp_path: Path) -> None:
    expected = _losses(_trainer(tmp_path, Autoencoder()))
    model = Autoencoder()
    trainer = accelerate(_trainer(tmp_path, model), strict=True)
    torch.testing.assert_close(_losses(trainer), expected, rtol=1e-4, atol=1e-5)
    stats = trainer.gradd_stats()
    assert stats["in_torch"] == {} and stats["forwards"] >= 4 * 4
    assert stats["self_check_failures"] == 0
    assert not any("forward" in vars(module) for module in model.modules())
    title = [line for line in progress.summary() if line.startswith("Autoencoder")]
    assert not title, "nothing of it ran in PyTorch"


def test_what_of_a_part_runs_in_pytorch_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _losses(_trainer(tmp_path, Nested(), Inner))
    trainer = accelerate(_trainer(tmp_path, Nested(), Inner))
    torch.testing.assert_close(_losses(trainer), expected, rtol=1e-4, atol=1e-5)
    assert trainer.gradd_stats()["in_torch"] == {"unsupported_operator": 4}
    assert any("Nested's Spectral" in record.getMessage() for record in caplog.records)
    with pytest.raises(CaptureError, match="svd"):
        accelerate(_trainer(tmp_path, Nested(), Inner), strict=True).train()


def test_parts_of_parts_run_in_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is called in the losses 3 and 4, and found by the fourth."""
    expected = _losses(_trainer(tmp_path, Nested(), Deep))
    model = Nested()
    attached: list[int] = []
    plain = Parts._attach

    def attach(self: Parts, modules: list[nn.Module]) -> None:
        attached.append(len(modules))
        plain(self, modules)

    monkeypatch.setattr(Parts, "_attach", attach)
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")  # checks count as forwards
    trainer = accelerate(_trainer(tmp_path, model, Deep), strict=True)
    torch.testing.assert_close(_losses(trainer), expected, rtol=1e-4, atol=1e-5)
    assert trainer.gradd_stats()["in_torch"] == {}
    assert trainer.gradd_stats()["forwards"] == 4 + 1
    inner, encoder = 2, 1  # children, and the part of one of them that was called
    assert [*dict.fromkeys(attached)] == [len([*model.modules()]) - 1, inner + encoder]
    assert not any("forward" in vars(module) for module in model.modules())


def test_parts_are_themselves_outside_of_the_loss(tmp_path: Path) -> None:
    """In a callback, in a copy, and after training."""
    model = Autoencoder()
    trainer = accelerate(_trainer(tmp_path, model))
    plain = trainer.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        forwards = trainer.gradd_stats()["forwards"]
        model.encoder(torch.zeros(1, 6))
        copy.deepcopy(model).encoder(torch.zeros(1, 6))
        assert trainer.gradd_stats()["forwards"] == forwards
        return result

    trainer.training_step = step
    trainer.train()
    assert trainer.gradd_stats()["forwards"] >= 4 * 4
