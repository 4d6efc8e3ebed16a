"""Sizes of the models that are measured on a GPU, and the operations that a step of them takes.

Nothing here needs torch: the page of results is made without it.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY, HEADS, KV_HEADS = 128256, 32, 8
SIZES = ((1, 2048), (4, 2048))  # rows, tokens of a row
# Dense bf16 products per second, by a part of the GPU's name; 0 elsewhere: no share is printed.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """A Llama: layers, widths, size of a head, and numbers of heads and words."""

    layers: int
    hidden: int
    inner: int
    head: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    vocabulary: int = VOCABULARY
    tied: bool = True

    @property
    def multiplied(self) -> int:
        """Parameters of linear layers, the head included; lookups multiply nothing."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + (
            self.vocabulary * self.hidden
        )

    def operations(self, rows: int, length: int, trained: float = 1.0) -> float:
        """Of a forward and backward: 2 per parameter and token forward, 2 for the gradient of the
        activations and 2 for that of the parameter, for the part that is `trained`; and 12 per
        pair of query and key that a mask of the past leaves, head and element of it. What is
        computed again counts once.
        """
        tokens = rows * length
        pairs = rows * length * (length + 1) / 2
        attention = 12 * self.layers * self.heads * self.head * pairs
        return (4 + 2 * trained) * self.multiplied * tokens + attention


SHAPES = {
    "1b": Shape(16, 2048, 8192, 64),  # Llama-3.2-1B
    "8b": Shape(2, 4096, 14336, 128),  # two layers of Llama-3.1-8B with a tied head
    "8b-full": Shape(32, 4096, 14336, 128, tied=False),
    "tiny": Shape(2, 64, 160, 16, heads=4, kv_heads=2, vocabulary=300),
}


def peak_of(gpu: str) -> float:
    """Products per second that the GPU of that name can do; 0: not known."""
    return next((peak for part, peak in PEAKS.items() if part in gpu), 0.0)
