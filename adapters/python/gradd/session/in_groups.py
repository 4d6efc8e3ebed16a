"""A backward whose gradients are used while the daemon computes the rest of them.

Such a request has a turn (timeline.py), on the host as well, where every other reply is waited for.
The daemon raises a word of the timeline each time that a group of gradients is done: torch's stream
waits for that, or on the host the thread that wants the group. If the daemon dies meanwhile, the
request is repeated as others of a timeline are, without the groups that were done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradd import errors, interrupts
from gradd.memory.devices import HOST
from gradd.session.timeline import MOST, Pending, Timeline

if TYPE_CHECKING:
    from gradd.session.client import Client

_PAUSES = (5e-5, 1e-3)  # seconds between two looks at the word: the first, and the longest
_ALSO = 10  # looks at the word, after which the sockets are looked at


def send(
    client: Client,
    fields: dict[str, Any],
    meanwhile: Callable[[], None],
    *,
    plan: int,
    parts: Sequence[Sequence[tuple[int, int]]],
    n: int,
    ended: Callable[[Any], None],
) -> tuple[Pending, dict[str, Any]] | None:
    """Sends a backward in groups, for a caller that has the lock and holds Ctrl-C back.

    Args:
        client: The session.
        fields: Of the request.
        meanwhile: Is called when it is on its way.
        plan: Of the run.
        parts: Per group, addresses and bytes of its gradients; empty on the host.
        n: How many groups there are.
        ended: Is called with the reply or the error.

    Returns:
        The request, and what the daemon has replied to one of its kind; None if none of its kind
        has succeeded, or the client waits for all replies: nothing was sent then.
    """
    timeline = client.with_turns()
    kind = (plan, *fields["go"]["at"], bool(fields["keep"]))
    forward = client.ledger.runs.get(fields["run"])
    flags = forward[0]["flags"] if forward else 0
    if timeline is None or not timeline.knows(kind, flags, in_groups=True):
        return None
    pending = Pending(
        "backward",
        fields,
        ended,
        failed=ended,
        forward=forward,
        groups=n,
    )
    pending.results = list(map(list, parts))
    client.ask_later(pending, meanwhile)
    return pending, timeline.known[kind]


def wait(client: Client, pending: Pending, group: int) -> None:
    """Waits for a group: torch's current stream does, or on the host the caller.

    Raises:
        StaleError: The daemon died, and the parameters have changed since the forward.
        GraddError: What the backward has failed with.
    """
    timeline: Timeline = client.timeline  # type: ignore[assignment]
    if client.memory is not HOST:
        with client.lock:
            if not pending.is_over:
                timeline.wait_for_group(pending, group)
        return
    try:
        with client.lock, interrupts.deferred:
            _wait_on_host(client, timeline, pending, group)
        if pending.error is not None:  # another thread has collected it
            timeline.is_told(pending.error)
            raise pending.error
    except errors.StaleError:
        if pending.fields["run"] not in client.ledger.lost:
            raise
        raise client.ledger.lost_run(pending.fields["run"]) from None


def _wait_on_host(client: Client, timeline: Timeline, pending: Pending, group: int) -> None:
    (pause, longest), looks = _PAUSES, 0
    while not pending.is_over and timeline.groups_done(pending) <= group:
        time.sleep(pause)
        pause = min(2 * pause, longest)
        looks += 1
        if looks % _ALSO == 0:  # for an error, or a daemon that has died
            interrupts.deliver_if_due()
            client.catch_up(MOST)
    if group + 1 == pending.groups:
        client.catch_up()
