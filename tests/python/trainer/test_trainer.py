"""ORTTrainer against Trainer: equal losses and equal behaviour around them, on a real daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from gradd.spec import CaptureError
from helpers.selection import every_run
from helpers.trainers.hugging_face import (
    Tokens,
    assert_same_losses,
    losses,
    make_trainer,
    norms,
    pad,
    tiny_llama,
    train_pair,
)
from optimum.gradd import attach

pytestmark = [pytest.mark.one_in(3), pytest.mark.usefixtures("daemon")]

# Accumulation, clipping that really clips, warm-up and weight decay at once.
FULL = {
    "max_steps": 50,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "warmup_steps": 5,
    "weight_decay": 0.1,
    "learning_rate": 3e-3,
    "num_train_epochs": 1,
}


def daemon_forwards(trainer: Any) -> int:
    """Forward passes that really ran in the daemon."""
    stats = trainer.gradd_stats()
    assert not stats["fallbacks"], stats
    return stats["forwards"]


def test_fifty_steps_with_torch_adamw(tmp_path: Path) -> None:
    plain, ours = train_pair(tmp_path, train_dataset=Tokens(200), **FULL)
    assert len(losses(plain)) == 50
    assert_same_losses(plain, ours, 1e-4)
    assert max(norms(plain)) > FULL["max_grad_norm"]
    np.testing.assert_allclose(norms(plain), norms(ours), rtol=1e-3)
    assert daemon_forwards(ours) >= 100


def test_fifty_steps_with_fused_adamw(tmp_path: Path) -> None:

    plain, ours = train_pair(
        tmp_path, train_dataset=Tokens(200), **{**FULL, "optim": "adamw_ort_fused"}
    )
    assert type(ours.optimizer.optimizer).__name__ == "FusedAdam"
    assert_same_losses(plain, ours, 1e-4)
    # The norm that is logged is the one before clipping, as in Trainer.
    np.testing.assert_allclose(norms(plain), norms(ours), rtol=1e-3)


def test_callbacks_between_clipping_and_the_step(tmp_path: Path) -> None:
    """They get clipped gradients, and what they make of them is not clipped again."""
    seen: list[float] = []

    class Between(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            seen.append(float(torch.nn.utils.get_total_norm(gradients)))
            for gradient in gradients:
                gradient.sub_(gradient.mean()).mul_(3)

    options = {"max_steps": 4, "max_grad_norm": 0.1, "learning_rate": 1e-2}
    plain, ours = train_pair(
        tmp_path, optim="adamw_ort_fused", callbacks=[Between()], adam_epsilon=1e-2, **options
    )
    np.testing.assert_allclose(seen, [0.1] * 8, rtol=1e-3)
    assert_same_losses(plain, ours, 1e-5)
    np.testing.assert_allclose(norms(plain), norms(ours), rtol=1e-3)


@pytest.mark.parametrize("most", [float("inf"), -1.0])
def test_norm_without_clipping(tmp_path: Path, most: float) -> None:
    options = {"max_steps": 3, "max_grad_norm": most, "optim": "adamw_ort_fused"}
    plain, ours = train_pair(tmp_path, **options)
    assert_same_losses(plain, ours, 1e-5)
    np.testing.assert_allclose(norms(plain), norms(ours), rtol=1e-3)


def test_num_items_in_batch_changes_every_step(tmp_path: Path) -> None:
    """Rows of different lengths: each step has another number of labels and other shapes."""
    options = {"max_steps": 6, "gradient_accumulation_steps": 2, "data_collator": pad}
    plain, ours = train_pair(tmp_path, train_dataset=Tokens(60, varied=True), **options)
    assert_same_losses(plain, ours, 1e-5)


@pytest.mark.parametrize("inside", every_run((True,), [False, True]), ids=["outside", "in-graph"])
def test_label_smoothing(tmp_path: Path, inside: bool) -> None:
    options = {"max_steps": 4, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    plain, ours = train_pair(tmp_path, use_module_with_loss=inside, **options)
    assert_same_losses(plain, ours, 1e-5)
    assert daemon_forwards(ours) >= 8


@pytest.mark.parametrize("reentrant", every_run((False,), [False, True]))
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    kind = {"use_reentrant": reentrant}
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kind}
    plain, ours = train_pair(tmp_path, max_steps=2, **options)
    assert_same_losses(plain, ours, 1e-5)
    assert ours.gradd_stats()["self_checks"] == ours.gradd_stats()["captures"] == 1


def test_custom_loss_outside_the_graph(tmp_path: Path) -> None:
    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        scores = outputs["logits"][:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, labels[:, 1:].flatten()) * 2.0

    plain, ours = train_pair(tmp_path, max_steps=3, compute_loss_func=loss_of)
    assert_same_losses(plain, ours, 1e-5)


def test_checkpoint_is_that_of_trainer(tmp_path: Path) -> None:
    plain, ours = train_pair(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    names = [
        {p.name for p in Path(t.args.output_dir, "checkpoint-2").iterdir()} for t in (plain, ours)
    ]
    assert names[0] == names[1] and "model.safetensors" in names[0]
    sizes = [
        Path(t.args.output_dir, "checkpoint-2/optimizer.pt").stat().st_size for t in (plain, ours)
    ]
    assert sizes[1] <= 1.1 * sizes[0]  # tensors in shared memory must not drag their segment along
    assert ours.gradd_stats()["captures"] == 1, "saving changes the configuration"
    loaded = AutoModelForCausalLM.from_pretrained(Path(ours.args.output_dir, "checkpoint-4"))
    for (name, a), (_, b) in zip(
        loaded.state_dict().items(), ours.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_resume_gives_the_same_tail(tmp_path: Path) -> None:
    whole = make_trainer("gradd", tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    whole.train()
    rest = make_trainer("gradd", tmp_path / "rest", tiny_llama(seed=9), max_steps=6)
    rest.train(resume_from_checkpoint=str(Path(whole.args.output_dir, "checkpoint-3")))
    assert losses(rest)[-3:] == losses(whole)[-3:]


def test_checkpoints_move_between_the_trainers(tmp_path: Path) -> None:
    plain = make_trainer("torch", tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    plain.train()
    ours = make_trainer("gradd", tmp_path / "b", tiny_llama(seed=9), max_steps=6)
    ours.train(resume_from_checkpoint=str(Path(plain.args.output_dir, "checkpoint-3")))
    np.testing.assert_allclose(losses(ours)[-3:], losses(plain)[-3:], atol=1e-5)


def test_evaluate_and_predict(tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        guess, labels = prediction.predictions, prediction.label_ids
        return {"accuracy": float((guess[:, :-1] == labels[:, 1:]).mean())}

    options = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    plain, ours = train_pair(tmp_path, **options)
    for a, b in zip(plain.state.log_history, ours.state.log_history, strict=True):
        if "eval_loss" in a:
            assert abs(a["eval_loss"] - b["eval_loss"]) < 1e-5
            assert abs(a["eval_accuracy"] - b["eval_accuracy"]) < 1e-2
    results = [t.predict(Tokens(8)) for t in (plain, ours)]
    assert abs(results[0].metrics["test_loss"] - results[1].metrics["test_loss"]) < 1e-5


def test_lora_trains_and_saves_its_adapter_alone(tmp_path: Path) -> None:
    import peft

    def build() -> Any:
        config = peft.LoraConfig(
            r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = tiny_llama()
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)

    options = {"max_steps": 4, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    plain, ours = train_pair(tmp_path, build, **options)
    assert_same_losses(plain, ours, 1e-5)
    ours.save_model(str(tmp_path / "adapter"))
    saved = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
    assert "model.safetensors" not in saved


def test_model_is_given_back_and_can_train_again(tmp_path: Path) -> None:
    trainer = make_trainer("gradd", tmp_path, max_steps=2)
    trainer.train()
    assert "forward" not in vars(trainer.model)
    trainer.train()
    assert daemon_forwards(trainer) >= 4
    assert "forward" not in vars(trainer.model)
    with torch.no_grad():
        made = trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
    assert made.shape == (1, 5)


def test_model_is_given_back_after_an_error(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert attach.is_attached(kwargs["model"])
            raise KeyboardInterrupt

    trainer = make_trainer("gradd", tmp_path, max_steps=2, callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "forward" not in vars(trainer.model)


def test_model_init_and_early_stop(tmp_path: Path) -> None:
    plain = make_trainer("torch", tmp_path, max_steps=3, model_init=lambda: tiny_llama())
    ours = make_trainer("gradd", tmp_path, max_steps=3, model_init=lambda: tiny_llama())
    for trainer in (plain, ours):
        trainer.train()
        trainer.train()  # a new model each time
    assert_same_losses(plain, ours, 1e-5)


def test_disabled_runs_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DISABLE", "1")
    plain, ours = train_pair(tmp_path, max_steps=2)
    assert losses(plain) == losses(ours)
    assert ours.gradd_stats() == {}


class Halved(torch.autograd.Function):
    """Half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def test_strict_raises_and_lenient_falls_back(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        """A backward of its own, which no graph of the daemon holds."""

        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_llama()

        def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
            result = self.net(input_ids, labels=labels)
            return {"loss": Halved.apply(result.loss), "logits": result.logits}

    with pytest.raises(CaptureError, match="autograd_function"):
        make_trainer("gradd", tmp_path, Odd(), max_steps=1).train()
    plain, ours = train_pair(tmp_path, Odd, max_steps=2, strict=False)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)
    stats = ours.gradd_stats()
    assert sum({**stats["fallbacks"], **stats.get("parts_in_torch", {})}.values()) >= 2


