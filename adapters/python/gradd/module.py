"""ORTModule: wraps a module so that its forward and backward run in the daemon.

The wrapper is transparent: parameters, buffers, state_dict keys, attributes and methods are those
of the wrapped module, and it shares that module's tables of parameters, buffers and submodules.
Only `forward` differs (forwarding.py): its calls go through dynamo.frontend.Compiled.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gradd import about, forwarding, module_tables, options
from gradd.debug import DebugOptions
from gradd.dynamo.frontend import Compiled
from gradd.session import reduction as reductions
from gradd.session.protocol import FINITE_CHECK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gradd.explain import Explanation
    from gradd.fallback import FallbackPolicy
    from gradd.progress import Tally

logger = logging.getLogger("gradd")
_OWN = {"_gradd_module", "_gradd_compiled", "_gradd_options", "_gradd_strict", "_gradd_memory"}
_OWN |= {"_gradd_parts", "_gradd_methods", "_gradd_reduction", "_gradd_sharded", "_gradd_tally"}
_OWN |= {"_gradd_policy", "training"}
_DELEGATED = (
    *("state_dict", "load_state_dict"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "children"),
    *("named_children", "zero_grad", "extra_repr", "get_parameter"),
    *("get_buffer", "get_submodule", "get_extra_state", "set_extra_state", "share_memory"),
    *("register_buffer", "register_parameter", "add_module", "register_module"),
)
_CHAINED = ("apply", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")
_CHAINED += ("requires_grad_", "to_empty")
_OF_ORT = "_torch_module"  # where scripts have reached for execution managers
_FSDP = "torch.distributed."  # fully_shard() makes the wrapper's class one of these
# Methods of these packages run on the wrapped module itself: they look after their own calls.
_LIBRARIES = ("torch.", "transformers.", "peft.", "accelerate.", "optimum.")
# Methods of transformers' models that compute as forward() does: get_text_features(), of CLIP.
_COMPUTES = re.compile(r"get_\w+_features")


class ORTModule(torch.nn.Module):
    """Runs a module's forward and backward in the gradd daemon.

    A call raises an OutOfMemoryError if its memory budget cannot be met; the message has the
    smallest budget that can be met, and the time it costs. Where PyTorch may not run a part that
    the daemon cannot run (`strict`, or the policies of docs/messages.md), the call raises the error
    of that part.

    Args:
        module: The module; its parameters and buffers move into shared memory in place. If it is
            an ORTModule already (a notebook cell was run twice), its module is wrapped anew.
        debug_options: Logging, saving of captured graphs, and a check for NaN and infinity.
        strict: Raise instead of falling back to PyTorch if the daemon cannot run something.
        memory_budget: Limit of the activations and workspace of one forward and backward, in bytes
            (int) or as text ("2GiB"). The backward recomputes values that the forward does not
            keep, with the same bits; a budget may also shorten the chunks of a language model's
            loss, which changes results by rounding. The default is GRADD_MEMORY_BUDGET; without
            either there is no limit.
        process_group: Processes that train this model together, each on a GPU: their daemons
            average the gradients of every backward, by NCCL, in place of DistributedDataParallel.
            Parameters and buffers become those of its first process. Nothing that has a gradient
            may run in PyTorch then: `strict` is set.

    Raises:
        TypeError: `module` is not a torch.nn.Module, or is a DataParallel; or the budget is neither
            a number nor text.
        ValueError: The budget is not a positive size; this process is not in `process_group`.
        UnsupportedError: With `process_group`: the module is not on a GPU, or there is no NCCL.
        PeerError: Another process of `process_group` has failed, has another module, or does not
            come.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        strict: bool = False,
        memory_budget: int | str | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if isinstance(module, ORTModule):
            logger.warning(
                "ORTModule(model): the model is an ORTModule already; the %s in it is wrapped anew",
                type(module.module).__name__,
            )
            module = module.module
        _check(module)
        reduction = None if process_group is None else reductions.join(module, process_group)
        self._wrap(module, debug_options or DebugOptions(), strict, memory_budget, reduction)

    def _wrap(
        self,
        module: torch.nn.Module,
        debug: DebugOptions,
        strict: bool,
        memory_budget: int | str | None = None,
        reduction: reductions.Reduction | None = None,
    ) -> None:
        self._share(module)
        about.note_model(module)
        debug.apply()
        self.__dict__["_gradd_options"] = debug
        self.__dict__["_gradd_strict"] = strict
        self.__dict__["_gradd_memory"] = memory_budget
        self.__dict__["_gradd_reduction"] = reduction
        self.__dict__["_gradd_compiled"] = made = self._compile()
        self.__dict__["_gradd_tally"] = made.tally

    def _share(self, module: torch.nn.Module) -> None:
        """Takes the module's tables for its own."""
        training = module.training
        self.__dict__["_gradd_module"] = module
        self.__dict__["_gradd_parts"] = {}
        self.__dict__["_gradd_methods"] = {}
        self.__dict__["_gradd_sharded"] = False
        self.__dict__["_gradd_policy"] = None
        torch.nn.Module.__init__(self)
        module.training = training
        for name in module_tables.SHARED:
            self.__dict__[name] = module.__dict__[name]
        for name in module_tables.replaced_steps(type(module)):
            self.__dict__[name] = getattr(module, name)

    def _compile(
        self, tally: Tally | None = None, method: Callable[..., Any] | None = None
    ) -> Compiled:
        """What runs calls of the module, or of one of its methods.

        Args:
            tally: Of the whole module, if this is a part or a method of it.
            method: Of the module, in place of its forward.
        """
        module = self._gradd_module
        made = Compiled(
            module,
            method,
            strict=self._gradd_strict,
            debug=self._gradd_options,
            # A module with hooks runs in PyTorch, and there those of the root must run as well.
            in_torch=module if method is None else method,
            memory_budget=self._gradd_memory,
            tally=tally,
            flags=FINITE_CHECK if self._gradd_options.finite_check else 0,
            reduction=self._gradd_reduction,
        )
        if self._gradd_policy is not None:
            made.take(self._gradd_policy)
        return made

    # ---- the call ----

    __call__ = forwarding.call_wrapper
    # The wrapped module's forward, in the daemon; assigned, it is replaced.
    forward = forwarding.Attribute()

    def gradd_stats(self) -> dict[str, Any]:
        """Counts since construction; see docs/messages.md for reasons.

        Returns:
            A dict, which a notebook shows as a table. Where the work ran: `forwards` (in the
            daemon), `in_torch` (a dict from reason to count; empty if all ran in the daemon), of
            that `fallbacks` (calls, or graphs) and
            `parts_in_torch` (parts of calls), `breaks` (graph breaks). Graphs: `captures`,
            `graphs`, `plans`, `repeated_forwards` (for outputs that were read late). Self-checks:
            `self_checks` (passed), `self_check_failures`, `self_checks_on_few_rows`,
            `self_check_forwards` (of the daemon), `self_check_seconds`, `last_checked_step`. Rows
            left out: `rows` (of the batches that were looked at), `unlabelled_rows_left_out`,
            `padding_rows_left_out`, `flops_left_out`.
            The process's session: `wait_ms` (in the daemon's queue), `compute_ms`, `arena_bytes`
            (the most that its runs took at once), `recoveries` (daemons that were lost).
            Memory: `slots` (sets of gradient buffers), `mirrored` (parameters that are copied
            before every forward), `shared_bytes`. Under GRADD_DISABLE only `captures`, `forwards`,
            `fallbacks` and `in_torch`.
        """
        return self._gradd_compiled.stats()

    def gradd_explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explains the daemon's work in a call with these arguments, planned but not run.

        Args:
            args: Positional arguments of the call.
            kwargs: Its keyword arguments. Without any arguments: the call that ran last.

        Returns:
            A gradd.explain.Explanation, which prints as a table.

        Raises:
            ValueError: No arguments, and no call has run in the daemon, or its plan is gone.
        """
        from gradd.explain import explain_call

        return explain_call(self._gradd_compiled, args, kwargs)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._gradd_module

    # ---- transparency ----

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped module's: isinstance() holds for it and for ORTModule, type() is ORTModule.

        So Trainer saves a configuration and finds the names of labels. Assigned, it is the wrapped
        module's, too, as torch.nn.utils.parametrize wants it. Dynamo, which would take methods from
        there and compile them, is told the truth.
        """
        module = self.__dict__.get("_gradd_module")
        traced = torch._guards.detect_fake_mode() is not None
        return type(self) if module is None or traced else module.__class__

    @property  # type: ignore[override]
    def training(self) -> bool:
        """Mode of the wrapped module."""
        return self._gradd_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._gradd_module.training = mode

    def train(self, mode: bool = True) -> ORTModule:
        """Sets the mode of the wrapped module."""
        self._gradd_module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_gradd_module")
        if module is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name == _OF_ORT and not hasattr(module, name):
            raise AttributeError(
                f"{name} was internal to ONNX Runtime's ORTModule, and gradd has none: "
                "docs/old-names.md says what to use"
            )
        value = getattr(module, name)
        if name == "generate":  # transformers' calls the module itself
            self._gradd_compiled.say_decoding()
        if isinstance(value, torch.nn.Module):
            return self._part(value)
        if inspect.ismethod(value) and value.__self__ is module and self._takes(value.__func__):
            # A method that calls self(...) then goes through the daemon as well.
            return types.MethodType(value.__func__, self)
        if _COMPUTES.fullmatch(name) and inspect.ismethod(value) and value.__self__ is module:
            return self._method(value)
        return value

    def _takes(self, method: Any) -> bool:
        """True for a method that is bound to the wrapper: the user's, and FSDP's if it is there."""
        return _is_users(method) or (self._gradd_sharded and method.__module__.startswith(_FSDP))

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The wrapped module and those in it; after fully_shard(), which knows it, this wrapper."""
        module = self._gradd_module
        for name, one in module.named_modules(memo, prefix, remove_duplicate):
            yield name, self if one is module and self._gradd_sharded else one

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and value.__module__.startswith(_FSDP):
            self.__dict__["_gradd_sharded"] = True
        if name in _OWN or name == "forward":
            object.__setattr__(self, name, value)
            return
        module = self.__dict__.get("_gradd_module")
        if module is None or name in torch.nn.Module.__dict__ or _is_hook_table(name):
            self.__dict__[name] = value
            return
        setattr(module, name, _own(value))

    def __delattr__(self, name: str) -> None:
        if name == "forward":
            object.__delattr__(self, name)
            return
        delattr(self._gradd_module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._gradd_module)})

    def __repr__(self) -> str:
        return f"ORTModule({self._gradd_module!r})"

    def __len__(self) -> int:
        return len(self._gradd_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, iter(self._gradd_module))  # type: ignore[call-overload]

    def __getitem__(self, index: Any) -> Any:
        return self._item(self._gradd_module[index])  # type: ignore[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._gradd_module[index] = _own(value)  # type: ignore[index]

    def __delitem__(self, index: Any) -> None:
        del self._gradd_module[index]  # type: ignore[attr-defined]

    # ---- parts ----

    def _item(self, value: Any) -> Any:
        return self._part(value) if isinstance(value, torch.nn.Module) else value

    def _part(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module that is asked for: a child, so that a call of it runs in the daemon."""
        if torch.compiler.is_compiling():
            return module
        known = self._gradd_parts.get(id(module))
        if known is not None and known.module is module:
            return known
        if options.get("GRADD_DISABLE"):
            return module
        if isinstance(module, ORTModule):
            return module  # it does so anyway
        if type(module).forward is torch.nn.Module.forward and not any(module.children()):
            return module  # nothing can be called
        children = set(map(id, self._gradd_module.children()))
        if id(module) not in children:
            return module
        for gone in self._gradd_parts.keys() - children:  # another module has taken its place
            del self._gradd_parts[gone]
        kind = next((k for listed, k in _LISTS.items() if isinstance(module, listed)), _Part)
        made = self._gradd_parts[id(module)] = kind(module, self)
        return made

    def _method(self, method: types.MethodType) -> Callable[..., Any]:
        """A method of a library that computes: so that a call of it runs in the daemon."""
        if torch.compiler.is_compiling() or options.get("GRADD_DISABLE"):
            return method
        known = self._gradd_methods.get(method.__name__)
        if known is None or known.forward != method:
            known = self._compile(self._gradd_tally, method)
            self._gradd_methods[method.__name__] = known

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return known(*args, **kwargs)

        return call

    # ---- copies ----

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not object's: pickle compares what it finds there with __class__.
        given = (self._gradd_options, self._gradd_strict, self._gradd_memory)
        given += (self._gradd_reduction,)
        return _again, (type(self), self._gradd_module, *given)

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "torch.nn.DataParallel around ORTModule is not supported: use "
            "DistributedDataParallel, one process per replica"
        )


