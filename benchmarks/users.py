"""How the daemons of several users divide a machine (`gradd serve --allow-group`). Needs root.

    .venv/bin/python benchmarks/users.py [--seconds 10] [--threads 2]

A supervisor, and a daemon for each of two users. Three lines: two users with the same work, one
session each; the same where one of them has four sessions; and a short request of one user beside
the four of the other, and alone. Of the first two the forwards of each user, the processor time of
the daemons, and Jain's index of either, where 1 is equal; of the last one milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A child of another uid can import nothing: all is here before.
import numpy.random  # noqa: F401

HERE = Path(__file__).resolve().parent
for folder in ("tests/python", "adapters/python", "benchmarks"):
    sys.path.insert(0, str(HERE.parent / folder))

from neighbours import SHORT, Session, Watch, ask, products  # noqa: E402

from helpers.other_users import GROUP, A, B, Users, why_not  # noqa: E402

LONG = (512, 10)  # side of the matrices and number of products of a request
SAMPLES = 300


class Child:
    """A process of another user; what it finds comes as JSON."""

    def __init__(self, uid: int, work: Callable[[], Any]) -> None:
        self.out, into = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(into)
            return
        try:
            os.setsid()
            os.setgroups((GROUP,))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            found = [work(), ""]
        except BaseException:
            found = [None, traceback.format_exc()]
        os.write(into, json.dumps(found).encode())
        os._exit(0)

    def result(self) -> Any:
        """Waits for it."""
        with os.fdopen(self.out, "rb") as file:
            text = file.read()
        os.waitpid(self.pid, 0)
        found, error = json.loads(text)
        if error:
            sys.exit(error)
        return found


def forwards(folder: Path, begin: float, seconds: float) -> int:
    """How many a session has done by the end."""
    with Session(folder).prepare(products(*LONG)) as s:
        s.forward()
        time.sleep(max(0.0, begin - time.monotonic()))
        count = 0
        while time.monotonic() < begin + seconds:
            s.forward()
            count += 1
    return count


def short(folder: Path, worker: int, begin: float) -> list[float]:
    """Milliseconds of short requests."""
    with Session(folder).prepare(products(*SHORT)) as s:
        expected = s.forward()
        time.sleep(max(0.0, begin - time.monotonic()))
        watch = Watch(worker)
        ask(s, expected, SAMPLES, watch)
    return watch.ms


def jain(values: list[float]) -> float:
    """The index: 1 if all have the same, 1/n if one has all."""
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def seconds_of(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def divide(users: Users, seconds: float, sessions: dict[int, int]) -> None:
    """One line: so many sessions of each user."""
    workers = {uid: users.ps(uid)["worker"] for uid in sessions}
    begin = time.monotonic() + 3
    children = {
        uid: [
            Child(uid, lambda uid=uid: forwards(users.folder(uid), begin, seconds))
            for _ in range(n)
        ]
        for uid, n in sessions.items()
    }
    time.sleep(max(0.0, begin - time.monotonic()))
    before = {uid: seconds_of(pid) for uid, pid in workers.items()}
    done = {uid: sum(child.result() for child in of) for uid, of in children.items()}
    took = {uid: seconds_of(pid) - before[uid] for uid, pid in workers.items()}
    print(
        f"sessions {[*sessions.values()]}: forwards {[*done.values()]}, "
        f"index {jain([float(n) for n in done.values()]):.3f}; processor seconds "
        f"{[round(s, 1) for s in took.values()]}, index {jain([*took.values()]):.3f}",
        flush=True,
    )


def beside(users: Users, seconds: float, others: int) -> None:
    """One line: a short request beside so many sessions of the other user."""
    begin = time.monotonic() + 3
    loads = [Child(A, lambda: forwards(users.folder(A), begin, seconds)) for _ in range(others)]
    worker = users.ps(B)["worker"]
    ms = sorted(Child(B, lambda: short(users.folder(B), worker, begin + 0.5)).result())
    for load in loads:
        load.result()
    print(
        f"short request beside {others} sessions of another user: median {ms[len(ms) // 2]:.1f}, "
        f"p99 {ms[len(ms) * 99 // 100]:.1f}, longest {ms[-1]:.1f} ms",
        flush=True,
    )


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    users = Users(threads=args.threads)
    try:
        for uid in (A, B):
            users.daemon(uid)
        divide(users, args.seconds, {A: 1, B: 1})
        divide(users, args.seconds, {A: 4, B: 1})
        beside(users, args.seconds, 0)
        beside(users, args.seconds, 4)
    finally:
        users.close()


if __name__ == "__main__":
    main()