def test_options_that_change_between_two_trainings(tmp_path: Path) -> None:
    trainer = make_trainer("gradd", tmp_path, max_steps=2)
    trainer.train()
    whole = trainer.gradd_explain().arena_bytes
    trainer.args.memory_budget = str(int(0.9 * whole))
    trainer.train()
    assert 0 < trainer.gradd_explain().arena_bytes <= 0.9 * whole
    trainer.args.memory_budget, trainer.args.strict = None, True
    trainer.train()
    assert trainer.gradd_explain().arena_bytes == whole
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match="no_graph"):
        trainer.train()


def test_arguments_travel_with_the_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer("gradd", tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    args = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert type(args) is type(trainer.args) and args.max_steps == 1
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "llama"


def test_captured_graphs_are_saved_on_request(tmp_path: Path) -> None:
    import onnx

    trainer = make_trainer("gradd", tmp_path, max_steps=1, save_onnx=True, onnx_prefix="net")
    trainer.train()
    files = sorted(Path(trainer.args.output_dir).glob("net_*.onnx"))
    stages = ("execution_model", "torch_exported")
    assert [f.name for f in files] == [f"net_{stage}_training.onnx" for stage in stages]
    graph = onnx.load(files[1]).graph
    assert "model.embed_tokens.weight" in {i.name for i in graph.input}