class _Part(ORTModule):
    """A child of a wrapped module as a script asks for it: called by itself, it is compiled too.

    Everything else is the child's: hooks, which are then part of its graph, copies, and what it is
    equal to. Its calls count as those of the wrapped module.
    """

    def __init__(self, module: torch.nn.Module, whole: ORTModule) -> None:
        self._share(module)
        names = ("_gradd_options", "_gradd_strict", "_gradd_memory", "_gradd_reduction")
        for name in (*names, "_gradd_policy"):
            self.__dict__[name] = whole.__dict__[name]
        self.__dict__["_gradd_tally"] = whole._gradd_tally

    def __getattr__(self, name: str) -> Any:
        if name == "_gradd_compiled":  # at the first call
            made = self.__dict__[name] = self._compile(self._gradd_tally)
            return made
        return super().__getattr__(name)

    def __eq__(self, other: object) -> bool:
        return (other.module if issubclass(type(other), _Part) else other) is self._gradd_module

    def __hash__(self) -> int:
        return hash(self._gradd_module)

    def __repr__(self) -> str:
        return repr(self._gradd_module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._gradd_module,)


class _List(_Part):
    """A ModuleList or Sequential, whose items are parts as well; it takes in modules themselves."""

    def append(self, module: torch.nn.Module) -> _List:
        self._gradd_module.append(_own(module))  # type: ignore[operator]
        return self

    def insert(self, index: int, module: torch.nn.Module) -> None:
        self._gradd_module.insert(index, _own(module))  # type: ignore[operator]

    def extend(self, modules: Iterable[torch.nn.Module]) -> _List:
        self._gradd_module.extend([_own(module) for module in modules])  # type: ignore[operator]
        return self

    __iadd__ = extend

    def __add__(self, modules: Iterable[torch.nn.Module]) -> torch.nn.Module:
        return self._gradd_module + [_own(module) for module in modules]  # type: ignore[operator]


