"""Rows of the table of edges: other names and overloads of what the other themes hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helpers.edges.rows import row

TWO = ("3,4", "3,4")
INTS = ("i9:3,4", "i3:3,4")
VOLUME = "1,2,4,4,4"
special = torch.special
ROWS = [
    row("subtract", lambda x, y: torch.subtract(x, y) + torch.subtract(y, 2.0), *TWO),
    row("subtract alpha", lambda x, y: torch.subtract(x, y, alpha=3), *TWO),
    row("multiply", lambda x, y: torch.multiply(x, y) * torch.multiply(x, 0.5), *TWO),
    row("divide", lambda x, y: torch.divide(x, y), *TWO),
    row("divide by a number", lambda x: torch.divide(x, 3.0) + torch.ops.aten.div.Scalar(x, 7.0)),
    row("divide floor", lambda x, y: torch.divide(x, y, rounding_mode="floor"), *TWO),
    row("divide trunc by a number", lambda x: torch.div(x, 0.5, rounding_mode="trunc")),
    row("true_divide", lambda x, y: torch.true_divide(x, y) + torch.true_divide(y, 2.0), *TWO),
    row("true_divide of ints", lambda i, j: torch.true_divide(i, j + 1), "i9:3,4", "i9:3,4"),
    row("greater", lambda x, y: (torch.greater(x, y), torch.greater(x, 0.5)), *TWO),
    row("greater_equal", lambda x, y: (torch.greater_equal(x, y), x.greater_equal(0.5)), *TWO),
    row("less", lambda x, y: (torch.less(x, y), torch.less(x, 0.5)), *TWO),
    row("less_equal", lambda x, y: (torch.less_equal(x, y), x.less_equal(0.5)), *TWO),
    row("clip tensors", lambda x, y: torch.clip(x, y, y + 1), *TWO),
    row("clip one tensor", lambda x, y: torch.clip(x, max=y), *TWO),
    row("concat", lambda x, y: torch.concat([x, y], 1), *TWO),
    row("concatenate", lambda x, y: torch.concatenate([x, y], 0), *TWO),
    row("all dims", lambda b: torch.all(b, dim=(0, 1)), "b3,4,2"),
    row("any dims", lambda b: torch.any(b, dim=(0, 1)), "b3,4,2"),
    row("all of floats", lambda x: torch.all(x, dim=(0, 1)), "n3,4"),
    row("atleast_1d", lambda x: torch.atleast_1d(x.sum())),
    row("atleast_2d", lambda x: torch.atleast_2d(x[0])),
    row("special.erf", lambda x: special.erf(x) + special.erfc(x)),
    row("special.softmax", lambda x: special.softmax(x, 1)),
    row("special.log_softmax", lambda x: special.log_softmax(x, 0)),
    row("special.xlog1py numbers", lambda x: special.xlog1py(x, 0.5) + special.xlog1py(2.0, x * x)),
    row("bitwise scalars", lambda i: (i & 3, i | 4, i ^ 1), "i9:3,4"),
    row("bitwise functions", lambda i, j: torch.bitwise_and(i, torch.bitwise_or(j, 2)), *INTS),
    row("bitwise number first", lambda i: (3 & i, 4 | i, 1 ^ i), "i9:3,4"),
    row("shift functions", lambda i, j: torch.bitwise_left_shift(i, j), *INTS),
    row("shift left", lambda i, j: (i << j, i << 2), *INTS),
    row("shift right", lambda i, j: (i >> j, i >> 1), *INTS),
    row("std whole biased", lambda x: torch.std(x, unbiased=False)),
    row("std_mean whole", lambda x: torch.std_mean(x)),
    row("std_mean correction", lambda x: torch.std_mean(x, (0, 1), correction=0)),
    row("var_mean whole", lambda x: torch.var_mean(x)),
    row("var whole biased", lambda x: torch.var(x, unbiased=False)),
    row("var_mean whole biased", lambda x: torch.var_mean(x, unbiased=False)),
    row("T", lambda x: x.T @ x),
    row("full and fill", lambda x: torch.full((3, 4), 0.5) * x + torch.full_like(x, 2.0)),
    row("fill tensor", lambda x: torch.fill(x, x.sum())),
    row("new_ones", lambda x: x.new_ones(3, 4) * x + x.new_zeros(4) + x.new_full((1,), 2.0)),
    row(
        "literals", lambda x: x * torch.tensor(2.0) + torch.tensor(3) + torch.tensor([1.0, 2, 3, 4])
    ),
    row("hann_window", lambda x: x * torch.hann_window(4)),
    row("hamming_window", lambda x: x * torch.hamming_window(4)),
    row("blackman_window", lambda x: x * torch.blackman_window(4)),
    row("symmetric windows", lambda x: x * torch.hann_window(4, False) + torch.bartlett_window(4)),
    row("hamming_window alpha", lambda x: x * torch.hamming_window(4, True, 0.6, 0.4)),
    row("kaiser_window", lambda x: x * torch.kaiser_window(4, True, 3.0)),
    row("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)), VOLUME),
    row("avg_pool3d", lambda x: F.avg_pool3d(x, 2), VOLUME),
    row("max_pool3d", lambda x: F.max_pool3d(x, 2), VOLUME),
    row("max_pool1d indices", lambda x: F.max_pool1d(x, 2, return_indices=True), "1,2,6"),
    row("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 1), VOLUME),
    row("pad reflect 1d", lambda x: F.pad(x, (1, 2), mode="reflect"), "2,3,4"),
    row("pad reflect 2d", lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"), "1,2,4,4"),
    row("pad replicate 3d", lambda x: F.pad(x, (1, 0, 0, 1, 1, 1), mode="replicate"), VOLUME),
    row("interpolate nearest 1d", lambda x: F.interpolate(x, scale_factor=2), "1,2,4"),
    row("interpolate nearest 3d", lambda x: F.interpolate(x, size=(2, 2, 2)), VOLUME),
    row("interpolate bicubic", lambda x: F.interpolate(x, size=(6, 6), mode="bicubic"), "1,2,4,4"),
    row(
        "interpolate trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True),
        VOLUME,
    ),
    row(
        "interpolate antialias",
        lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", antialias=True),
        "1,2,4,4",
    ),
    row("unique_consecutive", lambda x: torch.unique_consecutive(x), "n3,4"),
    row("unique dim", lambda x: torch.unique(x, dim=0), "n3,4"),
    row("view_as_real", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), "3,4,2"),
    row("polar", lambda x, y: torch.polar(x, y).real, *TWO),
    row("stft", lambda x: torch.stft(x, 4, return_complex=True).abs(), "2,16"),
    row("resolve", lambda x: x.conj().resolve_conj().resolve_neg() * x),
    row("mH", lambda x: x.mH @ x),
    row("equal", lambda x, y: x * float(torch.equal(x, y)), *TWO),
    row("allclose", lambda x, y: x * float(torch.allclose(x, y)), *TWO),
    row(
        "fake_quantize channels",
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32), 1, -128, 127
        ),
    ),
    row(
        "fake_quantize tensors",
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -128, 127
        ),
    ),
]
