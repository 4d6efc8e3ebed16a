"""Gradients of tables with sparse lookups (nn.Embedding(sparse=True)), in torch's format.

The daemon sums the looked-up rows into a dense gradient, and the graph also returns the indices.
This module extracts these rows, so `.grad` is a coalesced sparse tensor; the daemon needs the dense
one only during the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradd import errors
from gradd.calls import batched
from gradd.spec import OutputSpec


def gradients(
    specs: Sequence[OutputSpec],
    indices: Sequence[torch.Tensor],
    names: Sequence[str],
    found: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradients, those of the parameters that the specs name sparse.

    Args:
        specs: Of the lookups.
        indices: The indices that each has looked up.
        names: Of the parameters, which come first among the gradients.
        found: The gradients.

    Raises:
        UnsupportedError: They are a batch of gradients.
    """
    result = list(found)
    of: dict[str, list[torch.Tensor]] = {}
    for spec, ids in zip(specs, indices, strict=True):
        flat = ids.flatten()
        of.setdefault(spec.fqn or "", []).append(
            flat[flat != spec.padding] if spec.padding >= 0 else flat
        )
    for i, name in enumerate(names):
        dense = result[i]
        if dense is None or name not in of:
            continue
        if batched.is_transformed((dense,)):
            raise errors.UnsupportedError(f"a batch of gradients of {name!r}, which are sparse")
        rows = torch.cat(of[name]).unique()
        values = dense.index_select(0, rows)
        result[i] = torch.sparse_coo_tensor(
            rows.long()[None], values, dense.shape, is_coalesced=True, check_invariants=False
        )
    return result
