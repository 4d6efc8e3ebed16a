"""A thread that sends the messages queued by finalizers if no request carries them.

Finalizers run anywhere and never send. During training the next request carries the messages that
they queue; after `del model` there is none, and the daemon would keep graph, plans and memory. So
this thread looks a few times per second, and sends the rest if there was no request meanwhile. It
also queues what the process says of itself, when that has changed.
(Finalizers do not wake it: the callbacks of weak references are C functions, because Python
callbacks would swallow a Ctrl-C.) It never connects and never starts a daemon.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from gradd import about

if TYPE_CHECKING:
    from gradd.session.client import Client

PERIOD_SECONDS = 0.25


class Flusher:
    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._stopped = threading.Event()
        self._started = False

    def start(self) -> None:
        """Starts the thread, once; not in a finalizer."""
        if not self._started:
            self._started = True
            args = (self._client, self._stopped)
            threading.Thread(target=_run, args=args, name="gradd-flusher", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()


def _run(reference: weakref.ref[Client], stopped: threading.Event) -> None:
    seen, told = -1, about.version
    while not stopped.wait(PERIOD_SECONDS):
        client = reference()
        if client is None:
            return
        client.look_after_pending()
        if about.version != told:
            told = about.version
            client.later("about", about.fields())
        if client.requests == seen:
            client.flush_leftovers()
        seen = client.requests
        del client
