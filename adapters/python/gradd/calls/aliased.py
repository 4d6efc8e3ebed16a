"""Results of a call that share memory with other results, or with what the caller has.

The graph computes none of them, see export/shared.py. They are made here, outside of the daemon's
autograd function, with torch's own views: histories, version counters and the rules for writing in
place are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradd.calls.parameters import Place
from gradd.export import Capture, SharedSpec
from gradd.export.dims import form, symbols

_KEPT = 1024  # sizes of calls whose forms are kept


class Aliased:
    """The shared results of one capture.

    Attributes:
        bases: Leaves of the results that others are views of: they have to be computed.
        watched: Leaves that are views of what another result depends on: leaf, what to call it,
            and the leaf of which it is a view.
    """

    def __init__(self, module: torch.nn.Module, cap: Capture) -> None:
        self.specs = cap.shared
        self.bases = {s.source for s in cap.shared if s.kind == "output" and not s.same}
        names = {spec.leaf: spec.name for spec in cap.outputs if spec.kind == "user"}
        needed = frozenset().union(*cap.depends.values())
        self.watched = [
            (s.leaf, f"a view of {names[s.source]}", s.source)
            for s in cap.shared
            if s.kind == "output" and not s.same and s.source in needed
        ]
        self._rules = cap.dims
        self._getters = [self._getter(module, spec) for spec in cap.shared]
        self._forms: dict[tuple, list] = {}
        self._formless = [None] * len(cap.shared) if not any(s.form for s in cap.shared) else None
        self._in_memory = [
            (get, spec.strides)
            for get, spec in zip(self._getters, self.specs, strict=True)
            if get is not None and spec.strides is not None
        ]

    @staticmethod
    def _getter(module: torch.nn.Module, spec: SharedSpec) -> Callable[[], torch.Tensor] | None:
        if spec.kind == "state":
            return Place(module, spec.source).get
        return spec.source.get if spec.kind == "outside" else None

    def intact(self) -> bool:
        """False if a tensor of which there is a view lies otherwise in memory by now."""
        return all(get().stride() == strides for get, strides in self._in_memory)

    def sources(self, leaves: list) -> list[torch.Tensor | None]:
        """What the caller has of the sources, by spec; the caller holds the client's lock."""
        return [
            leaves[spec.source] if spec.kind == "argument" else get and get()
            for spec, get in zip(self.specs, self._getters, strict=True)
        ]

    def fill(self, results: dict[int, Any], sources: list, leaves: list) -> None:
        """Adds the shared results to those of the graph.

        Args:
            results: By number of the leaf.
            sources: What sources() gave.
            leaves: Of the call.
        """
        forms = self._forms_of(leaves)
        for spec, source, numbers in zip(self.specs, sources, forms, strict=True):
            base = results[spec.source] if spec.kind == "output" else source
            results[spec.leaf] = base if spec.same else _view(base, spec.way, numbers)

    def views(self, results: dict[int, Any], leaves: list) -> dict[int, torch.Tensor]:
        """The views of results and arguments, by number of the leaf, for the self-check."""
        found = {}
        for spec, numbers in zip(self.specs, self._forms_of(leaves), strict=True):
            if spec.same or spec.kind not in ("output", "argument"):
                continue
            base = results[spec.source] if spec.kind == "output" else leaves[spec.source]
            found[spec.leaf] = _view(base, "detach", numbers)
        return found

    def _forms_of(self, leaves: list) -> list:
        if self._formless is not None:
            return self._formless
        sizes = tuple(x.shape for x in leaves if isinstance(x, torch.Tensor))
        known = self._forms.get(sizes)
        if known is None:
            values = symbols(self._rules, leaves)
            known = [s.form and form(s.form, values) for s in self.specs]
            if len(self._forms) >= _KEPT:
                self._forms.clear()
            self._forms[sizes] = known
        return known


def _view(base: torch.Tensor, way: str, numbers: tuple | None) -> torch.Tensor:
    if way == "no_grad":
        with torch.no_grad():
            return _view(base, "view", numbers)
    if way != "view":
        base = base.detach() if way == "detach" else base.data
        if numbers is None:
            return base
    if numbers is None:
        return base.view_as(base)
    sizes, strides, offset = numbers
    return base.as_strided(sizes, strides, base.storage_offset() + offset)
