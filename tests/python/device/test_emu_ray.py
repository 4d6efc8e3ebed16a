"""Ray's TorchTrainer starts two workers, each with a GPU and its daemon, that train one model."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from helpers import emu_torch, ranks
from helpers.trainers import environment

pytestmark = [
    pytest.mark.emu,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]
SCRIPT = """
import os, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def setup():
    from helpers import emu_group, emu_torch

    emu_torch.load()  # the device of this process, and the back end of its group
    emu_group.register()

def loop(config):
    import ray.train
    import ray.train.torch
    import torch
    from gradd import ORTModule
    from gradd.session.client import get_client
    from helpers import ranks

    rank = ray.train.get_context().get_world_rank()
    device = torch.device("emu", rank)
    torch.accelerator.set_device_index(rank)
    module = ORTModule(ranks.stack("plain").to(device), strict=True)
    model = ray.train.torch.prepare_model(module, move_to_device=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(ranks.STEPS):
        optimizer.zero_grad()
        model(ranks.batch(step, rank).to(device)).backward()
        found += [p.grad.cpu() for p in model.parameters()]
        optimizer.step()
    stats = module.gradd_stats()
    what = {"gradients": found, "kind": type(model).__name__, "stats": stats}
    what["uuid"] = get_client(device=device).memory.uuid
    torch.save(what, f"{config['folder']}/{rank}.pt")

folder, *names = sys.argv[1:]
variables = {name: os.environ[name] for name in names}
environment = {"env_vars": variables, "worker_process_setup_hook": setup}
ray.init(runtime_env=environment, num_cpus=2, include_dashboard=False)
TorchTrainer(
    loop,
    train_loop_config={"folder": folder},
    torch_config=TorchConfig(backend="emu"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=folder),
).fit()
"""
TOLD = ("PYTHONPATH", "GRADD_BIN", "GRADD_DIR", "GRADD_BUILD", "GRADD_GROUP_BYTES", "GRADD_QUIET")


def test_torch_trainer_has_the_gradient_of_one_process(daemon: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {
        "PYTHONPATH": conftest.PYTHONPATH,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "GRADD_GROUP_BYTES": "9217",
        "GRADD_BUILD": str(conftest.BINARY.parents[1]),
    }
    done = subprocess.run(
        [environment.interpreter(), str(script), str(tmp_path), *TOLD],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for directory in conftest.gpu_directories(daemon.root):
        shutil.rmtree(directory)  # Ray kills the children of a worker, and so its GPU's daemon
    own, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert own["kind"] == "DistributedDataParallel" and own["uuid"] != other["uuid"]
    assert own["stats"]["in_torch"] == other["stats"]["in_torch"] == {}
    assert all(map(torch.equal, own["gradients"], other["gradients"]))
    for ours, theirs in zip(own["gradients"], ranks.in_one_process(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
