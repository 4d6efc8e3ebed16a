"""ORTTrainer: one call is forward, backward and, every few calls, a step of the optimizer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gradd import arguments
from gradd.legacy import states
from gradd.legacy.configs import OptimizerConfig, make_optimizer
from gradd.legacy.fp16 import all_finite
from gradd.legacy.model_desc import ModelDescription
from gradd.legacy.options import ORTTrainerOptions
from gradd.legacy.scalers import DynamicLossScaler
from gradd.module import ORTModule


@dataclass
class TrainStepInfo:
    """Where the training is; schedules and loss scalers get it.

    Attributes:
        optimizer_config: The trainer's.
        all_finite: Whether all gradients of the last optimizer step were finite.
        fetches: Names of the outputs that steps return; empty for all.
        optimization_step: Steps of the optimizer so far.
        step: Calls of train_step() so far.
    """

    optimizer_config: OptimizerConfig
    all_finite: bool = True
    fetches: list[str] = field(default_factory=list)
    optimization_step: int = 0
    step: int = 0


class ModelWithLoss(torch.nn.Module):
    """A model and the function that compares its result with the last input, the label."""

    def __init__(
        self, model: torch.nn.Module, loss_fn: Callable[..., Any] | None, names: list[str]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.n_inputs = len(names)
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        own = names if loss_fn is None else names[:-1]
        self.places = {
            n: i for i, n in enumerate(names) if n in parameters or (takes_all and n in own)
        }

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The loss and the model's result; the result alone without a loss function or label."""
        result = self.model(**{n: inputs[i] for n, i in self.places.items() if i < len(inputs)})
        if self.loss_fn is None or len(inputs) < self.n_inputs:
            return result
        return self.loss_fn(result, inputs[-1]), result


