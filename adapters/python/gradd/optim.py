"""Optimizers whose step runs in the daemon, on the shared parameters.

`FusedAdam` has the interface and the three modes of ONNX Runtime Training's optimizer of that name.
Parameters and state stay in shared memory; one request updates all of them through a redo journal,
so a daemon that is killed in the middle leaves nothing half done: the next one finishes the step
with the same bits. All arithmetic and the moments are float32, whatever the parameters are.
"""

from __future__ import annotations

import enum
import logging
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradd import errors, interrupts
from gradd.calls import tables
from gradd.calls.parameters import identity, overlapping
from gradd.memory import devices
from gradd.memory.holders import others
from gradd.memory.parameter_changes import Snapshot
from gradd.memory.shm import nbytes, round_up
from gradd.memory.watch import data_ptr
from gradd.optimizer_places import Bound, GradientPlaces, StatePlaces, wire
from gradd.session import bases, protocol
from gradd.session import client as clients
from gradd.session.client import Client
from gradd.session.replay import Send
from gradd.session.ring import Block
from gradd.session.timeline import Pending

logger = logging.getLogger("gradd")

# Elements of a journal's chunks; the daemon refuses other lengths than multiples of the first.
_CHUNK = 128 << 10
_LONG_CHUNK = 16 << 20  # of a GPU, where every chunk costs launches
_LONG_MAGIC = 0x324E524A << 32  # plus the length of the chunks; see docs/protocol.md
_CHUNK_BITS = 24  # of the journal's progress: step << 24 | chunks done of it
_SKIPPED = (1 << _CHUNK_BITS) - 1  # in place of a chunk, in the word behind: nothing was changed

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIELDS = {"bm": "exp_avg", "bv": "exp_avg_sq", "bw": "master"}  # of a request: in the state
_SETTINGS = {"lr": "learning rate", "eps": "epsilon value", "weight_decay": "weight_decay value"}
_MASTER = "master"  # name of the float32 master weights in the state of a bf16 parameter


class AdamWMode(enum.IntEnum):
    """How weight decay enters.

    ADAM_L2_REGULARIZATION adds it to the gradient; ADAMW_TRANSFORMERS decays the updated weights
    and adds eps to the uncorrected root; ADAMW_TORCH is torch.optim.AdamW.
    """

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


def _chunk_elements(device: str, largest: int) -> int:
    """Length of the chunks of a journal for parameters of up to `largest` elements."""
    if device in ("", "cpu"):
        return _CHUNK
    return max(_CHUNK, min(round_up(largest, _CHUNK), _LONG_CHUNK))


