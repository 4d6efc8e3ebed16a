"""Planned memory of training, before anything is run: `gradd.estimate(model, batch)`.

    print(gradd.estimate(model, batch, optimizer="adamw"))
    print(gradd.estimate(model, batch, batches=[1, 2, 4, 8], fits_gib=16))

The model is captured and planned, once per batch size, which takes milliseconds; the daemon's plans
know their peak exactly and add the parts up, as `gradd estimate` does. Weights are not needed: a
model on the meta device will do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from gradd import arguments, errors, picture, private, progress
from gradd.calls.planned import Planned
from gradd.dynamo import locks
from gradd.dynamo.frontend import function_of
from gradd.dynamo.owner import Owner, device_of
from gradd.dynamo.planning import plans
from gradd.memory.budget import Memory, parse_bytes
from gradd.session.client import Client, get_client
from gradd.spec import CaptureError

_MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class CurvePoint:
    """A memory budget that can be met, and its cost.

    Attributes:
        activations: Arena of one run, in bytes.
        recomputed: Bytes that the backward computes again instead of keeping them.
        percent: Additional time of forward and backward, in percent, by a model.
    """

    activations: int
    recomputed: int
    percent: float


@dataclass(frozen=True)
class LiveSaving:
    """The savings for the batch at hand from leaving out padding and rows without a label.

    Attributes:
        rows: Positions of the batch.
        labelled: Rows that are computed after the last attention; 0 = all of `real`.
        real: Rows that are computed before it, without padding; 0 = all rows.
        source: Rows of the encoder that are computed; 0 = all of them.
        activations: Arena of one run with these rows, in bytes.
        percent: Operations of forward and backward that are saved, in percent.
    """

    rows: int
    labelled: int
    real: int
    source: int
    activations: int
    percent: float

    def __str__(self) -> str:
        front = self.real or self.rows
        behind = self.labelled or front
        encoder = f", {self.source} of the encoder" if self.source else ""
        return (
            f"of {self.rows} rows of this batch {front} are needed, {behind} behind the last "
            f"attention{encoder}:\n{'activations':<26} {self.activations / 2**20:>8.1f} MiB, "
            f"{self.percent:.0f} % fewer operations"
        )


@dataclass(frozen=True)
class Estimate:
    """Memory of one training step, in bytes. Prints as a table; a notebook shows a plot as well.

    Attributes:
        batch: First size of the batch's tensors.
        optimizer: Name of the optimizer whose state is counted.
        parameters: Parameters that get a gradient.
        frozen: Other parameters, and buffers.
        gradients: One gradient per parameter.
        second_slot: Gradients once more, when several backwards are added up.
        state: State of the optimizer.
        activations: Arena of one run: the planned peak of activations and workspace.
        constants: Folded constants, once per plan.
        ring: Inputs and outputs of one run, and the gradients that arrive.
        total: The sum.
        curve: Memory budgets that can be met, at most 8, from the largest, which keeps everything,
            to the smallest.
        live: The savings from leaving rows out for this batch; None = nothing is left out, or the
            batch's values are unknown.
        available: Memory that was left when the estimate was made: the machine's, the rest of the
            control group's, or the GPU's.
    """

    batch: int
    optimizer: str
    parameters: int
    frozen: int
    gradients: int
    second_slot: int
    state: int
    activations: int
    constants: int
    ring: int
    total: int
    curve: tuple[CurvePoint, ...]
    live: LiveSaving | None
    available: int = field(compare=False)
    _lines: tuple[tuple[str, str], ...] = field(repr=False, compare=False)
    _foot: str = field(repr=False, compare=False)
    _curve: tuple[str, ...] = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = (f.name for f in fields(self) if not f.name.startswith("_"))
        found = {name: getattr(self, name) for name in names}
        live = None if self.live is None else asdict(self.live)
        return {**found, "curve": [asdict(point) for point in self.curve], "live": live}

    def __str__(self) -> str:
        return str(Estimates((self,)))

    def _repr_html_(self) -> str:
        return Estimates((self,))._repr_html_()


class Estimates(tuple):
    """Estimates for several batch sizes. Prints as a table, one column each; the curve of one."""

    def __str__(self) -> str:
        lines = [f"{'batch':<26}" + "".join(f" {e.batch:>12}" for e in self)]
        for parts in zip(*(e._lines for e in self), strict=True):
            lines.append(f"{parts[0][0]:<26}" + "".join(f" {amount:>12}" for _, amount in parts))
        if len(self) == 1 and self[0].curve:
            lines += ["", *self[0]._curve]
        if len(self) == 1 and self[0].live is not None:
            lines += ["", str(self[0].live)]
        return "\n".join([*lines, *dict.fromkeys(e._foot for e in self)])

    def _repr_html_(self) -> str:
        lines, feet = [e._lines for e in self], [e._foot for e in self]
        return picture.html(self, lines, feet, self[0].available)


def estimate(
    model: torch.nn.Module,
    batch: dict[str, Any] | Sequence[Any],
    optimizer: str = "adamw",
    *,
    batches: Sequence[int] | None = None,
    fits_gib: float | None = None,
    accumulate: bool = False,
    memory_budget: int | str | None = None,
    client: Client | None = None,
) -> Any:
    """Estimates the memory of training beyond that of idle processes; plans, but runs nothing.

    Args:
        model: A module, or an ORTModule; its parameters may be on the meta device.
        batch: Arguments of a call: a dict by keyword, or a sequence by position. Their dtypes and
            sizes count; the values only of an attention mask and of labels, for `live`.
        optimizer: A name that `gradd estimate --help` lists.
        batches: Batch sizes to plan instead: they replace the first size of the batch's tensors.
        fits_gib: A limit in GiB: adds the largest batch whose total fits as the last column.
        accumulate: Whether gradients of several backwards are added before a step.
        memory_budget: As in ORTModule; by default that of `model`, if it is an ORTModule.
            GRADD_MEMORY_BUDGET is not read.
        client: Session to use; by default the process's for the device of the parameters, or of
            the batch if there are none.

    Returns:
        An Estimate, or Estimates (a tuple) if `batches` or `fits_gib` is given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The optimizer is unknown, a size is not positive, or not even a batch of 1 fits.
        OutOfMemoryError: The memory budget cannot be met.
        CaptureError: The module cannot be captured.
        GraddError: The daemon cannot plan it.
    """
    sizes = _checked(model, batch, optimizer, batches, fits_gib)
    with contextlib.closing(_Planner(model, batch, optimizer, accumulate, client)) as planner:
        return _estimated(planner, sizes, batches, fits_gib, memory_budget)


def _estimated(
    planner: _Planner, sizes: Any, batches: Any, fits_gib: Any, memory_budget: Any
) -> Any:
    if memory_budget is not None:
        planner.memory = Memory(parse_bytes(memory_budget, "memory_budget"))
    title = type(planner.module).__name__
    if batches is None and fits_gib is None:
        with progress.Compiling(title, "to estimate its memory"):
            return planner.of(planner.size)
    total = None if fits_gib is not None else len(sizes)
    with progress.bar(f"memory of {title}", total) as planner.begin:
        found = [planner.of(size) for size in sizes]
        if fits_gib is not None:
            found.append(_largest(planner, int(fits_gib * (1 << 30))))
    return Estimates(found)


def _checked(model: Any, batch: Any, optimizer: Any, batches: Any, fits_gib: Any) -> list[int]:
    """The batch sizes, if the arguments are valid."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batch, (Mapping, list, tuple)):
        raise TypeError(
            f"batch: expected the arguments of a call, a dict by name or a tuple by position, got "
            f"{type(batch).__name__}"
        )
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer: expected a name, got {type(optimizer).__name__}")
    if fits_gib is not None:
        number = isinstance(fits_gib, (int, float)) and not isinstance(fits_gib, bool)
        if not number or not 0 < fits_gib < math.inf:
            raise ValueError(f"fits_gib: expected a number of GiB above 0, got {fits_gib!r}")
    if batches is None:
        return []
    sizes = list(batches) if isinstance(batches, Iterable) else []
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"batches: expected batch sizes from 1, got {batches!r}")
    return sizes


