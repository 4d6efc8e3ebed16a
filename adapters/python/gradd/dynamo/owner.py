"""The common state of one compiled function's graphs: session, parameters, slots, counts."""

from __future__ import annotations

import logging
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, options, tried
from gradd.calls import tables
from gradd.calls.graph import Graph, Passes
from gradd.calls.parameters import State
from gradd.calls.slots import SlotSet
from gradd.check import checktimes
from gradd.check.selfcheck import Checks
from gradd.dynamo.budget import Budget
from gradd.dynamo.generator_state import GeneratorState
from gradd.dynamo.own_forward import Now
from gradd.dynamo.planning import Planning
from gradd.fallback import Fallback
from gradd.memory import devices
from gradd.memory.budget import Memory
from gradd.memory.parameter_changes import watch_optimizers
from gradd.session.client import Client, get_client

if TYPE_CHECKING:
    from gradd.dynamo.compiled_graph import CompiledGraph
    from gradd.dynamo.piece import Piece
    from gradd.session.reduction import Reduction

logger = logging.getLogger("gradd")
_PART = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_LAST = 64  # plans of a call that are remembered


class Owner:
    """See the top of this file.

    Attributes:
        title: For messages.
        failed: Why all calls run in PyTorch: there is no daemon, or a graph is not forward()'s.
        refused: Why a graph has run in PyTorch as a whole.
        last: Graphs and plans of the last call.
        keys: Of the captures.
        parts: How often parts of graphs have run in PyTorch, by reason.
        live_rows: Rows that calls have left out; see LiveRows.seen.
        generator: The state of the generator of random numbers in a call.
        ends_traces: An error of an operator that Dynamo meets ends its trace.
        notes_generator: Calls note it when they begin, as one of their graphs may need it.
        planning: The call that is planned and not run.
        now: The call that is computed.
        has_calls: Graphs run within calls of frontend.Compiled.
        budget: The memory budget that graphs of one call share.
        reduction: Averages gradients over processes; None = nothing does.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        title: str,
        *,
        strict: bool = False,
        client: Client | None = None,
        device: torch.device | None = None,
        debug: Any = None,
        memory_budget: int | str | None = None,
        flags: int = 0,
        moves: bool = True,
        reduction: Reduction | None = None,
    ) -> None:
        """Args:
        module: Whose parameters move into shared memory now; None = those that graphs read, later.
        title: For messages.
        strict: Raise where something runs in PyTorch.
        client: Session to use (default: the one of the user's daemon for the device).
        device: That of all graphs, where that is known (default: that of the parameters).
        debug: DebugOptions, which are given every new capture, and its first plan.
        memory_budget: The most that a training run may take.
        flags: Of the protocol, for all runs of the user.
        moves: False = calls are only planned, and the module stays where it is.
        reduction: Of the gradients; then nothing may run in PyTorch, which would not average.

        Raises:
            ValueError: A budget, or another option, that cannot be read.
            SessionError: No daemon could be reached, and the policy does not allow PyTorch then.
        """
        options.check()
        tried.tell()
        self._module = weakref.ref(module) if module is not None else None
        self.title = title
        self.counts: Counter[str] = Counter()
        self.fallback = Fallback(title, strict or reduction is not None)
        self.reduction = reduction
        self.memory = Memory.of(memory_budget)
        mode = options.self_check()
        self.checks = None if mode == checktimes.OFF else Checks(mode)
        self.lazy = bool(options.get("GRADD_LAZY"))
        self.passes = Passes.read()
        self.debug = debug
        self.alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.pieces: weakref.WeakSet[Piece] = weakref.WeakSet()
        self.last: deque[tuple[weakref.ref, weakref.ref]] = deque(maxlen=_LAST)
        self.compiled = 0  # graphs, whatever became of them
        self.keys: set[bytes] = set()
        self._graphs: list[weakref.ref] = []
        self.parts: Counter[str] = Counter()
        self.live_rows: Counter[str] = Counter()
        self.generator = GeneratorState()
        self.ends_traces = True
        self.notes_generator = True
        self.planning = Planning()
        # Dynamo records sizes that depend on data, as of x[mask]; see masked_rows.py.
        self.keeps_places = self.has_calls = module is not None
        self.now = Now()
        self.budget = Budget(self.memory.budget)
        self._names: dict[int, str] = {}
        self.failed: Exception | None = None
        self.refused: Exception | None = None
        self._asked_again = False
        self._said: set[str] = set()
        options.warn_ineffective()
        if module is not None and moves:
            tables.note(module)
        watch_optimizers()
        self.flags = flags
        self._moves = moves
        self._stays = client is not None or device is not None or not moves
        if client is None:
            client = self._client_of(device or device_of(module, ()))
        self._begin(client)

    def _begin(self, client: Client) -> None:
        """From now on graphs are of this client, in whose memory the parameters go."""
        self.client = client
        self.state = State(client, self.module() if self._moves else None)
        self.slots = SlotSet(client)
        weakref.finalize(self, self.finish())
        try:
            with client.lock:
                client.connect()
                self.state.rehome_all()
                client.memory.give_back()  # what the parameters have left
        except errors.GraddError as error:
            self.fallback.decide(error)
            self.failed = error

    def _client_of(self, device: torch.device) -> Client:
        try:
            return get_client(device=device)
        except errors.GraddError as error:
            self.fallback.decide(error)
            self.failed = error
            return get_client()

    @property
    def device(self) -> torch.device | None:
        """Where graphs compute; None = they are only planned, and their device does not matter."""
        return self.client.memory.device if self._moves else None

    def follow(self, arguments: Sequence[Any]) -> None:
        """Before a graph is made: the module may have moved to another device.

        Args:
            arguments: Of the graph.
        """
        if self._stays:
            return
        device = device_of(self.module(), arguments)
        if device == self.client.memory.device:
            return
        self.failed = None
        before = self.state
        self._begin(self._client_of(device))
        before.forget_gone()

    def is_new(self, text: str) -> bool:
        """Whether something has not been reported yet."""
        new = text not in self._said
        self._said.add(text)
        return new

    def made(self, graph: CompiledGraph) -> None:
        """A graph that Dynamo holds from now on."""
        self._graphs[:] = [ref for ref in self._graphs if ref() is not None]
        self._graphs.append(weakref.ref(graph))
        self.notes_generator = not all(g.draws_never for g in self.graphs)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """Those that Dynamo holds."""
        return [g for g in (ref() for ref in self._graphs) if g is not None]

    def module(self) -> torch.nn.Module | None:
        return self._module() if self._module is not None else None

    def name_of(self, tensor: torch.Tensor, node: torch.fx.Node) -> str:
        """The name of a tensor of a graph: that of the user's module, or Dynamo's."""
        module = self.module()
        if module is not None and id(tensor) not in self._names:
            both = (*module.named_parameters(), *module.named_buffers())
            self._names = {id(t): name for name, t in both}
        return self._names.get(id(tensor)) or source_name(node)

    @property
    def training(self) -> bool:
        """Whether outputs that only the loss has needed may be left out."""
        module = self.module()
        return module is None or module.training

    def ran_in_torch(self, reason: str) -> None:
        """A part of a graph has run in PyTorch; "" = nothing that counts."""
        if reason:
            self.parts[reason] += 1

    def warn_asks_again(self) -> None:
        """Outputs that are read beside the loss do not fit the budget."""
        if not self._asked_again:
            self._asked_again = True
            logger.warning(
                "outputs of %s that are read beside the loss do not fit into its memory budget: "
                "every read runs another forward (repeated_forwards)",
                self.title,
            )

    def finish(self) -> Callable[[], None]:
        """A function that gives up all that the daemon holds; it does not hold this object."""
        return partial(_finish, self.state, self.slots, self.alive, self.pieces)

    def end(self) -> Callable[[], None]:
        """The same for when nothing can call a graph any more; Dynamo may keep each for good."""
        return partial(_end, self.finish(), self._graphs)


SOURCE = "gradd_source"  # mark of inputs: where Dynamo has found them


def source_name(node: torch.fx.Node) -> str:
    """A name from where Dynamo has found a tensor: `layers.0.weight`, `input_ids`."""
    source = node.meta.get(SOURCE)
    parts = _PART.findall(str(source.name)) if source is not None else []
    if parts:
        return ".".join(parts)
    name = node.name
    for start in ("l_kwargs_", "l_args_", "l_"):
        if name.startswith(start):
            name = name[len(start) :]
            break
    return name.strip("_") or "input"


def _end(finish: Callable[[], None], graphs: list[weakref.ref]) -> None:
    finish()
    for graph in filter(None, (ref() for ref in graphs)):
        graph.empty()


def _finish(
    state: State,
    slots: SlotSet,
    alive: weakref.WeakSet[Graph],
    pieces: weakref.WeakSet[Piece],
) -> None:
    """Queues only: it may run in a finalizer. Dynamo may keep pieces, and they hold plans."""
    for piece in list(pieces):
        piece.close()
    for graph in list(alive):
        graph.drop()
    slots.drop_all()
    state.drop_all()


def device_of(module: torch.nn.Module | None, arguments: Iterable[Any]) -> torch.device:
    """Where the parameters of a module are, or else the first argument with a size: or the CPU."""
    found = iter(module.parameters()) if module is not None else iter(())
    given = (x for x in arguments if isinstance(x, torch.Tensor) and x.dim())
    first = next(found, None)
    first = next(given, None) if first is None else first
    known = first is not None and devices.is_known(first.device)
    return first.device if known else devices.HOST.device  # type: ignore[union-attr]
