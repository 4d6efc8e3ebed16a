"""kill -9 of workers and owners at random moments of real training; the bits must be the same.

    python benchmarks/torture.py --seconds 600

One training after the other, with dropout and FusedAdam, is compared with one that nothing has
disturbed. Some kills wait for the commit of a step, some hit a worker that starts. The counts go on
from run to run in benchmarks/results/torture.json; a training whose bits differ, or that fails,
ends the run with its seed and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "torture.json"
STEPS = 12
MOST = 4  # kills in one step: with the fifth lost daemon in a row a request gives up
CHUNK_BITS = 24  # of the journal's progress: below are the chunks that are done
COUNTS = ("trainings", "workers", "in_commit", "starting", "owners")


def load(path: Path) -> dict[str, int]:
    """The counts so far."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: int(found.get(name, 0)) for name in COUNTS}


def save(path: Path, counts: dict[str, int]) -> None:
    """Writes the counts, all or none."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(counts, indent=1) + "\n")
    fresh.replace(path)


def state_of(pid: int) -> tuple[str, int]:
    """State and parent of a process; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


class Killer(threading.Thread):
    """Kills while a training runs."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.lock_file = folder / "lock"
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.in_step = 0
        self.progress = lambda: 0  # of the optimizer's journal
        self.last = 0  # worker that was killed

    def run(self) -> None:
        """Until the training is over."""
        while not self.over.wait(self.random.uniform(0.0, 0.12)):
            if self.in_step >= MOST:
                continue
            if self.random.random() < 0.06:
                self._kill_owner()
                continue
            if self.random.random() < 0.4:
                self._wait_for_commit()
            if self._kill_worker() and self.random.random() < 0.2 and self.in_step < MOST:
                self._kill_start()

    def is_in_commit(self) -> bool:
        """Whether a part of a step's chunks is done."""
        return self.progress() & ((1 << CHUNK_BITS) - 1) != 0

    def _wait_for_commit(self) -> None:
        deadline = time.monotonic() + 1
        while not self.is_in_commit() and time.monotonic() < deadline and not self.over.is_set():
            time.sleep(0)

    def _owner(self) -> int:
        try:
            return int(self.lock_file.read_text() or 0)
        except (OSError, ValueError):
            return 0

    def _worker(self, but: int = 0) -> int:
        owner = self._owner()
        for entry in os.listdir("/proc") if owner else ():
            if entry.isdigit() and int(entry) != but:
                state, parent = state_of(int(entry))
                if parent == owner and state not in ("", "Z"):
                    return int(entry)
        return 0

    def _kill(self, pid: int) -> bool:
        if not pid:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.in_step += 1
        while state_of(pid)[0] not in ("", "Z"):
            time.sleep(0)
        return True

    def _kill_worker(self) -> int:
        pid = self._worker()
        if not self._kill(pid):
            return 0
        self.counts["workers"] += 1
        self.counts["in_commit"] += self.is_in_commit()
        self.last = pid
        return pid

    def _kill_start(self) -> None:
        deadline = time.monotonic() + 1
        while not self.over.is_set() and time.monotonic() < deadline:
            if pid := self._worker(but=self.last):
                self.over.wait(self.random.uniform(0.0, 0.02))
                if self._kill(pid):
                    self.counts["workers"] += 1
                    self.counts["starting"] += 1
                return

    def _kill_owner(self) -> None:
        pid = self._owner()
        with contextlib.suppress(OSError):
            if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes() and self._kill(pid):
                self.counts["owners"] += 1


def train(seed: int, killer: Killer | None) -> list:
    """Losses of all steps and the parameters at the end."""
    import torch

    from gradd import ORTModule, optim

    torch.manual_seed(seed)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Dropout(0.2)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 64))
    model = ORTModule(net, strict=True)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    found = []
    for step in range(STEPS):
        if killer is not None:
            killer.in_step = 0
            words = optimizer._journal_words
            if words is not None:
                killer.progress = lambda words=words: int(words[1])
        x = torch.randn(8 + step % 3, 256, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    return found + [p.detach().clone() for p in model.parameters()]


def one(folder: Path, seed: int, expected: list) -> dict[str, int]:
    """A disturbed training; its kills."""
    import torch

    killer = Killer(folder, seed)
    killer.start()
    try:
        found = train(1, killer)
    finally:
        killer.over.set()
        killer.join()
    same = len(found) == len(expected) and all(
        torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )
    if not same:
        sys.exit(f"seed {seed}: other bits after {killer.counts}")
    return {**killer.counts, "trainings": 1}


def main() -> None:
    """Trains until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradd-torture-"))
    os.environ["GRADD_DIR"] = str(folder)
    import logging

    logging.getLogger("gradd").setLevel(logging.ERROR)
    counts = load(args.result)
    deadline = time.monotonic() + args.seconds
    try:
        expected = train(1, None)
        while time.monotonic() < deadline:
            seed = counts["trainings"] + 1
            for name, n in one(folder, seed, expected).items():
                counts[name] += n
            save(args.result, counts)
            print(json.dumps(counts), flush=True)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "lock").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
