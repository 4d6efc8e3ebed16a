"""`ORTTrainer`: transformers' Trainer whose forward and backward passes run in the gradd daemon.

`accelerate` does the same for a trainer that is there already (daemon_training.py).
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, TypeVar

from transformers import Trainer

from . import refuse
from .daemon_training import DaemonTraining, unwrapped
from .training_args import ORTTrainingArguments

_CHOOSES = "get_optimizer_cls_and_kwargs"
_Trainer = TypeVar("_Trainer", bound=Trainer)


class ORTTrainer(DaemonTraining):
    """Drop-in replacement of `transformers.Trainer`, which takes the same arguments.

    Args:
        model: The model, as in `transformers.Trainer`.
        args: An `ORTTrainingArguments`, or plain `TrainingArguments`.
        rest: Further arguments of `transformers.Trainer`, by position.
        tokenizer: The former name of `processing_class`.
        kwargs: Further arguments of `transformers.Trainer`, by name.

    Raises:
        NotImplementedError: FSDP, stage 3 of DeepSpeed's ZeRO or parallelism_config is set; at
            train() also if one process has several GPUs.
        ValueError: torch_compile is set, or DeepSpeed and `adamw_ort_fused`.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, tokenizer: Any = None, **kwargs: Any
    ) -> None:
        if tokenizer is not None:
            warnings.warn(
                "ORTTrainer: `tokenizer` is now `processing_class`.", FutureWarning, stacklevel=2
            )
            kwargs.setdefault("processing_class", tokenizer)
        if args is None:
            args = ORTTrainingArguments(output_dir="tmp_trainer")
        super().__init__(unwrapped(model), args, *rest, **kwargs)
        self.gradd_begin()

    def evaluate(self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any) -> Any:
        """As in Trainer; `inference_with_ort` of old scripts has no effect, and is named."""
        _name_inference(inference_with_ort)
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any) -> Any:
        """As in Trainer; `inference_with_ort` of old scripts has no effect, and is named."""
        _name_inference(inference_with_ort)
        return super().predict(*args, **kwargs)


def _name_inference(given: bool | None) -> None:
    if given is not None:
        text = "ORTTrainer: `inference_with_ort` has no effect: the trained model is evaluated."
        warnings.warn(text, FutureWarning, stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "ModuleWithLoss":
        raise ImportError(
            "optimum.onnxruntime.trainer.ModuleWithLoss: use ORTTrainingArguments("
            "use_module_with_loss=True), which captures the loss with the model"
        )
    raise AttributeError(name)


def accelerate(
    trainer: _Trainer, *, strict: bool = False, memory_budget: str | int | None = None
) -> _Trainer:
    """Lets a trainer train in the daemon: of TRL, of your own, any class made from Trainer.

    The trainer gets a class of the same name that is made from its own one; its methods, and the
    way in which it computes the loss, stay. What the loss does with the outputs runs in PyTorch.

    Args:
        trainer: Before it trains.
        strict: Raise where something would run in PyTorch.
        memory_budget: As ORTModule takes it.

    Returns:
        The same object.

    Raises:
        TypeError: It is no Trainer of transformers.
        NotImplementedError, ValueError: As for ORTTrainer.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer: expected a transformers.Trainer, got {type(trainer).__name__}")
    if not isinstance(trainer, DaemonTraining):
        refuse.check_trainer(trainer)
        own = type(trainer)
        about: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        if own.get_optimizer_cls_and_kwargs is not Trainer.get_optimizer_cls_and_kwargs:
            # as it stands there: static in Trainer, a method of the trainer elsewhere
            about[_CHOOSES] = inspect.getattr_static(own, _CHOOSES)
        trainer.model = unwrapped(trainer.model)
        trainer.model_wrapped = unwrapped(trainer.model_wrapped)
        trainer.__class__ = type(own.__name__, (DaemonTraining, own), about)
        trainer.gradd_begin()  # type: ignore[attr-defined]
    given = {"strict": strict, "memory_budget": memory_budget}
    known = trainer.gradd_options  # type: ignore[attr-defined]
    trainer.gradd_options = {**known, **{name: x for name, x in given.items() if x}}  # type: ignore
    return trainer
