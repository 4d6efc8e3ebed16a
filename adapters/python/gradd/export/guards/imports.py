"""Modules that forward() imports: which object stands under their names in sys.modules.

A statement `import a.b` in a forward reads `sys.modules["a"]` and `sys.modules["a.b"]`, whoever has
put them there. A module that the forward loads for the first time is watched from then on. One that
is not found is a refusal: where it might appear (files, finders, archives) nobody can watch.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

from gradd.export.guards.images import is_a
from gradd.export.guards.reads import Reads

_IMPORT = builtins.__import__
_MODULES = ("importlib", "_frozen_importlib", "_imp")
# Functions of importlib that load something anew whenever they are called.
_LOADERS = frozenset(
    {
        *("reload", "module_from_spec", "exec_module", "load_module", "spec_from_file_location"),
        *("spec_from_loader", "find_loader", "find_module", "create_module"),
    }
)


class Imports:
    """Notes the modules that recorded code imports."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def statement(self, names: dict, name: str, level: int) -> None:
        """An import in code with these globals; `level` counts the dots in front of the name."""
        self.named(_absolute(names, name, level) if level else name)

    def fallback(self, module: Any, name: str) -> None:
        """`from module import name`, where the module has no such attribute."""
        if is_a(module, types.ModuleType) and name not in module.__dict__:
            full = f"{module.__dict__.get('__name__')}.{name}"
            if full in sys.modules:
                self.named(full)

    def named(self, name: Any) -> None:
        """A module is imported by its full name, which imports its packages."""
        if type(name) is not str:
            return
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            self._reads.later(sys.modules, full, f"the module {full}", f"imports {full}")

    def called(self, function: Any, args: list, words: tuple[str, ...]) -> bool:
        """Functions that import what they are given, by whatever name; True if this is one."""
        module = getattr(function, "__module__", None) or ""
        if function is not _IMPORT and not module.startswith(_MODULES):
            return False
        first = len(args) - len(words)
        given = dict(zip(("name", "package"), args[:first], strict=False))
        given |= dict(zip(words, args[first:], strict=True))
        name, kind = given.get("name"), function.__name__
        if kind == "__import__":
            level = args[4] if first > 4 else given.get("level", 0)
            names = args[1] if first > 1 else given.get("globals")
            self.statement(names if is_a(names, dict) else {}, name, level)
        elif kind in ("import_module", "find_spec"):
            dots = len(name) - len(name.lstrip(".")) if type(name) is str else 0
            names = {"__package__": given.get("package") or ""}
            self.statement(names, name[dots:] if dots else name, dots)
            self._spec(kind, name)
        elif kind in _LOADERS:
            self._reads.blank(f"calls {module}.{kind}()")
        return True

    def _spec(self, kind: str, name: Any) -> None:
        found = sys.modules.get(name) if type(name) is str else None
        if kind == "find_spec" and found is not None:
            self._reads.attribute(found, "__spec__")


def _absolute(names: dict, name: Any, level: int) -> Any:
    package = names.get("__package__")
    if package is None:
        package = getattr(names.get("__spec__"), "parent", None)
    if type(package) is not str or type(name) is not str:
        return None
    base = package.rsplit(".", level - 1)[0]
    return f"{base}.{name}" if name else base
