"""Work that the first call of a module does once, or leaves out: the bytes of graphs stay."""

from __future__ import annotations

import gc
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule, private
from gradd.dynamo import settings
from gradd.dynamo.program import Program
from gradd.dynamo.tracers import logged
from gradd.graph.translation import inference, rewrites
from gradd.memory import garbage
from gradd.spec import CaptureError
from helpers.graphs.captures import Lambda, capture
from helpers.models import families
from helpers.nets import Net
from helpers.selection import every_run

X = torch.linspace(-1, 1, 40).reshape(5, 8)


def _bytes(family: str) -> bytes:
    module, make_batch = families.build(family)
    return capture(module, (), make_batch(2, 7, 0)).cap.onnx


@pytest.mark.parametrize("family", every_run(("llama",), ("llama", "bert_cls", "gpt2")))
def test_inference_once_per_kind_of_node_changes_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    infer, once = inference.Folding._infer, inference.Folding._infer_once
    monkeypatch.setattr(
        inference.Folding, "_infer", lambda s, n: (counts.update(["inferred"]), infer(s, n))[1]
    )
    monkeypatch.setattr(
        inference.Folding, "_infer_once", lambda s, n: (counts.update(["all"]), once(s, n))[1]
    )
    made = _bytes(family)
    assert 2 * counts["inferred"] < counts["all"]
    monkeypatch.setattr(inference, "_kind", lambda node: None)
    counts.clear()
    assert _bytes(family) == made and counts["inferred"] == counts["all"]


def _add(
    *sizes: int, number: float | None = None, kind: ir.DataType = ir.DataType.FLOAT
) -> ir.Node:
    a = ir.Value(name="a", shape=ir.Shape(sizes), type=ir.TensorType(kind))
    b = ir.Value(name="b", shape=ir.Shape([1]), type=ir.TensorType(kind))
    if number is not None:
        b.const_value = ir.tensor([number], dtype=kind)
    return ir.Node("", "Add", [a, b])


@pytest.mark.quick
def test_a_kind_is_all_that_inference_reads() -> None:
    nodes = [_add(2, 3), _add(2, 4), _add(2, 3, number=1.0), _add(2, 3, number=2.0)]
    nodes.append(_add(2, 3, kind=ir.DataType.DOUBLE))
    first, *others = map(inference._kind, nodes)
    assert first == inference._kind(_add(2, 3)) and len({first, *others}) == len(nodes)
    known = ir.Node("", "Cast", nodes[0].inputs, [ir.AttrInt64("to", 1)])
    other = ir.Node("", "Cast", nodes[0].inputs, [ir.AttrInt64("to", 11)])
    assert inference._kind(known) != inference._kind(other)
    tensor = [ir.AttrTensor("value", ir.tensor([1.0]))]
    assert inference._kind(ir.Node("", "ConstantOfShape", nodes[0].inputs, tensor)) is None


@pytest.mark.quick
def test_all_rewrites_can_be_one_rule() -> None:
    rules = rewrites.rules()
    assert not any(rule.as_function for rule in rules.all)
    assert {rule.remove_nodes for rule in rules.all} == {True, False}


class _Rule:
    """A rule about one type of node that replaces each of them, or none."""

    as_function, graph_pre_visitor = False, None

    def __init__(self, kind: str, remove_nodes: bool, done: object) -> None:
        self.kind, self.remove_nodes, self.done = kind, remove_nodes, done
        self.tried: list[str] = []
        self.over = 0
        op = SimpleNamespace(matches=lambda kind: kind == self.kind)
        self._target_pattern = SimpleNamespace(output_nodes=[SimpleNamespace(op=op)])

    def try_rewrite(self, model: object, scope: object, node: ir.Node, **options: object) -> object:
        self.tried.append(node.op_type)
        return self.done

    def graph_post_visitor(self) -> None:
        self.over += 1


