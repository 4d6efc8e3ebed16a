"""A graph of Dynamo as gradd runs it: pieces in the daemon, the rest in PyTorch."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.fx

from gradd import errors, interrupts, private
from gradd.calls.parameters import is_small
from gradd.dynamo import (
    budget,
    cache,
    checkpoints,
    complex_pairs,
    generator_state,
    instance_norms,
    known_functions,
    layouts,
    lower,
    modes,
    own_forward,
    partition,
    planned_numbers,
    planning,
    refused,
    work,
)
from gradd.dynamo import sizes as sizes_of
from gradd.dynamo.inputs import Input
from gradd.dynamo.owner import Owner
from gradd.dynamo.piece import Piece
from gradd.dynamo.sizes import Sizes, allowed, number
from gradd.dynamo.steps import InTorch, Values
from gradd.dynamo.tracers import leaves
from gradd.fallback import classify
from gradd.graph.locations import is_named, location_of
from gradd.graph.nodes import fake_mode, storages
from gradd.spec import Capture, CaptureError

Node = torch.fx.Node
_KEPT = ("example_value", "val", modes.KEY, modes.LEFT)  # of what is known of a node
_NODE = re.compile(r"\bnode \w+, |; \d+ of them")  # differs between graphs of the same code
_numbers = itertools.count()
_TRANSFORMS = "functorch"  # in the names of the modules that have them, of Python and of C
_TIME = "--compile-ms"  # in the message about a plan that takes too long
_HALVED = 8  # parts of a graph at most in which an operator is searched for by halving
_LAYOUT = frozenset({"as_strided", "as_strided_", "stride", "is_contiguous", "storage_offset"})
_CHANGES = (leaves.drop, complex_pairs.replace, instance_norms.replace, layouts.keep)
_NORMS = ("batch_norm", "instance_norm")  # they write to buffers, which their schemas do not say


class Step:
    """A part at run time.

    Attributes:
        part: Its nodes.
        piece: In the daemon; None = in PyTorch.
        torchs: The nodes that PyTorch runs: all of the part, or views of a piece's results.
        outside: Per output of the part, whether it is made outside of inference mode.
        hooked: Positions of its outputs that get hooks.
        over: Nodes that no later step reads.
        grad: Some of it records gradients, whatever the modes around the call are.
        ordinary: It does so as well where inference mode is around the call: it leaves that.
        reason: Why it runs in PyTorch.
    """

    def __init__(self, part: partition.Part, piece: Piece | None, torchs: InTorch | None) -> None:
        self.part, self.piece, self.torchs = part, piece, torchs
        self.grad = any(modes.of(n).grad for n in part.nodes)
        self.ordinary = any(modes.of(n).grad and modes.leaves_inference(n) for n in part.nodes)
        self.outside = [modes.leaves_inference(n) for n in part.outputs]
        self.hooked: list[int] = []
        self.over: list[Node] = []
        self.reason = ""


class CompiledGraph:
    """The function that Dynamo calls in place of its graph."""

    def __init__(
        self,
        owner: Owner,
        module: torch.fx.GraphModule,
        examples: Sequence[Any],
        *,
        alone: bool = False,
        begins: bool = False,
        stored: Collection[str] = (),
    ) -> None:
        """Args:
        owner: The common state of the graphs.
        module: Dynamo's graph.
        examples: The arguments of the call that it was made for.
        alone: A call of the user's function has no effects beyond the graph's results.
        begins: It is the first thing that such a call does.
        stored: Names of nodes that it keeps for later calls: what Dynamo meets again is no lazy
            output.

        Raises:
            GraddError: A refusal, where nothing may run in PyTorch.
        """
        self.owner = owner
        self.module = module
        self.examples = examples
        self.stored = stored
        self.number = next(_numbers)
        # The code behind a graph break reads the results of this graph.
        self.returns = not module.compile_subgraph_reason.graph_break  # type: ignore[union-attr]
        self.refusals: dict[Node, Exception] = {}
        self.first: Exception | None = None  # before it was known which nodes it is about
        self.halved = 0  # parts, in search of the node that stands in the way
        self.imagined: planning.Imagined | None = None  # for trials that are planned as well
        self.draws = False  # random numbers, in the daemon
        self.tell: Callable[[], None] | None = None  # of what runs in PyTorch, after a first call
        self.checkpoints = checkpoints.inline(module)
        if sum(change(module.graph) for change in _CHANGES):
            module.recompile()
        self.around = modes.now()
        modes.mark(module.graph, self.around)
        self.left = modes.of(module.graph.output_node()).grad  # what the code behind it finds
        if known_functions.inline(module):
            module.recompile()
        self.placeholders = list(module.graph.find_nodes(op="placeholder"))
        refused.check_trace(module.graph)
        refused.check_settings(module.graph)
        self.sizes = Sizes(self.placeholders, module.graph.nodes)
        self.results = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        mode = fake_mode(lower.value_of(n) for n in module.graph.nodes)
        self.env = mode.shape_env if mode is not None else None
        self.rest = InTorch((), module, self.around)  # numbers that no step reads
        self.steps = self._made()
        self.asks_layout = self._asks_layout()
        del self.examples, self.imagined  # what is made may outlive the module
        self._forget()
        self._find_ends()
        self.whole = self._as_whole()
        self.begins = begins
        # Nothing in such a call is concerned with random numbers.
        self.draws_never = alone and self.returns and self.whole is not None and not self.draws
        if alone and self.returns and self.whole is not None and not self.checkpoints:
            this = weakref.ref(self)
            self.whole[0].own_forward = lambda: own_forward.of(owner, this())

    # ---- how it is made ----

    def _made(self) -> list[Step]:
        torchs: dict[Node, Exception] = self.refusals
        inner = self._transformed()
        masks = inner if all(map(_is_whole, inner)) else {}  # no work that counts
        torchs.update({} if masks else inner)
        torchs.update(refused.nodes(self.module.graph, self.owner.device))
        viewed = [n for n in self.module.graph.nodes if n.meta.get(complex_pairs.VIEWED)]
        viewed += [n for n in masks if n not in torchs]
        ends = partition.hooked(self.module)
        while True:
            before = partition.read_before(self.module.graph, torchs)
            torchs.update({node: torchs[write] for node, write in before.items()})
            parts = partition.split(self.module.graph, {*torchs, *viewed}, ends)
            glue = [p for p in parts if p.daemon and len(parts) > 1 and work.is_glue(p.nodes)]
            if glue:
                glued = (n for p in glue for n in p.nodes)
                parts = partition.split(self.module.graph, {*torchs, *viewed, *glued}, ends)
            made = []
            for part in parts:
                if not part.daemon:
                    step = Step(part, None, InTorch(part.nodes, self.module, self.around))
                    step.reason = self._reason(part)
                    made.append(step)
                    continue
                piece = self._piece_or_refusal(part)
                if isinstance(piece, Exception):
                    self.first = self.first or piece
                    node = getattr(piece, "node", None)
                    found = vars(piece).pop("nodes", {node: piece})
                    if found.keys() <= set(part.nodes) - torchs.keys():
                        torchs.update(found)
                    else:
                        torchs.update(self._guilty(part, piece))
                    break
                after = None
                if part.after:
                    after = InTorch(part.after, self.module, self.around, part.same)
                made.append(Step(part, piece, after))
                made[-1].hooked = [i for i, n in enumerate(part.outputs) if n in ends]
            else:
                found = self._unplannable(made)
                if not found:
                    return made
                torchs.update(found)

    def _unplannable(self, made: Sequence[Step]) -> dict[Node, Exception]:
        """Nodes of a piece that only a plan refuses: for its types, sizes, or gradients."""
        # To evaluate a number would make a guard of it.
        given = [x.node.hint if isinstance(x, lower.SYMBOLIC) else x for x in self.examples]
        imagined = planning.Imagined(self, given)
        pieces = [step for step in made if step.piece is not None]
        for step in pieces:
            error = self._plan_refusal(step, imagined)
            if error is not None:
                for one in pieces:
                    one.piece.close()  # type: ignore[union-attr]
                self.imagined = imagined
                return self._guilty(step.part, error)
        return {}

    def _plan_refusal(self, step: Step, imagined: planning.Imagined) -> Exception | None:
        """The daemon's answer to the types, sizes and gradients of a piece."""
        try:
            planning.plan_step(step, imagined, values=False)
        except (errors.UnsupportedError, errors.GraphError) as error:
            return refusal(error)
        except errors.LimitError as error:  # of ranks and sizes; others are not about a node
            named = any(is_named(n, str(error)) for n in step.part.nodes)
            if not named or _TIME in str(error):
                return None
            return refusal(CaptureError("unsupported_operator", str(error)))
        except Exception:  # a call of the piece meets it again, and says it
            return None
        return None

    def _transformed(self) -> dict[Node, Exception]:
        """The nodes between the calls that begin and end a vmap: tensors are wrapped there.

        With the calls themselves, and those that prepare them.

        Raises:
            CaptureError: For derivatives, which depend on what autograd knows of all before.
        """
        found: dict[Node, Exception] = {}
        depth = 0
        for node in self.module.graph.nodes:
            own = _TRANSFORMS in str(getattr(node.target, "__module__", ""))
            name = str(getattr(node.target, "__name__", ""))
            if not own and (not depth or node.op not in ("call_function", "call_method")):
                continue
            found[node] = error = CaptureError(
                "func_transform",
                f"{location_of(node)}: forward() transforms a function (torch.func, vmap)",
            )
            if own and "increment" in name:
                if not depth and "vmap" not in name:
                    raise error
                depth += 1
            depth -= own and "decrement" in name
        return found

    def _check_again(self, part: partition.Part) -> None:
        """PyTorch does not repeat the writes of a piece."""
        for node in part.after:
            if partition.is_write(node) and node not in part.same:
                text = "writes in place, and returns another view of the tensor"
                raise CaptureError("input_mutation", f"{location_of(node)}: {text}", node)

    def _asks_layout(self) -> bool:
        """Whether PyTorch runs something that depends on how a tensor lies in memory."""
        steps = (s.torchs for s in self.steps if s.torchs is not None)
        return any(lower.name_of(n) in _LAYOUT for t in steps for n in t.nodes)

    def _reason(self, part: partition.Part) -> str:
        """The first reason why a part runs in PyTorch; "" for glue between other parts."""
        found = (self.refusals[n] for n in part.nodes if n in self.refusals)
        return next((classify(error)[1] for error in found), "")

    def _guilty(self, part: partition.Part, error: Exception) -> dict[Node, Exception]:
        """The nodes of a piece that the daemon cannot run: those of the line it names first."""
        found = self._guilty_alone([n for n in part.nodes if is_named(n, str(error))])
        alike = {n.target for n in found}
        rest = [n for n in part.nodes if n not in found and (not alike or n.target in alike)]
        return found | self._guilty_alone(rest) or self._first_guilty(part.nodes, error)

    def _guilty_alone(self, nodes: Iterable[Node]) -> dict[Node, Exception]:
        """Those that it cannot run each by itself."""
        found: dict[Node, Exception] = {}
        known: dict[Any, Exception | None] = {}
        for node in nodes:
            if partition.is_write(node):
                continue  # alone it writes to an argument: that may fix sizes, and takes seconds
            kind = _kind(node)
            if kind not in known:
                known[kind] = self._trial([node])
            why = known[kind]
            if why is not None:
                found[node] = why
        return found

    def _first_guilty(self, nodes: list[Node], error: Exception) -> dict[Node, Exception]:
        """The one that the daemon cannot run behind those before it, by halving; else all."""
        self.halved += 1
        why = self._trial(nodes) if self.halved <= _HALVED else None
        if why is None:
            return dict.fromkeys(nodes, error)
        passes, fails = 0, len(nodes)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            failure = self._trial(nodes[:middle])
            if failure is None:
                passes = middle
            else:
                fails, why = middle, failure
        return {nodes[passes]: why}

    def _trial(self, nodes: list[Node]) -> Exception | None:
        """Why nodes cannot run in the daemon, without all others."""
        last = nodes[-1:]
        if not isinstance(lower.value_of(last[0]), torch.Tensor):
            last = [n for n in last[0].users if partition.takes_one(n)] or last
            nodes = [*nodes, *(n for n in last if n not in nodes)]
        part = partition.Part(True, nodes)
        partition.find_ends(part, last)
        if not part.outputs and not any(map(partition.is_write, nodes)):
            return None  # a view
        piece = self._piece_or_refusal(part, trial=True)
        if isinstance(piece, Exception):
            return piece
        if piece is None or self.imagined is None:
            return None
        try:
            return self._plan_refusal(Step(part, piece, None), self.imagined)
        finally:
            piece.close()

    def _piece_or_refusal(
        self, part: partition.Part, trial: bool = False
    ) -> Piece | Exception | None:
        """An error is looked into by other trials when it is handled no more: none is its cause."""
        try:
            if not trial:
                self._check_again(part)
            return self._piece(part, trial)
        except errors.SessionError:  # it is not about the graph
            raise
        except Exception as error:  # whatever torch, or the exporter, does not expect
            return refusal(error)

    def _piece(self, part: partition.Part, trial: bool = False) -> Piece | None:
        nodes = part.nodes
        attributes = [n for n in self.module.graph.nodes if n.op == "get_attr"]
        used = {o for n in nodes for o in n.all_input_nodes}
        nodes = [*(n for n in attributes if n in used), *nodes]
        given = [n for n in part.inputs if isinstance(lower.value_of(n), torch.Tensor)]
        if len(given) < len(part.inputs):
            odd = next(n for n in part.inputs if n not in given)
            if sizes_of.is_read(odd):
                raise refused.read(odd)
            raise CaptureError("export_failed", f"{location_of(odd)}: a list of tensors goes in")
        done = lower.lower(nodes, given, part.outputs, self.module)
        twins = _twins(given)
        given = [n for n in given if n not in twins]
        if not trial:  # of a node alone even what a graph makes is an argument
            self._check_written(done)
        inputs = self._inputs(done, given)
        # PyTorch passes on what the translation may leave out: a norm_type without a max_norm.
        read = dict.fromkeys(o for n in nodes for o in n.all_input_nodes if sizes_of.is_number(o))
        refused.check_numbers(self.sizes, (*given, *read), nodes)
        names = [n.name for n in part.outputs]  # of the user's variables, where Dynamo knows them
        key = cache.key_of(done, inputs, names, self.checkpoints)
        cap, _ = cache.find(
            key,
            lambda: _translated(done, inputs, names, bool(self.checkpoints)),
            lambda: 0 if self.env is None else len(self.env.guards),
        )
        if trial:
            from gradd.calls.graph import check_supported

            check_supported(self.owner.client.put_graph(cap.onnx), cap)
            if self.imagined is None:
                return None
            part.inputs = given
            return Piece(self.owner, cap, inputs, lambda args: (), lambda args: True, lazy=False)
        self.draws = self.draws or generator_state.draws(done.graph)
        owner = self.owner
        owner.counts["captures"] += key not in owner.keys
        owner.keys.add(key)
        sizes = Sizes(given)
        given += [n for n in read if n not in given and sizes.missing(n)]
        given_numbers = [n for n in given if isinstance(lower.value_of(n), lower.SYMBOLIC)]
        named = {lower.value_of(n).node.expr: n for n in given_numbers}
        inside = modes.inside(part.nodes, self.around)
        in_torch = InTorch(nodes, self.module, inside)

        def numbered(args: Sequence[Any]) -> list[Any]:
            pairs = zip(given, args, strict=True)
            return [planned_numbers.value(x) if sizes_of.is_number(n) else x for n, x in pairs]

        def run(args: Sequence[Any]) -> Sequence[Any]:
            args = numbered(args)
            known: Values = dict(zip(given, args, strict=True))
            known.update({node: known[other] for node, other in twins.items()})
            values = sizes.values(args)

            def numbers(value: Any) -> Any:
                given_ = named.get(value.node.expr) if isinstance(value, lower.SYMBOLIC) else None
                return number(value, values) if given_ is None else known[given_]

            in_torch.run(known, numbers)
            return [known[n] for n in part.outputs]

        env = self.env
        piece = Piece(
            owner,
            cap,
            inputs,
            run,
            lambda args, few: allowed(sizes, numbered(args), env, few),
            lazy=self.returns and all(n in self.results for n in part.outputs),
        )
        piece.let_torch_repeat(len(given), inside)
        user = piece.graph.user
        piece.graph.asked_for |= {s.name for s in user if names[s.leaf] in self.stored}
        if owner.debug is not None:
            owner.debug.save(cap, owner.module())
        part.inputs = given
        return piece

    def _check_written(self, done: lower.Lowered) -> None:
        """A write whose gradient would have to go on in PyTorch is PyTorch's, as to a parameter."""
        placeholders = done.placeholders()
        memory = [storages(node) for node in placeholders]  # none of a number
        examples = dict(zip(self.placeholders, self.examples, strict=True))
        found: dict[Node, Exception] = {}
        for at in done.written:
            source = done.inputs[at]
            twice = sum(bool(memory[at] & other) for other in memory) > 1
            if isinstance(source, torch.Tensor):
                what = "in place to a constant of its graph"
            elif twice or lower.value_of(source).requires_grad:
                what = "in place to an argument that has a gradient, or shares its memory with "
                what += "another one"
            elif isinstance(real := examples.get(source), torch.nn.Parameter):
                what = f"to the parameter {self._name_of(source, real)!r}"
            else:
                continue
            for writer in lower.writers_of(done, placeholders[at]):
                text = f"{location_of(writer)}: forward() writes {what}"
                found.setdefault(writer, CaptureError("input_mutation", text, writer))
        if found:
            error = next(iter(found.values()))
            error.nodes = found  # type: ignore[attr-defined]
            raise error

    def _inputs(self, done: lower.Lowered, given: list[Node]) -> list[Input]:
        examples = dict(zip(self.placeholders, self.examples, strict=True))
        at = {node: i for i, node in enumerate(given)}
        taken: set[str] = set()
        inputs = []
        for number_, source in enumerate(done.inputs):
            if isinstance(source, torch.Tensor):
                name = _fresh(f"constant_{number_}", taken)
                inputs.append(Input(name, -1, False, source))
                continue
            position = at.get(source)
            if position is None:  # a number, which may go in twice: as a size, and as data
                position = len(given)
                given.append(source)
            real = examples.get(source)
            if not isinstance(real, torch.Tensor):
                real = None
            bound = isinstance(real, torch.nn.Parameter) or _is_bound_buffer(real, source)
            name = self._name_of(source, real)
            shape = getattr(lower.value_of(source), "shape", ())
            inputs.append(
                Input(
                    _fresh(name, taken),
                    position,
                    bound,
                    real if bound else None,
                    varies=any(isinstance(size, torch.SymInt) for size in shape),
                    planned=number_ in done.planned,
                )
            )
        return inputs

    def _name_of(self, source: Node, real: torch.Tensor | None) -> str:
        """Of an input; what a write to a parameter returns has the parameter's name."""
        value = lower.value_of(source)
        if real is None and isinstance(value, torch.nn.Parameter):
            known = ((n, lower.value_of(n)) for n in self.placeholders)
            same = (n for n, x in known if isinstance(x, torch.Tensor) and x is value)
            source = next(same, source)
            real = dict(zip(self.placeholders, self.examples, strict=True)).get(source)
        return source.name if real is None else self.owner.name_of(real, source)

    def reasons(self) -> dict[str, Exception]:
        """Why something runs in PyTorch, by the names of operators."""
        return {_cut_name(node, error): error for node, error in self.refusals.items()}

    def cut_places(self) -> set[str]:
        """The nodes in PyTorch, by their names and reasons: equal for graphs of the same code."""
        found = self.refusals.items()
        return {f"{_cut_name(n, error)}: {_NODE.sub('', str(error))}" for n, error in found}

    def cuts(self) -> str:
        """The nodes in PyTorch, the reasons, and the daemon's share of the work, for a message."""
        kinds: dict[str, list[str]] = {}
        for node, error in self.refusals.items():
            reasons = kinds.setdefault(_cut_name(node, error), [])
            reasons.append(str(error))
        texts = []
        for name, reasons in kinds.items():
            count = f" ({len(reasons)} of them)" if len(reasons) > 1 else ""
            texts.append(f"{name}{count}: {reasons[0].rstrip('.')}")
        return f"{'; '.join(texts)}. {self.amounts().said('this graph')}"

    def amounts(self) -> work.Amounts:
        """The operations of a forward in the daemon, and in PyTorch."""
        found = work.Amounts()
        for step in self.steps:
            found = found.plus(work.amounts(step.part.nodes, step.piece is not None))
        return found

    def _forget(self) -> None:
        """What Dynamo knows of nodes may hold the module, as a class with a property does."""
        for node in self.module.graph.nodes:
            node.meta = {name: node.meta[name] for name in _KEPT if name in node.meta}
        # Dynamo's guards hold the sizes for good, and these what operators gave in the trace.
        getattr(self.env, "fake_tensor_cache", {}).clear()

    # ---- how it runs ----

    def _find_ends(self) -> None:
        """Values go with the last part that reads them."""
        last: dict[Node, int] = {}
        for i, step in enumerate(self.steps):
            last.update(dict.fromkeys(_read((*step.part.nodes, *step.part.outputs)), i))
        results = [n for n in self.results if isinstance(n, Node)]
        kept = {*results, *_read(filter(self.sizes.missing, results))}
        for node, i in last.items():
            if node not in kept:
                self.steps[i].over.append(node)

    def _as_whole(self) -> tuple[Piece, Any] | None:
        """The one piece whose outputs are those of the graph, and its arguments."""
        step = self.steps[0] if len(self.steps) == 1 else None
        if step is None or step.piece is None or step.torchs is not None or step.hooked:
            return None
        if step.grad is not self.around.grad:
            return None
        part = self.steps[0].part
        if part.outputs != self.results:
            return None
        if not all(isinstance(lower.value_of(n), torch.Tensor) for n in part.inputs):
            return None  # a number
        positions = [self.placeholders.index(n) for n in part.inputs]
        if not positions:
            return self.steps[0].piece, lambda args: ()
        if len(positions) == 1:
            return self.steps[0].piece, lambda args, at=positions[0]: (args[at],)
        return self.steps[0].piece, itemgetter(*positions)

    def __call__(self, *args: Any) -> Any:
        if interrupts.noted:
            interrupts.deliver()
        owner = self.owner
        if owner.planning.on:
            return owner.planning.results(self, args)
        if self.draws and self._is_seeded():
            return self._in_torch(args, generator_state.refusal())
        if self.whole is None and self.sizes.has_large(args):
            return self._in_torch(args, planned_numbers.refusal())
        shares = self._shares(args) if owner.budget.amount else ()
        if self.whole is not None:
            piece, places = self.whole
            result = tuple(piece(places(args), *shares))
        else:
            result = self._in_steps(args, self.steps, shares)
            if self.tell is not None:  # it raised nothing, as types that do not fit would
                self.tell()
                self.tell = None
        if self.draws or self.whole is None:  # what PyTorch runs may draw as well
            owner.generator.go_on(owner.client.memory.device)
        return result

    @property
    def run(self) -> Callable[..., Any]:
        """The call; it leaves the grad mode that torch.set_grad_enabled(), as a call, has left."""
        return self.__call__ if self.left is self.around.grad else self._run_and_leave

    def _run_and_leave(self, *args: Any) -> Any:
        result = self(*args)
        torch.set_grad_enabled(self.left)
        return result

    def _is_seeded(self) -> bool:
        """Whether something else may have drawn, or seeded, in this call."""
        owner = self.owner
        unknown = owner.has_calls and not self.begins
        return owner.generator.is_moved(owner.client.memory.device, unknown)

    def numbers(self, args: Sequence[Any]) -> Callable[[Any], Any]:
        """Converts sizes of the trace, and lists of them, to their values in a call."""
        values: dict[str, int] | None = None

        def find(value: Any) -> Any:
            nonlocal values
            if values is None:
                values = self.sizes.values(args)
            return number(value, values)

        return find

    def _shares(self, args: Sequence[Any]) -> Sequence[int]:
        """Each piece's share of a memory budget; none: a call has but one."""
        owner = self.owner
        if self.returns and self.whole is not None and not owner.budget.going_on:
            return ()
        if not any(s.grad for s in self.steps):
            return ()
        sizes = tuple(self.sizes.values(args).items())
        wanted = tuple(x.requires_grad for x in args if isinstance(x, torch.Tensor))
        key = (self.number, sizes, wanted)
        return owner.budget.shares(key, self.returns, lambda: self._curves(args))

    def _curves(self, args: Sequence[Any]) -> list[budget.Curve]:
        found = planning.plan(self, planning.Imagined(self, args), values=True)
        return [budget.curve_of(self.owner.client, p) for p in found]

    def _in_torch(self, args: Sequence[Any], error: Exception) -> Any:
        """All of the graph in PyTorch, with its random numbers, for a reason that the call has."""
        fallback = self.owner.fallback
        reason = fallback.decide(error)
        if fallback.count(reason, str(error)):
            fallback.warn(reason, error, 0.0, 0.0)
        nodes = list(filter(partition.computes, self.module.graph.nodes))
        part = partition.Part(False, nodes)
        step = Step(part, None, InTorch(nodes, self.module, self.around))
        step.reason = reason
        return self._in_steps(args, [step])

    def _in_steps(
        self, args: Sequence[Any], steps: Sequence[Step], shares: Sequence[int] = ()
    ) -> Any:
        known: Values = dict(zip(self.placeholders, args, strict=True))
        numbers = self.numbers(args)
        share = iter(shares)
        for step in steps:
            self._run(step, known, numbers, next(share, None) if step.piece else None)
            if interrupts.noted:
                interrupts.deliver()
        found = []
        for result in self.results:
            is_node = isinstance(result, Node)
            found.append(self.rest.value(known, numbers, result) if is_node else result)
        return tuple(found)

    def _run(
        self, step: Step, known: Values, numbers: Callable[[Any], Any], share: int | None
    ) -> None:
        part = step.part
        if step.piece is not None:
            args = step.piece.tensors(
                [known[n] if n in known else numbers(lower.value_of(n)) for n in part.inputs]
            )
            inference = torch.is_inference_mode_enabled()
            with (
                torch.inference_mode(inference and not step.ordinary),
                torch.set_grad_enabled(step.grad),
            ):
                outputs = step.piece(args, share)
                if self.asks_layout:
                    pairs = zip(outputs, part.outputs, strict=True)
                    outputs = [_laid_out(x, numbers(lower.value_of(n).stride())) for x, n in pairs]
            if inference and step.ordinary:
                pairs = zip(outputs, step.outside, strict=True)
                outputs = [x if outside else _inferred(x) for x, outside in pairs]
            if step.hooked:
                outputs = _apart(outputs, step.hooked)
            known.update(zip(part.outputs, outputs, strict=True))
        if step.torchs is not None:
            step.torchs.run(known, numbers)
        if step.piece is None:
            self.owner.ran_in_torch(step.reason)
        for node in step.over:
            known.pop(node, None)

    def empty(self) -> None:
        """Forgets all: graphs, sizes and tensors of the trace are some MiB. It runs no more."""
        vars(self).clear()

    def close(self) -> None:
        """Gives up all that the daemon holds."""
        for step in self.steps:
            if step.piece is not None:
                step.piece.close()