class _Dict(_Part):
    """A ModuleDict, whose values are parts as well; it takes in modules themselves."""

    def update(self, modules: Any) -> None:
        pairs = modules.items() if hasattr(modules, "items") else modules
        self._gradd_module.update([(k, _own(m)) for k, m in pairs])  # type: ignore[operator]

    def values(self) -> Iterator[torch.nn.Module]:
        return (self._part(m) for m in self._gradd_module.values())  # type: ignore[operator]

    def items(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((k, self._part(m)) for k, m in self._gradd_module.items())  # type: ignore[operator]


_LISTS: dict[Any, type[_Part]] = {
    torch.nn.ModuleList: _List,
    torch.nn.Sequential: _List,
    torch.nn.ModuleDict: _Dict,
}


def _own(value: Any) -> Any:
    """What a wrapped module takes in: a module in place of the part, also within another module."""
    if isinstance(value, torch.nn.Module) and issubclass(type(value), _Part):
        return value.module
    if isinstance(value, torch.nn.Module) and not isinstance(value, ORTModule):
        for module in list(value.modules()):
            children = vars(module)[module_tables.SUBMODULES]  # twice what is in there twice
            for name, child in list(children.items()):
                if issubclass(type(child), _Part):
                    module.add_module(name, child.module)
    return value


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _again(
    kind: type[ORTModule],
    module: torch.nn.Module,
    debug: DebugOptions,
    strict: bool,
    memory_budget: int | str | None = None,
    reduction: reductions.Reduction | None = None,
) -> ORTModule:
    """A wrapper as it was when it was pickled or copied."""
    made = kind.__new__(kind)
    made._wrap(module, debug, strict, memory_budget, reduction)
    return made


def configure(wrapped: ORTModule, debug: DebugOptions, policy: FallbackPolicy | None) -> None:
    """Gives a wrapped module other debug options, and another policy, from its next call on.

    Its graphs are made again, for a policy decides what is in them, and its counts begin again.

    Args:
        wrapped: The module. Copies of it have the policy of the environment again.
        debug: The options.
        policy: None = it stays as it is.
    """
    debug.apply()
    wrapped.__dict__["_gradd_options"] = debug
    if policy is not None:
        wrapped.__dict__["_gradd_policy"] = policy
    wrapped._gradd_parts.clear()  # made again when they are asked for
    wrapped._gradd_methods.clear()
    wrapped.__dict__["_gradd_compiled"] = made = wrapped._compile()
    wrapped.__dict__["_gradd_tally"] = made.tally


def _check(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"ORTModule wraps a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.nn.DataParallel):
        raise TypeError(
            "ORTModule cannot wrap torch.nn.DataParallel: use DistributedDataParallel around "
            "ORTModule, one process per replica"
        )


def _is_hook_table(name: str) -> bool:
    ends = ("_hooks", "_hooks_with_kwargs", "_called", "_full_backward_hook")
    return name.startswith("_") and name.endswith(ends)


def _is_users(function: Any) -> bool:
    """True for methods that the user wrote and that do not depend on super()."""
    where = getattr(function, "__module__", "") or ""
    if f"{where}.".startswith(_LIBRARIES):
        return False
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" not in code.co_freevars


def _delegate(name: str, chained: bool) -> Any:
    original = getattr(torch.nn.Module, name)

    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._gradd_module, name)(*args, **kwargs)
        return self if chained else result

    method.__name__, method.__doc__ = name, original.__doc__
    return method


for _name in _DELEGATED:
    setattr(ORTModule, _name, _delegate(_name, False))
for _name in _CHAINED:
    setattr(ORTModule, _name, _delegate(_name, True))
for _name in vars(torch.nn.Module):
    if _name.startswith("register_") and _name not in _DELEGATED:
        setattr(_Part, _name, _delegate(_name, False))
