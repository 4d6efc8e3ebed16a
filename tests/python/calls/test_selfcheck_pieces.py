"""Self-checks of calls that take much memory: on few rows and positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.check import cut, selfcheck
from gradd.check.agreement import BUFFER, GRADIENT
from gradd.check.reference import Reference
from gradd.fallback import SelfCheckError
from gradd.graph.translation import convolutions

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Tagger(nn.Module):
    """A loss over all positions of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, ids, labels):
        """The mean over labelled positions."""
        scores = self.head(torch.tanh(self.embedding(ids)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch(rows=8, length=512):
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (rows, length))
    labels = ids.clone()
    labels[:, : length // 2] = -100
    return ids, labels


@pytest.fixture
def small_limit(monkeypatch):
    """Every call counts as large."""
    monkeypatch.setattr(selfcheck, "_SMALL", 0)


@pytest.fixture
def references(monkeypatch):
    """The shapes of the arguments of every run in PyTorch."""
    shapes: list[tuple] = []
    run = Reference.run_forward

    def noted(self, own, data, take):
        shapes.append(tuple(x.shape for x in data.leaves))
        return run(self, own, data, take)

    monkeypatch.setattr(Reference, "run_forward", noted)
    return shapes


def test_a_large_call_is_checked_on_a_piece(small_limit, references) -> None:
    torch.manual_seed(1)
    model = ORTModule(Tagger(), strict=True)
    model(*batch()).backward()
    stats = model.gradd_stats()
    assert (stats["self_checks"], stats["self_checks_on_few_rows"]) == (1, 1)
    assert references == [((2, 256), (2, 256))]


def test_a_small_call_is_checked_whole(references) -> None:
    model = ORTModule(Tagger(), strict=True)
    model(*batch()).backward()
    assert references == [((8, 512), (8, 512))]
    assert model.gradd_stats()["self_checks_on_few_rows"] == 0


def test_an_error_shows_in_a_piece(small_limit, monkeypatch) -> None:
    """A gradient of the daemon that is off by a hundredth."""
    compare = selfcheck._Check._in_daemon

    def wrong(self, data, selection):
        values, task = compare(self, data, selection)
        values["the gradient of", "head.weight"].mul_(1.01)
        return values, task

    monkeypatch.setattr(selfcheck._Check, "_in_daemon", wrong)
    model = ORTModule(Tagger(), strict=True)
    with pytest.raises(SelfCheckError, match=r"head\.weight"):
        model(*batch())
    assert model.gradd_stats()["self_check_failures"] == 1


def test_a_piece_has_labels(small_limit, monkeypatch) -> None:
    """Of positions without labels nothing could be learned."""
    parts, piece = [], cut.piece

    def pieces(fits, data, start=0):
        parts.extend(piece(fits, data, start + i) for i in range(4))
        return parts[-4]

    monkeypatch.setattr(cut, "piece", pieces)
    ORTModule(Tagger(), strict=True)(*batch()).backward()
    assert len(parts) >= 4
    for part in parts:
        assert part.leaves[0].shape == (2, 256)
        assert bool((part.leaves[1] != -100).any())


def test_a_piece_keeps_fixed_sizes(small_limit, references) -> None:
    """The second axis is the weight's: only rows can be left out."""
    model = ORTModule(nn.Sequential(nn.Linear(512, 8), nn.Tanh()), strict=True)
    model(torch.ones(16, 512)).sum().backward()
    assert references[0] == ((2, 512),)


class Placed(Tagger):
    """Has a small buffer, and takes positions that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, 16))

    def forward(self, ids, labels, positions):
        """The mean over labelled positions."""
        angles = positions[..., None] * self.frequencies
        scores = self.head(torch.tanh(self.embedding(ids) + angles.sin()))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def test_buffers_and_what_rows_share_are_no_part_of_a_batch(small_limit, monkeypatch) -> None:
    compared = []
    run = Reference.run_forward

    def noted(self, own, data, take):
        compared.append((sorted(x.shape for x in data.leaves), run(self, own, data, take)))
        return compared[-1][1]

    monkeypatch.setattr(Reference, "run_forward", noted)
    model = ORTModule(Placed(), strict=True)
    model(*batch(), torch.arange(512)[None]).backward()
    assert compared == [([(1, 256), (2, 256), (2, 256), (16,)], True)]
    assert model.gradd_stats()["self_checks_on_few_rows"] == 1


class Scored(Tagger):
    """Gives its scores as well."""

    def forward(self, ids, labels):
        """The loss and the scores of which it is made."""
        scores = self.head(torch.tanh(self.embedding(ids)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def test_scores_are_compared_when_a_call_computes_them(monkeypatch) -> None:
    """A training step leaves them out until they are read, and so does its check."""
    compared = []
    compare = selfcheck._Check._in_daemon

    def noted(self, data, seeded):
        values, task = compare(self, data, seeded)
        compared.append((task.outputs, tuple(task.seeds)))
        return values, task

    monkeypatch.setattr(selfcheck._Check, "_in_daemon", noted)
    model = ORTModule(Scored(), strict=True)
    _, scores = model(*batch())
    assert compared == [((0,), (0,))]
    assert scores.detach().isfinite().all()
    model(*batch())
    assert compared[1:] == [((0, 1), (0,)), ((0, 1), (0, 1))]


class Bottleneck(nn.Module):
    """One of ResNet's, whose middle goes on in other steps along both axes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for sizes, options in (
            ((3, 8, 1), {}),
            ((8, 8, 3), {"padding": 1, "stride": (1, 2)}),
            ((8, 16, 1), {}),
        ):
            layers += [nn.Conv2d(*sizes, bias=False, **options), nn.BatchNorm2d(sizes[1])]
            layers += [nn.ReLU()]
        self.body, self.shortcut = nn.Sequential(*layers), nn.Conv2d(3, 16, 1, (1, 2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        scores = self.head((self.body(x) + self.shortcut(x)).mean((2, 3)))
        return nn.functional.cross_entropy(scores, labels)


@pytest.fixture
def pictures(small_limit: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each run of a graph in PyTorch has had."""
    seen: list[int] = []
    run = Reference.run

    def noted(self: Reference, data: Any, take: Any) -> None:
        seen.append(len(data.leaves[0]))
        return run(self, data, take)

    monkeypatch.setattr(Reference, "run", noted)
    return seen


def trained(size: int = 12) -> ORTModule:
    torch.manual_seed(0)
    model = ORTModule(Bottleneck(), strict=True)
    model(torch.randn(18, 3, size, size), torch.randint(0, 4, (18,))).backward()
    return model


def test_two_pictures_are_enough(pictures: list[int]) -> None:
    """PyTorch's choice of a kernel has a guard for 16, but the graph is right for two."""
    assert trained().gradd_stats()["self_checks_on_few_rows"] == 1
    assert set(pictures) == {2}


def _turn(value: Tensor) -> None:
    value[1] *= -1


def _more(value: Tensor) -> None:
    value.mul_(1.5)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ((GRADIENT, "body.3.weight"), _turn),
        ((GRADIENT, "body.0.weight"), _more),
        ((GRADIENT, "shortcut.weight"), None),
        ((BUFFER, "body.1.running_mean"), _turn),
        ((BUFFER, "body.7.running_var"), _more),
    ],
)
def test_a_wrong_value_is_found(small_limit, monkeypatch, key: Any, change: Any) -> None:
    compare = selfcheck._Check._in_daemon

    def wrong(self: Any, data: Any, seeded: Any) -> Any:
        values, task = compare(self, data, seeded)
        if change is None:
            values[key] = None
        else:
            change(values[key])
        return values, task

    monkeypatch.setattr(selfcheck._Check, "_in_daemon", wrong)
    with pytest.raises(SelfCheckError, match=key[1]):
        trained()


def test_a_wrong_stride_is_found(small_limit, monkeypatch) -> None:
    """3 for 2: of 4 positions both take two, so that no size tells."""
    each = convolutions.each

    def other(value: Any, axes: int, what: str) -> Any:
        return [3 if n == 2 and "stride" in what else n for n in each(value, axes, what)]

    monkeypatch.setattr(convolutions, "each", other)
    with pytest.raises(SelfCheckError, match="differs from PyTorch"):
        trained(size=4)