def _apart(outputs: Sequence[torch.Tensor], hooked: Collection[int]) -> list[torch.Tensor]:
    """Results with steps of autograd of their own, which run only where a gradient arrives.

    The hooks of all results of a piece would run with one of them, some without a gradient. Copies:
    a write in place to a view would go around its hooks.
    """
    return [x.clone() if i in hooked and x.requires_grad else x for i, x in enumerate(outputs)]


def refusal(error: Exception) -> Exception:
    """An error as a reason to run something in PyTorch."""
    if not isinstance(error, (CaptureError, errors.GraddError)):
        text = " ".join(str(error).strip().splitlines()[:1])[:300]
        error = CaptureError("export_failed", f"{type(error).__name__}: {text}")
    return bare(error)


def _is_bound_buffer(real: torch.Tensor | None, source: Node) -> bool:
    """Whether an argument is a buffer that lives in shared memory.

    One that wants a gradient does not: the daemon gives those of parameters.
    """
    if real is None or "_buffers_" not in source.name or real.requires_grad:
        return False
    return not is_small(real) or any(lower.name_of(user) in _NORMS for user in source.users)


def bare(error: Exception) -> Exception:
    """An error without its causes, whose frames hold tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _read(nodes: Iterable[Node]) -> dict[Node, None]:
    """Nodes, and the values that have to be there when these run."""
    read = dict.fromkeys(nodes)
    found = [operand for node in read for operand in node.all_input_nodes]
    while found:
        operand = found.pop()
        if operand not in read and sizes_of.is_number(operand):
            found += operand.all_input_nodes  # computed where it is read
        read[operand] = None
    return read


def _laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A result of a piece as PyTorch would have laid it out in memory."""
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _inferred(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of inference mode, which is on."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach())


def _translated(
    done: lower.Lowered, inputs: Sequence[Input], names: Sequence[str], checkpoints: bool
) -> Capture:
    from gradd.dynamo import program  # takes most of a second, and a cached capture needs none

    return program.capture(done, inputs, names, checkpoints)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _twins(given: Iterable[Node]) -> dict[Node, Node]:
    """Nodes with the tensor of an earlier one, which stands for them: one gradient goes back."""
    first: dict[int, Node] = {}
    known = {node: first.setdefault(id(lower.value_of(node)), node) for node in given}
    return {node: other for node, other in known.items() if node is not other}


def _is_whole(node: Node) -> bool:
    """Whether all that a node returns are whole numbers or booleans, as masks are."""
    values = private.pytree.tree_leaves(lower.value_of(node))
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    return not any(x.is_floating_point() or x.is_complex() for x in tensors)


def _cut_name(node: Node, error: Exception) -> str:
    """The name of a node that runs in PyTorch, for a message: torch's transforms have one each."""
    names = {"func_transform": "vmap", "autograd_function": "autograd.Function"}
    return names.get(classify(error)[1]) or lower.readable_name(node)


def _kind(node: Node) -> Any:
    """Equal for nodes that are translated alike, as far as that can be seen from outside."""

    def one(value: Any) -> Any:
        if isinstance(value, Node):
            found = lower.value_of(value)
            if isinstance(found, torch.Tensor):
                return (found.dtype, tuple(map(str, found.shape)), found.requires_grad)
            return str(found)
        return repr(value)

    operands = torch.fx.map_arg((node.args, tuple(sorted(node.kwargs.items()))), one)
    return (str(node.target), repr(operands), modes.of(node))
