"""gradd estimate: planned memory equals the daemon's, and is close to the measured memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import BINARY, PYTHONPATH
from onnx import TensorProto, helper
from test_explain import command, layer, value, write  # noqa: F401

import gradd
from gradd import ORTModule, errors
from helpers.models import families
from helpers.nets import Net, batch
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(4)


@pytest.mark.quick
def test_planned_arena_is_what_the_daemon_reports(daemon: Any) -> None:
    net = Net(width=512)
    planned = gradd.estimate(net, batch(64), optimizer="sgd")
    wrapped = ORTModule(net, strict=True)
    loss = wrapped(*batch(64))[0]
    (session,) = daemon.ps()["sessions"]
    assert session["arena_bytes"] >= planned.activations > 0
    assert wrapped.gradd_explain().arena_bytes == planned.activations
    loss.backward()


def test_parts_of_an_estimate(daemon: Any) -> None:
    model, make = families.build("mlp_ce")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    one = gradd.estimate(model, make(2, 16, 0))
    assert (one.parameters, one.gradients, one.state) == (size, size, 2 * size)
    assert one.second_slot == 0 and one.total == sum(list(one.as_dict().values())[2:-4])
    assert gradd.estimate(model, make(2, 16, 0), accumulate=True).second_slot == size
    fused = gradd.estimate(model, make(2, 16, 0), "fused_adam")
    assert fused.state == 8 * sum(p.numel() for p in model.parameters())
    without_weights = gradd.estimate(model.to("meta"), make(2, 16, 0))
    assert without_weights == one
    assert daemon.ps()["counters"]["forward"] == 0


def test_batches_and_the_largest_that_fits(daemon: Any) -> None:
    net = Net(width=256)
    few = gradd.estimate(net, batch(4), batches=[1, 2, 8, 64], fits_gib=0.01)
    assert [e.batch for e in few[:4]] == [1, 2, 8, 64]
    assert few[0].activations < few[1].activations < few[2].activations < few[3].activations
    largest, limit = few[-1], int(0.01 * 2**30)
    assert largest.total <= limit
    assert gradd.estimate(net, batch(4), batches=[largest.batch + 1])[0].total > limit
    assert str(largest.batch) in str(few).splitlines()[0]
    with pytest.raises(ValueError, match="not even a batch of 1"):
        gradd.estimate(net, batch(4), fits_gib=1e-9)
    with pytest.raises(ValueError, match="'adagrad': expected one of adamw fused-adam momentum"):
        gradd.estimate(net, batch(4), "adagrad")


def test_python_prints_what_the_command_line_does(daemon: Any, tmp_path: Path) -> None:
    """The lists are those of the daemon; figures agree where both know the parameters."""
    net = Net(width=64)
    printed = str(gradd.estimate(net, batch(4), batches=[4])).splitlines()
    wrapped = ORTModule(net, strict=True)
    wrapped(*batch(4))[0].backward()
    path = tmp_path / "net.onnx"
    wrapped.gradd_explain().save_onnx(path)
    trained = ",".join(n for n, _ in net.named_parameters())
    inputs = [i for i in onnx.load(path).graph.input if i.name not in trained.split(",")]
    given = [(i.name, x.shape) for i, x in zip(inputs, batch(4), strict=True)]
    sizes = [f"{name}={'x'.join(map(str, shape))}" for name, shape in given]
    said = command("estimate", path, *sizes, "--batch", "4", "--train", trained).splitlines()
    assert [line[:26] for line in said[:-1]] == [line[:26] for line in printed[:-1]]
    assert (said[0], said[-1]) == (printed[0], printed[-1])
    for part in ("parameters", "gradients", "optimizer state", "activations"):
        (a,), (b,) = ([x for x in lines if x.startswith(part)] for lines in (said, printed))
        assert a == b


@pytest.mark.quick
def test_command_line(layer: Path) -> None:  # noqa: F811
    args = (layer, "x=2x5x6", "--batch", "1,4", "--optimizer", "momentum", "--json")
    one, four = json.loads(command("estimate", *args))["estimates"]
    assert one["parameters"] == one["gradients"] == one["state"] == 4 * (48 + 24)
    assert one["ring"] == 4 * 30 + 8 and four["ring"] == 4 * 120 + 8
    assert four["activations"] > one["activations"]
    assert one["total"] == sum(v for k, v in one.items() if k not in ("batch", "total"))
    assert "not even a batch" in command("estimate", layer, "x=2x5x6", "--fits", "1e-9", code=1)
    assert "--optimizer" in command("estimate", layer, "x=2x5x6", "--optimizer", "x", code=1)
    assert "usage: gradd estimate" in command("estimate", code=2)
    fixed = command("estimate", layer, "--dim", "seq=3", "--dim", "batch=2", "--json")
    one = command("estimate", layer, "--dim", "seq=3", "--dim", "batch=9", "--batch", "2", "--json")
    assert json.loads(one)["estimates"][0]["total"] == json.loads(fixed)["estimates"][0]["total"]


@pytest.mark.quick
def test_a_batch_without_an_axis_for_it(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "w"], ["loss"])
    path = write(
        tmp_path / "m.onnx", [node], [value("x", ["s0"]), value("w", [])], [value("loss", ["s0"])]
    )
    for option in ("--batch", "--fits"):
        text = command("estimate", path, "--dim", "s0=4", option, "8", code=1)
        assert "neither is there" in text


@pytest.mark.quick
def test_gradients_arrive_at_the_first_output_of_floats(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ArgMax", ["s"], ["ids"], axis=0, keepdims=0),
        helper.make_node("Mul", ["x", "w"], ["s"]),
    ]
    out = [helper.make_tensor_value_info("ids", TensorProto.INT64, []), value("s", [4])]
    path = write(tmp_path / "m.onnx", nodes[::-1], [value("x", [4]), value("w", [4])], out)
    (one,) = json.loads(command("estimate", path, "--json"))["estimates"]
    assert one["gradients"] == 4 * (4 + 4)


_TRAIN = '''
import gc, json, torch
import gradd
from gradd import ORTModule
from gradd.session.client import get_client

def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()

class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def make(width):
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    return Net(layers[0], torch.nn.GELU(), layers[1], torch.nn.GELU(), *layers[2:])

def held(pid):
    """Proportional bytes without files: a library's share depends on other processes."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in rollup if "Pss" in line}
    return 1024 * (kilobytes["Pss_Anon:"] + kilobytes["Pss_Shmem:"])