def _largest(planner: _Planner, limit: int) -> Estimate:
    """By doubling, then bisection, over plans."""
    low, high, good = 0, 1, None
    while high <= _MAX_BATCH:
        now = planner.within(high, limit)
        if now is None:
            break
        low, high, good = high, high * 2, now
    while high - low > 1 and high <= _MAX_BATCH:
        middle = (low + high) // 2
        now = planner.within(middle, limit)
        if now is None:
            high = middle
        else:
            low, good = middle, now
    if good is None:
        raise ValueError(f"not even a batch of 1 fits into {limit / (1 << 30):g} GiB")
    return good


class _Planner:
    """A model that stays where it is, and all that is the same for all batch sizes."""

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        optimizer: str,
        accumulate: bool,
        client: Client | None,
    ) -> None:
        self.module = getattr(model, "_gradd_module", model)
        self.accumulate = accumulate
        self.optimizer = optimizer
        self.args, self.kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
        if any(p.is_meta for p in self.module.parameters()):
            self.args, self.kwargs = _mapped(self.args, self.kwargs, _on_meta)
        leaves = arguments.tensors((self.args, self.kwargs))
        self.client = client or get_client(device=device_of(self.module, leaves))
        self.size = leaves[0].shape[0] if leaves and leaves[0].dim() else 1
        own = getattr(model, "_gradd_memory", None)
        self.memory = Memory() if own is None else Memory(parse_bytes(own, "memory_budget"))
        self._owner = Owner(
            self.module, type(self.module).__name__, client=self.client, moves=False
        )
        self._function = function_of(self._owner, self.module)
        self.begin: Callable[[str], None] = lambda part: None  # is called before a size is planned

    def close(self) -> None:
        self._owner.finish()()

    def of(self, size: int) -> Estimate:
        self.begin(f"batch {size}")
        args, kwargs = _mapped(self.args, self.kwargs, lambda t: self._resized(t, size))
        with locks.both(self.client):
            given, budget = size == self.size, self.memory.budget
            found, in_torch = plans(self._owner, self._function, args, kwargs, given, budget)
            if not found:
                none = CaptureError("no_graph", "torch.compile makes no graph of this call")
                raise next(iter(in_torch.values()), self._owner.refused or none)
            return replace(self._add_up(found, in_torch), batch=size)

    def within(self, size: int, limit: int) -> Estimate | None:
        """The same, if its total is at most the limit and its plan meets the budget."""
        try:
            found = self.of(size)
        except errors.OutOfMemoryError:
            if not self.memory.budget:
                raise
            return None
        return found if found.total <= limit else None

    def _resized(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != self.size or size == self.size:
            return tensor
        shape = (size, *tensor.shape[1:])
        empty = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return empty.requires_grad_(tensor.requires_grad)

    def _add_up(self, found: Sequence[Planned], in_torch: Collection[str]) -> Estimate:
        counted = [p.used if p.plan.over is not None else p.plan for p in found]
        for plan in counted:
            if plan.over is not None:
                raise errors.OutOfMemoryError(plan.over)
        held = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        trained = {at: t for planned in found for at, t in planned.trained.items()}
        asked: dict[str, Any] = {
            "plan": counted[0].info.id,
            "optimizer": self.optimizer,
            "accumulate": int(self.accumulate),
            "held": sum(map(_bytes, held.values())),
            "curve": 1,
        }
        if len(found) > 1:
            asked["more"] = [plan.info.id for plan in counted[1:]]
            asked["trained"] = sum(map(_bytes, trained.values()))
            asked["elements"] = sum(t.numel() for t in trained.values())
        try:
            reply = self.client.request("plan.estimate", asked)
        except errors.UnsupportedError as error:
            raise ValueError(error.what) from None
        known = {f.name for f in fields(Estimate)}
        foot = reply["foot"]
        if in_torch:
            foot += f"\n(memory that {', '.join(sorted(in_torch))} keep in PyTorch is not counted)"
        return Estimate(
            batch=self.size,
            optimizer=self.optimizer,
            **{p["key"]: p["bytes"] for p in reply["parts"] if p["key"] in known},
            _lines=tuple((p["heading"], p["amount"]) for p in reply["parts"]),
            _foot=foot,
            curve=tuple(
                CurvePoint(p["bytes"], p["recomputed"], p["percent"]) for p in reply["curve"]
            ),
            live=_live(found),
            _curve=(reply["curve_head"], *(p["line"] for p in reply["curve"])),
            available=self.client.memory.available(),
        )


def _live(found: Sequence[Planned]) -> LiveSaving | None:
    """The savings from leaving rows out, by graph."""
    for planned in found:
        live = planned.plan.live
        if planned.less is not None and live is not None:
            activations = sum(p.used.info.peak for p in found)
            saved = 100 * live.saved(planned.rows)
            return LiveSaving(live.rows, *planned.rows, activations, saved)
    return None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mapped(args: tuple, kwargs: dict, change: Any) -> tuple[tuple, dict]:
    """The same arguments with other tensors."""
    args, kwargs = private.pytree.tree_map(
        lambda x: change(x) if isinstance(x, torch.Tensor) else x, (tuple(args), dict(kwargs))
    )
    return args, kwargs


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
