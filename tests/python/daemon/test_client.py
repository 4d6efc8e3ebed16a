"""The client: memory, requests, versions, forks, and requests that the daemon refuses."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
import torch
from conftest import PYTHONPATH

from gradd import ORTModule, errors
from gradd.memory import devices, shm
from gradd.session import control, protocol, ring
from gradd.session.daemon import DirectoryError, check_directory, directory
from gradd.session.finalizers import Ends
from helpers import sessions, wrapper_internals
from helpers.nets import Net, batch, loss_of


class _NoDaemon:
    """Stands in for the client where only memory is tested: segments without a daemon to tell."""

    memory = devices.HOST

    def __init__(self) -> None:
        self.segments: list[shm.Segment] = []
        self.dropped = 0
        self.ends = Ends()

    def create_segment(self, size: int, purpose: str) -> shm.Segment:
        self.segments.append(shm.Segment(len(self.segments) + 1, size))
        return self.segments[-1]

    def drop_segment(self, segment: shm.Segment) -> None:
        self.dropped += 1
        segment.close()

    def segment_ids(self) -> range:
        return range(len(self.segments) - self.dropped)


# ---- memory ----


@pytest.mark.quick
def test_segments_are_sealed_and_reserved() -> None:
    import fcntl

    segment = shm.Segment(1, 5000)
    assert segment.size == 8192
    assert fcntl.fcntl(segment.fd, 1034) == 0x1 | 0x2 | 0x4
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    assert os.fstat(segment.fd).st_blocks * 512 >= 8192
    segment.close()


def test_more_memory_than_the_machine_has_is_a_named_error() -> None:
    with pytest.raises(errors.NoSpaceError, match="cannot reserve"):
        shm.Segment(1, 1 << 50)


def test_no_descriptor_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuses)
    with pytest.raises(errors.LimitError, match="Too many open files .`ulimit -n`"):
        shm.Segment(1, 4096)


@pytest.mark.quick
def test_blocks_come_back_when_their_tensors_are_gone() -> None:
    pool = ring.Pool(_NoDaemon(), "ring", grow=1 << 16, keep=True)
    block = pool.allocate(1000)
    tensor = block.tensor(torch.float32, (10, 25))
    view = tensor[2:]
    block.drop()
    pool.drain()
    assert pool.busy_bytes == 1024, "a tensor still refers to the block"
    del tensor, block
    gc.collect()
    pool.drain()
    assert pool.busy_bytes == 1024, "so does a view"
    del view
    pool.drain()
    assert pool.busy_bytes == 0


@pytest.mark.quick
def test_blocks_of_a_known_segment_may_not_overlap() -> None:
    pool = ring.Pool(_NoDaemon(), "state")
    segment = shm.Segment(1, 1 << 16)
    at = segment.start
    (first,) = pool.adopt(segment, {at + 1024: 256})
    assert pool.segment_of(segment.fd) is segment
    (again,) = pool.adopt_more(segment, {at + 1024: 256})
    assert again is first and first.pins == 2
    busy = pool.busy_bytes
    for wrong in (
        {at + 1024: 512},  # another size
        {at + 960: 128},  # into the first
        {at + 1088: 64},  # within the first
        {at + 2048: 256, at + 2176: 64},  # each other
        {at + 1024: 256, at + 1088: 64},
        {at + 2080: 64},  # not aligned
        {segment.size - 64: 128},  # beyond the end
        {segment.size + 4096: 64},
    ):
        with pytest.raises(errors.SharedMemoryError, match="overlap others"):
            pool.adopt_more(segment, wrong)
        assert pool.busy_bytes == busy, "nothing is taken"
    more = pool.adopt_more(segment, {at: 1024, at + 1280: 64, segment.size - 64: 64})
    assert pool.busy_bytes == busy + 1024 + 64 + 64
    for block in (first, again, *more):
        block.drop()
    pool.drain()
    assert pool.busy_bytes == 0 and pool.client.dropped == 1


@pytest.mark.quick
def test_many_blocks_do_not_take_many_segments() -> None:
    pool = ring.Pool(_NoDaemon(), "ring")
    blocks = [pool.allocate(4096) for _ in range(10)]
    assert pool.bytes() == 10 * 4096, "the first segments have just what was asked for"
    blocks += [pool.allocate(4096) for _ in range(2000)]
    assert len(pool.client.segment_ids()) < 32 and pool.bytes() < 2 * 2010 * 4096


@pytest.mark.quick
def test_a_large_segment_goes_though_something_is_always_alive() -> None:
    pool = ring.Pool(_NoDaemon(), "ring", grow=1 << 16, keep=True)
    large = pool.allocate(1 << 24)
    last = pool.allocate(256)  # the loss of a step lives until the next one is there
    large.drop()
    most = 0
    for _ in range(3 * 256):
        now = pool.allocate(256)
        last.drop()
        last = now
        pool.drain()
        most = max(most, len(pool.client.segment_ids()))
    assert pool.bytes() <= 1 << 17
    assert most <= 3


@pytest.mark.quick
def test_ranges_never_overlap_and_merge_again() -> None:
    pool = ring.Pool(_NoDaemon(), "ring", grow=1 << 16, keep=True)
    generator = torch.Generator().manual_seed(0)
    held: list[tuple[ring.Block, torch.Tensor, int]] = []
    for number in range(600):
        if held and torch.rand((), generator=generator) < 0.5:
            index = int(torch.randint(0, len(held), (), generator=generator))
            block, tensor, value = held.pop(index)
            assert tensor.eq(value).all(), "another block wrote here"
            block.drop()
        else:
            size = int(torch.randint(1, 3000, (), generator=generator))
            block = pool.allocate(size)
            assert block.offset % 64 == 0
            tensor = block.tensor(torch.uint8, (size,))
            tensor.fill_(number % 251)
            held.append((block, tensor, number % 251))
    for block, _, _ in held:
        block.drop()
    held.clear()
    del block, tensor
    pool.drain()
    assert pool.busy_bytes == 0
    pool.merge()
    for segment, starts, sizes in pool._free.values():
        assert starts == [0] and sizes == {0: segment.size}


@pytest.mark.quick
def test_small_blocks_take_the_same_places_again() -> None:
    """In every step, and give them up when something larger needs them."""
    pool = ring.Pool(_NoDaemon(), "ring", grow=1 << 16, keep=True)
    places = []
    for _ in range(300):
        blocks = [pool.allocate(size) for size in (512, 64, 64, 1000)]
        places.append([(b.segment.id, b.offset) for b in blocks])
        for block in blocks:
            block.drop()
        pool.drain()
        assert pool.busy_bytes == 0 and not pool.busy
    assert len({*map(frozenset, places)}) <= 2 and len({*places[0]}) == 4
    whole = pool.allocate(1 << 16)
    assert len(pool.client.segment_ids()) == 1 and whole.offset == 0
    whole.drop()
    twice = pool.allocate(64)
    twice.drop()
    twice.drop()  # by mistake: its place is taken once
    pool.drain()
    assert pool.allocate(64).offset != pool.allocate(64).offset


def test_empty_segments_go_when_they_are_not_needed() -> None:
    owner = _NoDaemon()
    pool = ring.Pool(owner, "ring")
    block = pool.allocate(1 << 16)
    block.drop()
    pool.drain()
    assert owner.dropped == 1 and pool.bytes() == 0


@pytest.mark.quick
@pytest.mark.parametrize("dtype", list(shm.DTYPE_CODES))
def test_every_dtype_and_shape_makes_a_base_tensor(dtype: torch.dtype) -> None:
    pool = ring.Pool(_NoDaemon(), "ring", grow=1 << 16)
    block = pool.allocate(4096)
    for shape in ((), (3,), (2, 3, 4), (0, 5)):
        tensor = block.tensor(dtype, shape)
        assert tensor.shape == shape and tensor.dtype is dtype and tensor._base is None
        tensor.fill_(1)
        assert tensor.eq(1).all()


# ---- requests ----


@pytest.mark.quick
def test_gradd_ps_shows_the_session(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    loss_of(model(*batch())).backward()
    (session,) = daemon.ps()["sessions"]
    assert session["pid"] == os.getpid() and session["graphs"] == 1 and session["plans"] >= 1
    assert session["steps"] >= 1 and session["engine_ms"] >= 0
    assert session["busy"] >= 0 and session["steps_per_second"] >= 0
    assert session["segment_bytes"] == sessions.session().segment_bytes()


def test_refused_requests_name_the_field_and_leave_the_session_alive(daemon: object) -> None:
    session = sessions.session()
    with pytest.raises(errors.GraddError, match="plan"):
        session.request("forward", {"run": 1})
    with pytest.raises(errors.StaleError, match="999"):
        none = protocol.tensors([])
        fields = {"plan": 999, "run": 1, "seed": 0, "flags": 0, "b": None, "in": none, "out": none}
        session.request("forward", fields)
    with pytest.raises(errors.GraddError, match="(?i)verb|nonsense"):
        session.request("nonsense", {})
    with pytest.raises(errors.GraddError) as caught:
        session.bind(session.next_id(), [(77, 0, 1, (4,))])
    assert caught.value.session == "alive"
    session.request("release", {"runs": []})


def test_model_bytes_that_are_no_model(daemon: object) -> None:
    session = sessions.session()
    for bytes_ in (b"", b"not a protobuf at all", bytes(range(256)) * 40):
        with pytest.raises((errors.ModelError, errors.GraphError, errors.LimitError)):
            session.put_graph(bytes_)
    session.request("release", {"runs": []})


def test_foreign_token_is_refused(daemon: object) -> None:
    session = sessions.session()
    session.connect()
    connection = control.Connection(daemon.directory)
    connection.attach()
    connection._token = bytes(16)
    reply = connection.call({"v": "release", "runs": []}, (), timeout=5)
    assert not reply["ok"] and reply["code"] == "SESSION"
    connection.close()
    session.request("release", {"runs": []})


def test_newer_protocol_is_refused_by_name(daemon: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL", (98, 99))
    with pytest.raises(errors.VersionError, match="9[89]"):
        sessions.session().connect()
    monkeypatch.setattr(protocol, "PROTOCOL", (1, 2))
    sessions.session().connect()


def test_repeated_sequence_number_gets_the_stored_reply(daemon: object) -> None:
    session = sessions.session()
    session.connect()
    connection = session._connection
    before = daemon.ps()["sessions"][0]["requests"]
    first = connection.call({"v": "release", "runs": []}, ())
    connection._q -= 1
    again = connection.call({"v": "release", "runs": []}, ())
    assert first == again
    assert daemon.ps()["sessions"][0]["requests"] <= before + 2
    connection._q -= 2
    stale = connection.call({"v": "release", "runs": []}, ())
    assert not stale["ok"] and stale["code"] == "SESSION"
    connection._q += 2


def test_interrupted_wait_does_not_shift_replies(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(Net(), strict=True)
    expected = loss_of(model(*batch())).item()
    session = model._gradd_compiled.client
    wait = control.Connection._wait

    def interrupted(self: control.Connection, *args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(control.Connection, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(*batch())
    monkeypatch.setattr(control.Connection, "_wait", wait)
    for _ in range(3):
        assert loss_of(model(*batch())).item() == expected
    session.flush()


def test_plans_say_which_inputs_are_parameters(daemon: object) -> None:
    net = Net()
    net.first.bias.requires_grad_(False)  # a frozen one is a parameter all the same
    model = ORTModule(net, strict=True)
    loss_of(model(*batch())).backward()
    ledger = model._gradd_compiled.client.ledger
    for fields in ledger.plans.values():
        names = [name for name, _, _ in ledger.graphs[fields["graph"]].inputs]
        assert {names[i] for i in fields["parameters"]} == {n for n, _ in net.named_parameters()}
    assert ledger.plans


def test_large_graphs_travel_through_shared_memory(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "FRAME_BYTES", 100)
    model = ORTModule(Net(), strict=True)
    value = loss_of(model(*batch())).item()
    daemon.kill()
    assert loss_of(model(*batch())).item() == value


def test_a_table_of_sources_is_sent_up_to_the_daemons_limits(
    daemon: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = ORTModule(Net(), strict=True)
    model(*batch())
    session = model._gradd_compiled.client
    (graph,) = wrapper_internals.graphs(model)
    row = ["node", "source"]
    for rows, text in ((protocol.SOURCE_ROWS, "x"), (10, "x" * 400_000)):
        assert len(protocol.source_frames([[row[0], text]] * rows)) == 1
    frames = [graph.cap.onnx, protocol.pack_sources([row] * protocol.SOURCE_ROWS)]
    session.request("graph.put", {"alias": []}, frames)
    frames[1] = protocol.pack_sources([row] * (protocol.SOURCE_ROWS + 1))
    with pytest.raises(errors.LimitError, match="more than 262144 values"):
        session.request("graph.put", {"alias": []}, frames)
    frames[1] = protocol.pack_sources([["node", "x" * protocol.SOURCE_BYTES]])
    with pytest.raises(errors.LimitError, match="source table of"):
        session.request("graph.put", {"alias": []}, frames)
    assert not [r for r in caplog.records if r.name == "gradd"]
    monkeypatch.setattr(protocol, "SOURCE_ROWS", 2)
    other = ORTModule(Net(width=20), strict=True)
    loss_of(other(*batch())).backward()
    (said,) = [r.getMessage() for r in caplog.records if r.name == "gradd"]
    assert "the table of source lines of a graph" in said


def test_threads_share_one_session(daemon: object) -> None:
    models = [ORTModule(Net(seed=i), strict=True) for i in range(3)]
    expected = [[loss_of(m(*batch(5, seed=s))).item() for s in range(8)] for m in models]
    got: list[list[float]] = [[], [], []]

    def work(i: int) -> None:
        for s in range(8):
            loss = loss_of(models[i](*batch(5, seed=s)))
            loss.backward()
            got[i].append(loss.item())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert len(daemon.ps()["sessions"]) == 1


# ---- processes ----


def _in_fork(work: object) -> object:
    """Runs work() in a forked child that ends without cleaning up; returns its result."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result: object = work()
        except BaseException as error:
            result = (type(error).__name__, str(error))
        os.write(write, pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def test_a_call_in_a_fork_raises_and_the_parent_goes_on(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    x, y = batch()
    loss = loss_of(model(x, y))
    name, text = _in_fork(lambda: model(x, y))
    assert name == "SessionError" and str(os.getpid()) in text and "fork" in text
    weights = _in_fork(lambda: model.first.weight.detach().sum().item())
    assert weights == model.first.weight.detach().sum().item(), "tensors stay readable"
    loss.backward()
    assert len(daemon.ps()["sessions"]) == 1


def test_data_loader_workers(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    data = torch.utils.data.TensorDataset(*batch(32))
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
            loss_of(model(x, y)).backward()
    stats = model.gradd_stats()
    assert stats["forwards"] == 8 + stats["self_check_forwards"] and stats["self_checks"] == 1


SCRIPT = """
import os, sys, torch
from helpers.nets import Net, batch, loss_of
from gradd import ORTModule
model = ORTModule(Net(), strict=True)
loss_of(model(*batch())).backward()
print(model._gradd_compiled.client.daemon_pid, flush=True)
"""


def test_auto_start_serves_and_the_script_ends_cleanly(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    env = {**os.environ, "GRADD_DIR": str(folder)}
    env["PYTHONPATH"] = PYTHONPATH
    command = [sys.executable, "-c", SCRIPT]
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    pids = {process.communicate(timeout=120)[0].strip() for process in runs}
    assert [process.returncode for process in runs] == [0, 0]
    assert len(pids) == 1, "two clients that start at once must share one daemon"
    try:
        assert control.ask_daemon(folder, "ps")["sessions"] == []
    finally:
        control.ask_daemon(folder, "stop")


@pytest.mark.quick
def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DIR", "/some/where")
    assert directory() == Path("/some/where")
    monkeypatch.delenv("GRADD_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert directory() == Path("/run/user/7/gradd")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert directory().name == f"gradd-{os.geteuid()}"
    monkeypatch.setenv("TMPDIR", "/else/where")
    assert directory() == Path(f"/else/where/gradd-{os.geteuid()}")
    monkeypatch.delenv("TMPDIR")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    os.chmod(open_to_all, 0o755)
    with pytest.raises(DirectoryError, match=f"^GRADD_E_IO: .*0700: chmod 700 {open_to_all}"):
        check_directory(open_to_all, create=True)
    link = tmp_path / "link"
    link.symlink_to(open_to_all)
    with pytest.raises(DirectoryError, match="^GRADD_E_IO: .*link"):
        check_directory(link, create=True)
    (file := tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=f"^GRADD_E_IO: {file} is no directory: set GRADD_DIR"):
        check_directory(file, create=True)
    with pytest.raises(DirectoryError, match="^GRADD_E_IO: .*107"):
        check_directory(tmp_path / ("x" * 120), create=True)


@pytest.mark.quick
def test_replies_that_cannot_be_read() -> None:
    for frame in (b"", b"\xc1", msgpack.packb([1, 2])):
        with pytest.raises(errors.InternalError, match="reply"):
            protocol.unpack(frame)
