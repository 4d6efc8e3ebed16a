"""Fails when the Python package has a circle of imports, or one module uses another's privates.

An import inside a function counts like any other, a relative one like an absolute one; importing a
module runs the packages around it, so these count as well. One under TYPE_CHECKING makes no circle,
but counts for the floors: a folder of FLOORS imports from those before it alone, and of the modules
beside the folders from BASE. A private name is one with a single underscore in front that some
module of the package defines and the one that uses it does not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folder of sys.path, and the package in it.
PACKAGES = (("adapters/python", "gradd"), ("adapters/optimum", "optimum.gradd"))
FLOORS = ("memory", "session", "graph", "calls", "check", "dynamo")
BASE = frozenset(
    {
        *("about", "arguments", "errors", "fallback", "forwarding", "html_tables", "interrupts"),
        *("module_tables", "options", "private", "progress", "reasons", "spec"),
        *("transforms", "tried"),
    }
)
OURS = re.compile(r"(optimum\.)?gradd(\.|$)")
# Private by their form, and torch's or a tool's own: those of modules and tensors that are read.
FOREIGN = frozenset({"_buffers", "_parameters", "_modules", "_version", "_guards", "_fields"})


def modules(folder: Path, package: str) -> dict[str, ast.Module]:
    """Parsed modules of a package by their dotted name, with absolute imports alone."""
    found = {}
    for path in sorted(folder.joinpath(*package.split(".")).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
        make_absolute(found[name], parts[:-1])
    return found


def make_absolute(tree: ast.Module, package: tuple[str, ...]) -> None:
    """Writes `from .x import y` in a module of the package with the whole name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            node.module = ".".join([*base, *([node.module] if node.module else [])])
            node.level = 0


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def imports(
    name: str, tree: ast.Module, known: dict[str, ast.Module], types: bool = False
) -> set[str]:
    """Which of the known modules this one runs; with `types` also those that it only names."""
    named = []
    for node in ast.walk(tree) if types else statements(tree):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                named.append(inner if inner in known else node.module)
    found = set()
    for one in named:
        parts = one.split(".")
        packages = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        found |= {p for p in packages if p in known and not f"{name}.".startswith(f"{p}.")}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle in order, or none."""
    done: set[str] = set()
    path: list[str] = []

    def walk(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            if found := walk(other):
                return found
        path.pop()
        done.add(name)
        return []

    for name in graph:
        if found := walk(name):
            return found
    return []


def floor(name: str, package: str) -> int:
    """Of a module: 0 of those that all may import, and one above all folders for the rest."""
    first = name.removeprefix(package).lstrip(".").partition(".")[0]
    if first in FLOORS:
        return FLOORS.index(first) + 1
    return 0 if first in BASE or name == package else len(FLOORS) + 1


def upward(graph: dict[str, set[str]], package: str) -> Iterator[str]:
    """Imports from a higher floor, as lines to print."""
    for name, others in graph.items():
        for other in sorted(others):
            if name != package and floor(other, package) > floor(name, package):
                yield f"{name}: imports {other}, which is above it"


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def is_private(name: str) -> bool:
    """One underscore in front."""
    return name.startswith("_") and not name.startswith("__") and name not in FOREIGN


def privates(name: str, tree: ast.Module, all_names: set[str]) -> Iterator[str]:
    """Uses of another module's private names, as lines to print."""
    own = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and OURS.match(node.module or ""):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{name}:{node.lineno}: imports {alias.name}: give it a public name"
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        base = node.value
        if isinstance(base, ast.Name) and base.id in ("self", "cls"):
            continue
        if node.attr in all_names and node.attr not in own:
            yield f"{name}:{node.lineno}: uses {ast.unparse(node)}: give it a public name"


def main() -> int:
    """Prints every problem; returns the exit status."""
    found: list[str] = []
    for folder, package in PACKAGES:
        known = modules(ROOT / folder, package)
        graph = {name: imports(name, tree, known) for name, tree in known.items()}
        if order := circle(graph):
            found.append(f"circle of imports: {' -> '.join(order)}")
        if package == "gradd":
            named = {name: imports(name, tree, known, True) for name, tree in known.items()}
            found += upward(named, package)
        names = {n for tree in known.values() for n in defined(tree)}
        for name, tree in known.items():
            found += privates(name, tree, names)
    print("\n".join(found) if found else "imports: no circle, nothing private is shared")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
