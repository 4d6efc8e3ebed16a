"""Rounds of a federation: what a client gives, the mean that a server adds, and both by Flower."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradd.train import CheckpointState, Optimizer, TrainError, artifacts
from gradd.train.federation import GlobalWeights, LocalTraining, Update
from helpers import BUILD, ROOT
from helpers import device_models as models
from helpers.browser import BROWSER

FLOWER = BUILD / "flower/bin/python"  # an environment of its own: it has many dependencies
quick = pytest.mark.quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of mlp() with SGD, the first layer frozen, and a nominal checkpoint."""
    return models.generate(
        tmp_path_factory.mktemp("federation"),
        requires_grad=["fc2.weight", "fc2.bias"],
        frozen_params=["fc1.weight", "fc1.bias"],
        optimizer=artifacts.OptimType.SGD,
        nominal_checkpoint=True,
    )


def batches(client: int) -> list[tuple]:
    """Two batches of different lengths for each client."""
    return [models.batch(10 * client, 3 + client), models.batch(10 * client + 1, 5)]


def by_hand(folder: Path, client: int, rate: float = 0.1) -> np.ndarray:
    """What a client's round adds to the trained weights, by a loop of its own."""
    _, module = models.load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    before = module.get_contiguous_parameters(True).numpy().copy()
    for batch in batches(client):
        module(*batch)
        optimizer.step()
        module.lazy_reset_grad()
    return (module.get_contiguous_parameters(True).numpy() - before).astype(np.float32)


def trained(folder: Path, clients: int) -> np.ndarray:
    """The trained weights after a round of that many clients, by hand."""
    _, module = models.load(folder)
    total = sum(by_hand(folder, i).astype(np.float64) * (8 + i) for i in range(clients))
    before = module.get_contiguous_parameters(True).numpy()
    return (before + total / sum(8 + i for i in range(clients))).astype(np.float32)


