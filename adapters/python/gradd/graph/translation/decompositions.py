"""torch's own decompositions in Python, without those that misread their arguments.

FakeTensor looks up the result of an operator on symbolic sizes in torch's table of decompositions.
Some entries are functions of torch's Python interface, whose parameters have another order than the
operator's: the reduction of nll_loss arrives as `size_average`, and "none" has a mean's rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gradd import private

_aten = torch.ops.aten
MISREAD = (
    *(_aten.nll_loss.default, _aten.std_mean.dim),
    *(_aten.add.Scalar, _aten.sub.Scalar, _aten.add_.Scalar, _aten.sub_.Scalar),
    *(_aten.baddbmm.dtype, _aten.baddbmm.dtype_out),
)


@contextlib.contextmanager
def sound() -> Iterator[None]:
    """torch computes those operators from their parts in C, as a call does."""
    table = private.decompositions
    taken = {target: table.pop(target) for target in MISREAD if target in table}
    try:
        yield
    finally:
        table.update(taken)