class _Sent:
    """A step as requested. If the request ends in an exception, only the step's journal tells
    whether the step is done, half done or not begun.

    Half a step must be finished with the gradients that it began with, and before anything else
    reads or writes the parameters. So from the exception on, the client's ledger holds the step and
    finishes it as soon as there is a connection again.
    """

    def __init__(
        self,
        client: Client,
        fields: dict[str, Any],
        journal: torch.Tensor,
        params: list[torch.Tensor],
        held: list[tuple[torch.Tensor, torch.Tensor]],
        states: list[dict[str, Any]],
        *,
        bound: list[Bound],
    ) -> None:
        self.client = client
        self.fields = fields
        self.params = [*params, *(p for p, _ in held)]  # a write to one of these is noticed
        self.held = held
        self.states = states
        self._journal = journal
        self._bound = bound  # the daemon knows the tensors by these as long as they live
        self._grads: list[torch.Tensor] = []
        self._left: Snapshot | None = None
        self._places: list[int] = []

    def keep(self, grads: list[torch.Tensor]) -> None:
        """The request ended in an exception. `.grad` is the user's again: its values are copied."""
        self._grads = [g.clone() for g in grads]
        self._left = Snapshot.of(self.params)
        self._places = [data_ptr(p) for p in self.params]
        self.client.ledger.steps.append(self)

    def forget(self) -> None:
        """The ledger need not finish it any more."""
        if self in self.client.ledger.steps:
            self.client.ledger.steps.remove(self)

    def is_done(self) -> bool:
        """All parameters are updated."""
        return self._progress() == (self.fields["step"] + 1) << _CHUNK_BITS

    def is_skipped(self) -> bool:
        """It is done, and changed nothing: a gradient was not finite."""
        return int(self._journal[2]) == self.fields["step"] << _CHUNK_BITS | _SKIPPED

    def norm(self) -> float | None:
        """The norm of all gradients; None once the journal is another step's."""
        return float(self._journal[4].view(torch.float64)) if self.is_done() else None

    def is_torn(self) -> bool:
        """Some parameters are updated, others are not."""
        magic, _, sealed = self._journal[:3].tolist()
        begin = self.fields["step"] << _CHUNK_BITS
        progress = self._progress()
        return bool(magic) and not self.is_done() and (progress != begin or sealed == progress)

    def _progress(self) -> int:
        return int(self._journal[1])

    def finish(self, send: Send) -> None:
        """Does the other half, if there is one and it still fits what was left."""
        if self.is_done():
            self.forget()
        if not self.is_torn() or self._was_written():
            return
        blocks = []
        try:
            wires = []
            sizes = [nbytes(grad.dtype, grad.shape) for grad in self._grads]
            self.client.gradients.reserve(sizes)
            for grad, size in zip(self._grads, sizes, strict=True):
                block = self.client.gradients.allocate(size)
                blocks.append(block)
                block.fill(grad, (grad.dtype, grad.shape, size, 0))
                wires.append(block.wire(grad.dtype, grad.shape))
            self.client.gradients.drop_empty()
            self.client.settle_copies()
            send("step", {**self.fields, "g": protocol.tensors(wires)}, ())
            self.forget()
        except errors.GraddError as error:
            logger.warning(
                "FusedAdam: a step that was interrupted cannot be finished: %s", str(error)
            )
        finally:
            for block in blocks:
                block.drop()

    def _was_written(self) -> bool:
        moved = self._places != [data_ptr(p) for p in self.params]
        return moved or self._left is None or self._left.has_changed()