@pytest.mark.quick
def test_the_first_rule_about_a_node_that_replaces_it_does() -> None:
    given = [_Rule("Add", True, None), _Rule("Exp", True, "a"), _Rule("Add", False, "b")]
    given.append(_Rule("Add", True, "c"))
    one = rewrites.Rules(given)
    exp = ir.Node("", "Exp", [])
    assert one.try_rewrite(None, None, exp) == "a" and one.remove_nodes
    assert one.try_rewrite(None, None, _add(2, number=0.0)) == "b" and not one.remove_nodes
    assert one.try_rewrite(None, None, _add(2, number=1e-9)) is None
    assert one.try_rewrite(None, None, ir.Node("", "Tanh", [])) is None
    assert [rule.tried for rule in given] == [["Add"], ["Exp"], ["Add"], []]
    one.graph_pre_visitor()
    one.graph_post_visitor()
    assert [rule.over for rule in given] == [1] * 4


# ---- operators without a translation ----


@torch.library.custom_op("gradd_tests::ends_a_graph", mutates_args=())
def _of_an_extension(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_of_an_extension.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda s, x: _of_an_extension(x).sum(), "gradd_tests.ends_a_graph.default"),
        (
            lambda s, x: (torch.linalg.qr(x)[1] + torch.linalg.qr(x + 1)[0].sum()).sum(),
            "aten.linalg_qr.default (2 of them)",
        ),
    ],
)
def test_it_is_refused_before_torch_decomposes_the_graph(
    forward: Callable, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decomposed: list[bool] = []
    monkeypatch.setattr(Program, "exported", lambda program: decomposed.append(True))
    with pytest.raises(CaptureError, match=re.escape(named)):
        capture(Lambda(forward), (torch.eye(5),))
    assert not decomposed


def test_what_torch_decomposes_or_leaves_out_is_not_refused_early() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        _of_an_extension(x)  # nothing reads it
        return F.batch_norm(x, None, None, training=True).square().sum()

    capture(Lambda(forward), (torch.randn(5, 4),))


# ---- full collections of garbage ----


class Noting(nn.Module):
    """Notes the thresholds of the collector at each call, where Dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = Net(), []

    @torch.compiler.disable
    def note(self) -> None:
        self.seen.append(gc.get_threshold())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        return self.net(x)


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Of the user's."""
    before = gc.get_threshold()
    gc.set_threshold(901, 11, 12)
    yield 901, 11, 12
    gc.set_threshold(*before)


def test_no_full_collection_starts_in_the_first_call(thresholds: tuple[int, int, int]) -> None:
    module = Noting()
    model = ORTModule(module)
    for _ in range(2):
        model(X).sum().backward()
        assert gc.get_threshold() == thresholds
    first, second = module.seen
    assert first[:2] == thresholds[:2] and first[2] > 10**6
    assert second == thresholds


@pytest.mark.quick
def test_contexts_within_each_other_end_with_the_outer_one(
    thresholds: tuple[int, int, int],
) -> None:
    one, two = garbage.postponed(), garbage.postponed()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 10**6
    two.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


@pytest.mark.quick
def test_thresholds_that_are_set_meanwhile_stay(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(ZeroDivisionError), garbage.postponed():
        gc.set_threshold(5, 6, 7)
        raise ZeroDivisionError
    assert gc.get_threshold() == (5, 6, 7)


@pytest.mark.quick
def test_functions_of_source_files_are_looked_up_for_a_log_that_is_on() -> None:
    """The texts of Dynamo's log `trace_call` are made where it is on, or where gradd is not."""
    base = private.tracer.__base__
    here = SimpleNamespace(f_code=nn.Linear.forward.__code__, inline_depth=0, lineno=0)
    line = here.f_code.co_firstlineno
    log = logging.getLogger(logged._LOGS[0])
    with settings.Applied():
        assert base.get_line_of_code_header(here, lineno=line) == ""
        before = log.level
        log.setLevel(logging.DEBUG)
        try:
            assert f":{line} in forward" in base.get_line_of_code_header(here, lineno=line)
        finally:
            log.setLevel(before)
    assert f":{line} in forward" in base.get_line_of_code_header(here, lineno=line)
