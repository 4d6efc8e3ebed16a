"""Ray's TorchTrainer starts two workers that train one model, on one node and on two."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH

from helpers import nodes, ranks
from helpers.trainers import environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
SCRIPT = """
import os, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop(config):
    import ray.train
    import ray.train.torch
    import torch
    from gradd import ORTModule
    from gradd.session.client import get_client
    from helpers import ranks

    rank = ray.train.get_context().get_world_rank()
    module = ORTModule(ranks.stack("plain"), strict=True)
    model = ray.train.torch.prepare_model(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(ranks.STEPS):
        optimizer.zero_grad()
        model(ranks.batch(step, rank)).backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    daemon = get_client().daemon_pid
    what = {"gradients": found, "daemon": daemon, "kind": type(model).__name__}
    what["stats"] = module.gradd_stats()
    torch.save(what, f"{config['folder']}/{rank}.pt")

folder, address, *names = sys.argv[1:]
variables = {name: os.environ[name] for name in names}  # others are those of the worker's node
where = {"address": address} if address else {"num_cpus": 2, "include_dashboard": False}
ray.init(runtime_env={"env_vars": variables}, **where)
TorchTrainer(
    loop,
    train_loop_config={"folder": folder},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False, placement_strategy="SPREAD"),
    run_config=RunConfig(storage_path=folder),
).fit()
"""


# What workers take from the driver, and the directory of the daemon on one node.
EVERYWHERE = ("PYTHONPATH", "GRADD_BIN", "GRADD_GROUP_BYTES", "GRADD_QUIET", "GRADD_CACHE")


def _environment() -> dict[str, str]:
    path = os.pathsep.join([PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "PYTHONPATH": path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "GRADD_GROUP_BYTES": "9217",
    }


def _command(folder: Path, address: str, *names: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return [environment.interpreter(), str(script), str(folder), address, *EVERYWHERE, *names]


def _assert_gradients(folder: Path) -> set[int]:
    """The gradient of one process on both workers; returns the daemons that they have had."""
    own, other = (torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert own["kind"] == "DistributedDataParallel" and own["stats"]["in_torch"] == {}
    assert all(map(torch.equal, own["gradients"], other["gradients"]))
    for ours, theirs in zip(own["gradients"], ranks.in_one_process(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return {own["daemon"], other["daemon"]}


@pytest.mark.usefixtures("daemon")
def test_torch_trainer_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        _command(tmp_path, "", "GRADD_DIR"),
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **_environment()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(_assert_gradients(tmp_path)) == 1


def test_two_nodes_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    """A worker on each, with the daemon of its node."""
    if why := nodes.why_not():
        pytest.skip(why)
    ray = (environment.interpreter(), "-m", "ray.scripts.scripts", "start", "--num-cpus", "1")
    with nodes.two(tmp_path) as both, tempfile.TemporaryDirectory(prefix="ray-") as short:
        first, second = both
        address = f"{first.address}:{nodes.PORT}"
        head = (*ray, "--head", "--port", str(nodes.PORT), "--temp-dir", short)
        head = (*head, "--include-dashboard", "false", "--node-ip-address", first.address)
        more = (*ray, "--address", address, "--node-ip-address", second.address)
        nodes.run([first], [head], _environment())
        nodes.run([second], [more], _environment())
        nodes.run([first], [_command(tmp_path, address)], _environment())
        assert len(_assert_gradients(tmp_path)) == 2
