"""Proportional memory (PSS) of processes: pages that two processes share count once in their
sum."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable

from gradd.memory.pss import pss_bytes


class PeakSampler:
    """Samples the PSS of some processes in a thread and keeps the peaks.

    Args:
        pids: called at each sample, so a daemon that starts later is seen: {name: pid}.
        period: seconds between samples. A sample walks page tables, so keep it well above the
            milliseconds that this takes.
    """

    def __init__(self, pids: Callable[[], dict[str, int]], period: float = 0.25) -> None:
        self._pids = pids
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pss", daemon=True)
        self.peaks: dict[str, int] = {}
        self.peak_sum = 0

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def sample(self) -> None:
        now = {name: pss_bytes(pid) for name, pid in self._pids().items()}
        for name, value in now.items():
            self.peaks[name] = max(self.peaks.get(name, 0), value)
        self.peak_sum = max(self.peak_sum, sum(now.values()))

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.sample()


def worker_pid() -> int | None:
    """The process that computes for this one, of the daemon that it is connected to, or None."""
    # Not imported, or another thread is about to: nothing can be connected.
    clients = getattr(sys.modules.get("gradd.session.client"), "clients", tuple)
    return next((client.worker_pid for client in clients() if client.worker_pid), None)


def in_mib(values: Iterable[int]) -> list[float]:
    """Bytes as MiB with one decimal, for reports."""
    return [round(v / 2**20, 1) for v in values]
