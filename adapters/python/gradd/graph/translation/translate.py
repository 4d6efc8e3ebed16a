"""Translation of an exported program to ONNX opset 23, with the stock exporter's defects repaired.

The train-mode program is translated directly if every operator is functional and has a translation,
or consists of operators that have one; this skips the exporter's decomposition (several times the
rest). Otherwise the program is decomposed first. This module depends on internals of torch, as does
doubles.py, which widens its constants.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir
import torch

from gradd import private
from gradd.graph import nodes, numbers, rules
from gradd.graph.decompose import decompose
from gradd.graph.locations import location_of
from gradd.graph.nodes import Operator
from gradd.graph.translation import doubles, operators, shapes, stock
from gradd.spec import CaptureError

OPSET = 23

_EFFECTS = "with_effects"  # torch puts it around the assertions of an operator
# Operators that are functional by schema but whose direct translation loses training semantics.
_DECOMPOSE = {
    "aten::batch_norm",
    "aten::instance_norm",
    "aten::_batch_norm_impl_index",
}
# Errors that only say that there was another one.
_WRAPPERS = frozenset({"ConversionError", "GraphConstructionError", "PassError"})


def to_onnx(program: Any) -> tuple[Any, Any]:
    """Translates an ExportedProgram prepared by fx.prepare().

    Returns:
        The onnx_ir model (parameters and buffers still initializers) and the program that it
        was made from, whose signature describes inputs and outputs.

    Raises:
        CaptureError: "unsupported_operator" or "input_mutation".
    """
    registry = stock.table()
    try:
        _inline_untranslated(program, registry)
        if all(_is_direct(node.target, registry) for node in _calls(program)):
            try:
                return _direct(program, registry)
            except CaptureError:
                raise
            except Exception:  # a translation that only knows core operators
                pass
        return _decomposed(program, registry)
    except CaptureError:
        raise
    except Exception as err:
        raise _explain(err) from err


def _inline_untranslated(program: Any, registry: Any) -> None:
    """Operators without a translation become those of which they consist, where that is enough."""

    def wanted(target: Operator) -> bool:
        return target.name() not in _DECOMPOSE and not registry.is_registered(target)

    graph = program.graph_module.graph
    functions = [n.target for n in graph.nodes if isinstance(n.target, Operator)]
    if any(nodes.is_mutable(f) or f.name() in _DECOMPOSE for f in functions):
        return
    if any(map(wanted, functions)):
        decompose(graph, program.graph_signature, wanted, _untranslated(registry))


def _direct(program: Any, registry: Any) -> tuple[Any, Any]:
    _promote(program)
    return _translated(program, registry), program


def _translated(program: Any, registry: Any) -> Any:
    _round_down(program)
    shapes.name_ones(program.graph_module.graph)
    with doubles.translating(program), _signatures_once():
        return private.to_onnx_program(program, registry=registry).model


def _round_down(program: Any) -> None:
    """Quotients of sizes: ONNX rounds towards zero, Python rounds down.

    Where one may be negative, a // b becomes (a - a % b) // b, which leaves no remainder.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        if not isinstance(node.meta.get("val"), torch.SymInt) or _is_positive(node):
            continue
        over, under = node.args
        a, b = (x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args)
        with graph.inserting_before(node):
            rest = graph.call_function(operator.mod, (over, under))
            whole = graph.call_function(operator.sub, (over, rest))
        rest.meta, whole.meta = {**node.meta, "val": a % b}, {**node.meta, "val": a - a % b}
        node.args = (whole, under)


def _is_positive(quotient: torch.fx.Node) -> bool:
    """Whether neither operand can be negative."""
    symbols = quotient.meta["val"].node.shape_env
    for operand in quotient.args:
        value = operand.meta["val"] if isinstance(operand, torch.fx.Node) else operand
        if isinstance(value, torch.SymInt):
            value = symbols.bound_sympy(value.node.expr).lower
        if not value >= 0:
            return False
    return True


@contextlib.contextmanager
def _signatures_once() -> Iterator[None]:
    """Replaces the library's function that makes signatures, one capture at a time.

    The exporter asks for one per node of ONNX, which takes a third of its time.
    """
    library = ir.schemas.OpSignature
    make = library.from_op_schema

    def known(schema: Any) -> Any:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in _signatures:
            _signatures[key] = make(schema)
        return _signatures[key]

    library.from_op_schema = known  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        library.from_op_schema = make  # type: ignore[method-assign]


