"""Every model family trains in the daemon as it does in PyTorch: losses and all gradients.

Five SGD steps from equal parameters, then other batch and sequence sizes, with and without an
attention mask, and the forms in which trainers call such models. The bounds and further checks are
in helpers/parity/steps.py.
"""

from __future__ import annotations

import pytest

from helpers.models import families
from helpers.parity import steps
from helpers.selection import every_run

pytestmark = [pytest.mark.one_in(2), pytest.mark.usefixtures("shared_daemon")]

STEPS = 5
TEXT = ("llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")
TEXT += ("bert_mlm", "bert_cls", "peft_lora_llama")
EVERY_RUN = ("gpt2", "peft_lora_llama")
# After the steps: batch 1, which is a capture of its own, and another length; then both differ.
SIZES = ((1, 11), (3, 6))
SAME_CAPTURE = ((4, 11), (3, 6))


def _train(name: str, sizes: tuple[tuple[int, int], ...] = SIZES) -> steps.Pair:
    model, make = families.build(name)
    batches = [make(2, 8, seed) for seed in range(STEPS)]
    others = [make(*size, 50 + i) for i, size in enumerate(sizes)]
    return steps.run(model, batches, others)


@pytest.mark.fake
@pytest.mark.slow
def test_llama() -> None:
    _train("llama")


@pytest.mark.nightly
def test_llama_without_mask() -> None:
    _train("llama_nomask")


@pytest.mark.fake
@pytest.mark.parametrize("name", every_run(EVERY_RUN, TEXT))
def test_family(name: str) -> None:
    _train(name)


@pytest.mark.parametrize("name", every_run((), TEXT))
def test_family_without_mask(name: str) -> None:
    _train(f"{name}_nomask", SAME_CAPTURE)


@pytest.mark.parametrize("name", families.MLPS)
@pytest.mark.quick
def test_mlp(name: str) -> None:
    model, make = families.build(name)
    batches = [make(6, 0, seed) for seed in range(STEPS)]
    steps.run(model, batches, [make(1, 0, 50), make(13, 0, 51)])