def _check_settings(group: dict[str, Any]) -> None:
    """In torch's words. An infinite setting is refused too: its results would not be numbers."""
    for name, what in _SETTINGS.items():
        if not 0.0 <= float(group[name]) < math.inf:
            raise ValueError(f"Invalid {what}: {group[name]}")
    for i, beta in enumerate(group["betas"]):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def _check_clip(norm: float | None) -> None:
    if norm is not None and not float(norm) >= 0.0:
        raise ValueError(f"Invalid max_grad_norm value: {norm}")


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW in the daemon; float32, bfloat16 and float16 parameters.

    With torch.amp.GradScaler: the daemon unscales what it reads of the gradients (`.grad` keeps its
    values) and skips the step where one is not finite, which changes neither parameters nor state.

    The moments of bfloat16 and float16 parameters are float32. Without master weights their update
    is computed in float32 from the parameter's value and rounded to nearest; updates below half a
    unit in the last place are lost.

    Args:
        params: Parameters or groups, as for torch optimizers. Parameters that no ORTModule has
            moved into shared memory yet are moved there at the first step.
        lr: Learning rate.
        bias_correction: Divide the moments by 1 - beta^t.
        betas: Decay of the two moments.
        eps: Term in the denominator.
        adam_w_mode: See AdamWMode.
        weight_decay: Decay rate.
        set_grad_none: Default of zero_grad(): whether it drops gradients or zeroes them.
        max_grad_norm: Clip the global norm of all gradients to this before the update, as
            torch.nn.utils.clip_grad_norm_ does; `.grad` itself keeps its values. None or 0: no
            clipping; inf: the norm alone.
        master_weights: Keep a float32 copy of every bfloat16 and float16 parameter, which the step
            updates; the parameter is the rounded copy. If a parameter was written in between (by
            the model's load_state_dict(), say), its new value replaces the copy. state_dict()
            holds the copies.
        sparse_rows: Lazy Adam for the weights of nn.Embedding and nn.EmbeddingBag in wrapped
            modules. A step skips each row whose gradient is all zeros: its value and moments stay,
            without decay. This is NOT Adam, which updates such rows by their moments, and trains
            differently; torch.optim.SparseAdam does the same for sparse gradients. A step takes
            time in proportion to the rows with a gradient, from all backwards since zero_grad();
            in a tied head these are practically all rows. `"sparse_rows"` in a parameter group
            overrides this: True for all its parameters of two and more dimensions, or False.

    Attributes:
        grad_norm: Global gradient norm of the last step; None unless max_grad_norm is set.
        skipped: Whether the last step changed nothing because a GradScaler found gradients that
            are not finite.
        copied_grads: Number of gradients copied into shared memory so far, because `.grad` was not
            the daemon's own (hooks, DDP with bucket views).
        copied_params: Number of parameters copied so far, because their memory has other holders
            (a state dict, a NumPy array), or because a GPU's cannot be shared: they stay there, and
            a copy is updated.

    Raises:
        ValueError: A setting is negative, infinite or NaN, or a beta is not in [0, 1).
    """

    # GradScaler leaves `grad_scale` and `found_inf` here and calls step() in any case.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        sparse_rows: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        _check_settings(defaults)
        _check_clip(max_grad_norm)
        super().__init__(params, defaults)
        self.adam_w_mode = AdamWMode(adam_w_mode)
        self.set_grad_none = set_grad_none
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.sparse_rows = sparse_rows
        self._begin()

    def _begin(self) -> None:
        """A copy has a journal and a session's other objects of its own."""
        self._norm: float | _Sent | None = None
        self._awaited: _Sent | None = None  # the step whose reply has the norm
        self.skipped = False
        self.copied_grads = 0
        self.copied_params = 0
        self._client: Client | None = None
        self._journal: Block | None = None
        self._journal_words: torch.Tensor | None = None
        self._journal_step = 0
        self._doubtful: _Sent | None = None  # the last step, if its request ended in an exception
        self._bound: dict[str, Bound] = {}
        self._placed: StatePlaces | None = None  # of the last step, if nothing was copied
        self._gradients: GradientPlaces | None = None
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._warned_of_tables = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; invalid settings raise a ValueError before the group is added."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops or zeroes gradients; the default is the constructor's set_grad_none."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        own = ("adam_w_mode", "set_grad_none", "max_grad_norm", "master_weights", "sparse_rows")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state of torch's AdamW has no such key
            group.setdefault("bias_correction", True)
        self.__dict__.setdefault("sparse_rows", False)  # one of an older version
        if self.__dict__.get("_doubtful"):  # with another state there is nothing left to finish
            self._doubtful.forget()
        self._begin()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but what is float32 by definition is not rounded to the parameter's type."""
        final: list[dict[str, Any]] = []  # what other hooks have made of it

        def note(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            final.append(given)

        def widen(_: torch.optim.Optimizer) -> None:
            self._take_wide(final[0])

        handles = (
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(widen, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _take_wide(self, saved: dict[str, Any]) -> None:
        """Takes what is float32 from a state dict without rounding."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for name, value in saved["state"].get(i, {}).items():
                if name in (*_MOMENTS, _MASTER):
                    self.state[p][name] = value.detach().to(p.device, torch.float32, copy=True)

    def _scale(self) -> tuple[float | None, bool]:
        """What a GradScaler has left here for this step: its scale, if gradients still have it,
        and whether it found them not to be finite."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else float(scale), bool(getattr(self, "found_inf", None) or 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        After an exception the parameters are unchanged or updated, or partly updated if the daemon
        was lost in the middle and no other could be started. The next request to a daemon then
        finishes the step.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The result of the closure, or None.

        Raises:
            ValueError: A setting is invalid; nothing is changed.
            TensorError: A parameter or gradient is not dense, has another dtype than float32,
                bfloat16 and float16, or is on another device than the daemon's; or two parameters
                view the same memory differently.
            StaleError: The last step was done in part and cannot be finished.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # other code may have changed them, such as a scheduler
            _check_settings(group)
        _check_clip(self.max_grad_norm)
        self._awaited = None
        if self.max_grad_norm is not None:
            self._norm = 0.0  # of no gradients
        entries = [
            (k, p) for k, group in enumerate(self.param_groups) for p in group["params"]
            if p.grad is not None
        ]  # fmt: skip
        scale, found = self._scale()
        self.skipped = False
        if scale is None and found:
            # What the scaler found may be gone: the gradients are unscaled, perhaps clipped.
            self._norm = None
            self.skipped = True
        elif entries:
            sized = [(k, p) for k, p in entries if p.numel()]
            if not self._are_placed([p for _, p in sized]):
                self._check(entries)
            client = self._session([p for _, p in entries])
            with client.lock, interrupts.deferred:
                if self._doubtful is not None:
                    self._settle_doubt(client, self._doubtful)
                self._send(client, sized, scale)
        return loss

    @property
    def grad_norm(self) -> float | None:
        """See the class. On a GPU it waits for the step."""
        if self._awaited is not None:
            with self._awaited.client.lock, interrupts.deferred:
                self._awaited.client.catch_up()
            self._awaited = None
        if isinstance(self._norm, _Sent):  # a daemon has died behind the step
            self._norm = self._norm.norm()
        return self._norm

    # ---- memory ----

    def _are_placed(self, params: list[torch.Tensor]) -> bool:
        """Whether everything lies where it lay at the last step; forgets where it does not."""
        client, placed, gradients = self._client, self._placed, self._gradients
        if client is None or client.closed:
            self._placed = self._gradients = None
            return False
        if placed is not None and not placed.hold(params, self.state, self.master_weights):
            self._placed = None
        if gradients is not None and not gradients.hold(client, [p.grad for p in params]):
            self._gradients = None
        return self._placed is not None and self._gradients is not None

    @staticmethod
    def _check(entries: list[tuple[int, torch.Tensor]]) -> None:
        for _, p in entries:
            for what, t in (("parameter", p), ("gradient", p.grad)):
                known = devices.is_known(t.device) and t.device == p.device
                if t.dtype not in _TYPES or not known or t.layout != torch.strided:
                    raise errors.TensorError(
                        f"FusedAdam: {what} of shape {tuple(p.shape)} is {t.dtype} on {t.device} "
                        f"({t.layout}); it takes dense float32, bfloat16 and float16 on the CPU, "
                        "or on a GPU that the daemon computes on"
                    )

    def _check_ties(self, client: Client, params: list[torch.Tensor]) -> None:
        """Moving a parameter would cut its tie to one that sees the same memory differently."""
        away = [p for p in params if not self._is_shared(client, p)]
        if not away:
            return
        every = (p for group in self.param_groups for p in group["params"])
        partly = overlapping(p for p in every if p.layout is torch.strided)
        for p in away:
            if identity(p) in partly:
                raise errors.TensorError(
                    f"FusedAdam: the parameter of shape {tuple(p.shape)} shares memory with "
                    "another one that sees it differently (a transpose or a slice), so it cannot "
                    "move into shared memory: use an optimizer of torch"
                )

    def _session(self, params: list[torch.Tensor]) -> Client:
        if self._client is None or self._client.closed:
            found = next((f for f in map(clients.find, params) if f is not None), None)
            self._client = found[0] if found else clients.get_client(device=params[0].device)
            self._bound.clear()
            self._placed = self._gradients = None
            self._journal = None
        return self._client

    @staticmethod
    def _is_shared(client: Client, tensor: torch.Tensor) -> bool:
        shared = tensor.is_contiguous() and client.locate(tensor) is not None
        return shared and (not bases.mapped or bases.holds(tensor) is None)

    def _shared(self, client: Client, tensor: torch.Tensor, pool: Any) -> torch.Tensor:
        """The tensor itself if it lies in shared memory, else a copy there."""
        if self._is_shared(client, tensor):
            return tensor
        return pool.tensor(tensor.dtype, tensor.shape).copy_(tensor.detach())

    def _state_names(self, p: torch.Tensor) -> tuple[str, ...]:
        """Names of the float32 tensors in a parameter's state."""
        has_master = self.master_weights and p.dtype is not torch.float32
        return (*_MOMENTS, _MASTER) if has_master else _MOMENTS

    def _reserve(self, client: Client, params: list[torch.Tensor]) -> None:
        """Few segments for everything that has no place yet, rather than one per tensor."""
        client.state.reserve(
            [
                p.numel() * 4
                for p in params
                for name in self._state_names(p)
                if name not in self.state.get(p, ())
            ]
        )
        away = [p for p in params if client.locate(p) is None and p not in self._copies]
        client.parameters.reserve([nbytes(p.dtype, p.shape) for p in away])

    def _stepped(self, client: Client, p: torch.Tensor) -> torch.Tensor:
        """What the daemon updates: the parameter, in shared memory from now on.

        If its memory has other holders, is not contiguous or cannot be shared, the parameter stays
        there and a copy is updated.
        """
        if self._is_shared(client, p):
            self._copies.pop(p, None)
            return p
        if p.is_contiguous() and not others(p) and client.memory.moves:
            p.data = self._shared(client, p.data, client.parameters)
            return p
        copy = self._copies.get(p)
        if copy is None or copy.shape != p.shape or copy.dtype is not p.dtype:
            copy = self._shared(client, p.data, client.parameters)
            self._copies[p] = copy
        self.copied_params += 1
        return copy.copy_(p.detach())

    def _settle(self, client: Client, p: torch.Tensor) -> dict[str, Any]:
        """State in shared memory; also after load_state_dict replaced it."""
        state = self.state[p]
        state["step"] = int(state.get("step", 0))
        names = self._state_names(p)
        for name in names:
            if name not in state:
                state[name] = self._begun(client, p, name)
            elif p.numel():
                state[name] = self._shared(client, state[name].float(), client.state)
        if _MASTER not in names:
            state.pop(_MASTER, None)  # of a saved state; it would not be kept up to date
        return state

    @staticmethod
    def _begun(client: Client, p: torch.Tensor, name: str) -> torch.Tensor:
        """The state of a parameter that has not been stepped, made in shared memory."""
        state = client.state.tensor(torch.float32, p.shape)
        return state.copy_(p.detach()) if name == _MASTER else state.zero_()

    def _place(self, client: Client, params: list[torch.Tensor]) -> StatePlaces:
        """Puts into shared memory what does not lie there."""
        self._check_ties(client, params)
        self._reserve(client, params)
        stepped = [self._stepped(client, p) for p in params]
        states = [self._settle(client, p) for p in params]
        bound = {"bp": self._bind(client, "bp", stepped)}
        for field, name in _FIELDS.items():
            tensors = [s[name] for s in states if name in s]
            if tensors:
                bound[field] = self._bind(client, field, tensors)
        placed = StatePlaces(params, stepped, self.state, self.master_weights, bound)
        self._placed = None if placed.held else placed
        return placed

    def _place_gradients(
        self, client: Client, grads: list[torch.Tensor]
    ) -> tuple[GradientPlaces, list[torch.Tensor]]:
        """The same for gradients, and what the daemon reads: copies of those from elsewhere."""
        copied = [grad for grad in grads if not self._is_shared(client, grad)]
        client.gradients.reserve([nbytes(g.dtype, g.shape) for g in copied])
        self.copied_grads += len(copied)
        shared = [self._shared(client, grad, client.gradients) for grad in grads]
        placed = GradientPlaces(client, shared, [wire(client, g) for g in shared])
        self._gradients = None if copied else placed
        return placed, shared

    def _bind(self, client: Client, name: str, tensors: list[torch.Tensor]) -> int:
        bound = self._bound.get(name)
        if bound is None or bound.key != tuple(data_ptr(t) for t in tensors):
            bound = self._bound[name] = Bound(client, tensors)
        return bound.id

    def _journal_wire(self, client: Client) -> dict[str, Any]:
        if self._journal is None:
            client.connect()  # the device that the daemon has decides
            every = (p.numel() for group in self.param_groups for p in group["params"])
            chunk = _chunk_elements(client.device, max(every))
            size = 4096 + 3 * 4 * chunk  # a page and three chunks of floats
            self._journal = client.state.allocate(size)
            self._journal_words = self._journal.tensor(torch.int64, (size // 8,)).zero_()
            if chunk != _CHUNK:
                self._journal_words[0] = _LONG_MAGIC | chunk
                self._journal_words[2] = -1  # no chunk is sealed
            self._journal.drop()  # the tensor alone keeps it
            self._journal_step = 0
        size = nbytes(torch.int64, self._journal_words.shape)  # type: ignore[union-attr]
        return protocol.tensor(self._journal.wire(torch.uint8, (size,)))

    # ---- sessions that outlive their process (keeping.py) ----

    def share_state(self) -> Client:
        """Puts parameters, their state and the journal into shared memory now.

        Without it that happens at the first step.

        Raises:
            TensorError: As for step().
        """
        params = self.kept_parameters()
        client = self._session(params)
        with torch.no_grad(), client.lock, interrupts.deferred:
            if self._doubtful is not None:
                self._settle_doubt(client, self._doubtful)
            self._check_ties(client, params)
            try:
                self._reserve(client, params)
                for p in params:
                    self._stepped(client, p)
                    self._settle(client, p)
            finally:
                for pool in (client.state, client.parameters, client.gradients):
                    pool.drop_empty()
            self._journal_wire(client)
        return client

    def kept_parameters(self) -> list[torch.Tensor]:
        """Those that a step may update, in order."""
        every = (p for group in self.param_groups for p in group["params"])
        return [p for p in every if p.requires_grad and p.numel()]

    @property
    def journal(self) -> torch.Tensor | None:
        """The words of the journal, i64; docs/protocol.md has their meaning."""
        return self._journal_words

    @property
    def journal_block(self) -> Block | None:
        """The block that the journal lies in."""
        return self._journal

    def count_from(self, steps: int) -> None:
        """Goes on with the number of an earlier journal's steps; the present one has none yet."""
        self._journal_step = steps
        self._journal_words[1] = steps << _CHUNK_BITS  # type: ignore[index]

    def adopt(self, client: Client, states: list[dict[str, Any]], journal: Block) -> None:
        """Takes over state that lies in shared memory, for kept_parameters() in order."""
        self._client, self._journal = client, journal
        self._bound.clear()
        self._placed = self._gradients = None
        self._copies.clear()
        self._journal_words = journal.tensor(torch.int64, (journal.size // 8,))
        self._journal_step = int(self._journal_words[1]) >> _CHUNK_BITS
        for p, state in zip(self.kept_parameters(), states, strict=True):
            self.state[p] = state

    # ---- the request ----

    def _groups(self, kinds: list[tuple[int, int]]) -> dict[str, list]:
        groups = [self.param_groups[k] for k, _ in kinds]
        return {
            "lr": [float(g["lr"]) for g in groups],
            "beta1": [float(g["betas"][0]) for g in groups],
            "beta2": [float(g["betas"][1]) for g in groups],
            "eps": [float(g["eps"]) for g in groups],
            "weight_decay": [float(g["weight_decay"]) for g in groups],
            "mode": [int(self.adam_w_mode)] * len(groups),
            "bias_correction": [bool(g["bias_correction"]) for g in groups],
            "t": [t for _, t in kinds],
        }

    def _widths(self, entries: list[tuple[int, torch.Tensor]]) -> list[int]:
        """Elements of a row of each parameter that is stepped by rows; 0 of the others."""
        asked = [self.param_groups[k].get("sparse_rows") for k, _ in entries]
        if not self.sparse_rows and not any(asked):
            return []
        found: set[int] = set()
        if self.sparse_rows and None in asked:
            found = tables.among(p for _, p in entries)
            if not found and not self._warned_of_tables:
                self._warned_of_tables = True
                logger.warning(
                    "FusedAdam(sparse_rows=True): none of the parameters is the weight of an "
                    "nn.Embedding in a wrapped module, so every step updates all rows"
                )
        by_rows = [p.dim() >= 2 and (id(p) in found if own is None else bool(own))
                   for own, (_, p) in zip(asked, entries, strict=True)]  # fmt: skip
        return [
            p.numel() // p.shape[0] if rows else 0
            for rows, (_, p) in zip(by_rows, entries, strict=True)
        ]

    def _clip(self) -> float:
        norm = self.max_grad_norm
        # inf: the norm alone
        return min(float(norm), sys.float_info.max) if norm and norm > 0 else 0.0

    def _send(
        self, client: Client, entries: list[tuple[int, torch.Tensor]], scale: float | None
    ) -> None:
        params = [p for _, p in entries]
        grads = [p.grad for p in params]
        placed, gradients = self._placed, self._gradients
        if placed is None or gradients is None:
            try:
                placed = placed or self._place(client, params)
                gradients, grads = self._place_gradients(client, grads)
            finally:
                for pool in (client.state, client.parameters, client.gradients):
                    pool.drop_empty()
        states = placed.states
        of_each = [(k, s["step"] + 1) for (k, _), s in zip(entries, states, strict=True)]
        kinds = sorted(set(of_each))
        index = {kind: i for i, kind in enumerate(kinds)}
        journal = self._journal_wire(client)  # a new one starts at step 0
        fields = {
            "step": self._journal_step,
            "journal": journal,
            "max_norm": self._clip(),
            "groups": self._groups(kinds),
            "group": [index[kind] for kind in of_each],
            **placed.bound,
            "g": gradients.field,
            "once": client.next_id(),
        }
        if scale is not None:
            fields.update(scale=1.0 / scale, finite=True)
        widths = self._widths(entries)
        if any(widths):
            fields["width"] = widths
        sent = _Sent(
            client,
            fields,
            self._journal_words,  # type: ignore[arg-type]
            placed.stepped,
            placed.held,
            states,
            bound=list(self._bound.values()),
        )
        # Before the request: a daemon that is lost in the middle leaves changed parameters, from
        # which no forward of before may be run again.
        torch.autograd.graph.increment_version(params)
        if client.timeline is not None and not client.timeline.waits_itself and scale is None:
            self._send_later(client, sent, gradients.places)
            return
        try:
            reply = client.request("step", fields)
        except BaseException as error:
            refused = isinstance(error, errors.GraddError) and error.code != "SESSION"
            if not refused or sent.is_torn() or sent.is_done():
                self._doubtful = sent
                sent.keep(grads)
            raise
        self._count(sent)
        self._norm = reply["norm"] if self.max_grad_norm is not None else None

    def _send_later(self, client: Client, sent: _Sent, grad_places: list[protocol.Tensor]) -> None:
        """The same, and the reply is not waited for. Nothing but a scaler's finding skips a step.

        The gradients may be given up meanwhile: no request behind a failed one writes there.
        """

        def answered(reply: dict[str, Any]) -> None:
            if self._awaited is sent:
                self._norm = reply.get("norm", sent)

        def failed(error: errors.GraddError) -> None:
            self._count_back(sent)
            self._norm = None
            self._doubtful = sent
            sent.keep([client.tensor_at(*place) for place in grad_places])

        client.ask_later(Pending("step", sent.fields, answered, failed=failed))
        if self.max_grad_norm is not None:
            self._awaited = sent
        self._count(sent)

    def _count(self, sent: _Sent) -> None:
        if sent.client is self._client:  # otherwise the journal is a new one
            self._journal_step += 1
        self.skipped = "finite" in sent.fields and sent.is_skipped()
        if self.skipped:
            return
        for s in sent.states:
            s["step"] += 1
        with torch.no_grad():
            for p, copy in sent.held:
                p.copy_(copy)

    def _count_back(self, sent: _Sent) -> None:
        """The step was counted, and is not done or only in part."""
        if sent.client is self._client:
            self._journal_step -= 1
        for s in sent.states:
            s["step"] -= 1

    def _settle_doubt(self, client: Client, sent: _Sent) -> None:
        """Settles the outcome of a step that ended in an exception.

        The request connects, if need be, and that finishes what is half done; it is answered after
        whatever was still in progress.
        """
        client.request("release", {"runs": []})
        if sent.is_torn():
            raise errors.StaleError(
                f"FusedAdam: step {sent.fields['step']} was interrupted when some parameters were "
                "updated and others not, and it could not be finished: the parameters were "
                "written since, or their client was closed. Load the states of model and optimizer"
            )
        sent.forget()
        self._doubtful = None
        if sent.is_done():
            self._count(sent)
