"""Names of torch that its documentation does not show: gradd/private.py has all, each is there.

Without those that have a substitute gradd goes on, as the table says; each other one is named by
the error.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gradd import ORTModule, errors, private
from gradd.dynamo import guards, own_forward, settings, traces
from helpers import ROOT
from helpers.nets import Net, assert_close

SOURCES = [p for p in sorted((ROOT / "adapters").rglob("*.py")) if not p.match("gradd/private.py")]
# Of Python, and of libraries that are no torch.
OTHERS = {
    *("_replace", "_fields", "_asdict", "_getframe", "_data", "_is_overflow"),
    *("_merge_shapes", "_target_pattern", "_prepare_for_training", "_do_inference"),
    *("_clip_grad_norm", "_get_grad_norm", "_opset_imports", "_amp_stash", "_amp_lazy_init"),
}
SUBSTITUTED = [name for name, row in private.NAMES.items() if row.substitute]
# Others are asked of an object, whose AttributeError names them.
NEEDED = [n for n, row in private.NAMES.items() if not row.substitute and n not in vars(private)]
X = torch.linspace(-1, 1, 40).reshape(5, 8)


def _is_hidden(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _path(node: ast.AST) -> list[str]:
    """The words of `a.b.c`; [] of other expressions."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else []


def _own_names(trees: list[ast.Module]) -> set[str]:
    """All that the sources define: functions, classes, attributes, what stands in __slots__."""
    found: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _path(node)[:1] != ["torch"]:
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_shown(path: str) -> bool:
    """Whether the documentation shows a path, or what it is a part of."""
    return any(path == name or path.startswith(f"{name}.") for name in private.DOCUMENTED)


def _is_own(name: str, known: set[str]) -> bool:
    return name in known or name.startswith("_gradd_")


def _hidden_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    known = own | OTHERS | {name.rpartition(".")[2] for name in private.DOCUMENTED}
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        for path in _imported(node):
            words = path.split(".")
            if words[0] == "torch" and any(map(_is_hidden, words)) and not _is_shown(path):
                yield node.lineno, path
        path = _path(node) if id(node) not in inner else []
        if path[:1] == ["torch"] and any(map(_is_hidden, path)):
            if not _is_shown(".".join(path)) and path[1] != "ops":
                yield node.lineno, ".".join(path)
        elif isinstance(node, ast.Attribute) and _path(node)[:1] not in (["torch"], ["_aten"]):
            if _is_hidden(node.attr) and not _is_own(node.attr, known):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and _path(node.func)[-1:] in (["getattr"], ["hasattr"]):
            given = node.args[1]
            name = given.value if isinstance(given, ast.Constant) else ""
            if _is_hidden(name) and not _is_own(name, known):
                yield node.lineno, name


@pytest.mark.quick
def test_no_other_file_uses_such_a_name() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    own = _own_names(list(trees.values()))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in _hidden_names(tree, own)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.quick
@pytest.mark.parametrize(
    "line",
    [
        "torch._C._len_torch_dispatch_stack()",
        "from torch._ops import HigherOrderOperator",
        "from torch.utils import _pytree",
        "import torch._guards",
        "from torch._dynamo import config, eval_frame",
        "torch._dynamo.reset()",
        "torch._higher_order_ops.utils.ops",
        "tensor._use_count()",
        "getattr(tensor, '_use_count', None)",
        "torch._guards.TracingContext.try_get()",
    ],
)
def test_the_walk_sees_one(line: str) -> None:
    assert list(_hidden_names(ast.parse(line), set())) != []


@pytest.mark.quick
@pytest.mark.parametrize(
    "line",
    [
        "torch.ops.aten._to_copy.default",
        "torch._dynamo.config",
        "torch._guards.detect_fake_mode()",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "self._own",
    ],
)
def test_what_is_shown_may_be_used(line: str) -> None:
    assert list(_hidden_names(ast.parse(line), {"_own"})) == []


@pytest.mark.quick
def test_there_are_no_more_than_that() -> None:
    assert len(private.NAMES) <= 25


@pytest.mark.quick
@pytest.mark.parametrize("name", private.NAMES)
def test_each_is_there(name: str) -> None:
    assert private.named(private.NAMES[name].path) is not None


@pytest.mark.quick
@pytest.mark.parametrize("path", private.DOCUMENTED)
def test_what_the_documentation_shows_is_there(path: str) -> None:
    assert private.named(path) is not None


