"""Every public name, variable and option has a docstring or a help, a page, and a test."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gradd_aliases import modules

from gradd import options
from helpers import ROOT

pytestmark = pytest.mark.quick
_PACKAGES = (
    "gradd",
    "gradd.optim",
    "gradd.errors",
    "optimum.gradd",
    "gradd.train",
    *modules.MODULES,
)
_REFERENCE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_FLAG = re.compile(r'^OPTION\(\w+, \w+, .*?"(--[\w-]+)", "(\w*)"', re.MULTILINE)


def _public() -> Iterator[tuple[str, Any]]:
    """Names that users import, old ones as well, and those of the Python reference."""
    for package in _PACKAGES:
        module = importlib.import_module(package)
        named = getattr(module, "__all__", None)
        for name in named if named is not None else vars(module):
            value = getattr(module, name)
            own = named is not None or getattr(value, "__module__", "") == package
            if own and not name.startswith("_") and (named or inspect.isclass(value)):
                yield name, value
    for path in _REFERENCE.findall((ROOT / "docs" / "python.md").read_text()):
        module_name, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module_name), name)
        if not inspect.ismodule(value):
            yield name, value


def _methods(value: Any) -> Iterator[tuple[str, Any]]:
    """Those that a class has itself, without those of the libraries behind it."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            known = (vars(base).get(name) for base in value.__mro__[1:])
            if not any(getattr(one, "__doc__", None) for one in known):
                yield name, member


@cache
def _words(folder: str, *kinds: str) -> frozenset[str]:
    files = itertools.chain(*((ROOT / folder).rglob(kind) for kind in kinds))
    texts = (file.read_text() for file in files if file != Path(__file__))
    return frozenset(itertools.chain(*(re.findall(r"[\w-]+", text) for text in texts)))


def _words_of(where: str) -> frozenset[str]:
    """Of the pages, or of the tests."""
    kinds = {"page": ("docs", "*.md"), "test": ("tests", "*.py", "*.c")}
    return _words(*kinds[where])


def test_public_names_have_docstrings() -> None:
    found = dict(_public())
    assert {"ORTModule", "FusedAdam", "accelerate", "ORTTrainer", "StaleError"} <= found.keys()
    bare = [name for name, value in found.items() if not (value.__doc__ or "").strip()]
    for name, value in found.items():
        bare += [f"{name}.{m}" for m, member in _methods(value) if not member.__doc__]
    assert not bare


@pytest.mark.parametrize("where", ["page", "test"])
def test_public_names_are_in(where: str) -> None:
    """Tests know an exception of the daemon by its class or by its code."""
    words = _words_of(where)
    lacking = set()
    for name, value in _public():
        if name not in words and (where == "page" or getattr(value, "code", "") not in words):
            lacking.add(name)
    assert not lacking


@pytest.mark.parametrize("where", ["page", "test"])
def test_variables_and_flags_are_in(where: str) -> None:
    """One test goes over all variables without effect; a flag may be tested as a variable."""
    rows = (ROOT / "server" / "host" / "options.inc").read_text().replace("\n", " ")
    pairs = _FLAG.findall(rows.replace("OPTION(", "\nOPTION("))
    assert len(pairs) > 15
    words = _words_of(where)
    lacking = [flag for flag, name in pairs if not {flag, name} & words]
    for option in options.OPTIONS:
        assert option.help
        if (option.effective or where == "page") and option.name not in words:
            lacking.append(option.name)
    assert not lacking