_signatures: dict[tuple[str, str, int], Any] = {}


def _decomposed(program: Any, registry: Any) -> tuple[Any, Any]:
    decompose(
        program.graph_module.graph, program.graph_signature, rules.LOST.__contains__, rules.LOST
    )
    _refuse_early(program, registry)
    traced = _results(program)
    program = program.exported().run_decompositions(_untranslated(registry))
    decompose(program.graph_module.graph, program.graph_signature)  # chunk() is a split by now
    nodes.drop_assertions(program.graph_module.graph)
    _promote(program)
    _check_signature(program.graph_signature)
    _check_results(traced, _results(program))
    _refuse(n for n in _calls(program) if not _is_translated(n.target, registry))
    return _translated(program, registry), program


@functools.cache
def _untranslated(registry: Any) -> dict[Any, Any]:
    """torch's rules for operators that have no translation: gathering them takes 0.1 s."""
    found = dict(private.decompositions)
    found |= torch.export.default_decompositions().items()
    return {
        target: rule
        for target, rule in (found | rules.LOST | rules.CELLS).items()
        if isinstance(target, Operator) and not registry.is_registered(target)
    }


def _calls(program: Any) -> list[torch.fx.Node]:
    return [n for n in program.graph_module.graph.nodes if n.op == "call_function"]


def _is_translated(target: Any, registry: Any) -> bool:
    return registry.is_registered(target) or getattr(target, "__name__", "") == "getitem"


def _refuse_early(program: Any, registry: Any) -> None:
    """Refuses operators that torch's decompositions would not replace.

    They need not be tried then, for they take several times as long as the translation.
    """
    calls = _calls(program)
    for node in calls:
        row = operators.table().get(node.target)
        if getattr(row, "refuses", False):
            try:
                row()  # type: ignore[misc]
            except CaptureError as error:
                raise CaptureError(error.reason, f"{location_of(node)}: {error.message}") from None
    _refuse(n for n in calls if _is_final(n, registry))


def _is_final(node: torch.fx.Node, registry: Any) -> bool:
    """Whether torch's decompositions leave a node as it is, and it has no translation."""
    target = node.target
    if not isinstance(target, Operator) or registry.is_registered(target):
        return False
    if not node.users or nodes.is_mutable(target) or nodes.is_assertion(target):
        return False  # removed, or made functional
    composed = target.has_kernel_for_dispatch_key("CompositeImplicitAutograd")
    return not composed and target not in _untranslated(registry)


def _refuse(found: Iterable[torch.fx.Node]) -> None:
    """Names all kinds of operators that have no translation; the exporter names the first."""
    kinds: dict[str, list[torch.fx.Node]] = {}
    for node in found:
        kinds.setdefault(str(node.target), []).append(node)
    if len(kinds) > 1:
        kinds.pop(_EFFECTS, None)
    if kinds:
        texts = [
            f"{location_of(nodes[0])}: {kind}" + (f" ({len(nodes)} of them)" if nodes[1:] else "")
            for kind, nodes in kinds.items()
        ]
        raise CaptureError("unsupported_operator", f"no translation to ONNX for {'; '.join(texts)}")


def _results(program: Any) -> list[torch.fx.Node]:
    """The nodes whose values forward() returns, in order."""
    named = {node.name: node for node in program.graph_module.graph.nodes}
    specs = program.graph_signature.output_specs
    names = [getattr(s.arg, "name", None) for s in specs if s.kind.name == "USER_OUTPUT"]
    return [named[name] for name in names if name in named]


def _check_results(traced: list[torch.fx.Node], decomposed: list[torch.fx.Node]) -> None:
    """Decomposition must not change the trace's types and sizes of the results."""
    for node, new in zip(traced, decomposed, strict=True):
        a, b = node.meta.get("val"), new.meta.get("val")
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if a.dim() != b.dim() or a.dtype != b.dtype:
            raise CaptureError(
                "unsupported_operator",
                f"{location_of(node)}: {node.target} gives {a.dtype} of rank {a.dim()}; torch's "
                f"decomposition makes it {b.dtype} of rank {b.dim()}",
            )


