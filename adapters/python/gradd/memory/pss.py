"""Proportional memory (PSS) of processes: pages that two processes share count once in their
sum."""

from __future__ import annotations

from typing import Any


def pss_bytes(pid: int | str = "self") -> int:
    """PSS of one process in bytes; 0 if the process is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def print_after(phase: str, run: Any) -> None:
    """ORTMODULE_PRINT_MEMORY_STATS: the memory held after a forward or a backward."""
    client, plan = run.client, run.plan
    rows = {
        "trainer": pss_bytes(),
        "daemon": pss_bytes(client.worker_pid),
        "shared": client.segment_bytes(),
        "planned": plan.info.peak,
        "saved": plan.info.saved,
    }
    text = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in rows.items())
    print(f"gradd: after {phase}: {text}", flush=True)
