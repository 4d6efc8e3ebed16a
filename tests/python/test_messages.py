"""Every row of docs/messages.md is raised: one case for each status code and each reason.

A case reaches its message as a user would: a call of a wrapped module, the optimizer, a client, a
command, or the protocol. The cases are compared with the lists, so a new row needs a case.
"""

from __future__ import annotations

import logging
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import BINARY, Daemon
from torch import nn
from torch.autograd import forward_ad

from gradd import ORTModule, errors
from gradd.calls import run
from gradd.dynamo import program
from gradd.fallback import classify
from gradd.optim import FusedAdam
from gradd.reasons import BY_NAME, DEFAULT_POLICY
from gradd.session import client, protocol, reduction
from gradd.spec import CaptureError
from helpers.graphs import engine
from helpers.graphs.captures import Lambda
from helpers.hostile import control_socket, graphs, runs
from helpers.hostile.raw_client import Raw, Row
from helpers.nets import Determinants, Net, batch, loss_of
from helpers.other_versions import new_daemon

X = torch.linspace(-1, 2, 24).reshape(6, 4)
ROWS = {
    row.name: row
    for module in (control_socket, graphs, runs)
    for table in module.TABLES.values()
    for row in table
}


class World:
    """What a case may use.

    Attributes:
        daemon: That of the module.
        patch: Undone behind the case.
        folder: An empty one.
    """

    def __init__(self, daemon: Daemon, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.daemon, self.patch, self.folder = daemon, patch, folder

    def away(self) -> Path:
        """A directory in which no daemon runs, and in which none can be started."""
        path = self.folder / "d"
        path.mkdir(mode=0o700)
        self.patch.setenv("GRADD_DIR", str(path))
        self.patch.setenv("GRADD_BIN", str(self.folder / "missing"))
        return path


@pytest.fixture
def world(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[World]:
    yield World(shared_daemon, monkeypatch, tmp_path)
    client.get_client(tmp_path / "d").close()


# ---- status codes: each case raises one ----

Wrap = Callable[..., ORTModule]
CODES: dict[str, Callable[[World], Any]] = {}


def raises(code: str) -> Callable:
    def add(case: Callable[[World], Any]) -> Callable[[World], Any]:
        CODES[code] = case
        return case

    return add


def _row(name: str) -> Callable[[World], Any]:
    """A row of the tables of bad input, sent over the protocol."""

    def case(world: World) -> None:
        row: Row = ROWS[name]
        with Raw(world.daemon.directory).open() as session:
            protocol.checked(row.send(session))

    return case


CODES |= {
    "MODEL": _row("graph: a picture"),
    "SHM": _row("segment: /dev/null"),
    "LIMIT": _row("control: deep"),
    "NOSPC": _row("segment: never reserved"),
    "NONFINITE": _row("run: NaN in the input"),
    "EXTDATA": _row("graph: data in a harmless file"),
}


@raises("SESSION")
def _no_daemon(world: World) -> None:
    world.away()
    ORTModule(Net())


@raises("GRAPH")
def _a_missing_attribute(world: World) -> None:
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Concat", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [2])], [value("y", 1, [2])])
    opset = [onnx.helper.make_opsetid("", 20)]
    client.get_client().put_graph(
        onnx.helper.make_model(graph, opset_imports=opset).SerializeToString(), ()
    )


@raises("INDEX")
def _a_token_beyond_the_table(world: World) -> None:
    model = ORTModule(Lambda(lambda self, ids: self.table(ids), table=nn.Embedding(10, 4)))
    model(torch.tensor([1, 2]))
    model(torch.tensor([1, 10]))


@raises("TENSOR")
def _doubles_for_the_optimizer(world: World) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    FusedAdam([parameter]).step()


@raises("STALE")
def _an_output_after_the_step(world: World) -> None:
    model = ORTModule(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss, scores = model(*batch())
        loss.backward()
        optimizer.step()
    scores.detach()


@raises("VERSION")
def _a_newer_daemon(world: World) -> None:
    with new_daemon(world.away()):
        ORTModule(Net())


@raises("NOMEM")
def _a_budget_of_a_kilobyte(world: World) -> None:
    ORTModule(Net(), memory_budget="1KiB")(*batch(500))


@raises("DEVICE")
def _a_damaged_plugin(world: World) -> None:
    """From gradd.h: a daemon that loses its device ends, and its client asks the next one."""
    (world.folder / "libgradd_cuda.so").write_text("no object")
    world.patch.setenv("GRADD_PLUGINS", str(world.folder))
    try:
        engine.check(
            engine.LIB.gradd_device_open(
                engine.C.byref(engine.DeviceOptions(name=b"cuda")),
                engine.C.byref(engine.C.c_void_p()),
            )
        )
    except engine.EngineError as error:
        raise errors.from_code(error.code, str(error)) from None


@raises("PEER")
def _a_rank_that_has_failed(world: World) -> None:
    """What a rank is told about the others when a module is wrapped."""
    reduction.check_all([("", b"id", "a"), ("no NCCL", b"", "a")])


@raises("IO")
def _a_directory_for_all(world: World) -> None:
    command = [str(BINARY), "serve", "--dir", str(world.folder)]
    world.folder.chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    code, what = re.fullmatch(r"gradd: (\w+): (.*)\n", done.stderr).groups()
    raise errors.from_code(code, what)


@raises("UNSUPPORTED")
def _an_unknown_operator(world: World) -> None:
    ORTModule(Determinants(), strict=True)(torch.randn(2, 3))


@raises("INTERNAL")
def _another_result(world: World) -> None:
    _wrong_gradients(lambda module: ORTModule(module, strict=True), world)


# ---- reasons: each case gives a module with a call that has counted one ----

Case = Callable[[Wrap, World], ORTModule]
REASONS: dict[str, Case] = {}


def counts(reason: str) -> Callable:
    def add(case: Case) -> Case:
        REASONS[reason] = case
        return case

    return add


def _forward(function: Callable[..., Any], *args: Any, **parts: Callable[[], nn.Module]) -> Case:
    """A call of a module with this forward."""

    def case(wrap: Wrap, world: World) -> ORTModule:
        made = {name: make() for name, make in parts.items()}
        model = wrap(Lambda(function, lin=nn.Linear(4, 4), **made))
        model(*(args or (X,)))
        return model

    return case


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Tagged(torch.Tensor):
    """Functions of torch pass this class on."""


_LOCK = threading.Lock()


def _behind_a_lock(x: torch.Tensor) -> torch.Tensor:
    with _LOCK:
        print("", end="")
        return x


def _seeded(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return nn.functional.dropout(self.lin(x))


REASONS |= {
    "autograd_function": _forward(lambda self, x: _Double.apply(self.lin(x)).sum()),
    "device": _forward(lambda self, x, y: (self.lin(x), y * 2), X, torch.ones(3, device="meta")),
    "func_transform": _forward(lambda self, x: torch.vmap(lambda v: v.exp())(self.lin(x))),
    "graph_break": _forward(
        lambda self, x: torch.masked_select(self.lin(x), x > 0).sort()[0].sum()
    ),
    "input_mutation": _forward(
        lambda self, x: self.lin(x.mul_(2)), X.clone().requires_grad_().mul(1)
    ),
    "memory_layout": _forward(
        lambda self, x: self.lin(x).sum() + torch.as_strided(x[:2], (4, 4), (4, 1)).sum()
    ),
    "no_graph": _forward(lambda self, x: torch.compiler.disable(self.lin)(x)),
    "python_random": _forward(_seeded),
    "sequence_or_loop": _forward(lambda self, x: torch.unsafe_split(self.lin(x), 3)[0].sum()),
    "tensor_subclass": _forward(lambda self, x: self.lin(x), X.as_subclass(Tagged)),
    "unsupported": _forward(lambda self, x: self.cut(self.lin(x)).sum(), cut=Determinants),
    "unsupported_input_type": _forward(
        lambda self, x, y: self.lin(x) * y.float(), X, torch.ones(4, dtype=torch.uint16)
    ),
    "unsupported_operator": _forward(
        lambda self, x: torch.linalg.eigvals(self.lin(x[:4])).abs().sum()
    ),
    "unsupported_parameter": _forward(lambda self, x: self.late(x), late=lambda: nn.LazyLinear(4)),
    "untraced_function": _forward(
        lambda self, x: self.b(_behind_a_lock(self.lin(x))), b=lambda: nn.Linear(4, 4)
    ),
}


@counts("autocast")
def _floats_under_autocast(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float32)
    try:
        model(X)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
    return model


@counts("being_traced")
def _recorded(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    torch.jit.trace(model, X)
    return model


@counts("create_graph")
def _a_derivative_of_a_backward(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    torch.autograd.grad(model(X).sum(), [model.weight], create_graph=True)
    return model


@counts("data_dependent_control_flow")
def _a_number_of_a_tensor(wrap: Wrap, world: World) -> ORTModule:
    """Without this setting of torch's, the graph ends there and another one begins."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return _forward(lambda self, x: self.lin(x).clamp(0.0, x.sum().item()))(wrap, world)


@counts("decoding")
def _with_a_cache(wrap: Wrap, world: World) -> ORTModule:
    class Decoder(Net):
        def forward(self, x: torch.Tensor, past_key_values: Any) -> torch.Tensor:
            return self.second(x)

    model = wrap(Decoder(width=4))
    with torch.no_grad():
        model(X, past_key_values=())
    return model


@counts("export_failed")
def _an_error_that_nothing_expects(wrap: Wrap, world: World) -> ORTModule:
    def fail(*args: Any) -> Any:
        raise MemoryError("no memory")

    world.patch.setattr(program, "capture", fail)
    return _forward(lambda self, x: self.lin(x).cosh().sum())(wrap, world)


@counts("flush_denormal")
def _flushing(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    assert torch.set_flush_denormal(True)
    try:
        model(X)
    finally:
        torch.set_flush_denormal(False)
    return model


@counts("forward_ad")
def _dual(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    with forward_ad.dual_level():
        model(forward_ad.make_dual(X, torch.ones_like(X)))
    return model


def _changed_graph(wrap: Wrap, world: World, change: Callable[[bytes], bytes]) -> ORTModule:
    """What the daemon gets is another graph than the capture: it refuses it."""
    put = client.Client.put_graph
    world.patch.setattr(
        client.Client, "put_graph", lambda self, data, *rest: put(self, change(data), *rest)
    )
    return _forward(lambda self, x: self.lin(x).tanh().sum())(wrap, world)


@counts("model")
def _half_of_the_bytes(wrap: Wrap, world: World) -> ORTModule:
    return _changed_graph(wrap, world, lambda data: data[: len(data) // 2])


@counts("graph")
def _without_its_first_node(wrap: Wrap, world: World) -> ORTModule:
    def change(data: bytes) -> bytes:
        model = onnx.load_from_string(data)
        del model.graph.node[0]
        return model.SerializeToString()

    return _changed_graph(wrap, world, change)


@counts("self_check")
def _wrong_gradients(wrap: Wrap, world: World) -> ORTModule:
    backward = run.Run.backward

    def wrong(self: run.Run, go: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, go, keep, *more)
        grads[self.plan.params.index("second.bias")].mul_(1.01)
        return grads

    world.patch.setattr(run.Run, "backward", wrong)
    model = wrap(Net())
    model(*batch())
    return model


@counts("sharded_parameters")
def _marked_as_deepspeed_marks_them(wrap: Wrap, world: World) -> ORTModule:
    model = wrap(nn.Linear(4, 4))
    model.weight.ds_id = 0
    model(X)
    return model


@counts("session")
def _wrapped_without_a_daemon(wrap: Wrap, world: World) -> ORTModule:
    world.away()
    model = wrap(Net())
    loss_of(model(*batch())).backward()
    return model


@counts("version")
def _wrapped_at_a_newer_daemon(wrap: Wrap, world: World) -> ORTModule:
    with new_daemon(world.away()):
        model = wrap(Net())
        loss_of(model(*batch())).backward()
    return model


# ---- the tests ----


@pytest.mark.quick
def test_there_is_a_case_for_every_message() -> None:
    assert CODES.keys() == errors.BY_CODE.keys()
    assert REASONS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_raised(code: str, world: World) -> None:
    with pytest.raises(errors.BY_CODE[code], match=f"^GRADD_E_{code}: ") as caught:
        CODES[code](world)
    assert caught.value.code == code


def _in_torch(model: ORTModule) -> set[str]:
    stats = model.gradd_stats()
    return stats["fallbacks"].keys() | stats["parts_in_torch"].keys()


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_counted_and_said(
    reason: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    flag = BY_NAME[reason].flag
    if flag is not None and not flag & DEFAULT_POLICY:
        world.patch.setenv("ORTMODULE_FALLBACK_POLICY", flag.name)
    with caplog.at_level(logging.WARNING, "gradd"):
        model = REASONS[reason](ORTModule, world)
    assert _in_torch(model) == {reason}
    said = [r.getMessage().lower() for r in caplog.records if "in PyTorch" in r.getMessage()]
    assert any(reason in text for text in said), said
    assert not any(f"({reason}): {reason}" in text for text in said), "it is said twice"


@pytest.mark.parametrize("reason", REASONS)
def test_strict_raises_what_has_a_policy(reason: str, world: World) -> None:
    flag = BY_NAME[reason].flag

    def wrap(module: nn.Module) -> ORTModule:
        return ORTModule(module, strict=True)

    if flag is None:
        assert _in_torch(REASONS[reason](wrap, world)) == {reason}
        return
    with pytest.raises((CaptureError, errors.GraddError)) as caught:
        REASONS[reason](wrap, world)
    assert classify(caught.value) == (flag, reason)


def test_another_error_counts_under_the_name_of_its_type(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.patch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(Net(), memory_budget="1KiB")
    with caplog.at_level(logging.WARNING, "gradd"):
        model(*batch(500))
    assert _in_torch(model) == {"OutOfMemoryError"}
    assert "(OutOfMemoryError): GRADD_E_NOMEM" in caplog.text


@pytest.mark.quick
def test_a_reason_that_is_not_in_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match="'moon_phase'"):
        CaptureError("moon_phase", "full")
