"""Sessions that outlive their process: a restarted kernel takes its model up again.

`keep()` gives the session a name. When the process ends, in whatever way, the daemon holds what
parameters, buffers and the state of FusedAdam lie in, for as long as was asked for. `reattach()` in
another process maps that memory in place: nothing is copied.

With each step of the optimizer, notes are written beside them: the number of updates of each
parameter, settings, small buffers, the state of torch's random generator, and values of the user.
There are two places for notes, written in turn *before* a step begins; the journal of the step says
how many steps are done, and thereby which notes are true. So a process may die at any moment.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradd import errors, interrupts, module_tables
from gradd.calls.parameters import identity, overlapping
from gradd.html_tables import table
from gradd.kept_checks import check_name, check_same, stepped
from gradd.memory.holders import others
from gradd.memory.shm import DTYPE_CODES, DTYPES, nbytes
from gradd.memory.waiting import seconds_of
from gradd.memory.watch import data_ptr
from gradd.optim import FusedAdam
from gradd.session import client as clients
from gradd.session import kept as sessions
from gradd.session.client import Client
from gradd.session.kept import Manifest, Taken
from gradd.session.ring import Block

logger = logging.getLogger("gradd")

_NOTES_BYTES = 1 << 20  # of the user's values
_SLOT_BYTES = 16 << 10  # of one of two notes, at first
_HEAD = 64  # bytes in front of the slots, and of each slot
_MAGIC = int.from_bytes(b"GRADNOTE", "little")
# Words of the head: an optimizer of torch writes; the steps it has done; another one has stepped.
_WRITING, _DONE, _OTHERS = 1, 2, 3
_CHUNK_BITS = 24  # of a journal's progress: step << 24 | chunks done of it
_CHUNKS = (1 << _CHUNK_BITS) - 1  # as chunks, behind the last one: the step was skipped
_PLAIN = (bool, int, float, str, type(None))
_kept: dict[str, Kept] = {}  # of this process


class Kept:
    """A named session of this process; see keep() and reattach().

    Attributes:
        name: Of the session.
        notes: The user's values, as of the last step that is done (after reattach()), or as given
            to note().
        random_state: After reattach(): the state of torch's random generator at the end of the
            last step, for torch.set_rng_state(); else None.
        client: That has the memory.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        seconds: float,
        client: Client,
    ) -> None:
        self.name = name
        self.notes: dict[str, Any] = {}
        self.random_state: torch.Tensor | None = None
        self._seconds = seconds
        self.client = client
        self._model = weakref.ref(_inner(model))
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._packed = b"\x80"  # the user's values
        self._slot = 0  # bytes of one
        self._block: Block | None = None
        self._words: torch.Tensor | None = None
        self._key: tuple = ()
        self._told: dict[str, Any] = {}  # the content of the manifest
        self._last: torch.Tensor | None = None  # the words of the journal that it names
        self._handles: list[Any] = []
        self._held: list[Any] = []  # what the name says stays, even if the script lets go of it
        self._ids: set[int] = set()  # of these

    def __repr__(self) -> str:
        return f"Kept({self.name!r}, steps={self.steps}, notes={self.notes})"

    def _repr_html_(self) -> str:
        model = self._model()
        rows = [
            ("kept session", self.name),
            ("model", "gone" if model is None else type(model).__name__),
            ("steps", str(self.steps)),
            *((f"note {name}", str(value)[:200]) for name, value in self.notes.items()),
            ("kept for", "ever" if self._seconds < 0 else f"{self._seconds:g} s"),
        ]
        return table(rows, heads=False)

    @property
    def steps(self) -> int:
        """Steps of the optimizer that are done since the session was named first."""
        journal = self._journal()
        if journal is not None:
            return int(journal[1]) >> _CHUNK_BITS
        return 0 if self._words is None else int(self._words[_DONE])

    def note(self, **values: Any) -> None:
        """Values to find again with the next step that is done: numbers, texts, lists, maps.

        Raises:
            TypeError: A value is of another kind.
            LimitError: They have more than 1 MiB together.
        """
        notes = {**self.notes, **values}
        try:
            packed = msgpack.packb(notes, use_bin_type=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"note(): {error}; expected numbers, texts, bytes, lists and maps"
            ) from None
        if len(packed) > _NOTES_BYTES:
            raise errors.LimitError(f"note(): {len(packed)} bytes, the limit is {_NOTES_BYTES}")
        self.notes, self._packed = notes, packed
        if self._optimizer is None:  # nothing else says when they are true
            self._write(self.steps)

    # ---- what is kept ----

    def _journal(self) -> torch.Tensor | None:
        optimizer = self._of_optimizer()
        return optimizer.journal if isinstance(optimizer, FusedAdam) else None

    def _of_optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._optimizer is None else self._optimizer()

    def _shared(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors that lie in shared memory: parameters, and buffers that are large."""
        model = self._model()
        if model is None:
            return []
        buffers = [(n, b) for n, b in model.named_buffers() if self.client.locate(b) is not None]
        return [*((n, p) for n, p in model.named_parameters() if p.numel()), *buffers]

    def _small(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers that are noted with each step."""
        model = self._model()
        named = () if model is None else model.named_buffers()
        return [(n, b) for n, b in named if b.numel() and self.client.locate(b) is None]

    def _states(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        optimizer = self._of_optimizer()
        if not isinstance(optimizer, FusedAdam):
            return []
        return [
            (p, {n: t for n, t in optimizer.state[p].items() if torch.is_tensor(t)})
            for p in optimizer.kept_parameters()
        ]

    def _place(self, tensor: torch.Tensor, what: str) -> list[Any]:
        found = self.client.locate(tensor) if tensor.is_contiguous() else None
        if found is None:
            raise errors.TensorError(
                f"keep: {what} does not lie in shared memory: it is not contiguous, or its memory "
                "has other holders (a state dict, an array of NumPy)"
            )
        return sessions.place((*found, DTYPE_CODES[tensor.dtype], tuple(tensor.shape)))

    def _places(self) -> tuple:
        """Equal as long as everything lies where it did, and is stepped as it was."""
        tensors, states = [t for _, t in self._shared()], self._states()
        tensors += [t for _, state in states for t in state.values()]
        optimizer = self._of_optimizer()
        groups = [] if optimizer is None else [g["params"] for g in optimizer.param_groups]
        stepped = [[id(p) for p in group] for group in (*groups, [p for p, _ in states])]
        return [*map(data_ptr, tensors)], stepped

    def _manifest(self) -> Manifest:
        names = {id(t): name for name, t in self._shared()}
        block = self._block
        content: dict[str, Any] = {
            "tensors": [{"name": name, "at": self._place(t, name)} for name, t in self._shared()],
            "small": [
                {"name": name, "dtype": DTYPE_CODES[t.dtype], "dims": list(t.shape)}
                for name, t in self._small()
            ],
            "notes": {"slot": self._slot, "at": self._of_block(block)},  # type: ignore[arg-type]
        }
        optimizer, journal = self._of_optimizer(), self._journal()
        if optimizer is not None:
            content["stepped"] = stepped(self.name, self._model(), optimizer)  # type: ignore[arg-type]
        if journal is not None:
            content["optimizer"] = {
                "journal": {"at": self._place(journal, "the journal")},
                "states": [
                    {
                        "of": names.get(id(p), ""),
                        "tensors": [
                            {"name": n, "at": self._place(t, f"the optimizer's {n}")}
                            for n, t in state.items()
                        ],
                    }
                    for p, state in self._states()
                ],
            }
        return Manifest(content)

    @staticmethod
    def _of_block(block: Block) -> list[Any]:
        return sessions.place((block.segment.id, block.offset, DTYPE_CODES[torch.uint8],
                               (block.size,)))  # fmt: skip

    # ---- notes ----

    def _content(self, steps_begun: bool, random: torch.Tensor | None) -> bytes:
        optimizer = self._of_optimizer()
        content: dict[str, Any] = {
            "user": self._packed,
            "random": _bytes_of(torch.get_rng_state() if random is None else random),
            "small": [_bytes_of(t) for _, t in self._small()],
        }
        if optimizer is not None:
            content["groups"] = [_plain(group) for group in optimizer.param_groups]
        if isinstance(optimizer, FusedAdam):
            params = optimizer.kept_parameters()
            content["counts"] = [
                int(optimizer.state[p]["step"]) + (steps_begun and p.grad is not None)
                for p in params
            ]
        return msgpack.packb(content, use_bin_type=True)

    def _write(self, step: int, begun: bool = False, random: torch.Tensor | None = None) -> None:
        """Notes that are true once `step` steps are done; `random`: None = the present state."""
        data = self._content(begun, random)
        if len(data) > self._slot:
            self._grow(len(data))
        self._write_slot(step, data)

    def _write_slot(self, step: int, data: bytes) -> None:
        words, at = self._words, (_HEAD + step % 2 * (_HEAD + self._slot)) // 8
        address = data_ptr(words) + at * 8 + _HEAD
        words[at] = -1  # type: ignore[index]
        ctypes.memmove(address, data, len(data))
        words[at + 1] = len(data)  # type: ignore[index]
        words[at] = step  # type: ignore[index]

    def _grow(self, size: int) -> None:
        """A larger place for notes; the name says so before a step relies on it."""
        last = None if self._words is None else _read_slot(self._words, self._slot, self.steps)
        head = None if self._words is None else self._words[: _HEAD // 8].clone()
        with self.client.lock, interrupts.deferred:
            self._slot = max(_SLOT_BYTES, (2 * size + 63) // 64 * 64)
            self._block = self.client.state.allocate(_HEAD + 2 * (_HEAD + self._slot))
            self._words = self._block.tensor(torch.int64, (self._block.size // 8,)).zero_()
            self._block.drop()  # the tensor alone keeps it
        self._words[0] = _MAGIC
        if head is not None:
            self._words[1 : _HEAD // 8] = head[1:]
        if last is not None:
            self._write_slot(self.steps, last)
            self.say()

    # ---- the name ----

    def say(self) -> None:
        """Tells the daemon where all lies; again after anything has moved."""
        manifest = self._manifest()
        self.client.names.say(self.client, self.name, self._seconds, manifest)
        self._told, self._last = manifest.content, self._journal()
        self._held = [self._of_optimizer(), *(tensor for _, tensor in self._shared())]
        self._ids = set(map(id, self._held))
        self._key = self._places()

    def start(self) -> None:
        """Writes the first notes, gives the name, and follows the optimizer."""
        self._write(self.steps, random=self.random_state)  # until the first step that of before
        self.say()
        optimizer = self._of_optimizer()
        if optimizer is not None:
            self._handles = [
                optimizer.register_step_pre_hook(_weakly(self, Kept._before)),
                optimizer.register_step_post_hook(_weakly(self, Kept._after)),
                optimizer.register_load_state_dict_post_hook(_weakly(self, Kept._loaded)),
            ]
            _look_at_other_optimizers()
        _kept[self.name] = self

    def end(self) -> None:
        """Follows the optimizer no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._held, self._ids = [], set()
        _kept.pop(self.name, None)

    def _before(self) -> None:
        if self.client.closed or self._model() is None:
            return
        self._find()
        self._write(self.steps + 1, begun=True)
        if not isinstance(self._of_optimizer(), FusedAdam):
            self._words[_WRITING] = 1  # type: ignore[index]

    def _after(self) -> None:
        if self.client.closed or isinstance(self._of_optimizer(), FusedAdam):
            return
        self._words[_DONE] += 1  # type: ignore[index]
        self._words[_WRITING] = 0  # type: ignore[index]

    def _loaded(self) -> None:
        """The optimizer has another state: what is kept is this one, from now on."""
        if not self.client.closed and self._model() is not None:
            self._find()
            self._write(self.steps)

    def _find(self) -> None:
        """Says where all lies if it lies elsewhere."""
        if self._places() == self._key:
            return
        optimizer = self._of_optimizer()
        self._move(insist=True)
        if isinstance(optimizer, FusedAdam):
            optimizer.share_state()
            if optimizer.journal is not self._last and self._last is not None:
                optimizer.count_from(int(self._last[1]) >> _CHUNK_BITS)
        self.say()

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step; warns, once, of another one than the session's."""
        own, words = self._of_optimizer(), self._words
        if own is None or own is optimizer or self.client.closed or words is None:
            return
        if int(words[_OTHERS]):
            return
        if any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            words[_OTHERS] = 1
            logger.warning(
                "session '%s': a %s has stepped parameters, which is not the optimizer that keep() "
                "was given: neither its state nor the number of its steps is kept; call "
                "gradd.keep('%s', model, optimizer) with the one that trains",
                *(self.name, type(optimizer).__name__, self.name),
            )

    def _move(self, insist: bool = False) -> None:
        """Parameters that do not lie in shared memory go there.

        `insist`: also those whose memory has other holders, which keep the values of now.
        """
        model, client = self._model(), self.client
        away = [p for p in model.parameters() if p.numel() and client.locate(p) is None]  # type: ignore[union-attr]
        held = [p for p in away if not p.is_contiguous() or others(p)]
        if insist and held:
            apart = overlapping(p for p in model.parameters() if p.layout is torch.strided)  # type: ignore[union-attr]
            held = [p for p in held if identity(p) in apart]
            logger.warning(
                "session '%s': parameters were given other memory (load_state_dict(assign=True), "
                "say); they move into shared memory, and other holders keep the values of now",
                self.name,
            )
        away = [p for p in away if not any(p is other for other in held)]
        with torch.no_grad(), client.lock, interrupts.deferred:
            client.parameters.reserve([nbytes(p.dtype, p.shape) for p in away])
            for p in away:
                p.data = client.parameters.tensor(p.dtype, p.shape).copy_(p)
            client.parameters.drop_empty()

    # ---- taking over ----

    def taken(self) -> Taken:
        """All of this process's own session, for another model in it."""
        if self._model() is not None:
            self._find()
        tensors = [t for t in (*self._held, self._words, self._journal()) if torch.is_tensor(t)]
        tensors += [t for _, state in self._states() for t in state.values()]
        found = {self.client.locate(t): t.detach() for t in tensors}
        blocks = {self.client.locate(self._words): self._block}  # type: ignore[arg-type]
        optimizer = self._of_optimizer()
        if isinstance(optimizer, FusedAdam):
            blocks[self.client.locate(optimizer.journal)] = optimizer.journal_block  # type: ignore[arg-type]
        with self.client.lock:
            for block in blocks.values():
                block.pins += 1  # type: ignore[union-attr]
        return Taken(self._told, self._seconds, blocks, found)  # type: ignore[arg-type]

    def said(self) -> tuple[int, dict[str, Any]]:
        """How many steps are done, and the notes that are true then."""
        return _said(self.name, self._words, self._slot, self._journal())  # type: ignore[arg-type]

    def restore(self, taken: Taken) -> None:
        """Puts model and optimizer onto the memory of a session that was taken over.

        Raises:
            StaleError: Its process has died in the middle of a step that was not finished.
            TensorError: Model or optimizer are others.
        """
        content, model = taken.content, self._model()
        optimizer = self._of_optimizer()
        notes = content["notes"]
        self._slot, self._block = int(notes["slot"]), taken.blocks[tuple(notes["at"][:2])]
        self._words = self._block.tensor(torch.int64, (self._block.size // 8,))
        place = content.get("optimizer")
        journal = None if place is None else taken.tensor(place["journal"]["at"])
        done, said = _said(self.name, self._words, self._slot, journal)
        if int(self._words[_OTHERS]):
            logger.warning(
                "session '%s': another optimizer than the kept one has stepped its parameters: "
                "notes, moments and the number of steps (%d) are older than they are",
                *(self.name, done),
            )
        with torch.no_grad():
            self._restore_tensors(model, taken)  # type: ignore[arg-type]
            self._restore_small(model, content["small"], said["small"])  # type: ignore[arg-type]
            if optimizer is not None:
                self._restore_optimizer(optimizer, taken, said)
        self._words[_OTHERS] = 0
        if not isinstance(optimizer, FusedAdam):
            self._words[_DONE] = done
        self._packed = said["user"]
        self.notes = msgpack.unpackb(said["user"], raw=False)
        self.random_state = torch.frombuffer(bytearray(said["random"]), dtype=torch.uint8)

    def _restore_tensors(self, model: torch.nn.Module, taken: Taken) -> None:
        for row in taken.content["tensors"]:
            tensor = taken.tensor(row["at"])
            old = _named(model, row["name"])
            if old.is_meta or not isinstance(old, torch.nn.Parameter):
                exchange(model, row["name"], tensor)
            else:
                old.data = tensor

    @staticmethod
    def _restore_small(
        model: torch.nn.Module, rows: list[dict[str, Any]], values: list[bytes]
    ) -> None:
        for row, value in zip(rows, values, strict=True):
            made = torch.frombuffer(bytearray(value), dtype=DTYPES[row["dtype"]])
            made = made.reshape(row["dims"])
            old = _named(model, row["name"])
            if old.is_meta:
                exchange(model, row["name"], made.clone())
            else:
                old.copy_(made)

    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, taken: Taken, said: dict[str, Any]
    ) -> None:
        for group, settings in zip(optimizer.param_groups, said.get("groups", ()), strict=False):
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()})
        place = taken.content.get("optimizer")
        if place is None or not isinstance(optimizer, FusedAdam):
            return
        states = [
            {**{t["name"]: taken.tensor(t["at"]) for t in row["tensors"]}, "step": count}
            for row, count in zip(place["states"], said["counts"], strict=True)
        ]
        optimizer.adopt(self.client, states, taken.blocks[tuple(place["journal"]["at"][:2])])


def _read_slot(words: torch.Tensor, slot: int, step: int) -> bytes | None:
    at = (_HEAD + step % 2 * (_HEAD + slot)) // 8
    size = int(words[at + 1])
    if int(words[at]) != step or not 0 < size <= slot:
        return None
    return ctypes.string_at(data_ptr(words) + at * 8 + _HEAD, size)


def _said(
    name: str, words: torch.Tensor, slot: int, journal: torch.Tensor | None
) -> tuple[int, dict[str, Any]]:
    """How many steps are done, and the notes that are true then.

    Raises:
        StaleError: A step is half done.
        SharedMemoryError: These are no notes.
    """
    fits = slot >= 0 and words.numel() * 8 >= _HEAD + 2 * (_HEAD + slot)
    if not fits or int(words[0]) != _MAGIC:
        raise errors.SharedMemoryError(f"session '{name}': its notes are none")
    if journal is None:
        done, torn = int(words[_DONE]), bool(words[_WRITING])
    else:
        magic, progress, sealed = journal[:3].tolist()
        done = progress >> _CHUNK_BITS
        torn = bool(magic) and (bool(progress & _CHUNKS) or sealed == progress)
    if torn:
        raise errors.StaleError(
            f"session '{name}': its process has died in the middle of step {done + 1}; some "
            "parameters are updated, others are not. Load a checkpoint"
        )
    written = _read_slot(words, slot, done)
    if written is None:
        raise errors.SharedMemoryError(f"session '{name}': no notes of step {done}")
    said = msgpack.unpackb(written, raw=False)
    if journal is not None and int(journal[2]) == (done - 1) << _CHUNK_BITS | _CHUNKS:
        before = _read_slot(words, slot, done - 1)  # a GradScaler had it skipped: no update
        said["counts"] = msgpack.unpackb(before, raw=False)["counts"] if before else []
    return done, said


def _own(name: str, client: Client) -> Kept | None:
    """The session of this process that has a name."""
    found = _kept.get(name)
    return found if found is not None and found.client is client else None


def look(name: str) -> tuple[int, dict[str, Any]]:
    """Steps and notes of a kept session, for a process that is going to take it over.

    Raises:
        SessionError, StaleError: As for reattach().
    """

    if (former := _own(name, clients.get_client())) is not None:
        steps, said = former.said()
        return steps, msgpack.unpackb(said["user"], raw=False)

    def want(content: dict[str, Any], read: Callable[[Any], bytes]) -> tuple[int, dict[str, Any]]:
        notes, place = content["notes"], content.get("optimizer")
        words = torch.frombuffer(bytearray(read(notes["at"])), dtype=torch.int64)
        journal = None
        if place is not None:
            data = bytearray(read(place["journal"]["at"]))
            journal = torch.frombuffer(data, dtype=torch.int64)
        steps, said = _said(name, words, int(notes["slot"]), journal)
        return steps, msgpack.unpackb(said["user"], raw=False)

    return sessions.peek(clients.get_client(), name, want)


def _weakly(kept: Kept, call: Callable[[Kept], None]) -> Callable[..., None]:
    """A hook of an optimizer that keeps nothing alive."""
    ref = weakref.ref(kept)

    def hook(*unused: Any) -> None:
        found = ref()
        if found is not None:
            call(found)

    return hook


@functools.cache
def _look_at_other_optimizers() -> None:
    def stepped(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        for kept in list(_kept.values()):
            kept.stepped_by(optimizer)

    register_optimizer_step_post_hook(stepped)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().contiguous()
    return ctypes.string_at(data_ptr(whole), nbytes(whole.dtype, whole.shape))


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a parameter group that a note can hold."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params":
            continue
        if torch.is_tensor(value) and value.numel() == 1:
            value = value.item()
        items = value if isinstance(value, (tuple, list)) else (value,)
        if all(isinstance(v, _PLAIN) for v in items):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _named(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    return module_tables.holding(model.get_submodule(path), key)[key]


def exchange(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Another tensor takes the place of one, under all its names."""
    old = _named(model, name)
    new = tensor
    if isinstance(old, torch.nn.Parameter) and not isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
    for module in model.modules():
        for held in (vars(module)[kind] for kind in module_tables.NAMES):
            for key in [k for k, t in held.items() if t is old]:
                held[key] = new


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The module that an ORTModule wraps."""
    from gradd.module import ORTModule

    return model.module if isinstance(model, ORTModule) else model


def _plain_module(model: torch.nn.Module) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return model


def _client_of(model: torch.nn.Module) -> Client:
    devices = {p.device for p in (*model.parameters(), *model.buffers()) if not p.is_meta}
    if devices - {torch.device("cpu")}:
        raise errors.UnsupportedError(
            f"a session outlives its process on the CPU only so far, tensors are on {devices}"
        )
    return clients.get_client()


def keep(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep_alive: str | float = "10m",
) -> Kept:
    """Names this process's session: model and optimizer stay in the daemon when the process ends.

    Parameters, buffers, and moments of FusedAdam stay where they are, in memory that the daemon
    holds for `keep_alive`, counted from the end of the process; a killed process as well.
    reattach() in another process goes on. Other optimizers' state is not kept. `gradd ps` lists
    kept sessions; forget() and `gradd stop` end them. Until then their memory stays, even if the
    script lets go of model and optimizer.

    Args:
        name: Of up to 64 characters, without blanks.
        model: An ORTModule, or a module that becomes one. On the CPU.
        optimizer: That steps it. Without it nothing tells a torn update from a whole one.
        keep_alive: Seconds, or a text such as "90s", "10m", "2h"; -1: as long as the daemon lives.

    Returns:
        The session; its note() keeps values of yours, such as the position in the data.

    Raises:
        SessionError: Another process uses the name, or has left a session of that name.
        TensorError: A parameter cannot lie in shared memory; the message names it.
        UnsupportedError: The model is on a GPU.
        ValueError: `keep_alive` is no duration.
    """
    check_name(name)
    seconds = seconds_of(keep_alive)
    client = _client_of(_plain_module(model))
    made = Kept(name, model, optimizer, seconds, client)
    if isinstance(optimizer, FusedAdam):
        optimizer.share_state()
    made._move()
    former = _own(name, client)
    if former is not None:
        if former._model() not in (None, _inner(model)):
            logger.warning(
                "session '%s' was that of another model of this process, which is kept no longer",
                name,
            )
        former.end()
    made.start()
    return made


def reattach(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep_alive: str | float | None = None,
) -> Kept:
    """Takes over a session that keep() named in a process that has ended.

    Parameters, buffers, and the state of FusedAdam are mapped in place. The session keeps its name.
    A session of this process is taken from the model that has it, as when a cell runs again.

    Args:
        name: Of the session.
        model: With the same parameters and buffers; they may be on the meta device where no
            optimizer is given: it is made of the model's parameters, which this replaces.
        optimizer: Of the same kind, with the same parameters in the same groups and order; without
            it its state is let go, with a warning.
        keep_alive: As for keep(); None: as before.

    Returns:
        The session: `steps` that are done, `notes`, `random_state`.

    Raises:
        SessionError: There is no such session, or another process uses it.
        StaleError: Its process has died in the middle of a step that could not be finished.
        TensorError: The model or the optimizer is another one; the message has the difference.
    """
    check_name(name)
    seconds = None if keep_alive is None else seconds_of(keep_alive)
    client = _client_of(_plain_module(model))
    former = _own(name, client)
    taken = sessions.take(client, name) if former is None else former.taken()
    try:
        check_same(name, model, optimizer, taken.content)
        made = Kept(name, model, optimizer, taken.seconds if seconds is None else seconds, client)
        made.restore(taken)
    finally:
        with client.lock:
            taken.drop()
    if optimizer is None and "optimizer" in taken.content:
        logger.warning(
            "session '%s': reattach() was given no optimizer, so the state of FusedAdam is let go",
            name,
        )
    if former is not None:
        former.end()
    made.start()
    logger.info("session '%s' is taken over: %d steps are done", name, made.steps)
    return made


def forget(name: str) -> None:
    """Ends a kept session: its memory is freed, when no process uses it.

    Raises:
        SessionError: There is none of that name, or another process uses it.
    """
    client = clients.get_client()
    client.connected("end a kept session", lambda connection: connection.forget(name))
    client.names.drop(name)
    former = _kept.get(name)
    if former is not None:
        former.end()
