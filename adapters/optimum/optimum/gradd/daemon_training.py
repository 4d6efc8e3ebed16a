"""What a Trainer does differently to train in the gradd daemon: a class in front of its own.

Only small hooks are overridden and no part of Trainer's loop is copied: `_prepare_for_training`
replaces the model's forward before anything wraps the model, `train` gives it back at the end, and
the clipping hooks step aside where the optimizer clips by itself. GRADD_DISABLE=1 leaves plain
Trainer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import OptimizerNames

from . import attach, clipping, refuse, sessions
from .callbacks import GraddCallback
from .metrics import Metrics
from .parts import Parts
from .training_args import ORTOptimizerNames, gradd_is_disabled

# Options of what is compiled: if one of them changes between two train(), it is made again.
_BUILT_WITH = ("strict", "memory_budget", "save_onnx", "onnx_prefix", "onnx_log_level")


def unwrapped(model: Any) -> Any:
    """The module in an ORTModule: the trainer sends its calls to the daemon itself."""
    made = sys.modules.get("gradd.module")
    return model.module if made is not None and isinstance(model, made.ORTModule) else model


class DaemonTraining(Trainer):
    """Methods in front of those of Trainer, or of a class that is made from it.

    Names that Trainer does not have start with `gradd` or `_gradd`: the class behind has its own.
    """

    _gradd_compiled: Any = None  # made at the first train() and kept for the next ones
    _gradd_compiled_module: nn.Module | None = None
    _gradd_built_with: Mapping[str, Any] = MappingProxyType({})  # options
    _gradd_source: tuple[Any, ...] = ()  # what the forward that was compiled is made of
    _gradd_smoother: Any = None  # of labels, in the graph
    _gradd_parts: Parts | None = None
    _gradd_norm: torch.Tensor | None = None
    _gradd_clips = False  # the optimizer, in the present step
    _gradd_metrics: Metrics | None = None  # while it trains
    _gradd_session: sessions.Session | None = None  # the same
    _gradd_enabled = False
    gradd_options: Mapping[str, Any] = MappingProxyType({})  # in place of those of the arguments

    def gradd_begin(self) -> None:
        """Once, when all that Trainer has is there."""
        self._gradd_enabled = not gradd_is_disabled()
        if self._gradd_enabled:
            refuse.check_trainer(self)
            self.add_callback(GraddCallback(self))

    # ---- the module ----

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The user's new model, without the ORTModule that may be around it."""
        return unwrapped(super().call_model_init(trial))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._gradd_enabled:
            refuse.check_model(self)
            self._gradd_attach(self.model)
            self._gradd_end_metrics()
            self._gradd_metrics = Metrics.of(self._gradd_compiled)
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._gradd_session is not None and not self._gradd_session.folder:
            self._gradd_session.begin()
        return prepared

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Trainer does; the model has its own forward again when this returns.

        Args:
            resume_from_checkpoint: As in Trainer, or "session:NAME": goes on where a process has
                ended that had `keep_session=NAME`, at the next step, with the same bits.
            args: Further arguments of Trainer.train(), by position.
            kwargs: The same by name.
        """
        try:
            with contextlib.ExitStack() as around:
                resume = self._gradd_open_session(resume_from_checkpoint, around)
                return super().train(resume, *args, **kwargs)
        finally:
            self._gradd_session = None
            self._gradd_end_metrics()
            if self._gradd_compiled_module is not None:
                attach.detach(self._gradd_compiled_module)

    # ---- sessions that outlive their process ----

    def _gradd_open_session(self, resume: Any, around: contextlib.ExitStack) -> Any:
        """What Trainer resumes from."""
        named = isinstance(resume, str) and resume.startswith(sessions.PREFIX)
        name = resume[len(sessions.PREFIX) :] if named else getattr(self.args, "keep_session", None)
        if not self._gradd_enabled or not name:
            if named:
                why = "gradd is disabled" if name else "expected session:NAME"
                raise ValueError(f"resume_from_checkpoint={resume!r}: {why}")
            return resume
        alive = getattr(self.args, "keep_alive", None) or "10m"
        self._gradd_session = sessions.Session(self, name, alive)
        return around.enter_context(self._gradd_session.resumed()) if named else resume

    def _gradd_resumes(self, checkpoint: Any) -> bool:
        session = self._gradd_session
        return session is not None and bool(session.folder) and checkpoint == session.folder

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        if not self._gradd_resumes(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self._gradd_resumes(checkpoint):
            self._gradd_session.take_over()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._gradd_resumes(checkpoint):
            self._gradd_session.restore_random()
        else:
            super()._load_rng_state(checkpoint)

    def gradd_before_optimizer_step(self) -> None:
        if not self._gradd_clips:  # Trainer has clipped, or a method of a class made from it
            clipping.leave_out(self.gradd_own_optimizer())
        if self._gradd_session is not None:
            self._gradd_session.note()

    def _gradd_end_metrics(self) -> None:
        if self._gradd_metrics is not None:
            self._gradd_metrics.end()
            self._gradd_metrics = None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer; what it logs of training gets the daemon's numbers (metrics.py)."""
        if self._gradd_metrics is not None and "loss" in logs:
            logs = {**logs, **self._gradd_metrics.take()}
        super().log(logs, *args, **kwargs)

    def _gradd_attach(self, model: nn.Module) -> None:
        options = {name: self._gradd_option(name) for name in _BUILT_WITH}
        same = self._gradd_compiled_module is model and self._gradd_built_with == options
        if self._gradd_parts is None or not same:
            if self._gradd_parts is not None:  # the model of an earlier trial, or other options
                attach.detach(self._gradd_compiled_module)
                self._gradd_compiled.close()
                self._gradd_parts.close()
            debug = self._gradd_debug_options()
            self._gradd_built_with = options
            self._gradd_source = self._gradd_source_of(model)
            self._gradd_compiled = self._gradd_compile(
                model, self._gradd_forward_to_capture(model), debug
            )
            tally = self._gradd_compiled.tally
            self._gradd_compiled_module = model
            self._gradd_parts = Parts(
                model,
                lambda child: self._gradd_compile(
                    child, _without_cache(child, attach.original_forward(child)), debug, tally
                ),
            )
        attach.attach(model, self._gradd_parts.around(self._gradd_call))

    def _gradd_source_of(self, model: nn.Module) -> tuple[Any, ...]:
        return attach.original_forward(model), self._gradd_smoother

    def _gradd_call(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model, whose forward a script may have replaced since the last one."""
        model = self._gradd_compiled_module
        source = self._gradd_source_of(model)  # type: ignore[arg-type]
        if source != self._gradd_source:
            self._gradd_source = source
            self._gradd_compiled.replace_forward(self._gradd_forward_to_capture(model))
        return self._gradd_compiled(*args, **kwargs)

    def _gradd_compile(
        self, module: nn.Module, forward: Callable[..., Any], debug: Any, tally: Any = None
    ) -> Any:
        from gradd.dynamo.frontend import Compiled

        return Compiled(
            module,
            forward=forward,
            strict=bool(self._gradd_built_with["strict"]),
            debug=debug,
            memory_budget=self._gradd_built_with["memory_budget"],
            tally=tally,
        )

    def _gradd_option(self, name: str) -> Any:
        return self.gradd_options.get(name) or getattr(self.args, name, None)

    def gradd_stats(self) -> dict[str, Any]:
        """The dict of ORTModule.gradd_stats(); empty before train() and under GRADD_DISABLE."""
        return self._gradd_compiled.stats() if self._gradd_compiled is not None else {}

    def gradd_explain(self, *args: Any, **kwargs: Any) -> Any:
        """Explains the daemon's work in a step, as ORTModule.gradd_explain() does.

        Args:
            args: Positional arguments of the model's forward.
            kwargs: Its keyword arguments. Without any arguments: the call that ran last.

        Raises:
            ValueError: train() has not been called, or the plan of the last call is gone.
        """
        if self._gradd_compiled is None:
            raise ValueError("nothing has run in the daemon: call train() first")
        from gradd.explain import explain_call

        return explain_call(self._gradd_compiled, args, kwargs)

    def _gradd_debug_options(self) -> Any:
        """`save_onnx`, `onnx_prefix` and `onnx_log_level` as ORTModule takes them."""
        from gradd import DebugOptions, LogLevel

        args = self.args
        if getattr(args, "save_onnx", False):
            os.makedirs(args.output_dir, exist_ok=True)
        debug = DebugOptions(
            log_level=LogLevel[getattr(args, "onnx_log_level", "WARNING")],
            save_onnx=bool(getattr(args, "save_onnx", False)),
            onnx_prefix=getattr(args, "onnx_prefix", None) or "",
            save_path=args.output_dir,
        )
        debug.apply()
        return debug

    # ---- the loss ----

    def _gradd_forward_to_capture(self, model: nn.Module) -> Callable[..., Any]:
        """The callable that graphs are captured from: forward, or forward and smoothed loss.

        One callable serves both: the keyword that chooses is a constant of the call, and therefore
        part of what makes two captures different.
        """
        plain = _without_cache(model, attach.original_forward(model))
        smoother, causal = self._gradd_smoother, self._gradd_is_causal_lm(model)
        if smoother is None:
            return plain

        def forward(*args: Any, gradd_smooth_labels: bool = False, **kwargs: Any) -> Any:
            if not gradd_smooth_labels:
                return plain(*args, **kwargs)
            labels = kwargs.pop("labels")
            outputs = plain(*args, **kwargs)
            loss = smoother(
                outputs,
                labels,
                shift_labels=causal,
                num_items_in_batch=kwargs.get("num_items_in_batch"),
            )
            return {"loss": loss}

        return forward

    @property
    def _gradd_loss_in_graph(self) -> bool:
        """Without label smoothing models compute their loss in forward: nothing is left to add."""
        wanted = bool(getattr(self.args, "use_module_with_loss", False))
        return wanted and self.label_smoother is not None and self.compute_loss_func is None

    def _gradd_is_causal_lm(self, model: nn.Module) -> bool:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        return inner.__class__.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """As in Trainer; in it, parts of the model run in the daemon as well."""
        around = contextlib.ExitStack()
        around.enter_context(super().compute_loss_context_manager())
        module = self._gradd_compiled_module
        if module is not None and attach.is_attached(module):
            around.enter_context(self._gradd_parts.on())
        return around

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """As in Trainer; with `use_module_with_loss` the smoothed loss comes out of the graph."""
        inside = (
            self._gradd_loss_in_graph
            and not return_outputs
            and model.training
            and "labels" in inputs
            and self._gradd_compiled_module is not None
            and attach.is_attached(self._gradd_compiled_module)
        )
        if not inside:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        # Trainer's own code does the rest (scaling over processes): it only must not smooth again.
        self._gradd_smoother, self.label_smoother = self.label_smoother, None
        try:
            return super().compute_loss(model, {**inputs, "gradd_smooth_labels": True}, **kwargs)
        finally:
            self.label_smoother = self._gradd_smoother

    # ---- the optimizer ----

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """As in Trainer; knows `adamw_ort_fused` in addition."""
        if args.optim != ORTOptimizerNames.ADAMW_ORT_FUSED:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        if gradd_is_disabled():
            plain = copy.copy(args)
            plain.optim = OptimizerNames.ADAMW_TORCH
            return Trainer.get_optimizer_cls_and_kwargs(plain, model)
        return DaemonTraining.get_ort_optimizer_cls_and_kwargs(args)

    @staticmethod
    def get_ort_optimizer_cls_and_kwargs(args: Any) -> tuple[Any, dict[str, Any]]:
        """The fused AdamW, with torch's arithmetic, which also clips."""
        from gradd.optim import AdamWMode, FusedAdam

        return FusedAdam, {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "adam_w_mode": AdamWMode.ADAMW_TORCH,
            "max_grad_norm": clipping.ArgumentsLimit(max(args.max_grad_norm or 0, 0)),
            **_optimizer_options(args.optim_args),
        }

    def gradd_own_optimizer(self) -> Any:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _gradd_decide_clipping(self, model: nn.Module) -> bool:
        """Whether the optimizer's step clips this time, so that nothing else has to."""
        own = getattr(super()._clip_grad_norm, "__func__", None) is not Trainer._clip_grad_norm
        callbacks, wanted = self.callback_handler.callbacks, self.args.max_grad_norm
        optimizer = self.gradd_own_optimizer()
        self._gradd_clips = not own and clipping.by_step(optimizer, model, wanted, callbacks)
        return self._gradd_clips

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self._gradd_decide_clipping(model):
            return super()._clip_grad_norm(model)
        return None  # the step clips

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not (self.args.max_grad_norm or 0) > 0:  # else it has been decided
            self._gradd_decide_clipping(model)
        if grad_norm is not None or not self._gradd_clips:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        # The norm is a by-product of the step, which comes after this call and before the value is
        # logged: hand out the tensor that the step's callback fills.
        self._gradd_norm = torch.zeros(())
        return self._gradd_norm

    def gradd_after_optimizer_step(self) -> None:
        """Called by GraddCallback: completes what only the step could know."""
        optimizer = self.gradd_own_optimizer()
        if self._gradd_norm is not None:
            norm = optimizer.grad_norm
            self._gradd_norm.fill_(float("nan") if norm is None else norm)
        self._gradd_norm, self._gradd_clips = None, False
        # accelerate takes a step that was called for one that was made; skipped, it must not move
        # the scheduler
        if getattr(optimizer, "skipped", False):
            self.optimizer._is_overflow = True


def _optimizer_options(text: str | None) -> dict[str, Any]:
    """`optim_args` of adamw_ort_fused: master_weights and sparse_rows, true or false."""
    if not text:
        return {}
    options: dict[str, Any] = {}
    for item in text.replace(" ", "").split(","):
        name, _, value = item.partition("=")
        if name not in ("master_weights", "sparse_rows") or value.lower() not in ("true", "false"):
            raise ValueError(
                f"optim_args={text!r}: adamw_ort_fused takes master_weights=true or =false, and "
                "sparse_rows=true or =false"
            )
        options[name] = value.lower() == "true"
    return options


def _without_cache(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward, told not to return a cache of keys and values where it would.

    Trainer turns that off in the model's own configuration; inner decoders (T5's) keep a copy of it
    in which it is on, and a cache is no output that a graph can have.
    """
    configs = [getattr(m, "config", None) for m in model.modules()]
    if not any(getattr(c, "use_cache", False) for c in configs):
        return forward
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "use_cache" not in inspect.signature(inner.forward).parameters:
        return forward

    def uncached(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs.setdefault("use_cache", False)
        return forward(*args, **kwargs)

    uncached.__name__ = "forward"
    return uncached
