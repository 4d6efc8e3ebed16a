"""Modules that forward() imports: another one under the same name is another answer."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scaled import Scaled

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.ones(2, 3)


def _put(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _world(value: float) -> None:
    """A package and a module that stand for something else with every value."""
    _put("gradd_pack", k=value, __path__=[])
    _put("gradd_pack.part", k=value * 2)
    _put("gradd_plain", k=value * 3)


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(sys.modules)
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    yield
    for name in [n for n in sys.modules if n.startswith("gradd_p") and n not in before]:
        del sys.modules[name]


def _statement() -> float:
    import gradd_plain

    return gradd_plain.k


def _renamed() -> float:
    import gradd_pack.part as other

    return other.k


def _dotted() -> float:
    import gradd_pack.part

    return gradd_pack.part.k


def _name() -> float:
    from gradd_plain import k as value

    return value


def _submodule() -> float:
    from gradd_pack import part

    return part.k


def _in_class() -> float:
    class Holder:
        from gradd_plain import k

    return Holder.k


def _relative() -> float:
    names = {"__package__": "gradd_pack", "__name__": "gradd_pack.me"}
    exec("from . import part\nfrom .part import k", names)
    return names["part"].k + names["k"]


def _builtin_level() -> float:
    return __import__("part", {"__package__": "gradd_pack"}, {}, ["k"], 1).k


FOUND: dict[str, Callable[[], Any]] = {
    "import": _statement,
    "import as": _renamed,
    "import with dots": _dotted,
    "from import": _name,
    "from package": _submodule,
    "in a class": _in_class,
    "relative": _relative,
    "import_module": lambda: importlib.import_module("gradd_plain").k,
    "import_module, relative": lambda: importlib.import_module(".part", "gradd_pack").k,
    "import_module, by name": lambda: importlib.import_module(name="gradd_pack.part").k,
    "__import__": lambda: __import__("gradd_plain").k,
    "__import__ with a list": lambda: __import__("gradd_pack.part", fromlist=["k"]).k,
    "__import__ with a level": _builtin_level,
    "mapped": lambda: next(iter([m.k for m in map(importlib.import_module, ["gradd_plain"])])),
}


def _both(take: Callable[[], Any], changes: list[Callable[[], Any]]) -> Any:
    """Ours and eager side by side; returns what ours has counted."""
    ours, eager = ORTModule(Scaled(take)), Scaled(take)
    for change in changes:
        change()
        for _ in range(2):
            assert ours(X).tolist() == eager(X).tolist()
    return ours.gradd_stats()


@pytest.mark.parametrize("name", FOUND)
def test_another_module_is_seen(name: str) -> None:
    changes = [lambda v=v: _world(v) for v in (1.0, 2.0, 5.0)]
    stats = _both(FOUND[name], changes)
    if name != "mapped":
        assert stats["fallbacks"] == {}
        assert stats["captures"] == 3


def _optional() -> float:
    try:
        import gradd_plain
    except ImportError:
        return 1.0
    return gradd_plain.k


def _optional_function() -> float:
    try:
        return importlib.import_module("gradd_plain").k
    except ModuleNotFoundError:
        return 1.0


def _looked_for() -> float:
    return 1.0 + (importlib.util.find_spec("gradd_plain") is not None)


def _looked_up() -> float:
    return 1.0 + ("gradd_plain" in sys.modules)


def _found() -> None:
    module = _put("gradd_plain", k=2.0)
    module.__spec__ = importlib.util.spec_from_loader("gradd_plain", None)


def _gone() -> None:
    sys.modules.pop("gradd_plain", None)


@pytest.mark.parametrize("take", [_optional, _optional_function, _looked_for, _looked_up])
def test_a_module_that_appears_and_goes(take: Callable[[], Any]) -> None:
    _both(take, [_gone, _found, _gone, _found])
    _both(take, [_found, _gone, _found])


def test_a_module_that_is_forbidden() -> None:
    stats = _both(_optional, [lambda: sys.modules.update(gradd_plain=None), _found])
    assert stats["fallbacks"] == {}


def test_a_file_that_appears_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write() -> None:
        (tmp_path / "gradd_plain.py").write_text("k = 4.0\n")
        importlib.invalidate_caches()

    assert set(_both(_optional, [lambda: None, write])["fallbacks"]) == {"outside_state"}


def test_a_first_import_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gradd_plain.py").write_text("k = 4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stats = _both(_statement, [lambda: None, _found])
    assert stats["fallbacks"] == {}
    assert stats["captures"] == 2


def test_an_import_of_the_users_own() -> None:
    plain = builtins.__import__
    scale = types.SimpleNamespace(k=2.0)

    def replaced(name: str, *args: Any, **kwargs: Any) -> Any:
        return scale if name == "gradd_plain" else plain(name, *args, **kwargs)

    def replace() -> None:
        builtins.__import__ = replaced

    def change() -> None:
        scale.k = 7.0

    def restore() -> None:
        builtins.__import__ = plain

    _both(_statement, [lambda: _world(1.0), replace, change, restore])


def test_a_module_that_is_loaded_again_in_every_call() -> None:
    _world(1.0)
    stats = _both(lambda: importlib.reload(importlib).__name__ == "importlib", [lambda: None])
    assert set(stats["fallbacks"]) == {"outside_state"}


def test_the_evaluation_of_annotations_is_refused() -> None:
    class Noted:
        value: "Factor"  # noqa: F821, UP037

    _world(1.0)

    def take() -> float:
        return 1.0 + (typing.get_type_hints(Noted)["value"] is int)

    def change(kind: type) -> Callable[[], None]:
        return lambda: globals().__setitem__("Factor", kind)

    assert set(_both(take, [change(int), change(str)])["fallbacks"]) == {"outside_state"}
    del globals()["Factor"]