class ORTTrainer:
    """Trains a module in the daemon; the trainer owns the optimizer.

    Args:
        model: The module. It stays the script's: its parameters are what is trained.
        model_desc: Names and shapes of inputs and outputs, see model_desc.py. Inputs are passed to
            forward() by name; the outputs are its first results in their order.
        optim_config: AdamConfig, LambConfig or SGDConfig.
        loss_fn: Function of the model's result and of the last input. Its result is then the first
            output. Without it, the model returns the loss.
        options: An ORTTrainerOptions.

    Attributes:
        model_desc: The checked description.
        optim_config: As given.
        options: As given, or the defaults.
        loss_fn: As given.
        optimizer: The torch optimizer, FusedAdam for AdamConfig.
        module: The ORTModule around model and loss.

    Raises:
        TypeError: The model is no module (ONNX models are not trained), or the configuration is
            none of the three.
        ValueError: The description, an option or a name of `frozen_weights` does not fit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_desc: dict[str, Any],
        optim_config: OptimizerConfig,
        loss_fn: Callable[..., Any] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        _check_arguments(model, optim_config, loss_fn)
        self.options = options or ORTTrainerOptions()
        self.model_desc = ModelDescription(model_desc)
        self.model_desc.check_forward(model.forward, loss_fn is not None)
        if loss_fn is not None and not self.model_desc.outputs[0].is_loss:
            raise ValueError("model_desc: with loss_fn, the loss must be the first output")
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self._model = model.module if type(model) is ORTModule else model
        self._device = torch.device(self.options.device.id)
        self._model.to(self._device)
        names = [d.name for d in self.model_desc.inputs]
        self.module = ORTModule(ModelWithLoss(self._model, loss_fn, names))
        trained = _trained(self._model, self.options.utils.frozen_weights)
        self.optimizer = make_optimizer(optim_config, trained)
        mixed = self.options.mixed_precision
        if mixed.enabled and mixed.loss_scaler is None:
            mixed.loss_scaler = DynamicLossScaler()
        self._scale = 1.0  # of the gradients that are being accumulated
        self._train_step_info = TrainStepInfo(optim_config)
        self._example: list[torch.Tensor] = []  # of no memory, for save_as_onnx()

    # ---- steps ----

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, backward, and a step of the optimizer if gradients of enough calls are there.

        Gradients are the mean over `gradient_accumulation_steps` calls, clipped to the norm
        `max_norm_clip` (Adam, LAMB). In mixed precision, a step with a gradient that is not finite
        is left out.

        Args:
            args: The inputs in the order of the description, or one list of them. One more number
                or tensor of one element is the learning rate of this call.
            kwargs: Inputs by name.

        Returns:
            The outputs in the order of the description, as a list; one output as itself.

        Raises:
            ValueError: Inputs or outputs do not fit the description.
        """
        inputs, rate = self._inputs(args, kwargs)
        if len(inputs) < len(self.model_desc.inputs):
            missing = self.model_desc.inputs[len(inputs)].name
            raise ValueError(f"train_step() needs the input {missing!r}")
        info, scheduler = self._train_step_info, self.options.lr_scheduler
        if rate is not None and scheduler is not None:
            raise ValueError("give a learning rate to train_step() or have an lr_scheduler")
        if not self.module.training:
            self.module.train()
        outputs = self._run(inputs)
        info.step += 1
        if rate is None:
            rate = self.optim_config.lr if scheduler is None else scheduler.step(info)[0]
        self._backward(outputs)
        if info.step % self.options.batch.gradient_accumulation_steps == 0:
            self._optimize(rate)
        return self._results(outputs)

    @torch.no_grad()
    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs in evaluation mode.

        Args:
            args: As for train_step(), without a learning rate. The last input may be missing if
                `fetches` leave the loss out.
            kwargs: Inputs by name.

        Returns:
            As train_step().

        Raises:
            ValueError: Inputs or outputs do not fit the description.
        """
        inputs, rate = self._inputs(args, kwargs)
        if rate is not None:
            raise ValueError("eval_step() takes no learning rate")
        self.module.eval()
        try:
            return self._results(self._run(inputs))
        finally:
            self.module.train()

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], float | None]:
        """The inputs that are there, on the device, and the learning rate if one is given."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        names = [d.name for d in self.model_desc.inputs]
        rate = None
        if len(args) + len(kwargs) == len(names) + 1 and args and _is_number(args[-1]):
            args, rate = args[:-1], float(args[-1])
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        n = len(args) + len(kwargs)
        if set(given) != set(names[:n]) or len(given) != n:
            raise ValueError(f"{len(args)} inputs and {sorted(kwargs)} given, expected {names}")
        inputs = [given[name] for name in names[:n]]
        for name, value in zip(names, inputs, strict=False):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        self.model_desc.check(inputs)
        return [t.to(self._device) for t in inputs], rate

    def _run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One tensor for each described output; None for the loss if there is no label."""
        described = self.model_desc.outputs
        mixed = self.options.mixed_precision.enabled
        with torch.autocast(self._device.type, torch.float16) if mixed else nullcontext():
            found: list[torch.Tensor | None] = [*arguments.tensors(self.module(*inputs))]
        if len(inputs) < len(self.model_desc.inputs) and described[0].is_loss:
            if self.loss_fn is not None or len(found) == len(described) - 1:
                found.insert(0, None)
        if len(found) < len(described):
            raise ValueError(
                f"the model returns {len(found)} tensors, model_desc has "
                f"{[d.name for d in described]}"
            )
        found = found[: len(described)]
        self.model_desc.check(inputs, found)
        if len(inputs) == len(self.model_desc.inputs):
            self._example = [torch.empty_like(t, device="meta") for t in inputs]
        return found

    def _results(self, outputs: list[torch.Tensor | None]) -> Any:
        named = {d.name: t for d, t in zip(self.model_desc.outputs, outputs, strict=True)}
        names = self._train_step_info.fetches or list(named)
        if unknown := [n for n in names if named.get(n) is None]:
            raise ValueError(f"there are no outputs {unknown} of these inputs")
        results = [named[n].detach() for n in names]
        return results[0] if len(results) == 1 else results

    def _backward(self, outputs: list[torch.Tensor | None]) -> None:
        n = self.options.batch.gradient_accumulation_steps
        mixed = self.options.mixed_precision
        if mixed.enabled and (self._train_step_info.step - 1) % n == 0:
            self._scale = mixed.loss_scaler.loss_scale
        loss = next(t for d, t in zip(self.model_desc.outputs, outputs, strict=True) if d.is_loss)
        assert loss is not None
        if n > 1 or mixed.enabled:
            loss = loss.float() * (self._scale / n)
        loss.backward()

    def _optimize(self, rate: float) -> None:
        info, mixed = self._train_step_info, self.options.mixed_precision
        groups = self.optimizer.param_groups
        params = [p for g in groups for p in g["params"] if p.grad is not None]
        if mixed.enabled:
            info.all_finite = all_finite(p.grad for p in params)
        if info.all_finite:
            for p in params if mixed.enabled else ():
                p.grad.div_(self._scale)
            self._clip([p.grad for p in params])
            for group in groups:
                group["lr"] = rate
            self.optimizer.step()
            info.optimization_step += 1
        self.optimizer.zero_grad(set_to_none=True)
        if mixed.enabled and getattr(mixed.loss_scaler, "automatic_update", True):
            mixed.loss_scaler.update(info)

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        """Each group to its own limit of the norm of all gradients."""
        groups = [g for g in self.optimizer.param_groups if g["max_norm_clip"] is not None]
        if not groups or not self.options.utils.grad_norm_clip:
            return
        norm = torch.nn.utils.get_total_norm(gradients)
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group["params"], group["max_norm_clip"], norm)

    # ---- states ----

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Copies of the states, on the CPU.

        Args:
            pytorch_format: The model's alone, as the model's own state_dict().

        Returns:
            The model's state, or a dict with `model`, `optimizer` (`Moment_1`, `Moment_2` and
            `Update_Count` of each parameter), `trainer_options` and `train_step_info`.
        """
        model = states.model_state(self._model)
        if pytorch_format:
            return model
        info, mixed = self._train_step_info, self.options.mixed_precision.enabled
        return {
            "model": {"full_precision": model},
            "optimizer": states.optimizer_state(self.optimizer, self._model),
            "trainer_options": {
                "mixed_precision": mixed,
                "zero_stage": 0,
                "world_rank": 0,
                "world_size": 1,
                "optimizer_name": self.optim_config.name,
            },
            "train_step_info": {"optimization_step": info.optimization_step, "step": info.step},
        }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads what state_dict() gave; parts that are missing stay as they are.

        Args:
            state_dict: In the longer of the two forms.
            strict: Fail where the names of the model's tensors or of the optimizer's parameters
                are not the same.

        Raises:
            ValueError: The state is another optimizer's.
            RuntimeError: Names or shapes differ.
        """
        self.optimizer.zero_grad(set_to_none=True)  # those of accumulated calls
        saved = state_dict.get("trainer_options", {}).get("optimizer_name", self.optim_config.name)
        if "optimizer" in state_dict and saved != self.optim_config.name:
            raise ValueError(f"the state is of {saved}, the trainer has {self.optim_config.name}")
        if "model" in state_dict:
            self._model.load_state_dict(state_dict["model"]["full_precision"], strict=strict)
        if "optimizer" in state_dict:
            given = state_dict["optimizer"]
            states.load_optimizer_state(self.optimizer, self._model, given, strict)
        for name, value in state_dict.get("train_step_info", {}).items():
            setattr(self._train_step_info, name, value)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        user_dict: dict[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> None:
        """Writes the states to a file of torch.save().

        Args:
            path: The file.
            user_dict: Numbers, text, tensors, and lists and dicts of them, for load_checkpoint().
            include_optimizer_states: Whether the moments are saved, too.
        """
        state = self.state_dict()
        if not include_optimizer_states:
            del state["optimizer"]
        torch.save({**state, "user_dict": user_dict or {}}, path)

    def load_checkpoint(self, *paths: str | os.PathLike[str], strict: bool = True) -> Any:
        """Loads a file of save_checkpoint().

        Args:
            paths: One file.
            strict: As for load_state_dict().

        Returns:
            The user_dict.

        Raises:
            ValueError: Several files: parts of a state that was distributed.
        """
        if len(paths) != 1:
            raise ValueError("load_checkpoint() takes one file: states are not distributed here")
        state = torch.load(paths[0], map_location="cpu", weights_only=True)
        self.load_state_dict(state, strict)
        return state.get("user_dict", {})

    def save_as_onnx(self, path: str) -> None:
        """Writes model and loss in evaluation mode as an ONNX model with the current weights.

        Args:
            path: The file; weights of more than 2 GiB go to a file beside it.

        Raises:
            RuntimeError: No step has run yet: the types of the inputs are unknown.
        """
        if not self._example:
            raise RuntimeError("save_as_onnx() needs a train_step() or eval_step() before it")
        states.export(self.module.module, self._example, self.model_desc, path)


def _check_arguments(model: Any, config: Any, loss_fn: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"ORTTrainer trains a torch.nn.Module, got {type(model).__name__}: for an ONNX model, "
            "write the module and load the weights into it"
        )
    if not isinstance(config, OptimizerConfig):
        raise TypeError(f"optim_config must be AdamConfig, LambConfig or SGDConfig, got {config!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of result and label, got {loss_fn!r}")
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError("loss_fn has parameters, which would not be trained: the model needs them")


def _trained(model: torch.nn.Module, frozen: list[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters to train by name; freezes the others."""
    every = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [n for n in frozen if n not in every and n not in dict(model.named_buffers())]:
        raise ValueError(f"utils.frozen_weights: the model has no {unknown}")
    for name in frozen:
        if name in every:
            every[name].requires_grad_(False)
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))
