"""Small models that are trained for 50 steps, and how far two such trajectories may be apart.

A trajectory is the result of a training: the loss of every step, and the parameters at its end. In
f32 two trajectories are compared with each other: losses step by step, and each parameter relative
to the distance from its start. In bf16 they drift apart by rounding, in PyTorch as well: there the
distance from PyTorch's trajectory in f32 may be at most twice that of PyTorch's own bf16.

AdamW turns a gradient that is nothing but rounding (of BERT's biases of keys, which no loss depends
on) into steps of the whole learning rate. Such parameters are known by their gradients and left
out. T5 has no ReLU, whose kinks let two trajectories in f32 part by percents, in PyTorch alone too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from helpers.models import families

Batch = dict[str, torch.Tensor]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
IGNORED = -100
VOCABULARY = 1201  # logits of a batch have 600 KiB: a loss is chunked from 256 on
ROWS, LENGTH = 4, 32
STEPS, BATCHES = 50, 4
RATE = 2e-3
TWICE = 2.0


def _ids(seed: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (ROWS, length), generator=generator)


def _some(like: torch.Tensor, part: float, seed: int) -> torch.Tensor:
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)) < part


def _lengths(seed: int, length: int = LENGTH) -> torch.Tensor:
    """A mask: half of all positions are padding, on the right; one row has none."""
    ends = torch.linspace(0.05, 1.0, ROWS).mul(length).long()[torch.arange(ROWS).roll(seed)]
    return (torch.arange(length) < ends[:, None]).long()


def sft(seed: int) -> Batch:
    """Half padding on the right, 30 % of all positions labelled."""
    ids, mask = _ids(seed), _lengths(seed)
    labels = ids.masked_fill(~(_some(ids, 0.6, seed + 1000) & mask.bool()), IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def masked_words(seed: int) -> Batch:
    """15 % labelled, a few positions of padding."""
    ids, mask = _ids(seed), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[0, -5:] = 0
    chosen = _some(ids, 0.15, seed + 1000) & mask.bool()
    labels = ids.masked_fill(~chosen, IGNORED)
    ids = ids.masked_fill(chosen, 1) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def two_masks(seed: int) -> Batch:
    """Of an encoder and of a decoder."""
    ids, mask = _ids(seed), _lengths(seed)
    target, seen = _ids(seed + 500, LENGTH - 8), _lengths(seed + 2, LENGTH - 8)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "decoder_attention_mask": seen,
        "labels": target.masked_fill(seen == 0, IGNORED),
    }


def packed(seed: int) -> Batch:
    """Three documents in a row, told by positions that start again; some labels are ignored."""
    ids = _ids(seed)
    place = torch.arange(LENGTH)
    cut = 9 + seed % 3
    place = torch.where(place < 2 * cut, place % cut, place - 2 * cut)
    labels = ids.masked_fill(_some(ids, 0.3, seed + 1000), IGNORED)
    places = place.expand(ROWS, -1).contiguous()
    return {"input_ids": ids, "position_ids": places, "labels": labels}


def _t5() -> nn.Module:
    import transformers

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    sizes |= {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    config = transformers.T5Config(
        vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, **sizes
    )
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).train()


@dataclass(frozen=True)
class Kind:
    """A model, and the batches that it is trained on."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


def _of(family: str) -> Callable[[], nn.Module]:
    return lambda: families.build(family, vocab_size=VOCABULARY)[0]


KINDS = {
    "sft": Kind(_of("llama"), sft),
    "bert": Kind(_of("bert_mlm"), masked_words),
    "t5": Kind(_t5, two_masks),
    "packed": Kind(_of("llama"), packed),
}


@dataclass
class Trajectory:
    """What a training leaves.

    Attributes:
        losses: Of every step, as doubles.
        state: Parameters at the end, by name.
        largest: Largest entry of all gradients that a parameter had, by name.
    """

    losses: torch.Tensor
    state: dict[str, torch.Tensor]
    largest: dict[str, float]

    def same_bits(self, other: Trajectory) -> bool:
        """Of all losses and all parameters."""
        states = zip(self.state.values(), other.state.values(), strict=True)
        return torch.equal(self.losses, other.losses) and all(torch.equal(a, b) for a, b in states)

    def moved(self) -> list[str]:
        """Names of the parameters whose gradients are more than rounding."""
        least = 1e-6 * max(self.largest.values())
        return [name for name, largest in self.largest.items() if largest > least]


def _distance(trajectory: Trajectory, to: Trajectory, name: str) -> float:
    return float((trajectory.state[name].double() - to.state[name].double()).norm())


def far(ours: Trajectory, theirs: Trajectory, first: nn.Module) -> tuple[float, float, str]:
    """The largest distances: of losses; of a parameter, relative to the way it went; its name."""
    losses = float(((ours.losses - theirs.losses) / theirs.losses).abs().max())
    begin = dict(first.named_parameters())
    ways = []
    for name in theirs.moved():
        went = float((theirs.state[name].double() - begin[name].detach().double()).norm())
        ways.append((_distance(ours, theirs, name) / went, name))
    return (losses, *max(ways))


def check_near(ours: Trajectory, theirs: Trajectory, first: nn.Module, bound: float) -> None:
    """Losses agree to a tenth of `bound`, and parameters to `bound` of the way they went."""
    losses, way, name = far(ours, theirs, first)
    assert losses <= 0.1 * bound, f"losses are {losses:.2g} apart"
    assert way <= bound, f"{name} is off by {way:.2g} of the way it went"


def check_as_near(ours: Trajectory, theirs: Trajectory, exact: Trajectory) -> None:
    """`ours` is at most twice as far from `exact` as PyTorch's of the same precision."""
    off, own = (float((c.losses - exact.losses).norm()) for c in (ours, theirs))
    assert off <= TWICE * own, f"losses are {off:.2g} from f32, PyTorch's {own:.2g}"
    for name in exact.moved():
        off, own = _distance(ours, exact, name), _distance(theirs, exact, name)
        assert off <= TWICE * own, f"{name} is {off:.2g} from f32, PyTorch's {own:.2g}"


def start(kind: str, dtype: torch.dtype) -> nn.Module:
    """The model of a trajectory before its first step, with values that this type has."""
    return copy.deepcopy(_started(kind)).to(dtype)


@functools.cache
def _started(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return KINDS[kind].build()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)


def train(
    kind: str,
    model: nn.Module,
    optimizer: Optimizer = adamw,
    halfway: Callable[[int, str], object] = lambda step, where: None,
) -> Trajectory:
    """Trains in place.

    Args:
        kind: One of KINDS.
        model: Wrapped or not.
        optimizer: Made of the model.
        halfway: Called with the step's number, and what comes next: "forward", "backward", "step".
    """
    stepping = optimizer(model)
    batches = [KINDS[kind].batch(seed) for seed in range(BATCHES)]
    losses, largest = [], dict.fromkeys((n for n, _ in model.named_parameters()), 0.0)
    for step in range(STEPS):
        halfway(step, "forward")
        loss = model(**batches[step % BATCHES]).loss
        halfway(step, "backward")
        loss.backward()
        losses.append(loss.detach().double())
        if step % 10 == 0:
            for name, p in model.named_parameters():
                largest[name] = max(largest[name], float(p.grad.abs().max()))
        halfway(step, "step")
        stepping.step()
        stepping.zero_grad()
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Trajectory(torch.stack(losses), state, largest)