def measured():
    gc.collect()
    return held("self") + held(get_client().worker_pid)

warm = ORTModule(make(64), strict=True)
optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
for _ in range(2):
    step(warm, optimizer, torch.randn(32, 64))
before = measured()
model = ORTModule(make(1536), strict=True)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(1024, 1536)
planned = gradd.estimate(model, [x])
for _ in range(3):
    step(model, optimizer, x)
print(json.dumps([planned.total, measured() - before - x.nbytes]))
'''


def test_total_is_close_to_what_is_measured(daemon: Any) -> None:
    """By a daemon of one thread: with several, oneDNN also takes unplanned memory."""
    folder = daemon.directory.parent / "one"
    folder.mkdir(mode=0o700)
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_SELF_CHECK": "0", "OMP_NUM_THREADS": "1"}
    env |= {"GRADD_DIR": str(folder), "GRADD_THREADS": "1"}
    env["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back to the system
    try:
        command = [sys.executable, "-c", _TRAIN]
        done = subprocess.run(command, env=env, capture_output=True, timeout=120)
    finally:
        subprocess.run([str(BINARY), "stop", "--dir", str(folder)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    planned, real = json.loads(done.stdout.splitlines()[-1])
    assert planned > 150e6
    assert abs(real - planned) <= 0.08 * planned, (planned / 1e6, real / 1e6)


def test_estimate_does_not_move_parameters(daemon: Any) -> None:
    net = Net()
    places = [p.data_ptr() for p in net.parameters()]
    gradd.estimate(net, batch())
    assert places == [p.data_ptr() for p in net.parameters()]
    assert torch.is_tensor(net(batch()[0]))


WRONG = {
    "a function": ({"model": len}, TypeError, "model: expected a torch.nn.Module"),
    "a tensor": ({"batch": torch.ones(2, 8)}, TypeError, "batch: expected the arguments"),
    "an optimizer": ({"optimizer": torch.optim.AdamW}, TypeError, "optimizer: expected a name"),
    "no such optimizer": ({"optimizer": "lion"}, ValueError, "lion"),
    "text": ({"fits_gib": "1"}, ValueError, "fits_gib: expected a number"),
    "infinite": ({"fits_gib": math.inf}, ValueError, "fits_gib: expected a number"),
    "nothing": ({"fits_gib": 0}, ValueError, "fits_gib: expected a number"),
    "a number": ({"batches": 4}, ValueError, "batches: expected batch sizes"),
    "none": ({"batches": []}, ValueError, "batches: expected batch sizes"),
    "zero": ({"batches": [4, 0]}, ValueError, "batches: expected batch sizes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_say_what_is_expected(name: str, shared_daemon: Any) -> None:
    changes, kind, text = WRONG[name]
    arguments = {"model": torch.nn.Linear(8, 4), "batch": (torch.ones(2, 8),), **changes}
    with pytest.raises(kind, match=text):
        gradd.estimate(**arguments)


# ---- shares of rows ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any, shared_daemon: Any) -> tuple[Path, str]:
    """A model file, and the names of its trained parameters."""
    model = ORTModule(families.build("llama")[0], strict=True)
    path = tmp_path_factory.mktemp("m") / "llama.onnx"
    model.gradd_explain(**families.build("llama")[1](2, 16, 0)).save_onnx(path)
    inputs = [i.name for i in onnx.load(path).graph.input]
    parameters = {n for n, p in model.named_parameters()}
    return path, ",".join(n for n in inputs if n in parameters)


SIZES = ("input_ids=4x32", "attention_mask=4x32", "labels=4x32")


@pytest.mark.parametrize(
    "rows",
    every_run(
        {(13, 64), (None, 70), (0, 128)},
        [(13, 64), (40, None), (None, 70), (0, 128), (64, 64), (127, 128)],
    ),
)
def test_shares_plan_what_a_batch_would(
    llama: tuple[Path, str], rows: tuple[int | None, int | None]
) -> None:
    """Lists, memory and operations are those of a batch with so many labelled and real rows."""
    labelled, real = rows
    path, trained = llama
    options = [] if labelled is None else ["--labelled", str(labelled / 128)]
    options += [] if real is None else ["--real", str(real / 128)]
    said = command("estimate", path, *SIZES, "--train", trained, "--json", *options)
    (found,) = json.loads(said)["estimates"]
    module, make = families.build("llama")
    batch, row = make(4, 32, 0), torch.arange(128).view(4, 32)
    batch["attention_mask"] = (row < (128 if real is None else real)).long()
    # The labels of a row are those one further on; the last position of a sequence has none.
    given = torch.zeros(4, 32, dtype=torch.bool)
    free = [i for i in range(128) if i % 32 < 31 and i < (real or 128)]
    count = (real or 128) if labelled is None else labelled
    for i in free[:count]:
        given.view(-1)[i + 1] = True
    batch["labels"] = batch["input_ids"].masked_fill(~given, -100)
    planned = gradd.estimate(module, batch)
    assert found["live"]["rows"] == 128
    assert found["live"]["whole_activations"] == planned.activations
    if planned.live is None:
        assert (found["live"]["labelled"], found["live"]["real"]) == (0, 0)
        assert found["activations"] == planned.activations and found["live"]["percent"] == 0
        return
    lists = found["live"]["labelled"], found["live"]["real"]
    if labelled is None:  # all real rows that can have a label have one here
        assert lists == (0, planned.live.real)
        return
    assert lists == (planned.live.labelled, planned.live.real)
    assert found["activations"] == planned.live.activations
    assert found["live"]["percent"] == pytest.approx(planned.live.percent, abs=0.01)
    assert found["curve"][0]["activations"] == found["activations"]


def test_shares_are_said_and_checked(llama: tuple[Path, str], layer: Path) -> None:  # noqa: F811
    path, _ = llama
    text = command("estimate", path, *SIZES, "--labelled", "0.1", "--real", ".5", "--batch", "2,8")
    assert "batch 2: of 64 rows 32 are needed, 8 behind the last attention: " in text
    assert "batch 8: of 256 rows 128 are needed, 26 behind the last attention: " in text
    assert text.count("(over all rows activations take") == 2
    budget = command("estimate", path, *SIZES, "--real", "0.5", "--memory-budget", "1MiB")
    assert "fewer operations" in budget and "over all rows" not in budget
    said = command("explain", path, *SIZES, "--train", "all", "--labelled", "0.25")
    assert "of 128 rows of a batch places for 32 labelled ones" in said
    for options, why, code in (
        (["--labelled", "0.6", "--real", "0.5"], "--labelled 0.6 is more than --real 0.5", 1),
        (["--labelled", "1.5"], "expected a share of rows from 0 to 1, got '1.5'", 2),
        (["--real", "x"], "expected a share of rows from 0 to 1, got 'x'", 2),
        (["--real", "nan"], "expected a share of rows from 0 to 1, got 'nan'", 2),
        (["--real", "0.5", "--out", "logits"], "the graph has no rows to leave out", 1),
    ):
        assert why in command("estimate", path, *SIZES, *options, code=code)
    assert "no rows to leave out" in command("estimate", layer, "x=2x5x6", "--real", "1", code=1)
    assert "has no effect" in command("explain", "--real", "0.5", code=2)


@pytest.mark.usefixtures("shared_daemon")
def test_a_forward_that_uses_gradients_of_its_graphs_is_refused_by_name() -> None:
    """A plan runs nothing, so there is no such gradient."""

    class Energy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(y @ self.weight).sum(), y)
            return x - 0.1 * slope + x @ self.weight

    with pytest.raises(errors.UnsupportedError, match="cannot be planned: .* appears to not have"):
        gradd.estimate(Energy(), [torch.randn(2, 6)])
