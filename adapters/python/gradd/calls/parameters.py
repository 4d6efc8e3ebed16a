"""Keeps parameters and buffers of a module in shared memory, and notices when they move.

`State` copies each parameter and buffer into the client's parameter segment once and points
`p.data` there ("re-homing"). Every call compares the addresses, because `.to()`,
`load_state_dict(assign=True)`, `vector_to_parameters` and engines that own flat buffers move
tensors; it re-homes those that have moved.

Memory with other references (a flat buffer whose owner keeps writing into it, a state dict that is
still alive, a NumPy array) must not be left behind: such a tensor stays where it is, and its values
are copied before every forward ("mirrored") until no other reference is left. The same holds for
parameters that view the same memory differently (one is the other's transpose, or a slice of it):
an update of one updates the other, which two separate blocks could not do. It also holds for
tensors that are not contiguous, because their strides are visible to the user, and for all tensors
of a GPU whose memory cannot be shared (gpu_segments.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from gradd import errors
from gradd.memory.holders import others
from gradd.memory.shm import DTYPE_CODES, nbytes
from gradd.memory.tensor_classes import is_dense, is_plain
from gradd.memory.watch import accesses, data_ptr, untyped_storage
from gradd.session.ring import Block, packed

if TYPE_CHECKING:
    from gradd.session.client import Client
    from gradd.session.protocol import Tensor

_SMALL = 4096  # bytes
_PIECE = 8 << 20  # bytes that are moved until their old memory is given back
_generations = itertools.count(1)


class Home:
    """Where one tensor lives: its block, and whether the block is only a copy of it."""

    __slots__ = ("block", "dtype", "mirror", "offset", "owner", "pointer", "shape")

    def __init__(self, block: Block, tensor: torch.Tensor, mirror: torch.Tensor | None) -> None:
        self.block = block
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.pointer = data_ptr(tensor)
        self.mirror = mirror
        self.owner = weakref.ref(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """False if the address is another tensor's by now, as with FSDP, which frees and gathers.

        Runs of the first one may still read the copy of it.
        """
        owner = self.owner()
        return owner is tensor or (owner is not None and identity(owner) == identity(tensor))

    def wire(self) -> Tensor:
        """Its description in the protocol, for a binding."""
        return self.block.wire(self.dtype, self.shape)


class Binding:
    """A list of homes that the daemon knows by number; ends with its last reference.

    It keeps the blocks pinned, so that a run that was started with it can be replayed although
    the parameters have moved since.
    """

    __slots__ = ("__weakref__", "id")

    def __init__(self, client: Client, homes: Sequence[Home]) -> None:
        self.id = client.next_id()
        client.bind(self.id, [home.wire() for home in homes])
        blocks = [home.block for home in homes]
        for block in blocks:
            block.pins += 1
        client.ends.watch(self, partial(_unbind, client, self.id, blocks))


def _unbind(client: Client, bind: int, blocks: Sequence[Block]) -> None:
    client.later("unbind", {"bind": bind})
    for block in blocks:
        block.drop()


class Entry:
    """Where a name is to be found: in a list of the arguments of the present call."""

    __slots__ = ("key", "name", "table")

    def __init__(self, table: list[torch.Tensor], key: int, name: str) -> None:
        self.table, self.key, self.name = table, key, name

    def get(self) -> torch.Tensor:
        return self.table[self.key]


def is_small(buffer: torch.Tensor) -> bool:
    """True for a buffer that is copied for each call: its memory can then be resized, as some are.

    Shared memory cannot. A buffer of a lazy module has no size yet.
    """
    return is_lazy(buffer) or buffer.numel() * buffer.element_size() < _SMALL


def identity(tensor: torch.Tensor) -> tuple:
    """Equal for tensors that see the same memory in the same way."""
    return (data_ptr(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _last_byte(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return data_ptr(tensor) + (last + 1) * tensor.element_size() - 1


def overlapping(tensors: Iterable[torch.Tensor]) -> set[tuple]:
    """Identities of those that share bytes with another one that is not the same view.

    Interleaved columns, whose ranges overlap though their elements do not, count as well.
    """
    spans = {identity(t): (data_ptr(t), _last_byte(t)) for t in tensors if t.numel()}
    found: set[tuple] = set()
    widest, reach = None, -1  # the one so far that ends last
    for one, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first <= reach:
            found |= {one, widest}  # type: ignore[arg-type]
        if last > reach:
            widest, reach = one, last
    return found


class State:
    """Homes of a module's parameters and buffers. The caller holds the client's lock."""

    def __init__(self, client: Client, module: torch.nn.Module | None) -> None:
        self.client = client
        # Weakly: the finalizer of the compiled function holds this object, and the module may lead
        # to that function.
        self._module = weakref.ref(module) if module is not None else None
        self._others: dict[int, weakref.ref] = {}  # tensors that belong to no module, by id
        self.generation = 0
        self.mirrored = 0
        self._homes: dict[tuple, Home] = {}  # identity() of the tensor -> home
        accesses.expect()

    def rehome_all(self) -> None:
        """Moves everything but small buffers into shared memory now, grouped by dtype."""
        stay = self._small_buffers()
        tensors = [t for t in self._tensors() if self._can_move(t) and id(t) not in stay]
        tensors.sort(key=lambda t: DTYPE_CODES[t.dtype])
        self._move(tensors)

    def _small_buffers(self) -> set[int]:
        module = self._module() if self._module is not None else None
        return set() if module is None else set(map(id, filter(is_small, module.buffers())))

    def _all(self) -> Iterable[torch.Tensor]:
        found: list[torch.Tensor] = []
        module = self._module() if self._module is not None else None
        if module is not None:
            found = [*module.parameters(), *module.buffers()]
        if self._others:
            own = set(map(id, found))
            others = [(i, ref()) for i, ref in list(self._others.items())]
            for i, tensor in others:
                if tensor is None:
                    del self._others[i]
                elif i not in own:
                    found.append(tensor)
        # With others calls run in PyTorch; a lazy one has no size before the first forward.
        return (t for t in found if is_dense(t) and not is_lazy(t))

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that may belong to no module are looked after as well."""
        for tensor in tensors:
            known = self._others.get(id(tensor))
            if known is None or known() is not tensor:
                self._others[id(tensor)] = weakref.ref(tensor)

    def _tensors(self) -> Iterable[torch.Tensor]:
        seen: set[tuple] = set()
        for tensor in self._all():
            if tensor.numel() and identity(tensor) not in seen:
                seen.add(identity(tensor))
                yield tensor

    def _can_move(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device == self.client.memory.device
            and tensor.layout == torch.strided
            and tensor.dtype in DTYPE_CODES
            and is_plain(type(tensor))
        )

    def home_of(self, tensor: torch.Tensor) -> Home | None:
        """The home of a tensor at its present address, if it has one of the right type."""
        return self._homes.get(identity(tensor))

    def settle(self, entries: Sequence[Entry]) -> list[Home]:
        """Homes of the tensors of `entries`; moves those that have none.

        Raises:
            TensorError: A tensor cannot live in shared memory (device, type).
        """
        tensors = [e.get() for e in entries]
        missing = [t for t in tensors if t.numel() and self.home_of(t) is None]
        for tensor, entry in zip(tensors, entries, strict=True):
            if not self._can_move(tensor):
                raise errors.TensorError(
                    f"{entry.name} is a {tensor.dtype} {type(tensor).__name__} on "
                    f"{tensor.device}: only plain tensors on {self.client.memory.device} can be "
                    "shared"
                )
        if missing:
            unique = {identity(t): t for t in missing}
            self._move(list(unique.values()))
        return [self._settled(t) for t in tensors]

    def _settled(self, tensor: torch.Tensor) -> Home:
        home = self.home_of(tensor)
        if home is None:  # an empty tensor: any address will do
            block = self.client.parameters.allocate(0)
            home = Home(block, tensor, None)
            self._homes[identity(tensor)] = home
        return home

    def _move(self, tensors: list[torch.Tensor]) -> None:
        """Gives each tensor a home; moves it there if its memory is its own."""
        if not tensors:
            return
        pool = self.client.parameters
        todo = []
        for tensor in tensors:
            block = self._own_block(tensor)
            if block is not None:  # another compiled function of this process has moved it
                block.pins += 1
                self._homes[identity(tensor)] = Home(block, tensor, None)
            else:
                todo.append(tensor)
        counts = dict(zip(map(id, todo), self._other_users(todo), strict=True))
        with torch.inference_mode(False), torch.no_grad():
            moving = iter(todo)
            for count, size in packed([nbytes(t.dtype, t.shape) for t in todo]):
                with pool.filling(size):
                    self._move_group(list(itertools.islice(moving, count)), counts)
        self.generation = next(_generations)
        self.forget_gone()

    def _move_group(self, tensors: list[torch.Tensor], others: dict[int, int]) -> None:
        """One after the other: memory that a tensor leaves behind is free for the next ones."""
        left = 0
        known = set(self._homes)
        try:
            for tensor in tensors:
                self._move_one(tensor, stays=self._stays(tensor, others[id(tensor)]))
                left += nbytes(tensor.dtype, tensor.shape)
                if left > _PIECE:
                    self.client.memory.give_back()
                    left = 0
        except BaseException:
            for gone in self._homes.keys() - known:  # the daemon will not know them
                self._leave(gone)
            raise

    def _other_users(self, tensors: list[torch.Tensor]) -> list[int]:
        """Per tensor: how many share its memory, other than the same view of it in the module."""
        own = [(t, untyped_storage(t).data_ptr()) for t in self._all() if self._can_move(t)]
        known = Counter(pointer for _, pointer in own)
        partly = overlapping(t for t, pointer in own if known[pointer] > 1)
        return [
            others(t) - max(known[untyped_storage(t).data_ptr()] - 1, 0) + (identity(t) in partly)
            for t in tensors
        ]

    def _stays(self, tensor: torch.Tensor, others: int) -> bool:
        """True for a tensor that keeps its memory, which `others` more refer to."""
        own = others == 0 and not tensor.is_inference() and tensor.is_contiguous()
        return not (own and self.client.memory.moves)

    def _move_one(self, tensor: torch.Tensor, stays: bool) -> None:
        block = self.client.parameters.allocate(nbytes(tensor.dtype, tensor.shape))
        copy = block.tensor(tensor.dtype, tuple(tensor.shape))
        copy.copy_(tensor.detach())
        if stays:
            self._homes[identity(tensor)] = Home(block, tensor, copy)
            self.mirrored += 1
            return
        view = identity(tensor)
        for other in self._all():
            if other is not tensor and identity(other) == view:
                other.data = copy  # tied by memory: stays tied
        tensor.data = copy
        self._homes[identity(copy)] = Home(block, copy, None)

    def _own_block(self, tensor: torch.Tensor) -> Block | None:
        place = self.client.locate(tensor)
        if place is None or not tensor.is_contiguous():
            return None
        block = self.client.parameters.busy.get(place)
        if block is None or block.size < nbytes(tensor.dtype, tensor.shape):
            return None
        return block

    def forget_gone(self) -> None:
        """Drops homes at whose address none of the module's tensors is any more."""
        here = {identity(t) for t in self._tensors()}
        for gone in [i for i in self._homes if i[0] and i not in here]:
            self._leave(gone)

    def _leave(self, place: tuple) -> None:
        home = self._homes.pop(place)
        self.mirrored -= home.mirror is not None
        home.mirror = None
        home.block.drop()

    def refresh_mirrors(self, pairs: Sequence[tuple[torch.Tensor, Home]]) -> None:
        """Copies the present values of mirrored tensors; moves those that are alone by now.

        A tensor that has come to the address of another one gets a copy of its own.
        """
        counts = self._other_users([t for t, _ in pairs])
        accesses.touch()  # the copies are what runs have read
        with torch.inference_mode(False), torch.no_grad():
            for (tensor, home), other in zip(pairs, counts, strict=True):
                stays = self._stays(tensor, other)
                if stays and home.is_of(tensor):
                    home.mirror.copy_(tensor.detach())  # type: ignore[union-attr]
                    continue
                if home.mirror is None:  # this call has the memory by two names
                    continue
                self._leave(identity(tensor))
                self._move_one(tensor, stays)
                self.generation = next(_generations)

    def drop_all(self) -> None:
        """Gives up all homes at the end; the module's tensors keep their memory."""
        for place in list(self._homes):
            self._leave(place)
