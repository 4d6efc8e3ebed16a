"""A thread that sends what finalizers have queued, where no request takes it along.

Finalizers run anywhere and never send. In a training the next request carries what they queue;
after `del model` there is none, and the daemon would keep graph, plans and memory. So they ask, and
a moment later this thread sends whatever is left. It never connects and starts no daemon.
"""

from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradd.client import Client

DELAY_SECONDS = 0.25  # most steps are shorter: their requests come first


class Flusher:
    """Asks for flushes of one client."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._asked: SimpleQueue[bool] = SimpleQueue()  # its put() may be called in finalizers
        self._due = False
        self._started = False

    def start(self) -> None:
        """Starts the thread, once; not in a finalizer."""
        if self._started:
            return
        self._started = True
        target, args = _run, (self._client, self._asked)
        threading.Thread(target=target, args=args, name="gradd-flusher", daemon=True).start()

    def ask(self) -> None:
        """There is something to send. Any thread, any time."""
        if not self._due:
            self._due = True
            self._asked.put(True)

    def begin(self) -> None:
        """What is queued from now on needs another flush."""
        self._due = False

    def stop(self) -> None:
        """Ends the thread."""
        self._asked.put(False)


def _run(reference: weakref.ref[Client], asked: SimpleQueue[bool]) -> None:
    while asked.get():
        time.sleep(DELAY_SECONDS)
        client = reference()
        if client is None:
            return
        client.flush_leftovers()
        del client
