"""Samplers that give the processes of a training batches of like cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives each process samples of like complexity at the same time.

    Samples are sorted by complexity, within groups if there is a `group_size`; each run of
    `world_size` neighbours is dealt to the processes.

    Args:
        dataset: Has a length and indices.
        complexity_fn: Of a sample: a whole number, its length for instance.
        world_size: Number of processes; default: of torch.distributed.
        rank: This process; default: of torch.distributed.
        shuffle: Shuffle the runs, or with a `group_size` the order of the groups.
        group_size: Number of samples in a group.
        seed: Of the shuffling; the same in all processes.
        drop_last: Leave out what does not fill a run; otherwise the first samples fill it.
        random_level: From 0, the best balance, to 1: the share of the range of complexities up to
            which a random number is added to each.

    Raises:
        ValueError: `rank` or `random_level` is out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        complexity_fn: Callable[[Any], int],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.world_size = torch.distributed.get_world_size() if world_size is None else world_size
        self.rank = torch.distributed.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size - 1}]")
        if not 0.0 <= random_level <= 1.0:
            raise ValueError(f"random_level {random_level} is not in [0, 1]")
        self.dataset = dataset
        self.complexity_fn = complexity_fn
        self.shuffle = shuffle
        self.group_size = group_size
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch = 0
        full, rest = divmod(len(dataset), self.world_size)
        self.num_samples = full if drop_last or not rest else full + 1
        self.total_size = self.num_samples * self.world_size
        self._complexities: torch.Tensor | None = None

    def runs(self) -> list[list[int]]:
        """Indices of this epoch: `num_samples` lists with one sample of each process."""
        if self._complexities is None:  # once: a complexity may be costly
            every = (int(self.complexity_fn(self.dataset[i])) for i in range(len(self.dataset)))
            self._complexities = torch.tensor(list(every), dtype=torch.int64)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = self._sorted(self._complexities, generator)
        order += order * (-(-self.total_size // max(1, len(order))) - 1)
        n = self.world_size
        runs = [order[i : i + n] for i in range(0, self.total_size, n)]
        if not self.shuffle or self.group_size is not None:
            return runs
        return [runs[i] for i in torch.randperm(len(runs), generator=generator).tolist()]

    def _sorted(self, complexities: torch.Tensor, generator: torch.Generator) -> list[int]:
        """All indices: groups in their order, each by complexity."""
        count = len(complexities)
        if count and self.random_level > 0:
            spread = int(complexities.max() - complexities.min())
            top = int(spread * self.random_level) + 1
            complexities = complexities + torch.randint(top, (count,), generator=generator)
        size = self.group_size or max(1, count)
        groups = [
            (torch.argsort(part, stable=True) + size * i).tolist()
            for i, part in enumerate(complexities.split(size))
        ]
        if self.shuffle and self.group_size is not None:
            shuffled = torch.randperm(len(groups), generator=generator).tolist()
            groups = [groups[i] for i in shuffled]
        return [index for group in groups for index in group]

    def __iter__(self) -> Iterator[int]:
        return iter([run[self.rank] for run in self.runs()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Another order of shuffling; call it at the beginning of each epoch."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of different sizes, as many in each process.

    Args:
        sampler: Without drop_last.
        batch_fn: Of a process's indices: a list of batches, lists of indices.
        drop_last: Leave out batches that not every process has; otherwise the first are repeated.

    Raises:
        ValueError: The sampler is another one, or drops samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError("sampler must be a LoadBalancingDistributedSampler")
        if sampler.drop_last:
            raise ValueError("the sampler must not have drop_last")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._make()

    def _make(self) -> None:
        runs = self.sampler.runs()
        every = [self.batch_fn([run[r] for run in runs]) for r in range(self.sampler.world_size)]
        self._length = (min if self.drop_last else max)(len(batches) for batches in every)
        own = every[self.sampler.rank]
        times = -(-self._length // max(1, len(own)))
        self._batches = (own * times)[: self._length]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Another order of shuffling, and new batches."""
        self.sampler.set_epoch(epoch)
        self._make()
