"""Trainers on a GPU do not wait for their daemon; streams do, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from gradd import errors, optim
from gradd.memory import devices
from gradd.session import client as clients
from gradd.session import control, timeline
from helpers import ROOT, emu_torch
from helpers.emu_steps import DEVICE, Squares, Trainer, Words

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the client waits for the stream and for replies, and the stream for others."""
    found: Counter[str] = Counter()

    def counted(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(*given: Any, **named: Any) -> Any:
            found[name] += name != "collect" or named.get("wait", False)
            return real(*given, **named)

        monkeypatch.setattr(kind, name, call)

    counted(devices.Gpu, "settle")
    counted(devices.Gpu, "_waiting")
    counted(control.Connection, "call")
    counted(control.Connection, "collect")
    return found


@pytest.mark.parametrize(
    ("model", "most", "way"), [(Squares, 0, "vmm"), (Words, 1, "vmm"), (Squares, 1, "pinned")]
)
def test_a_step_waits_for_labels_alone(
    model: type[Words], most: int, way: str, waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_GPU_MEMORY", way)
    trainer = Trainer("fused", model)
    for i in range(4):
        trainer.step(i).item()
    assert isinstance(trainer.optimizer, optim.FusedAdam) and trainer.optimizer.grad_norm > 0
    waits.clear()
    losses = [trainer.step(i) for i in range(4)]
    assert waits.pop("_waiting", 0) <= (0 if way == "pinned" else 2 * 4)  # forward and backward
    # the replies to forward, backward and step of before, of which the last is waited for
    assert set(+waits) <= {"collect"} and waits["collect"] <= 3 * 4 * most
    assert len({loss.item() for loss in losses}) == 4
    assert trainer.optimizer.grad_norm > 0
    assert trainer.model.gradd_stats()["mirrored"] == (3 if way == "pinned" else 0)


STEADY = """
import sys
from pathlib import Path
from helpers import emu_torch
emu_torch.load()
from helpers import emu_steps
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import test_emu_timeline as timeline
steps = emu_steps.Trainer("fused", getattr(emu_steps, sys.argv[2]))
for i in range(8):
    steps.step(i).item()
for _ in range(3):
    steps.client.flush()
    found = timeline.counted(Path(sys.argv[3]))
    trainer = found.pop(str(timeline.os.getpid()))
    (daemon,) = found.values()
    print({"trainer": trainer, "daemon": daemon})
    for i in range(8):
        steps.step(i)
    with steps.client.lock:
        steps.client.catch_up()
"""


def counted(folder: Path) -> dict[str, tuple[int, ...]]:
    """Waits of the host, copies to it, their bytes, and kernels, by process."""
    return {file.name: struct.unpack("4Q", file.read_bytes()) for file in folder.iterdir()}


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "labels"), [("Squares", 0), ("Words", 1)])
def test_steps_cost_the_same_and_the_trainer_waits_for_labels_alone(
    model: str, labels: int, tmp_path: Path
) -> None:
    """By what the stand-in counts. The daemon copies records to its host, and no tensor."""
    done = subprocess.run(
        [sys.executable, "-c", STEADY, __file__, model, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "GRADD_SIM_COUNTS": str(tmp_path),
        },
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    stop = [str(conftest.BINARY), "stop", "--dir", os.environ["GRADD_DIR"]]
    subprocess.run(stop, check=True, timeout=60, capture_output=True)
    assert not done.returncode, done.stderr[-3000:]
    seen = [eval(line) for line in done.stdout.splitlines()]
    trainers, daemons = ([s[side] for s in seen] for side in ("trainer", "daemon"))
    first, second = map(_difference, trainers, trainers[1:])
    assert first == second and first[0] <= labels * 8 and first[1] <= labels * 8
    first, second = map(_difference, daemons, daemons[1:])
    waits, copies, copied, kernels = first
    assert first == second and waits > 0 and copied <= 64 * copies and kernels % 8 == 0


def _difference(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]


def test_a_trainer_that_waits_for_its_stream_is_helped(daemon: Any) -> None:
    """No request follows: the stream would wait for a dead daemon for ever."""
    trainer = Trainer("sgd")
    for i in range(4):
        trainer.step(i)
    with trainer.client.lock:  # so that the daemon is dead before the client can know
        trainer.client.catch_up()
        daemon.kill(trainer.client.daemon_pid)
        trainer.client.timeline.begin(late := _Unsent(trainer.client))
        trainer.client.timeline.follow(late)
    torch.accelerator.synchronize(DEVICE)
    with trainer.client.lock:
        trainer.client.catch_up()
    assert late.replies == [True] and trainer.client.recoveries == 1


class _Unsent(timeline.Pending):
    """A request that the dead daemon never got."""

    __slots__ = ("replies",)

    def __init__(self, client: clients.Client) -> None:
        self.replies: list[bool] = []
        super().__init__("release", {"runs": []}, lambda reply: self.replies.append(reply["ok"]))


@contextlib.contextmanager
def _late_stream() -> Iterator[None]:
    """What torch's current stream is given in this context is done after it."""
    gate = devices.Words(devices.of(torch.device(DEVICE)))
    gate.wait_in_turn(gate.READY, 1)
    try:
        yield
        time.sleep(0.5)  # a daemon that does not wait is done by then
    finally:
        gate.write(gate.READY, 1)
        torch.accelerator.synchronize(DEVICE)
        gate.close()


@pytest.mark.parametrize("wait", [False, True])
def test_a_refused_value_is_raised_and_its_results_are_nan(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_WAIT", str(int(wait)))
    clients.close_all()
    trainer = Trainer("fused")
    for i in range(4):
        trainer.step(i)
    before = trainer.values()
    ids, labels = trainer.batch(5)
    labels[3] = 9  # there are 7 classes
    if wait:
        with pytest.raises(errors.GraddError, match="CrossEntropy|9"):
            trainer.model(ids, labels)
    else:
        loss = trainer.model(ids, labels)
        assert loss.isnan().item()
        with pytest.raises(errors.GraddError, match="CrossEntropy|9"):
            loss.backward(trainer.ones)
    assert all(map(torch.equal, trainer.values(), before))
    trainer.optimizer.zero_grad()
    assert trainer.step(0).isfinite().item()
    assert not all(map(torch.equal, trainer.values(), before))


def test_steps_behind_a_failure_are_not_done() -> None:
    """The whole step is on its way before the failure is known; it changes no parameter."""
    trainer = Trainer("fused")
    for i in range(4):
        trainer.step(i).item()
    before = trainer.values()
    ids, labels = trainer.batch(5)
    labels[3] = 9
    trainer.batches[0] = (ids, labels)
    gate = torch.zeros(1 << 20, device=DEVICE)
    with pytest.raises(errors.GraddError):
        gate += 1
        trainer.step(0)
        trainer.client.request("release", {"runs": []})
    assert all(map(torch.equal, trainer.values(), before))
    trainer.batches[0] = trainer.batch(0)
    trainer.optimizer.zero_grad()
    for i in range(4):
        assert trainer.step(i).isfinite().item()


def test_a_step_that_is_sent_before_a_failure_is_known_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, backward and step are with the daemon when the first of them fails."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer = Trainer("fused", Squares)
    for i in range(4):
        trainer.step(i).item()
    before = trainer.values()
    ids, labels = trainer.batches[0]
    ids = ids + 99  # there are 20 words
    with _late_stream():
        loss = trainer.model(ids, labels)
        loss.backward(trainer.ones)
        trainer.optimizer.step()
        assert len(trainer.client.timeline.pending) == 3
    assert loss.isnan().item() and all(p.grad.isnan().all() for p in trainer.model.parameters())
    with pytest.raises(errors.GraddError, match="119|words|Gather"):
        trainer.client.request("release", {"runs": []})
    assert all(map(torch.equal, trainer.values(), before))


def test_no_daemon_repeats_what_is_behind_a_failure(daemon: Any) -> None:
    """The next daemon does not know the chain: it must not get the rest of it."""
    trainer = Trainer("fused")
    for i in range(4):
        trainer.step(i).item()
    before, client = trainer.values(), trainer.client
    trainer.step(0)
    with client.lock:
        client.timeline._failure = errors.GraddError("a request before it")
        daemon.kill(client.daemon_pid)
        with pytest.raises(errors.GraddError, match="a request before it"):
            client.catch_up()
    done = [not torch.equal(a, b) for a, b in zip(trainer.values(), before, strict=True)]
    assert all(done) or not any(done)  # the killed daemon may have done all of it
    trainer.optimizer.zero_grad()
    assert trainer.step(1).isfinite().item()


def test_a_step_without_gradients_has_no_norm_of_another() -> None:
    trainer = Trainer("fused")
    for i in range(4):
        trainer.step(i)
    trainer.optimizer.step()
    assert trainer.optimizer.grad_norm == 0


def _unchanged(model: type[Words] = Words) -> tuple[Trainer, list[float]]:
    """A trainer whose steps change no parameter, and its losses by batch."""
    trainer = Trainer("sgd", model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    for i in range(4):
        trainer.step(i)
    return trainer, [trainer.step(i).item() for i in range(4)]


def test_inputs_that_are_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, right = _unchanged(Squares)
    with _late_stream():
        late = [trainer.model(*trainer.batches[i]) for i in range(2)]
    assert [loss.item() for loss in late] == right[:2]


def test_calls_of_several_streams_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream alone does not say that the inputs of the other's call are there."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, right = _unchanged(Squares)
    with torch.Stream(DEVICE), _late_stream():
        late = [trainer.model(*trainer.batches[0])]
        with torch.Stream(DEVICE):
            late += [trainer.model(*trainer.batches[1])]
    assert [loss.item() for loss in late] == right[:2]


def test_a_stream_does_not_write_what_another_one_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result that is gone leaves its memory to the next call."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, right = _unchanged(Squares)
    with torch.Stream(DEVICE):
        loss = trainer.model(*trainer.batches[0])
        with _late_stream():
            copy = loss.detach().clone()
            del loss
            with torch.Stream(DEVICE):
                trainer.model(*trainer.batches[1])
    assert copy.item() == right[0]


def test_what_a_side_stream_reads_is_not_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is made on that stream, as in torch's pattern: read, record_stream(), drop."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, _ = _unchanged(Squares)
    parameters = list(trainer.model.parameters())
    main, side = torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)

    def forward(number: int) -> torch.Tensor:
        return trainer.model(*trainer.batches[number])

    def backward(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, parameters, trainer.ones))

    def right_though_late(read: list[torch.Tensor], call: Callable[[], object]) -> list[bool]:
        """Whether the side stream gets what it reads after the call has been made."""
        right = [t.cpu() for t in read]
        side.wait_stream(main)
        with side, _late_stream():
            copies = [t.clone() for t in read]
            while read:
                read.pop().record_stream(side)
            with main:
                trainer.client.flush()  # what is free need not be of this call
                call()
        return [torch.equal(a.cpu(), b) for a, b in zip(copies, right, strict=True)]

    result = right_though_late([forward(0).detach()], lambda: forward(1))
    gradients, loss = backward(forward(0)), forward(1)
    found = right_though_late(gradients, lambda: backward(loss))
    assert result == [True] and found == [True] * len(parameters), (result, found)


def test_without_the_wait_for_inputs_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests prove: each side's wait is needed."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, right = _unchanged()
    monkeypatch.setattr(devices.Words, "write_in_turn", devices.Words.write)
    for delay in ("20000", "400000"):  # a busy machine's daemon may be late itself
        monkeypatch.setenv("GRADD_SIM_DELAY_US", delay)
        late = [trainer.model(*trainer.batches[i % 4]) for i in range(8)]
        copies = [loss.detach().clone() for loss in late]
        monkeypatch.setenv("GRADD_SIM_DELAY_US", "50")
        torch.accelerator.synchronize(DEVICE)
        if any(c.item() != right[i % 4] for i, c in enumerate(copies)):
            return
    pytest.fail("each forward read the batch that was still under way")


def test_without_the_wait_for_results_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    trainer, right = _unchanged(Squares)  # without labels a call waits for no reply
    monkeypatch.setattr(devices.Words, "wait_in_turn", lambda *unused: None)
    owner = trainer.client.daemon_pid
    (worker,) = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    os.kill(int(worker), signal.SIGSTOP)  # nothing is computed
    try:
        late = [trainer.model(*trainer.batches[i]) for i in range(2)]
        copies = [loss.detach().cpu() for loss in late]
    finally:
        os.kill(int(worker), signal.SIGCONT)
    assert any(c.item() != right[i] for i, c in enumerate(copies))
