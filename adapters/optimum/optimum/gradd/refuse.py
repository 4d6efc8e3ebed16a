"""Refuses what ORTTrainer does not train, before training starts, and suggests alternatives."""

from __future__ import annotations

from typing import Any

from .training_args import ORTOptimizerNames

_LAST_STAGE = 2  # of ZeRO
_INSTEAD = "Use transformers.Trainer, or set GRADD_DISABLE=1, to train this way in PyTorch."


def check_trainer(trainer: Any) -> None:
    """Raises for arguments under which a model cannot be captured as a whole.

    Raises:
        NotImplementedError: FSDP, whose hooks would cut the graph of a call at every block; stage 3
            of ZeRO and parallelism_config, under which parameters are shards.
        ValueError: torch_compile by another back end: two compilers cannot own one forward. Or
            DeepSpeed has to divide the state of adamw_ort_fused.
    """
    args, name = trainer.args, type(trainer).__name__
    if trainer.is_fsdp_enabled or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise NotImplementedError(
            f"{name}: FSDP's hooks cut the graph of a call at every block; a loop that wraps "
            f"the blocks trains under FSDP2 (docs/launchers.md). {_INSTEAD}"
        )
    if trainer.is_deepspeed_enabled:
        _check_deepspeed(trainer)
    if getattr(args, "parallelism_config", None) is not None:
        raise NotImplementedError(f"{name}: parallelism_config is not supported. {_INSTEAD}")
    if args.torch_compile:
        raise ValueError(
            f"{name}: torch_compile=True and gradd exclude each other; "
            f"torch_compile_backend='gradd' is what it trains with. {_INSTEAD}"
        )


def _check_deepspeed(trainer: Any) -> None:
    name = type(trainer).__name__
    if trainer.accelerator.state.deepspeed_plugin.zero_stage > _LAST_STAGE:
        raise NotImplementedError(
            f"{name}: ZeRO of stage 3 shards parameters; stages 1 and 2 are served. " + _INSTEAD
        )
    if trainer.args.optim == ORTOptimizerNames.ADAMW_ORT_FUSED:
        raise ValueError(
            f"{name}: optim={str(trainer.args.optim.value)!r} clips the gradients that it is "
            "given, and DeepSpeed gives each process a part of them; use optim='adamw_torch'"
        )


def check_model(trainer: Any) -> None:
    """Raises for a model or device that cannot be trained through one replaced forward.

    Raises:
        NotImplementedError: DataParallel (several GPUs in one process).
    """
    if trainer.args.n_gpu > 1:
        raise NotImplementedError(
            f"{type(trainer).__name__}: {trainer.args.n_gpu} GPUs in one process mean "
            "DataParallel, which copies the module at every step. Launch one process per GPU "
            "(torchrun), or set CUDA_VISIBLE_DEVICES to one GPU."
        )
