"""Decides how many test processes this machine runs in parallel.

A worker is one thread of Python and a daemon of two threads, of which one part at a time works: a
core each. Control groups (of a container, or of systemd) may allow less time and less memory than
the machine has; every group above this process may have a limit of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

WORKER_BYTES = 3 << 29  # 1.5 GiB: torch, transformers, the captures of a file of tests, a daemon
KEPT_BYTES = 1 << 29  # for other processes


def workers(root: Path = Path("/")) -> int:
    """One per core that may be used, fewer where the memory is short; at least one."""
    by_memory = (_free_bytes(root) - KEPT_BYTES) // WORKER_BYTES
    return max(1, min(_cores(root), by_memory))


def _cores(root: Path) -> int:
    """Cores of the affinity mask, and no more than the control groups' time is worth."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, "cpu"):
        words = _read(group / "cpu.max").split()  # "max 100000" or "150000 100000"
        if not words:
            words = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and words[0].isdigit() and int(words[1] or 0) > 0:
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(1, int(cores))


def _free_bytes(root: Path) -> int:
    """What the kernel could give without swapping, and no more than the control groups leave."""
    words = _read(root / "proc/meminfo").split()
    free = int(words[words.index("MemAvailable:") + 1]) << 10
    for group in _groups(root, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _read(group / limit).strip(), _read(group / used).strip()
            if most.isdigit() and now.isdigit():
                free = min(free, int(most) - int(now) + _cache_bytes(group))
    return max(0, free)


def _cache_bytes(group: Path) -> int:
    """Pages of files that a group gives back when it needs memory."""
    words = _read(group / "memory.stat").split()
    named = dict(zip(words[::2], words[1::2], strict=False))
    return int(named.get("inactive_file", 0)) + int(named.get("active_file", 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the group of this process and of all above it, in the layout that is there.

    In a container the path is often not visible: then the root of the mount is the group's own.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _read(path: Path) -> str:
    """The text of a file that may be missing or closed to us."""
    try:
        return path.read_text()
    except OSError:
        return ""
