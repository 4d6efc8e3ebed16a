"""ORTTrainingArguments: our optimizer's name, arguments of earlier releases, refusals."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from optimum.gradd import ORTTrainer, ORTTrainingArguments, refuse
from optimum.gradd.legacy import _IGNORED, _MAPPED, LegacyArguments
from optimum.gradd.training_args import ORTOptimizerNames, ORTSeq2SeqTrainingArguments

COMMON: dict[str, Any] = {"use_cpu": True, "report_to": "none"}


def make(tmp_path: Path, **kwargs: Any) -> ORTTrainingArguments:
    return ORTTrainingArguments(str(tmp_path), **{**COMMON, **kwargs})


@pytest.mark.quick
def test_defaults_are_those_of_training_arguments(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        ours = make(tmp_path)
    theirs = TrainingArguments(str(tmp_path), **COMMON)
    for field in dataclasses.fields(TrainingArguments):
        if field.name not in ("logging_dir", "distributed_state"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.quick
def test_fused_optimizer_is_accepted_and_survives_copies(tmp_path: Path) -> None:
    args = make(tmp_path, optim="adamw_ort_fused")
    assert args.optim == ORTOptimizerNames.ADAMW_ORT_FUSED
    assert args.to_dict()["optim"] == "adamw_ort_fused"
    assert dataclasses.replace(args, learning_rate=1.0).optim == "adamw_ort_fused"
    assert pickle.loads(pickle.dumps(args)).optim is ORTOptimizerNames.ADAMW_ORT_FUSED
    with pytest.raises(ValueError):
        make(tmp_path, optim="adamw_of_no_library")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", 5, "per_device_eval_batch_size", 5),
        ("no_cuda", True, "use_cpu", True),
        ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
        ("adafactor", True, "optim", "adafactor"),
        ("push_to_hub_model_id", "me/it", "hub_model_id", "me/it"),
        ("push_to_hub_token", "t", "hub_token", "t"),
        ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
        ("include_tokens_per_second", True, "include_num_input_tokens_seen", "all"),
    ],
)
def test_renamed_argument_is_mapped(
    tmp_path: Path, old: str, value: Any, new: str, expected: Any
) -> None:
    with pytest.warns(FutureWarning, match=f"`{old}` is now `{new}`"):
        args = make(tmp_path, **{old: value})
    assert getattr(args, new) == expected
    # A copy that changes the new argument must not have it mapped over again.
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        dataclasses.replace(args, learning_rate=0.5)


@pytest.mark.quick
def test_old_arguments_beside_their_successors(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        args = make(
            tmp_path,
            warmup_steps=500,
            warmup_ratio=0.1,
            include_inputs_for_metrics=True,
            include_for_metrics=["loss"],
        )
    assert args.warmup_steps == 500 and args.include_for_metrics == ["loss", "inputs"]
    with pytest.warns(FutureWarning):
        assert make(tmp_path, warmup_ratio=1.0).get_warmup_steps(300) == 300


@pytest.mark.quick
def test_old_optimizer_name_and_ignored_arguments_are_named(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as caught:
        args = make(tmp_path, optim="adamw_hf", overwrite_output_dir=True, fp16_backend="apex")
    text = "\n".join(str(w.message) for w in caught)
    assert args.optim == "adamw_torch"
    assert "adamw_hf" in text and "overwrite_output_dir" in text and "fp16_backend" in text


@pytest.mark.quick
def test_every_old_argument_has_exactly_one_row() -> None:
    fields = {f.name for f in dataclasses.fields(LegacyArguments)}
    assert not set(_MAPPED) & set(_IGNORED)
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert {new for _, new, _ in _MAPPED.values()} <= known
    assert not fields & known - {"logging_dir"}


def test_command_line_of_an_old_script(tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --no_cuda --overwrite_output_dir --evaluation_strategy epoch"
    line += " --optim adamw_ort_fused --warmup_ratio 0.2 --predict_with_generate"
    parser = HfArgumentParser(ORTSeq2SeqTrainingArguments)
    with pytest.warns(FutureWarning):
        (args,) = parser.parse_args_into_dataclasses(line.split())
    assert args.use_cpu and args.optim == "adamw_ort_fused" and args.warmup_steps == 0.2
    assert args.eval_strategy == "epoch" and args.predict_with_generate


@pytest.mark.quick
def test_onnx_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="onnx_prefix"):
        make(tmp_path, save_onnx=True)
    with pytest.raises(ValueError, match="onnx_log_level"):
        make(tmp_path, onnx_log_level="LOUD")
    assert make(tmp_path, save_onnx=True, onnx_prefix="n", onnx_log_level="info").save_onnx


@pytest.mark.quick
def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="torch_compile"):
        ORTTrainer(model=model, args=make(tmp_path, torch_compile=True))
    ours = make(tmp_path, torch_compile=True, torch_compile_backend="gradd")
    ORTTrainer(model=model, args=ours)
    assert not ours.torch_compile and ours.torch_compile_backend is None
    with pytest.warns(UserWarning, match="use_liger_kernel"):
        assert make(tmp_path, use_liger_kernel=True).use_liger_kernel is False


@pytest.mark.quick
def test_optimizer_arguments_reach_the_fused_optimizer(tmp_path: Path) -> None:
    from gradd import optim

    args = make(
        tmp_path,
        optim="adamw_ort_fused",
        learning_rate=0.25,
        adam_beta1=0.8,
        adam_beta2=0.7,
        adam_epsilon=1e-5,
        max_grad_norm=3.0,
    )
    cls, kwargs = ORTTrainer.get_optimizer_cls_and_kwargs(args)
    assert cls is optim.FusedAdam
    assert kwargs == {
        "lr": 0.25,
        "betas": (0.8, 0.7),
        "eps": 1e-5,
        "adam_w_mode": optim.AdamWMode.ADAMW_TORCH,
        "max_grad_norm": 3.0,
    }


@pytest.mark.quick
def test_disabled_means_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DISABLE", "1")
    cls, _ = ORTTrainer.get_optimizer_cls_and_kwargs(make(tmp_path, optim="adamw_ort_fused"))
    assert cls is torch.optim.AdamW
    trainer = ORTTrainer(model=torch.nn.Linear(2, 2), args=make(tmp_path))
    assert not trainer._gradd_enabled


def _trainer_of(args: Any, stage: int | None = None, fsdp: bool = False) -> Any:
    """As much of a trainer as is asked before it trains."""
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(
        args=args,
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=stage is not None,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
    )


@pytest.mark.quick
def test_ways_of_several_processes_that_are_not_served_are_named(tmp_path: Path) -> None:
    args, fused = make(tmp_path), make(tmp_path, optim="adamw_ort_fused")
    for stage in (0, 1, 2, None):
        refuse.check_trainer(_trainer_of(args, stage))
    with pytest.raises(NotImplementedError, match="ZeRO of stage 3 .* stages 1 and 2 are served"):
        refuse.check_trainer(_trainer_of(args, 3))
    with pytest.raises(ValueError, match="optim='adamw_ort_fused' .* optim='adamw_torch'"):
        refuse.check_trainer(_trainer_of(fused, 2))
    with pytest.raises(NotImplementedError, match="FSDP's hooks .*launchers.md"):
        refuse.check_trainer(_trainer_of(args, fsdp=True))
    args.parallelism_config = object()
    with pytest.raises(NotImplementedError, match="parallelism_config"):
        refuse.check_trainer(_trainer_of(args))


class Distance(torch.nn.Module):
    """What Trainer evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x).squeeze(1)
        return {"loss": (y - labels).square().mean(), "logits": y}


@pytest.mark.quick
def test_old_arguments_of_evaluate_and_predict_are_named(tmp_path: Path) -> None:
    data = [{"x": torch.ones(2), "labels": torch.zeros(())} for _ in range(3)]
    trainer = ORTTrainer(Distance(), make(tmp_path, disable_tqdm=True), eval_dataset=data)
    with pytest.warns(FutureWarning, match="`inference_with_ort` has no effect"):
        old = trainer.evaluate(data, inference_with_ort=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert trainer.evaluate()["eval_loss"] == old["eval_loss"]
    with pytest.warns(FutureWarning, match="`inference_with_ort` has no effect"):
        assert trainer.predict(data, inference_with_ort=False).predictions.shape == (3,)


@pytest.mark.quick
def test_a_class_of_the_old_trainer_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"use_module_with_loss=True\)"):
        from optimum.onnxruntime.trainer import ModuleWithLoss  # noqa: F401