def _name_outputs(program: Any) -> None:
    """Follows the results that type promotion has put a cast behind, which it does not say."""
    (results,) = program.graph_module.graph.output_node().args
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(node, torch.fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = node.name


def _is_direct(target: Any, registry: Any) -> bool:
    if not isinstance(target, Operator):
        return _is_translated(target, registry)
    if target.name() in _DECOMPOSE or nodes.is_mutable(target):
        return False
    return registry.is_registered(target)


def _promote(program: Any) -> None:
    """Makes explicit the conversions of element types that operators do with their operands.

    torch's pass runs the graph that it is given: it gets the operators alone that convert.
    """
    for node in list(filter(_needs_promotion, program.graph_module.graph.nodes)):
        _promote_node(node)
    _name_outputs(program)


def _promote_node(node: torch.fx.Node) -> None:
    alone, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for operand in node.all_input_nodes:
        copies[operand] = alone.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    alone.output(alone.node_copy(node, copies.__getitem__))
    private.promote(torch.fx.GraphModule({}, alone))
    with node.graph.inserting_before(node):
        given = {copy: operand for operand, copy in copies.items()}
        promoted = node.graph.graph_copy(alone, given)
    node.replace_all_uses_with(promoted)
    node.graph.erase_node(node)


def _needs_promotion(node: torch.fx.Node) -> bool:
    """True if an operator mixes element types, computes floats from integers, or takes a size."""
    if node.op != "call_function" or node.target in operators.TYPE_STABLE:
        return False
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(node.target, Operator):
        return False
    promoted = node.target.overloadpacket.__name__ in _PROMOTED
    if not promoted and torch.Tag.pointwise not in node.target.tags:
        return False
    operands = [a.meta.get("val") for a in node.all_input_nodes]
    dtypes = {t.dtype for t in operands if isinstance(t, torch.Tensor)}
    if len(dtypes) > 1 or any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in operands):
        return True
    if dtypes and result.dtype is not torch.bool and result.dtype not in dtypes:
        return True
    has_float = any(isinstance(a, (float, torch.SymFloat)) for a in node.args)
    return has_float and any(not t.is_floating_point for t in dtypes)


# Of the operators that convert their operands those that are not tagged as pointwise.
_PROMOTED = {
    *("addr", "all", "amax", "amin", "any", "cat", "cumprod", "cumsum", "dot", "floor_divide"),
    *("fill", "glu", "huber_loss", "isreal", "l1_loss", "logsumexp", "mse_loss", "nll_loss"),
    *("pdist", "poisson_nll_loss", "prelu", "prod", "smooth_l1_loss", "std", "std_mean", "sum"),
    *("var", "vdot"),
}


def _check_signature(signature: Any) -> None:
    for spec in signature.output_specs:
        if spec.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(
                "input_mutation", f"forward() writes to the parameter {spec.target!r}"
            )


def _explain(err: BaseException) -> CaptureError:
    seen: BaseException | None = err
    text = ""
    while seen is not None:
        if isinstance(seen, CaptureError):
            placed = " @ " in seen.message
            return seen if placed else CaptureError(seen.reason, _named(err, seen.message))
        if type(seen).__name__ == "DispatchError" or "No ONNX function found" in str(seen):
            line = str(seen).strip().splitlines()[0]  # a translation, but not for this overload
            return CaptureError("unsupported_operator", _named(err, line))
        if not text or type(seen).__name__ not in _WRAPPERS:
            text = f"{type(seen).__name__}: {''.join(str(seen).strip().splitlines()[:1])[:300]}"
        seen = seen.__cause__ or seen.__context__
    return CaptureError("unsupported_operator", _named(err, text))


def _named(err: BaseException, text: str) -> str:
    """The text, and in front of it the operator that was being worked on, with its location."""
    found, seen = None, [err]
    while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None:
        seen.append(cause)
    for error in seen:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for value in frame.f_locals.values():
                if isinstance(value, torch.fx.Node) and value.op == "call_function":
                    found = value
    if found is None:
        return text
    if isinstance(found.target, Operator) and (names := numbers.changing(found)):
        text = f"{', '.join(names)} has to be a constant, and is a number that changes"
    return f"{location_of(found)}: {found.target} ({text})"
