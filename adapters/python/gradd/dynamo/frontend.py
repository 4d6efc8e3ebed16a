"""The function around a call: TorchDynamo captures, gradd runs its graphs.

    call = Compiled(module)
    outputs = call(*args, **kwargs)      # what module(*args, **kwargs) would return

Dynamo checks everything that a call depends on and recompiles after a change; its graphs come to
the back end here. Before each call the function tells Dynamo which axes may vary, and checks the
state that Dynamo does not guard. After it, the function counts calls that reached no graph, and
reports what ran in PyTorch, or raises an error if nothing may.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from gradd import arguments, errors, forwarding, interrupts, options, private, progress, transforms
from gradd.calls.lazy import LazyTensor, connected
from gradd.check import checktimes
from gradd.check.selfcheck import Checks
from gradd.dynamo import (
    cumulative_norms,
    derived,
    locks,
    marking_hooks,
    masked_rows,
    settings,
    sizes,
)
from gradd.dynamo.backend import compiled
from gradd.dynamo.between_graphs import Call as CallOfGraphs
from gradd.dynamo.between_graphs import Gaps, Watch
from gradd.dynamo.guards import Supplement, is_users
from gradd.dynamo.owner import Owner
from gradd.dynamo.planning import plans
from gradd.dynamo.refused import MistracedError
from gradd.dynamo.tracers import failures, output_hooks
from gradd.dynamo.traces import Frames, cause
from gradd.html_tables import Stats
from gradd.memory import garbage, tensor_classes, watch
from gradd.session.client import Client
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from gradd.calls.graph import Graph, Plan
    from gradd.calls.planned import Planned
    from gradd.reasons import FallbackPolicy
    from gradd.session.reduction import Reduction

logger = logging.getLogger("gradd")
_numbers = itertools.count()
_ODD = 8  # forms of calls that are set aside
# Times that such calls may cost another capture: those that raise, and those that reach no graph,
# which a break within a loop does for good. After that the former wait, for twice as many calls
# each time.
_AGAIN, _AGAIN_WITHOUT_GRAPH = 16, 3
_WAIT = 16  # calls, the first time
# Causes that Dynamo does not count.
_SKIPPED = (
    "its recompile limit is reached, it breaks within a loop (at an ORTModule, or at a hook that it"
    " does not trace), it skips the code, or torch.compile is disabled"
)
_FAILED = "it fails at the code, as the log has it"
# By the names of keyword arguments: Dynamo fails where it says why a call with fewer of them is not
# like an earlier one. And by what Dynamo does not compare of the arguments.
_Functions = dict[tuple[str | bool, ...], Callable[..., Any]]
_Version = tuple[Supplement, _Functions]
_CHOICES = (bool, str, type(None))
_VERSIONS = 8  # of a compiled function, by the state that Dynamo does not compare


class Compiled:
    """Runs calls of one module through Dynamo and the daemon. See the top of this file."""

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any] | None = None,
        *,
        strict: bool = False,
        debug: Any = None,
        in_torch: Callable[..., Any] | None = None,
        memory_budget: int | str | None = None,
        tally: progress.Tally | None = None,
        flags: int = 0,
        reduction: Reduction | None = None,
    ) -> None:
        """Args:
        module: Owner of parameters and buffers, which move into shared memory here.
        forward: The meaning of a call (default: a call of the module).
        strict: Raise instead of running anything in PyTorch.
        debug: DebugOptions, which are given every new capture, and its first plan.
        in_torch: The function to run in PyTorch (default: `forward`, else the module).
        memory_budget: The most that a training run may take.
        tally: That of the module that this one is a part of, or that `forward` is a method of.
        flags: Of the protocol, for all runs of the user.
        reduction: Averages gradients over processes; then `strict` is set.
        """
        self.module = module
        self.given_forward = forward
        self._eager = next(f for f in (in_torch, forward, module) if f is not None)
        self._disabled = bool(options.get("GRADD_DISABLE"))
        title = type(module).__name__
        if tally is not None:
            method = "forward" if forward is None else forward.__name__
            title = f"{tally.title}'s {title if method == 'forward' else method}"
        self.tally = tally or progress.Tally(title)
        self._first = True  # the next call is
        self._passes = False  # Dynamo has traced a call that computes nothing
        # Why the last call had no graph: Dynamo says so once.
        self._cause = _SKIPPED
        if self._disabled:
            return
        self.owner = Owner(
            module,
            title,
            strict=strict,
            debug=debug,
            memory_budget=memory_budget,
            flags=flags,
            reduction=reduction,
        )
        owner = self.owner
        if tally is None:
            self.tally = progress.tally(module, owner.counts, owner.fallback.counts, owner.parts)
        else:
            owner.counts, (owner.fallback.counts, owner.parts) = tally.counts, tally.in_torch
        # Dynamo may keep graphs, and the owner with them.
        weakref.finalize(self, self.owner.end())
        self._gaps = Gaps(self.owner)
        self._held = interrupts.Deferred(f"the capture of {title}")
        self._versions: list[_Version] = []
        self._odd_versions: list[_Version] = []
        self._odd_forms: set[Any] = set()  # of calls that take those
        self._failed_again = 0  # of these calls
        self._skipped = 0  # calls for which Dynamo skips a function where one of them has raised
        self._embeddings: marking_hooks.Embeddings | None = None
        self._keeps_places = self.owner.keeps_places
        self._norms = cumulative_norms.Norms(module)
        self._attends: bool | None = None  # see settings.attends(); None = it is not known yet
        self._hooks = 0  # of all modules, before the last trace
        self._hooked = False  # a call has installed some, and was traced again
        self._lost: str | None = None  # why Dynamo fails at a function
        self._unchecked = True  # some parameters may have no size yet, or be shards

    def _compiled(
        self, versions: list[_Version], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Callable[..., Any]:
        """The compiled function whose graphs apply as things are now.

        Args:
            versions: Those that there are; a new one is added.
            kwargs: Of the call.
            leaves: Of its arguments.
        """
        if self._embeddings is not None and self._embeddings.changed():
            marking_hooks.leave_out(self.module)
        if versions and versions[0][0].holds():
            functions = versions[0][1]
        else:
            functions = self._functions(versions)
        key: tuple[str | bool, ...] = tuple(kwargs)
        if versions[0][0].asks_history:
            key += tuple([x.is_leaf for x in leaves if isinstance(x, torch.Tensor)])
        found = functions.get(key)
        if found is None:
            found = function_of(self.owner, self.module, self.given_forward)
            functions[key] = found
        return found

    def _functions(self, versions: list[_Version]) -> _Functions:
        """Those of another version than the first, or of a new one."""
        for i, (state, functions) in enumerate(versions):
            if i and state.holds():
                versions.insert(0, versions.pop(i))
                return functions
        if versions:
            logger.info(
                "%s is compiled again: %s has changed",
                type(self.module).__name__,
                versions[0][0].changed() or "the environment or a method of a class",
            )
        # torch.Tensor gets attributes of ours, which are part of the state.
        watch.install()
        self._lost = None
        output_hooks.install_in_traces()
        marking_hooks.leave_out(self.module)
        self._embeddings = marking_hooks.Embeddings.of(self.module)
        self._hooks = marking_hooks.number(self.module)
        versions.insert(0, (self._state(), {}))
        del versions[_VERSIONS:]
        return versions[0][1]

    def _state(self, before: Supplement | None = None) -> Supplement:
        """That of now.

        Args:
            before: That of older graphs of the same version.
        """
        state = Supplement((self.module, self.given_forward), before)
        self._attends = bool(self._attends) or settings.attends(self.module, state)
        return state

    def take(self, policy: FallbackPolicy) -> None:
        """Decides by this policy in place of the environment's."""
        if not self._disabled:
            self.owner.fallback.take(policy)

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Gives the next calls another meaning than the `forward` that this was made with."""
        self.given_forward = self._eager = forward
        if not self._disabled:
            for versions in (self._versions, self._odd_versions):
                versions.clear()

    @property
    def forward(self) -> Callable[..., Any]:
        return self.given_forward if self.given_forward is not None else self.module.forward

    @property
    def client(self) -> Client:
        return self.owner.client

    @property
    def counts(self) -> Counter[str]:
        return self.owner.counts

    # ---- the call ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of `forward(*args, **kwargs)`, computed by the daemon."""
        self.tally.calls += 1
        if self._disabled:
            return self._eager(*args, **kwargs)
        mode = private.dispatch_mode()
        if isinstance(mode, Watch):  # of a module around this one, which counts its own
            with mode.paused():
                return self._call(args, kwargs, private.dispatch_mode())
        if self._first:
            self._first = False
            with garbage.postponed(), progress.Compiling(self.owner.title, "in its first call"):
                return self._call(args, kwargs, mode)
        return self._call(args, kwargs, mode)

    def _call(self, args: tuple, kwargs: dict, mode: Any) -> Any:
        owner = self.owner
        if owner.failed is not None:
            return self._in_torch(owner.failed, args, kwargs)
        try:
            transforms.check(mode)
            if self._unchecked:
                self._check_parameters()
        except CaptureError as error:
            return self._in_torch(error, args, kwargs)
        if torch.compiler.is_compiling() and locks.compiles_here():
            if owner.reduction is not None:
                raise errors.UnsupportedError(
                    "process_group: a module around this one compiles it in PyTorch, where nothing "
                    "averages gradients"
                )
            return self._eager(*args, **kwargs)
        if kwargs.get("past_key_values") is not None and not torch.is_grad_enabled():
            return self._decode(args, kwargs)
        leaves = arguments.leaves(args, kwargs)
        if LazyTensor in map(type, leaves):
            args, kwargs = private.pytree.tree_map_only(LazyTensor, connected, (args, kwargs))
        sizes.mark(leaves)
        if self._keeps_places and not owner.keeps_places:  # calls are traced again
            self._keeps_places = False
            del self._versions[:], self._odd_versions[:]
            self._odd_forms.clear()
        now, frames, graphs = owner.now, Frames.now(), owner.compiled
        before, versions = now.graphs, self._versions
        if self._odd_forms and _form(leaves) in self._odd_forms:
            versions = self._odd_versions
            if self._skipped:
                self._go_on()
        owner.last.clear()
        if owner.memory.budget:
            owner.budget.begin()
        notes = owner.notes_generator
        if notes:
            owner.generator.note(owner.client.memory.device)
        here = forwarding.here
        outer, here.module = here.module, self.module
        again: Callable[[], Any] | None = None
        norms = self._norms if self._norms.norms else None
        try:
            with self._held, settings.Applied(owner.keeps_places, self._attends is not False):
                function = self._compiled(versions, kwargs, leaves)
                called = self.module if self.given_forward is None else self.given_forward
                now.call = (self.module, called, function, args, kwargs, before)
                if norms is not None:
                    norms.__enter__()
                ran = CallOfGraphs(now, self._gaps.due > 0)
                hidden = self._embeddings.hide() if self._embeddings is not None else []
                try:
                    result = function(*args, **kwargs)
                finally:
                    if hidden:
                        marking_hooks.show(hidden)
                    if ran.watch is not None:
                        ran.watch.__exit__(None, None, None)
                    now.run = ran.around
                    if norms is not None:
                        norms.__exit__()
        except (CaptureError, errors.GraddError):
            raise
        except masked_rows.AgainError:
            again = functools.partial(self._call, args, kwargs, mode)
        except BaseException as error:  # the user's, sys.exit() among them
            self._set_aside(leaves, frames, versions, raises=True)
            if not isinstance(error, failures.FailsError):
                raise
            again = functools.partial(self._fails, args, kwargs)
        finally:
            here.module = outer
            if notes:
                owner.generator.forget()
            now.call = None
        if again is not None:
            return again()
        if owner.failed is not None:  # a self-check has found it
            return self._eager(*args, **kwargs)
        counts, after, why = private.counters["frames"], frames, ""
        if counts["total"] != frames.total or counts["ok"] != frames.ok:
            with private.compile_lock:  # what another thread is about to trace has not failed
                after, why = Frames.now(), self._located(cause())
        hooked = owner.compiled > graphs and self._learn(versions)
        seen = self._gaps.count(ran, why)
        failed = after is not frames and after.failed(frames)
        if owner.keeps_places and after != frames and (failed or now.graphs == before):
            # It may have failed at sizes that depend on data, which it recorded.
            owner.keeps_places &= bool(why) and "data-dependent" not in why.lower()
        if now.graphs == before:
            if self._computes_nothing(leaves, result, after != frames and not (failed or why)):
                return result
            self._set_aside(leaves, frames, versions, raises=False)
            self._reached_nothing(why or (_FAILED if failed else ""))
        elif not seen and self._skipped and versions is self._odd_versions:
            self._say_lost("an exception has passed it")
        elif not seen and not hooked and (self._lost is not None or failed):
            self._say_lost(why)
        return result

    def _learn(self, versions: list[_Version]) -> bool:
        """After a call for which graphs were made; whether it has installed hooks.

        Args:
            versions: That the call has used.
        """
        hooked = self._has_new_hooks()
        self._embeddings = marking_hooks.Embeddings.of(self.module)
        if versions:
            if marking_hooks.leave_out(self.module) or hooked:
                del versions[:1]  # graphs were broken for one
            else:  # the call may have reached classes that were not there before
                versions[0] = self._state(versions[0][0]), versions[0][1]
        return hooked

    def _has_new_hooks(self) -> bool:
        """Whether the call has installed forward hooks, which breaks its graph: another one does
        not.

        Those of transformers are installed so, by the first call that asks for hidden states.
        """
        if self._hooked or marking_hooks.number(self.module) <= self._hooks:
            return False
        logger.info("%s is compiled again: its call has installed hooks", self.owner.title)
        self._hooked = True
        return True

    def _computes_nothing(self, leaves: Sequence[Any], result: Any, traced: bool) -> bool:
        """Whether a call without a graph only hands its arguments on, as nn.Identity does.

        Args:
            leaves: Of the arguments.
            result: Of the call.
            traced: Dynamo has just traced it as a whole, without a word.
        """
        self._passes |= traced
        given = {id(x) for x in leaves}
        found = (x for x in private.pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
        return self._passes and all(id(x) in given for x in found)

    def _check_parameters(self) -> None:
        """Dynamo would forever skip a forward whose first call gives parameters their sizes.

        And it does not see an engine's flat parameter, of which a module's own are parts.
        """
        if engine := tensor_classes.engine_of(self.module):
            raise CaptureError(
                "sharded_parameters",
                f"{engine} keeps the parameters in a flat one of its own, which gradients have to "
                "reach: use torch.distributed.fsdp.fully_shard, ZeRO of stage 1 or 2, or "
                "DistributedDataParallel around an ORTModule",
            )
        both = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        for name, tensor in both:
            if is_lazy(tensor):
                raise CaptureError("unsupported_parameter", f"{name!r} has no size before a call")
        self._unchecked = False

    def _set_aside(
        self, leaves: Sequence[Any], frames: Frames, versions: list[_Version], raises: bool
    ) -> None:
        """Calls that fail, or reach no graph, get compiled functions of their own.

        Dynamo never again traces a function that it once failed at, whatever the sizes are. A new
        compiled function serves the other calls; those of the same form as well, in the end ever
        more rarely.

        Args:
            leaves: Of the arguments.
            frames: The functions that Dynamo had traced before the call.
            versions: That the call has used.
            raises: It has raised.
        """
        if Frames.now() == frames:
            return
        if versions is self._odd_versions:
            self._failed_again += 1
            if self._failed_again < (_AGAIN if raises else _AGAIN_WITHOUT_GRAPH):
                del versions[:1]
            elif raises:
                self._skipped = _WAIT << (self._failed_again - _AGAIN)
        elif len(self._odd_forms) < _ODD:
            self._odd_forms.add(_form(leaves))
            del self._versions[:1]

    def _go_on(self) -> None:
        """Counts a call whose form Dynamo skips a function for; after enough of them it may not."""
        self._skipped -= 1
        if not self._skipped:
            del self._odd_versions[:1]

    def _in_torch(self, error: Exception, args: tuple, kwargs: dict) -> Any:
        reason = self.owner.fallback.decide(error)
        start = time.perf_counter()
        result = self._eager(*args, **kwargs)
        if self.owner.fallback.count(reason, str(error)):
            self.owner.fallback.warn(reason, error, time.perf_counter() - start, 0.0)
        return result

    def _fails(self, args: tuple, kwargs: dict) -> Any:
        """A call in which an operator raises, as far as Dynamo knows: PyTorch has the last word."""
        result = self._eager(*args, **kwargs)
        self.owner.ends_traces = False  # later calls run up to that operator
        reason = "untraced_function"
        error = CaptureError(reason, "an operator raises in the trace of this call alone")
        if self.owner.fallback.count(reason, str(error)):
            self.owner.fallback.warn(reason, error, 0.0, 0.0)
        return result

    def _decode(self, args: tuple, kwargs: dict) -> Any:
        """A step of decoding with a cache: too little work for a request, and a graph per state."""
        self.say_decoding()
        return self._eager(*args, **kwargs)

    def say_decoding(self) -> None:
        """Counts a call of a decoding loop, and says once that it runs in PyTorch.

        It is no error where nothing may run in PyTorch: an evaluation may generate.
        """
        if not self._disabled and self.owner.fallback.count("decoding"):
            logger.warning(
                "%s: decoding with a cache of keys and values runs in PyTorch (decoding)",
                self.owner.title,
            )

    def _reached_nothing(self, why: str) -> None:
        """Dynamo has run a call in PyTorch as a whole, without a word."""
        if why and (why != _FAILED or self._cause == _SKIPPED):
            self._cause = why
        refused = self.owner.refused
        if isinstance(refused, MistracedError):
            self._cause = refused.message
        error = CaptureError(
            refused.reason if isinstance(refused, MistracedError) else "no_graph",
            f"torch.compile has run this call without a graph ({self._located(self._cause)}; "
            "TORCH_LOGS=graph_breaks shows where)",
        )
        reason = self.owner.fallback.decide(error)
        if self.owner.fallback.count(reason, "no graph"):
            self.owner.fallback.warn(reason, error, 0.0, 0.0)

    def _located(self, why: str) -> str:
        """Dynamo's words, with a user's forward hook if they name no line: of hooks it has none."""
        hook = "" if not why or ".py:" in why else marking_hooks.said(self.module)
        return f"{why}; the module has the forward hook {hook}" if hook else why

    def _say_lost(self, why: str) -> None:
        """Dynamo has failed at a function, here or in an earlier call.

        No operators have been seen in it. It is said and counted, and no error where nothing may
        run in PyTorch.
        """
        if self.owner.reduction is not None:
            raise errors.UnsupportedError(
                f"process_group: torch.compile fails at a function that forward() calls"
                f"{f' ({why})' if why else ''}: it runs in PyTorch, where nothing averages "
                "gradients"
            )
        if self._lost is None:
            self._lost = f" ({why})" if why else ""
            logger.warning(
                "%s: torch.compile fails at a function that forward() calls%s: it runs in PyTorch "
                "(untraced_function); no operators were seen in it. TORCH_LOGS=graph_breaks shows "
                "where",
                self.owner.title,
                self._lost,
            )
        self.owner.ran_in_torch("untraced_function")

    # ---- for users and wrappers ----

    def plans(self, args: tuple, kwargs: dict) -> list[tuple[Graph, Plan]]:
        """Graphs and plans of such a call; without arguments those of the last call.

        Raises:
            ValueError: No arguments, and no call has run in the daemon (or its plan is gone).
            UnsupportedError: GRADD_DISABLE is set.
        """
        if self._disabled:
            raise errors.UnsupportedError("GRADD_DISABLE is set: nothing runs in the daemon")
        if args or kwargs:
            found = [(p.graph, p.used) for p in self._planned(args, kwargs)]
        else:
            found = [(graph(), plan()) for graph, plan in self.owner.last]
        if not found or any(plan is None for _, plan in found):
            raise ValueError(
                "no call has run in the daemon yet, or its plan is gone: pass the arguments of a "
                "call, which is then planned and not run"
            )
        return found

    def _planned(self, args: tuple, kwargs: dict) -> list[Planned]:
        if self.owner.failed is not None:
            raise self.owner.failed
        with self._held:
            budget = self.owner.memory.budget
            function = self._compiled(self._versions, kwargs, arguments.leaves(args, kwargs))
            return plans(self.owner, function, args, kwargs, True, budget)[0]

    def stats(self) -> Stats:
        """Counts since construction.

        `in_torch` is empty if all operators of all calls ran in the daemon: it counts, by reason,
        calls (`fallbacks`) and parts of calls (`parts_in_torch`) that PyTorch ran. `graphs` are
        those that Dynamo holds, `breaks` counts how often calls left a graph before their end.
        """
        if self._disabled:
            none = {"captures": 0, "forwards": 0, "fallbacks": {}}
            return Stats({**none, "in_torch": {"disabled": self.tally.calls}})
        owner = self.owner
        graphs = list(owner.alive)
        seen, said = owner.live_rows, owner.client.said
        found = {
            "captures": owner.counts["captures"],
            "graphs": len(owner.graphs),
            "plans": sum(len(g.plans) for g in graphs),
            "forwards": owner.counts["forwards"],
            "repeated_forwards": owner.counts["repeated_forwards"],
            **(owner.checks or Checks(checktimes.OFF)).stats(),
            # A graph that runs in PyTorch as a whole is counted by both.
            "in_torch": dict(owner.fallback.counts | owner.parts),
            "fallbacks": dict(owner.fallback.counts),
            "parts_in_torch": dict(owner.parts),
            "breaks": owner.counts["breaks"],
            "rows": seen["rows"],
            "unlabelled_rows_left_out": seen["unlabelled"],
            "padding_rows_left_out": seen["padding"],
            "flops_left_out": 3 * seen["flops"],
            "slots": len(owner.slots),
            "mirrored": owner.state.mirrored,
            "wait_ms": said.waited_us / 1e3,
            "compute_ms": said.ran_us / 1e3,
            "arena_bytes": said.arena_bytes,
            "recoveries": owner.client.recoveries,
            "shared_bytes": owner.client.segment_bytes(),
        }
        return Stats(found)

    def close(self) -> None:
        """Gives up everything that the daemon holds; parameters stay readable."""
        if not self._disabled:
            for graph in self.owner.graphs:
                graph.close()
            self.owner.finish()()


def _form(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for calls whose tensors have the same sizes and types, and with the same choices."""

    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.dtype, not x.is_nested and x.shape
        return (type(x), x) if isinstance(x, _CHOICES) else type(x)

    return tuple(map(one, leaves))


def function_of(
    owner: Owner, module: torch.nn.Module, forward: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A compiled function with a cache of its own: calls `forward`, or else the module."""
    calls = module if forward is None else forward

    def target(gradd_derived: derived.Derived, *args: Any, **kwargs: Any) -> Any:
        gradd_derived  # noqa: B018  (torch 2.14 forgets arguments that nothing reads)
        return calls(*args, **kwargs)

    # Dynamo's cache goes with the code: it must not be that of all modules. Globals of other
    # functions it looks up in modules by their names, where code that exec() has run is not to
    # be found: those of the user's function are this function's own.
    code = target.__code__.replace(co_name=f"call_{next(_numbers)}")
    users = [f for f in (getattr(forward, "__func__", forward), type(module).forward) if _is_own(f)]
    names = users[0].__globals__ if users else globals()
    target = types.FunctionType(code, names, closure=target.__closure__)
    this = weakref.ref(owner)

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found = this()
        return graph.forward if found is None else compiled(found, graph, examples, code)

    def ends() -> bool:
        found = this()
        return found is not None and found.ends_traces and not found.fallback.strict

    made = torch.compile(target, backend=backend, **settings.of_function())
    return derived.called(made, derived.Derivation(ends))


def _is_own(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and is_users(function)
