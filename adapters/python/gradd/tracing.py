"""A trace of the work of trainer and daemon, for Perfetto (https://ui.perfetto.dev).

    with gradd.trace("step.json"):
        train_some_steps()

Times come with replies that the trainer gets anyway. The file is written as events come, so memory
stays bounded, and a trace that is cut off can be read as well.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from gradd.session import client as clients
from gradd.session import said

logger = logging.getLogger("gradd")

_MOST = 1_000_000  # events, of about 120 bytes
_BUFFER = 256  # events that are written together
_TRAINER, _QUEUE = 1, 2  # numbers of lanes
_RUNS = {"forward": (3, "forward"), "backward": (4, "backward"), "step": (5, "optimizer")}
_LANES = {_TRAINER: "trainer", _QUEUE: "queue", **dict(_RUNS.values())}


class trace:  # used like a function
    """Writes what trainer and daemon do in a `with` block as a trace for Perfetto.

    Lanes: the trainer (its own work, and the requests that it waits for), the daemon's queue, and
    forwards, backwards and optimizer steps in the daemon; a counter has the memory of the process's
    runs. What no client of this process asks for is not in it.

    Args:
        path: A file, which is overwritten; JSON in Chrome's format of traces.

    Raises:
        OSError: The file cannot be written; at the begin of the block.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()

    def __enter__(self) -> trace:
        self._file = self._path.open("wb", buffering=0)
        self._pid = os.getpid()  # a fork of this process writes nothing
        self._start = self._answered = said.now()
        self._written = self._dropped = 0
        self._lines: list[str] = []
        self._name("process_name", 0, f"process {self._pid} and its daemon")
        for lane, name in _LANES.items():
            self._name("thread_name", lane, name)
            order = f'"args":{{"sort_index":{lane}}}'
            self._put(f'"name":"thread_sort_index","tid":{lane},"ph":"M",{order}')
        said.everywhere += (self._hear,)
        for client in clients.clients():
            client.said.begin(self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            for client in clients.clients() if kind is None else ():
                with client.lock:
                    client.catch_up()  # with requests that were not waited for
        finally:
            self._end()

    def _end(self) -> None:
        said.everywhere = tuple(known for known in said.everywhere if known != self._hear)
        for client in clients.clients():
            client.said.end(self._hear)
        if self._pid != os.getpid():
            return
        with self._lock:
            self._flush()
            self._file.write(b"\n]\n")
            self._file.close()
        if self._dropped:
            logger.warning(
                "%s has the first %d events; %d more were left out",
                *(self._path, self._written, self._dropped),
            )

    def _hear(self, verb: str, sent: int, reply: dict[str, Any]) -> None:
        answered = said.now()
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._file.closed:
                return
            if sent:
                own = max(sent - self._answered, 0)  # another thread's request may be over later
                self._slice("trainer", _TRAINER, sent - own - self._start, own)
                self._slice(verb, _TRAINER, sent - self._start, answered - sent)
                self._answered = answered
            us = reply.get("us")
            if us is not None and verb in _RUNS and us["at"] * 1000 >= self._start:
                self._done(verb, us, reply)
            if len(self._lines) >= _BUFFER:
                self._flush()

    def _done(self, verb: str, us: dict[str, int], reply: dict[str, Any]) -> None:
        arrived = us["at"] * 1000 - self._start
        began = arrived + us["queued"] * 1000
        self._slice(verb, _QUEUE, arrived, us["queued"] * 1000)
        lane, name = _RUNS[verb]
        self._slice(name, lane, began, us["ran"] * 1000)
        arena = reply.get("arena", 0)
        self._memory(began, arena)
        self._memory(began + us["ran"] * 1000, reply.get("rest", arena))

    def _name(self, what: str, lane: int, name: str) -> None:
        self._put(f'"name":"{what}","tid":{lane},"ph":"M","args":{{"name":"{name}"}}')

    def _slice(self, name: str, lane: int, start: int, took: int) -> None:
        """A slice, in nanoseconds from the start."""
        times = f'"ts":{start / 1000},"dur":{took / 1000}'
        self._put(f'"name":"{name}","tid":{lane},"ph":"X",{times}')

    def _memory(self, at: int, size: int) -> None:
        value = f'"args":{{"MiB":{size / 2**20}}}'
        self._put(f'"name":"activations","tid":0,"ph":"C","ts":{at / 1000},{value}')

    def _put(self, event: str) -> None:
        if self._written + len(self._lines) >= _MOST:
            self._dropped += 1
            return
        self._lines.append(f'{{"pid":{self._pid},{event}}}')

    def _flush(self) -> None:
        if not self._lines:
            return
        lines = ",\n".join(self._lines)
        self._file.write(f"{',' if self._written else '['}\n{lines}".encode())
        self._written += len(self._lines)
        self._lines.clear()