def _without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes torch look as if it had no such name, for lookups from now on."""
    row = private.NAMES[name]
    gone = row._replace(path=row.path + "_gone")
    monkeypatch.setitem(private.NAMES, name, gone)
    monkeypatch.delitem(vars(private), name, raising=False)


@pytest.mark.quick
@pytest.mark.parametrize("name", NEEDED)
def test_an_error_says_which_one_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _without(monkeypatch, name)
    with pytest.raises(ImportError, match=private.NAMES[name].path.replace(".", r"\.")):
        getattr(private, name)


@pytest.mark.quick
def test_each_one_says_what_for_and_what_happens_without_it() -> None:
    for row in private.NAMES.values():
        assert row.use and row.without
    assert sorted(SUBSTITUTED) == sorted(
        [
            "compile_lock",
            "counters",
            "dict_version",
            "keeps_graph",
            "settings",
            "tensor_users",
            "tracer",
        ]
    )


def _assert_trains() -> ORTModule:
    plain, model = Net(), ORTModule(Net())
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(X).square().sum().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(b.grad, a.grad)
    assert model.gradd_stats()["fallbacks"] == {}
    return model


@pytest.mark.usefixtures("daemon")
def test_without_versions_of_dictionaries_values_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, "dict_version")
    _assert_trains()

    class Scaled(torch.nn.Module):
        def by(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by(x)

    model = ORTModule(Scaled())
    supplement = guards.Supplement([Scaled()])
    assert supplement.holds() and supplement.holds()
    assert_close(model(X), X * 2)
    Scaled.by = lambda self, x: x * 3
    assert not supplement.holds()
    assert_close(model(X), X * 3)


@pytest.mark.usefixtures("daemon")
def test_without_counters_no_cause_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "counters")
    assert traces.cause() == "" and traces.Frames.now() == (0, 0)
    _assert_trains()


@pytest.mark.usefixtures("daemon")
def test_without_variables_settings_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "settings")
    assert settings._variable("suppress_errors") is None
    monkeypatch.setattr(settings, "_FAST", False)
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    with settings.Applied():
        assert torch._dynamo.config.skip_nnmodule_hook_guards is False
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before
    _assert_trains()


@pytest.mark.usefixtures("daemon")
def test_without_the_tracer_a_call_may_do_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "tracer")
    assert own_forward.does_more(Net.forward.__code__)
    _assert_trains()


@pytest.mark.usefixtures("daemon")
def test_without_the_flag_a_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "keeps_graph")
    model = ORTModule(Net())
    with pytest.raises(errors.UnsupportedError, match="retain_graph"):
        model(X).sum().backward()


@pytest.mark.usefixtures("daemon")
def test_without_users_of_tensors_they_count_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "tensor_users")
    assert private.tensor_users(X) == 1
    _assert_trains()


@pytest.mark.quick
def test_tables_of_modules_are_found_by_what_a_fresh_one_has() -> None:
    from gradd import module_tables

    net = Net()
    net.register_buffer("scale", torch.ones(3))
    names = dict(net.named_parameters(recurse=False)) | dict(net.named_buffers(recurse=False))
    for name, tensor in names.items():
        assert module_tables.holding(net, name)[name] is tensor
    children = [vars(net)[name] for name in module_tables.NAMES]
    assert any(dict(net.named_children()) == table for table in children)
    assert len(module_tables.NAMES) == 3


@pytest.mark.quick
def test_hooks_of_all_modules_are_in_the_tables_that_are_compared() -> None:
    registered = [
        torch.nn.modules.module.register_module_forward_hook(print),
        torch.nn.modules.module.register_module_forward_pre_hook(print),
        torch.nn.modules.module.register_module_full_backward_pre_hook(print),
    ]
    try:
        for handle in registered:
            assert any(handle.hooks_dict_ref() is table for table in guards.HOOKS_OF_ALL)
    finally:
        for handle in registered:
            handle.remove()


@pytest.mark.quick
def test_modules_and_loggers_have_their_names() -> None:
    """Names of packages that stand in texts: paths of files, names of loggers."""
    assert isinstance(torch._dynamo, ModuleType)
    assert logging.getLogger(private.ONNXRegistry.__module__).name.startswith("torch.onnx")