@quick
def test_a_round_adds_the_mean_by_hand_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """A client has a nominal checkpoint only: the weights come with the round."""
    client_files = shutil.copytree(folder, tmp_path / "client")
    (client_files / "checkpoint").unlink()
    weights = GlobalWeights(folder)
    before = weights.values
    updates = []
    for i in range(3):
        update = LocalTraining(client_files, lambda i=i: batches(i)).fit(before, 0.1)
        assert update.examples == 8 + i and np.isfinite(update.loss)
        np.testing.assert_array_equal(update.values, by_hand(folder, i))
        updates.append(update)
    weights.add(updates)
    weights.save(tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    of_all = np.concatenate([state.parameters[f"fc2.{n}"].data.ravel() for n in ("weight", "bias")])
    np.testing.assert_array_equal(of_all, trained(folder, 3))
    old = CheckpointState.load_checkpoint(folder / "checkpoint")
    name = "fc1.weight"  # frozen
    np.testing.assert_array_equal(state.parameters[name].data, old.parameters[name].data)
    loss, examples = LocalTraining(client_files, lambda: batches(0)).evaluate(weights.values)
    assert loss < LocalTraining(folder, lambda: batches(0)).evaluate(before)[0] and examples == 8


@quick
def test_updates_are_clipped_made_noisy_and_halved(folder: Path) -> None:
    weights = GlobalWeights(folder).values

    def values(**options) -> np.ndarray:
        return LocalTraining(folder, lambda: batches(1), **options).fit(weights, 0.1).values

    plain = values()
    np.testing.assert_array_equal(values(half=True), plain.astype(np.float16))
    norm = float(np.linalg.norm(plain.astype(np.float64)))
    np.testing.assert_array_equal(values(clip=2 * norm), plain)
    np.testing.assert_allclose(values(clip=norm / 4), plain / 4, rtol=1e-6)
    noise = values(noise=0.5, seed=3) - plain
    np.testing.assert_array_equal(values(noise=0.5, seed=3) - plain, noise)
    assert 0.25 < noise.std() < 1.0
    for options in ({"clip": 0.0}, {"clip": float("nan")}, {"noise": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            values(**options)


@quick
def test_what_does_not_fit_is_refused_and_changes_nothing(folder: Path) -> None:
    weights = GlobalWeights(folder)
    before = weights.values
    right = LocalTraining(folder, lambda: batches(0)).fit(before)
    ones = np.ones_like(right.values)
    wrong = {
        r"float32\[20\], expected float32\[21\]": ones[1:],
        r"float64\[21\]": ones.astype(np.float64),
        "not finite": ones * np.inf,
    }
    for text, values in wrong.items():
        with pytest.raises(ValueError, match=text):
            weights.add([right, Update(values, 3, 0.0)])
    with pytest.raises(ValueError, match="0 examples"):
        weights.add([right, Update(ones, 0, 0.0)])
    with pytest.raises(ValueError, match="no update"):
        weights.add([])
    np.testing.assert_array_equal(weights.values, before)
    with pytest.raises(TrainError, match="51"):
        LocalTraining(folder, lambda: batches(0)).fit(before[1:])
    with pytest.raises(TrainError, match="no batch"):
        LocalTraining(folder, list).fit(before)
    with pytest.raises(TrainError, match="not finite in float16"):
        LocalTraining(folder, lambda: batches(0), half=True).fit(before, 1e7)


SERVER = """
import sys
from flwr.server import ServerConfig, start_server
from gradd.train.federation import GlobalWeights
from gradd.train.flower import MeanOfUpdates
address, files, clients = sys.argv[1], sys.argv[2], int(sys.argv[3])
strategy = MeanOfUpdates(
    GlobalWeights(files), files + "/learnt", min_fit_clients=clients,
    min_available_clients=clients, min_evaluate_clients=clients,
    on_fit_config_fn=lambda n: {"learning_rate": 0.1},
)
history = start_server(server_address=address, config=ServerConfig(num_rounds=1), strategy=strategy)
print("losses", history.losses_distributed)
"""
CLIENT = """
import sys
import numpy as np
from flwr.client import start_client
from gradd.train.federation import LocalTraining
from gradd.train.flower import Client
address, files, data = sys.argv[1:]
held = np.load(data)
batches = [(held[f"x{i}"], held[f"y{i}"]) for i in range(2)]
client = Client(LocalTraining(files, lambda: batches)).to_client()
start_client(server_address=address, client=client, insecure=True)
"""


def flower() -> str | None:
    """A Python that has Flower and numpy."""
    for python in (FLOWER, Path(sys.executable)):
        if python.exists() and not subprocess.run([python, "-c", "import flwr"]).returncode:
            return str(python)
    return None


def listening() -> str:
    """An address on the loopback that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.nightly
def test_a_round_with_flowers_server(folder: Path, tmp_path: Path) -> None:
    """Three clients, each a process, on the loopback."""
    python = flower()
    if python is None:
        pytest.skip("no Flower: make train-test installs it")
    files = shutil.copytree(folder, tmp_path / "files")
    address = listening()
    env = os.environ | {"PYTHONPATH": str(ROOT / "adapters/python"), "FLWR_TELEMETRY_ENABLED": "0"}
    run = [python, "-c"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*run, SERVER, address, str(files), "3"], env=env, stdout=log, stderr=log
        )
        clients = []
        for i in range(3):
            held = {}
            for k, (x, y) in enumerate(batches(i)):
                held |= {f"x{k}": x, f"y{k}": y}
            np.savez(tmp_path / f"data{i}.npz", **held)
            command = [*run, CLIENT, address, str(files), str(tmp_path / f"data{i}.npz")]
            clients.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        codes = [child.wait(180) for child in (server, *clients)]
    text = (tmp_path / "server.log").read_text()
    assert codes == [0] * 4, text[-3000:]
    state = CheckpointState.load_checkpoint(files / "learnt")
    of_all = np.concatenate([state.parameters[f"fc2.{n}"].data.ravel() for n in ("weight", "bias")])
    expected = trained(folder, 3)
    np.testing.assert_allclose(of_all, expected, rtol=1e-6)  # clients come in any order
    assert re.search(r"^losses \[\(1, \d+\.\d+\)\]$", text, re.M), text[-3000:]


# Carries a round to a program, which writes its update; the loss afterwards is measured here.
RELAY = """
import subprocess
import sys
import numpy as np
from pathlib import Path
from flwr.client import start_client
from gradd.train.federation import LocalTraining, Update
from gradd.train.flower import Client
address, files, data, *command = sys.argv[1:]

class Program(LocalTraining):
    def fit(self, weights, learning_rate):
        weights.tofile(f"{data}/global.f32")
        words = [*command, files, data, repr(learning_rate)]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        examples, loss = said.split()
        return Update(np.fromfile(f"{data}/update.f32", np.float32), int(examples), float(loss))

def batches():
    for k in range(2):
        labels = np.fromfile(f"{data}/y{k}.i64", np.int64)
        yield np.fromfile(f"{data}/x{k}.f32", np.float32).reshape(len(labels), -1), labels

client = Client(Program(files, batches)).to_client()
start_client(server_address=address, client=client, insecure=True)
"""
CLIENTS = Path(__file__).parent / "clients"
TRAIN = BUILD / "train"
NEEDED = ("aarch64-linux-gnu-gcc", "qemu-aarch64", "javac", "emcc")


def compiled(compiler: str, target: str, folder: Path) -> Path:
    """The client in C for a machine."""
    program, library = folder / f"client-{target}", TRAIN / target
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", "-o", program]
    link = [f"-L{library}", "-lgradd_train", f"-Wl,-rpath,{library}"]
    subprocess.run([compiler, *options, CLIENTS / "client.c", *link], check=True)
    return program


def programs(folder: Path) -> dict[str, list[str | Path]]:
    """The command of each kind of client; all are built."""
    make = ["make", "--no-print-directory", f"B={os.path.relpath(BUILD, ROOT)}"]
    for target in (["train-java"], ["train", "TARGET=aarch64"], ["web"]):
        done = subprocess.run([*make, *target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    emulated = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    java = [f"-Djava.library.path={TRAIN}/native", "-cp", TRAIN / "native/gradd-train.jar"]
    return {
        "native": [compiled("gcc", "native", folder)],
        "aarch64": [*emulated, compiled("aarch64-linux-gnu-gcc", "aarch64", folder)],
        "java": ["java", *java, CLIENTS / "RoundClient.java"],
        "tab": [sys.executable, CLIENTS / "tab.py", BUILD / "web"],
    }


@pytest.mark.nightly
def test_a_round_of_four_kinds_of_clients(folder: Path, tmp_path: Path) -> None:
    """In C, native and emulated, in Java, and in a tab of Chromium: the mean by hand."""
    python = flower()
    missing = [program for program in NEEDED if not shutil.which(program)]
    missing += [] if BROWSER else ["chromium"]
    if python is None or missing:
        pytest.skip(f"no {', '.join(missing) or 'Flower: make train-test installs it'}")
    files = shutil.copytree(folder, tmp_path / "files")
    address = listening()
    paths = f"{ROOT}/adapters/python:{ROOT}/tests/python"  # what drives the tab is a helper
    env = os.environ | {"PYTHONPATH": paths, "FLWR_TELEMETRY_ENABLED": "0"}
    commands = programs(tmp_path)
    with (tmp_path / "log").open("w") as log:
        started = [[python, "-c", SERVER, address, files, str(len(commands))]]
        for i, (kind, command) in enumerate(commands.items()):
            (data := tmp_path / kind).mkdir()
            for k, (x, labels) in enumerate(batches(i)):
                x.tofile(data / f"x{k}.f32")
                labels.astype(np.int64).tofile(data / f"y{k}.i64")
            started.append([python, "-c", RELAY, address, files, data, *command])
        children = [subprocess.Popen(c, env=env, stdout=log, stderr=log) for c in started]
        codes = [child.wait(240) for child in children]
    text = (tmp_path / "log").read_text()
    assert codes == [0] * 5, text[-3000:]
    updates = [np.fromfile(tmp_path / kind / "update.f32", np.float32) for kind in commands]
    for i, (kind, update) in enumerate(zip(commands, updates, strict=True)):
        if kind == "tab":  # its products have other last bits
            np.testing.assert_allclose(update, by_hand(folder, i), atol=1e-6)
        else:
            np.testing.assert_array_equal(update, by_hand(folder, i), kind)
    # Clients have random identities, by whose order the server adds: one of these orders.
    before = models.load(folder)[1].get_contiguous_parameters(True).numpy()
    sums = [
        sum(updates[i].astype(np.float64) * (8 + i) for i in order)
        for order in itertools.permutations(range(4))
    ]
    means = {(before + total / sum(range(8, 12))).astype(np.float32).tobytes() for total in sums}
    state = CheckpointState.load_checkpoint(files / "learnt")
    of_all = [state.parameters[f"fc2.{n}"].data.ravel() for n in ("weight", "bias")]
    assert np.concatenate(of_all).tobytes() in means
