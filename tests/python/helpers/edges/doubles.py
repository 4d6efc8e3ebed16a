"""Operations on doubles with Python numbers that no float holds: 0.1, and 1e-60, which is 0 as one.

They are run in double precision only. ROWS has operations on tensors, OF_SIZES numbers that are
computed from a size of the call.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from helpers.edges.rows import row

TWO = ("3,4", "3,4")
D = torch.float64
SMALLEST = torch.finfo(D).min


def _norm_with_statistics(x):
    mean, var = torch.zeros(4, dtype=D), torch.ones(4, dtype=D)
    y = F.batch_norm(x, mean, var, training=True, momentum=0.3, eps=0.1)
    return y, mean, var


def _written(write):
    def function(x):
        y = x.clone()
        write(y)
        return y

    return function


ROWS = [
    row("masked row", lambda x, b: x.masked_fill(b, SMALLEST).softmax(-1), "3,4", "b3,4"),
    row("masked row where", lambda x, b: torch.where(b, SMALLEST, x).softmax(-1), "3,4", "b3,4"),
    row("clamped logarithm", lambda x: x.relu().clamp(min=1e-60).log()),
    row("beyond floats", lambda x: x * 1e-60 * 1e60 + torch.full_like(x, 1e-60) * 1e60),
    row("infinite as floats", lambda x: ((x * 1e300).isinf(), (x * 1e300).isposinf())),
    row("negative infinity", lambda x: (x * 1e300).isneginf()),
    row("clamp", lambda x: x.clamp(-0.1, 0.3) + x.clamp_max(0.1) + x.clamp_min(0.2)),
    row("threshold", lambda x: F.threshold(x, 0.1, 0.3)),
    row("where", lambda x, b: torch.where(b, x, 0.1) * torch.where(b, 0.1, 0.3), "3,4", "b3,4"),
    row("masked_fill", lambda x, b: x.masked_fill(b, math.pi), "3,4", "b3,4"),
    row("index_fill", lambda x: x.index_fill(1, torch.tensor([1]), 0.1)),
    row("nan_to_num", lambda x: (x / 0 * 0.1).nan_to_num(0.1, 0.2, 0.3)),
    row("full", lambda x: torch.full((4,), 0.1, dtype=D) * x + x.new_full((4,), 0.3)),
    row("linspace", lambda x: torch.linspace(0.1, 0.7, 4, dtype=D) * x),
    row("logspace", lambda x: torch.logspace(0, 0.7, 4, dtype=D) * x),
    row("window", lambda x: torch.hann_window(4, dtype=D) * x),
    row("leaky_relu", lambda x: F.leaky_relu(x, 0.1)),
    row("elu", lambda x: F.elu(x, 0.7)),
    row("celu", lambda x: F.celu(x, 0.7)),
    row("hardsigmoid", lambda x: F.hardsigmoid(x)),
    row("softplus", lambda x: F.softplus(x, 0.7, 0.3)),
    row("alpha", lambda x, y: torch.sub(x, y, alpha=0.1) + torch.add(x, 0.3, alpha=0.1), *TWO),
    row("rsub", lambda x: torch.rsub(x, 0.1, alpha=0.3)),
    row("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.1), *TWO),
    row("addcdiv", lambda x, y: torch.addcdiv(x, y, y.exp(), value=0.1), *TWO),
    row("addmm", lambda x: torch.addmm(x, x, x[:4], beta=0.1, alpha=0.3), "4,4"),
    row("index_add", lambda x: x.index_add(0, torch.tensor([0]), x[:1], alpha=0.1)),
    row("pow of a number", lambda x: torch.pow(2.1, x)),
    row("quantile", lambda x: x.quantile(0.3)),
    row("layer_norm", lambda x: F.layer_norm(x, (4,), eps=0.1)),
    row("rms_norm", lambda x: F.rms_norm(x, (4,), eps=0.1)),
    row("group_norm", lambda x: F.group_norm(x, 2, eps=0.1)),
    row("group_norm image", lambda x, w: F.group_norm(x, 2, w, w, 0.1), "2,4,3,2", "4"),
    row("instance_norm", lambda x: F.instance_norm(x, eps=0.1), "2,3,4"),
    row("batch_norm", lambda x, w: F.batch_norm(x, None, None, w, w, True, eps=0.1), "3,4", "4"),
    row("batch_norm statistics", _norm_with_statistics),
    row("pairwise_distance", lambda x, y: F.pairwise_distance(x, y, eps=0.1), *TWO),
    row("triplet margin", lambda x, y: F.triplet_margin_loss(x, y, y.flip(0), margin=0.1), *TWO),
    row("ranking margin", lambda x, y, t: F.margin_ranking_loss(x, y, t, 0.1), *TWO, "t3,4"),
    row("hinge margin", lambda x, t: F.hinge_embedding_loss(x, t, 0.1), "3,4", "t3,4"),
    row("cosine margin", lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.1), *TWO, "t3"),
    row("poisson", lambda x, y: F.poisson_nll_loss(x, y.abs(), full=True), *TWO),
    row("tied maximum", lambda x: x.clamp(max=0.1).max() + x.clamp(min=0.1).min()),
    row("mul_", _written(lambda y: y.mul_(0.1))),
    row("fill_", lambda x: x * torch.zeros_like(x).fill_(0.1)),
    row("leaky_relu_", _written(lambda y: F.leaky_relu_(y, 0.1))),
    row("a column", _written(lambda y: y[:, 1].mul_(0.1))),
    row("nearly silu", lambda x: x * torch.sigmoid(1.0000009 * x)),
    row("nearly quick gelu", lambda x: x * torch.sigmoid(1.702004 * x)),
    row("complex", lambda x: (torch.complex(*[x.clamp(-9, 9)] * 2) * 0.1).real),
]

OF_SIZES = {
    "third": lambda x, n: x * (n / 3),
    "inverse": lambda x, n: x * (1 / n),
    "root": lambda x, n: x * n**-0.5 + x / math.sqrt(n),
    "tensor": lambda x, n: x * torch.tensor(n / 3, dtype=D),
    "full": lambda x, n: x * torch.full((n, 1), 1 / n, dtype=D),
    "full_like": lambda x, n: x * torch.full_like(x, n / 3),
    "new_full": lambda x, n: x * x.new_full((1,), n / 3),
    "bound": lambda x, n: x.clamp(max=1 / n),
    "alpha": lambda x, n: torch.add(x, x, alpha=1 / n),
    "addmm": lambda x, n: torch.addmm(x, x, x[:4].t() @ x[:4], beta=1 / n, alpha=n / 3),
    "beside floats": lambda x, n: x.float() * (n / 3) + x * (n / 3),
    "steps": lambda x, n: torch.arange(0, n / 10, 0.1, dtype=D).sum() * x,
    "steps of floats": lambda x, n: torch.arange(0.0, n, 0.7).sum() * x,
    "whole": lambda x, n: x[: math.floor(n * 0.29) + 1] * math.ceil(n / 3),
    "chain": lambda x, n: x * ((2 * n / (3 * n + 1)) - min(n / 3, 2.5)),
}
