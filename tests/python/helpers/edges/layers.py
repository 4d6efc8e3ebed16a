"""Rows of the table of edges: softmax, normalisations, attention, convolution and pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helpers.edges.rows import row

_CAUSAL = torch.tril(torch.ones(3, 3)).bool()
IMG = ("2,3,6,6",)
CONV2D = ("2,3,6,6", "4,3,3,3")
SEQ = ("2,3,8",)
_GRID = ("2,2,4,5", "2,3,3,2")


def _bags(mode, **options):
    """Bags of three, none, two and two of seven indices."""
    offsets = torch.tensor([0, 3, 3, 5] + [7] * options.get("include_last_offset", False))
    return lambda w, i: F.embedding_bag(i, w, offsets, mode=mode, **options)


def _sampled(mode, padding, corners=False):
    return lambda x, g: F.grid_sample(x, g, mode, padding, corners)


def _recomputed(x):
    return F.interpolate(x, scale_factor=0.7, mode="linear", recompute_scale_factor=True)


ROWS = [
    row("softmax", lambda x: x.softmax(-1)),
    row("softmax 0", lambda x: x.softmax(0)),
    row(
        "softmax of masked rows",
        lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1),
        "3,4",
        "b3,4",
    ),
    row("softmin", lambda x: F.softmin(x, -1)),
    row("log_softmax", lambda x: x.log_softmax(-1)),
    row("log_softmax 0", lambda x: x.log_softmax(0)),
    row("softmax dtype", lambda x: x.softmax(-1, dtype=torch.float32)),
    row("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), "3,4", "4", "4"),
    row("layer_norm plain", lambda x: F.layer_norm(x, (4,))),
    row("layer_norm eps", lambda x: F.layer_norm(x, (3, 4), eps=1e-12), "2,3,4"),
    row("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), "3,4", "4"),
    row("rms_norm plain", lambda x: F.rms_norm(x, (4,))),
    row("rms_norm eps", lambda x: F.rms_norm(x, (4,), eps=1e-6)),
    row("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "2,4,3", "4", "4"),
    row("group_norm plain", lambda x: F.group_norm(x, 2), "2,4,3"),
    row("instance_norm", lambda x: F.instance_norm(x), "2,3,5"),
    row("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "3,4", "4", "4"),
    row("batch_norm 1d", lambda x: F.batch_norm(x, None, None, training=True), "3,4,5"),
    row("batch_norm eval", lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), "3,4"),
    row("local_response_norm", lambda x: F.local_response_norm(x, 2), *SEQ),
    row("linear", lambda x, w, b: F.linear(x, w, b), "3,4", "2,4", "2"),
    row("linear no bias", lambda x, w: F.linear(x, w), "2,3,4", "2,4"),
    row("bilinear", lambda x, y, w: F.bilinear(x, y, w), "3,4", "3,2", "5,4,2"),
    row("embedding", lambda w, i: F.embedding(i, w), "5,4", "i5:2,3"),
    row("embedding padding", lambda w, i: F.embedding(i, w, padding_idx=0), "5,4", "i5:2,3"),
    row(
        "embedding padding negative",
        lambda i, w: F.embedding(i, 2 * w, padding_idx=-2),
        *("i5:2,3", "5,4"),
    ),
    row("embedding_bag mean", lambda w, i: F.embedding_bag(i, w, mode="mean"), "5,4", "i5:2,3"),
    row("embedding_bag sum", lambda w, i: F.embedding_bag(i, w, mode="sum"), "5,4", "i5:2,3"),
    row("embedding_bag max", lambda w, i: F.embedding_bag(i, w, mode="max"), "5,4", "i5:2,3"),
    row("embedding_bag offsets", _bags("mean"), "5,4", "i5:7"),
    row("embedding_bag offsets sum", _bags("sum", padding_idx=2), "5,4", "i5:7"),
    row("embedding_bag offsets max", _bags("max", padding_idx=-2), "5,4", "i5:7"),
    row("embedding_bag last offset", _bags("mean", include_last_offset=True), "5,4", "i5:7"),
    row(
        "embedding_bag weights",
        lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        *("5,4", "i5:2,3", "2,3"),
    ),
    row("one_hot", lambda x, i: F.one_hot(i, 4) * x, "3,4", "i4:3"),
    row(
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "2,3,4",
        "2,3,4",
        "2,3,4",
    ),
    row(
        "attention causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "1,2,3,4",
        "1,2,3,4",
        "1,2,3,4",
    ),
    row(
        "attention masked",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        "1,2,3,4",
        "1,2,3,4",
        "1,2,3,4",
        "b3,3",
    ),
    row(
        "attention bias",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        "1,2,3,4",
        "1,2,3,4",
        "1,2,3,4",
        "3,3",
    ),
    row(
        "attention by hand",
        lambda q, k, v: (q @ k.mT / 2).masked_fill(~_CAUSAL, float("-inf")).softmax(-1) @ v,
        "1,2,3,4",
        "1,2,3,4",
        "1,2,3,4",
    ),
    row(
        "attention by hand min",
        lambda q, k, v: (
            (
                (q @ k.mT / 2) + torch.where(_CAUSAL, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
            ).softmax(-1)
            @ v
        ),
        "1,2,3,4",
        "1,2,3,4",
        "1,2,3,4",
    ),
    row("conv1d", lambda x, w: F.conv1d(x, w), "2,3,8", "4,3,3"),
    row(
        "conv1d padding",
        lambda x, w, b: F.conv1d(x, w, b, padding=1, stride=2),
        "2,3,8",
        "4,3,3",
        "4",
    ),
    row("conv2d", lambda x, w: F.conv2d(x, w), "2,3,6,6", "4,3,3,3"),
    row(
        "conv1d groups dilation",
        lambda x, w, b: F.conv1d(x, w, b, padding=2, dilation=2, groups=2),
        "2,4,8",
        "6,2,3",
        "6",
    ),
    row("conv1d same", lambda x, w: F.conv1d(x, w, padding="same"), "2,3,8", "4,3,4"),
    row("conv1d unbatched", lambda x, w, b: F.conv1d(x, w, b), "3,8", "4,3,3", "4"),
    row("conv2d same", lambda x, w: F.conv2d(x, w, padding="same", dilation=2), *CONV2D),
    row("conv2d valid", lambda x, w: F.conv2d(x, w, padding="valid", stride=(2, 1)), *CONV2D),
    row("conv2d depthwise", lambda x, w: F.conv2d(x, w, padding=1, groups=3), IMG[0], "6,1,3,3"),
    row("conv2d pointwise", lambda x, w, b: F.conv2d(x, w, b), IMG[0], "4,3,1,1", "4"),
    row("conv2d no images", lambda x, w: F.conv2d(x, w), "0,3,6,6", "4,3,3,3"),
    row("conv2d twice", lambda x, w: F.conv2d(F.conv2d(x, w), w[:3, :2]), IMG[0], "2,3,3,3"),
    row(
        "conv3d",
        lambda x, w, b: F.conv3d(x, w, b, padding=(1, 0, 1), stride=(1, 2, 1)),
        "2,3,4,5,4",
        "2,3,3,2,3",
        "2",
    ),
    row("conv3d same", lambda x, w: F.conv3d(x, w, padding="same"), "1,3,3,4,3", "6,3,2,2,2"),
    row(
        "convolution",
        lambda x, w: torch.convolution(x, w, None, [1, 2], [1, 0], [1, 1], False, [0, 0], 1),
        *CONV2D,
    ),
    row("conv3d groups", lambda x, w: F.conv3d(x, w, groups=3), "1,3,3,4,3", "6,1,2,2,2"),
    row("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w), "2,3,8", "3,2,3"),
    row(
        "conv_transpose2d",
        lambda x, w, b: F.conv_transpose2d(
            x, w, b, stride=2, padding=1, output_padding=1, groups=2, dilation=(2, 1)
        ),
        "2,4,3,4",
        "4,3,3,2",
        "6",
    ),
    row("conv_transpose3d", lambda x, w: F.conv_transpose3d(x, w), "1,2,2,3,2", "2,3,2,1,2"),
    row("max_pool1d", lambda x: F.max_pool1d(x, 2), *SEQ),
    row("max_pool1d overlapping", lambda x: F.max_pool1d(x, 3, 1, 1), *SEQ),
    row("max_pool2d", lambda x: F.max_pool2d(x, 2), *IMG),
    row("max_pool2d overlapping", lambda x: F.max_pool2d(x, 3, 2, 1), *IMG),
    row("max_pool indices", lambda x: F.max_pool2d(x, 2, return_indices=True), *IMG),
    row("avg_pool1d", lambda x: F.avg_pool1d(x, 2), *SEQ),
    row("avg_pool2d", lambda x: F.avg_pool2d(x, 2), *IMG),
    row("avg_pool2d padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), *IMG),
    row("adaptive_avg_pool1d 1", lambda x: F.adaptive_avg_pool1d(x, 1), *SEQ),
    row("adaptive_avg_pool1d 4", lambda x: F.adaptive_avg_pool1d(x, 4), *SEQ),
    row("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), *IMG),
    row("adaptive_max_pool1d 1", lambda x: F.adaptive_max_pool1d(x, 1), *SEQ),
    row("adaptive_max_pool2d 1", lambda x: F.adaptive_max_pool2d(x, 1), *IMG),
    row("max_pool1d whole", lambda x: F.max_pool1d(x, 8), *SEQ),
    row("max_pool2d whole", lambda x: F.max_pool2d(x, 6), *IMG),
    row("avg_pool1d whole", lambda x: F.avg_pool1d(x, 8), *SEQ),
    row("adaptive_max_pool1d 4", lambda x: F.adaptive_max_pool1d(x, 4), *SEQ),
    row("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (2, 3)), *IMG),
    row("lp_pool1d", lambda x: F.lp_pool1d(x, 2, 2), *SEQ),
    row("lp_pool2d 3", lambda x: F.lp_pool2d(x, 3.0, 2), *IMG),
    row("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2), *IMG),
    row("interpolate bilinear", lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"), *IMG),
    row("interpolate recomputed", _recomputed, *SEQ),
    row("interpolate linear", lambda x: F.interpolate(x, size=5, mode="linear"), *SEQ),
    row("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), *_GRID),
    row("grid_sample corners", lambda x, g: F.grid_sample(x, g, align_corners=True), *_GRID),
    row("grid_sample border", _sampled("bilinear", "border"), *_GRID),
    row("grid_sample reflection", _sampled("bilinear", "reflection"), *_GRID),
    row("grid_sample mirrored", _sampled("bilinear", "reflection", True), *_GRID),
    row("grid_sample nearest", _sampled("nearest", "zeros"), *_GRID),
    row("grid_sample nearest border", _sampled("nearest", "border", True), *_GRID),
    row("grid_sample bicubic", _sampled("bicubic", "zeros"), *_GRID),
    row("grid_sample bicubic border", _sampled("bicubic", "border", True), *_GRID),
    row("grid_sample bicubic mirrored", _sampled("bicubic", "reflection"), *_GRID),
    row("grid_sample 3d", _sampled("bilinear", "zeros"), "1,2,3,2,4", "1,2,2,3,3"),
    row("grid_sample 3d nearest", _sampled("nearest", "reflection"), "1,2,3,2,4", "1,2,2,3,3"),
    row("affine_grid", lambda t: F.affine_grid(t, [1, 1, 2, 2], align_corners=False), "1,2,3"),
    row("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), "1,4,2,2"),
    row("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), "1,1,4,4"),
    row("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "1,4,2,2"),
    row("unfold image", lambda x: F.unfold(x, 2), *IMG),
    row("fold image", lambda x: F.fold(x, (4, 4), 2), "1,4,9"),
    row("pad", lambda x: F.pad(x, (1, 2)), "2,3"),
    row("pad value", lambda x: F.pad(x, (1, 2, 0, 1), value=float("-inf")), "2,3"),
    row("pad negative", lambda x: F.pad(x, (-1, 1))),
    row("pad reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), *SEQ),
    row("pad replicate", lambda x: F.pad(x, (1, 2), mode="replicate"), *SEQ),
    row("pad circular", lambda x: F.pad(x, (1, 2), mode="circular"), *SEQ),
    row("pad circular cut", lambda x: F.pad(x, (-1, 2), mode="circular"), *SEQ),
    row("dropout eval", lambda x: F.dropout(x, 0.5, training=False)),
    row("dropout zero", lambda x: F.dropout(x, 0.0)),
    row("gumbel by hand", lambda x, u: (x - (-u.log()).log()).softmax(-1), "3,4", "u3,4"),
    row(
        "rope by hand",
        lambda x, c, s: x * c + torch.cat([-x[..., 2:], x[..., :2]], -1) * s,
        "2,3,4",
        "n3,4",
        "n3,4",
    ),
    row("swiglu by hand", lambda x, y: F.silu(x) * y, "3,4", "3,4"),
    row("gelu by hand", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
    row(
        "gelu new by hand",
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    ),
    row("quick gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    row("relu squared", lambda x: F.relu(x).square()),
    row(
        "layer norm by hand",
        lambda x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        ),
    ),
    row(
        "layer norm std by hand",
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    ),
    row(
        "softmax by hand",
        lambda x: (
            (x - x.amax(-1, keepdim=True)).exp()
            / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        ),
    ),
    row("straight through", lambda x: x + (x.round() - x).detach()),
    row(
        "rnn by hand",
        lambda x, w, u: torch.tanh(x[:, 1] @ w + torch.tanh(x[:, 0] @ w) @ u),
        "3,2,4",
        "4,4",
        "4,4",
    ),
    row(
        "lstm",
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, True, 1, 0.0, True, False, False)[0],
        *("3,2,4", "1,2,3", "1,2,3", "12,4", "12,3", "12", "12"),
    ),
    row(
        "lstm of two layers and directions",
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, False, 2, 0.0, True, True, True)[0],
        *("2,3,2", "4,2,2", "4,2,2", "8,2", "8,2", "8,2", "8,2", "8,4", "8,2", "8,4", "8,2"),
    ),
    row(
        "lstm last cells",
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, True, 1, 0.0, True, False, False)[2],
        *("3,2,4", "1,2,3", "1,2,3", "12,4", "12,3", "12", "12"),
    ),
    row(
        "lstm with a projection",
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, True, 1, 0.0, True, False, False)[0],
        *("3,2,4", "1,2,2", "1,2,3", "12,4", "12,2", "12", "12", "2,3"),
    ),
    row(
        "gru",
        lambda x, h, *w: torch.gru(x, h, w, True, 1, 0.0, True, False, False)[0],
        *("3,2,4", "1,2,3", "9,4", "9,3", "9", "9"),
    ),
    row(
        "rnn tanh",
        lambda x, h, *w: torch.rnn_tanh(x, h, w, True, 1, 0.0, True, False, False)[0],
        *("3,2,4", "1,2,3", "3,4", "3,3", "3", "3"),
    ),
    row(
        "rnn relu",
        lambda x, h, *w: torch.rnn_relu(x, h, w, True, 1, 0.0, True, False, False)[1],
        *("3,2,4", "1,2,3", "3,4", "3,3", "3", "3"),
    ),
]
