"""Statistics of activations and their gradients, written to files, one for each tensor and step.

They come from forward hooks on all modules, which break the graph at each of them: the daemon gets
many small graphs. After remove(), another ORTModule around the model has whole ones again.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gradd.arguments import tensors


class StatisticsSubscriber:
    """Writes `step_<n>/<name>_forward` and `_backward`, and their order to `step_<n>/order.txt`.

    A file has the shape and dtype; minimum, maximum, mean and standard deviation; numbers of NaN,
    infinite, negative, positive and zero elements; the first 128 elements.

    Args:
        output_dir: The folder, which is made.
        start_step: First step, counted from 0; None: 0.
        end_step: The step behind the last one; None: no end.
        override_output_dir: Remove the folder if it exists.
        run_on_cpu: Compute the statistics on the CPU.
        bucket_size: Without effect.

    Raises:
        FileExistsError: The folder exists.
    """

    def __init__(
        self,
        output_dir: str,
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 1 << 29,
    ) -> None:
        self._folder = Path(output_dir)
        self._start = start_step or 0
        self._end = end_step
        self._on_cpu = run_on_cpu
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(f"{output_dir} exists: pass override_output_dir=True")
            shutil.rmtree(self._folder)

    def wants(self, step: int) -> bool:
        """Whether this step is between the first and the last."""
        return self._start <= step and (self._end is None or step < self._end)

    def write(self, tensor: torch.Tensor, name: str, step: int, title: str) -> None:
        """Appends the name to the order of the step, and writes the tensor's file."""
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "order.txt", "a", encoding="utf-8") as order:
            order.write(f"{name}\n")
        values = tensor.detach().flatten()
        lines = _summary(values.cpu() if self._on_cpu else values)
        head = f"{title} shape: {tuple(tensor.shape)} dtype: {tensor.dtype}"
        (folder / name).write_text("\n".join([head, *lines, "=" * 16, ""]), encoding="utf-8")


def _summary(values: torch.Tensor) -> list[str]:
    if not values.numel():
        return ["no elements"]
    wide = values if values.dtype == torch.float64 else values.float()
    spread = wide.std().item() if wide.numel() > 1 else 0.0
    counts = {
        "nan": wide.isnan(), "inf": wide.isinf(), "neg": wide < 0, "pos": wide > 0,
        "zero": wide == 0,
    }  # fmt: skip
    numbers = {k: int(v.sum()) for k, v in counts.items()}
    return [
        f"min: {wide.min().item()} max: {wide.max().item()}, mean: {wide.mean().item()}, "
        f"std: {spread}",
        f"nan: {numbers['nan']}, inf: {numbers['inf']}",
        f"samples(top 128): {values[:128].tolist()}",
        f"neg: {numbers['neg']}, pos: {numbers['pos']}, zero: {numbers['zero']}",
    ]


class SubscriberManager:
    """Passes the tensors of one model to subscribers.

    Attributes:
        step: Calls of the model since subscribe().
        is_on: Whether there are subscribers.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_on = False
        self._subscribers: list[StatisticsSubscriber] = []
        self._handles: list[Any] = []

    def subscribe(
        self, module: torch.nn.Module, subscribers: Iterable[StatisticsSubscriber]
    ) -> None:
        """Sets hooks on the module and all inside it; a second model takes the first one's place.

        Args:
            module: The model, or an ORTModule around it.
            subscribers: StatisticsSubscribers.
        """
        self.remove()
        self.step = 0
        self._subscribers = list(subscribers)
        self.is_on = True
        root = getattr(module, "module", module) if _is_wrapper(module) else module
        count = itertools.count()
        for path, one in root.named_modules():
            depth = path.count(".") + 1 if path else 0
            name = f"{type(one).__name__}_{next(count)}"
            self._handles.append(one.register_forward_hook(self._hook(name, depth)))
        self._handles.append(root.register_forward_hook(self._end_step))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._subscribers = [], []
        self.is_on = False

    @torch.compiler.disable
    def inspect(self, name: str, tensor: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Passes a tensor on, and later its gradient; returns the tensor."""
        takers = [s for s in self._subscribers if s.wants(self.step)]
        step, mark = self.step, ">" * depth
        for taker in takers:
            taker.write(tensor, f"{name}_forward", step, f"{mark}{name} forward run")
        if takers and tensor.requires_grad:

            def write(gradient: torch.Tensor) -> None:
                for taker in takers:
                    taker.write(gradient, f"{name}_backward", step, f"{mark}{name} backward run")

            tensor.register_hook(write)
        return tensor

    def _hook(self, name: str, depth: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            for i, tensor in enumerate(tensors(output)):
                self.inspect(f"{name}_{i}th_output", tensor, depth)

        return torch.compiler.disable(hook)

    def _end_step(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.step += 1


def _is_wrapper(module: torch.nn.Module) -> bool:
    from gradd.module import ORTModule

    return type(module) is ORTModule


GlobalSubscriberManager = SubscriberManager()


def inspect_activation(activation_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Passes a tensor inside of a forward to the subscribers; returns it.

    Args:
        activation_name: First part of the names of its files.
        tensor: Any tensor.
    """
    manager = GlobalSubscriberManager
    return manager.inspect(activation_name, tensor) if manager.is_on else tensor
