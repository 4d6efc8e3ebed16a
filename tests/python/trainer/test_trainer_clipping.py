"""Clipping with FusedAdam, whose step clips: whatever sets the limit, as with Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from gradd.optim import AdamWMode, FusedAdam
from helpers.trainers.hugging_face import (
    assert_same_losses,
    make_trainer,
    norms,
    tiny_llama,
    train_pair,
)

pytestmark = [pytest.mark.one_in(3), pytest.mark.usefixtures("daemon")]
# With a large eps the size of a step depends on that of gradients.
OPTIONS = {
    "optim": "adamw_ort_fused",
    "adam_epsilon": 1e-2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.05,
    "max_steps": 5,
}


class AtEnds(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, deed: Callable[[Any, int, Any], None]) -> None:
        self.deed = deed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deed(args, state.global_step, kwargs)


def _assert_same(plain: Trainer, ours: Trainer) -> None:
    assert_same_losses(plain, ours, 1e-5)
    np.testing.assert_allclose(norms(plain), norms(ours), rtol=1e-3)


def _limit(args: Any, step: int, rest: Any) -> None:
    args.max_grad_norm = (0.0, 1.0, 0.02, 0.0)[step % 4]


def _thaw(args: Any, step: int, rest: Any) -> None:
    """The optimizer does not know these parameters; Trainer's norm has their gradients."""
    for name, parameter in rest["model"].named_parameters():
        parameter.requires_grad_(step >= 2 or "layers" not in name)


def _leave_out(args: Any, step: int, rest: Any) -> None:
    optimizer = getattr(rest["optimizer"], "optimizer", rest["optimizer"])
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][step % 2 :]


@pytest.mark.parametrize("deed", [_limit, _thaw, _leave_out], ids=lambda deed: deed.__name__[1:])
def test_what_a_callback_changes(deed: Any, tmp_path: Path) -> None:
    def build() -> Any:
        model = tiny_llama()
        if deed is _thaw:
            model.model.layers.requires_grad_(False)
        return model

    _assert_same(*train_pair(tmp_path, build, callbacks=[AtEnds(deed)], **OPTIONS))


def test_a_callback_whose_method_is_its_own(tmp_path: Path) -> None:
    """It gets clipped gradients, and changes them before the step, as one of a class does."""
    callback = TrainerCallback()

    def doubled(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(2)

    callback.on_pre_optimizer_step = doubled
    _assert_same(*train_pair(tmp_path, callbacks=[callback], **OPTIONS))


def test_a_limit_that_changes_between_trainings(tmp_path: Path) -> None:
    pair = []
    for kind in ("torch", "gradd"):
        trainer = make_trainer(kind, tmp_path, **{**OPTIONS, "max_steps": 2})
        for limit in (0.05, 0.01, 0.0, 0.3):
            trainer.args.max_grad_norm = limit
            trainer.train()
        pair.append(trainer)
    _assert_same(*pair)


class _Values:
    """Another way to clip, in a class that is made from a trainer's."""

    def _clip_grad_norm(self, model: Any) -> Any:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize("first", [True, False])
def test_a_method_that_clips_stays(first: bool, tmp_path: Path) -> None:
    """In front of ours, and behind as in a trainer that is told to use the daemon."""
    pair = []
    for kind in ("torch", "gradd"):
        trainer = make_trainer(kind, tmp_path, **OPTIONS)
        own = type(trainer)
        if kind == "torch" or first:
            trainer.__class__ = type("Own", (_Values, own), {})
        else:
            trainer.__class__ = type("Own", (own, type("Base", (_Values, Trainer), {})), {})
        trainer.train()
        pair.append(trainer)
    _assert_same(*pair)


@pytest.mark.parametrize(("own", "given"), [(0.05, 1.0), (1.0, 0.05), (0.05, 0.0)])
def test_an_optimizer_with_a_limit_of_its_own(own: float, given: float, tmp_path: Path) -> None:
    """The lower limit counts."""
    pair = []
    for kind in ("torch", "gradd"):
        limit = given if kind == "gradd" else 0.05
        trainer = make_trainer(kind, tmp_path, **{**OPTIONS, "max_grad_norm": limit})
        parameters = trainer.model.parameters()
        if kind == "gradd":
            trainer.optimizer = FusedAdam(
                parameters,
                lr=1e-2,
                eps=1e-2,
                adam_w_mode=AdamWMode.ADAMW_TORCH,
                max_grad_norm=own,
            )
        else:
            trainer.optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0)
        trainer.train()
        pair.append(trainer)
    _assert_same(*pair)
    assert pair[1].gradd_own_optimizer().max_grad_norm == own
