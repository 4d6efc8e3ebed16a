"""Ray's TorchTrainer starts two workers that train one model, where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH

from helpers import ranks

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
    what = {"gradients": found, "kind": type(model).__name__, "stats": module.gradd_stats()}
    torch.save(what, f"{config['folder']}/{rank}.pt")

folder = sys.argv[1]
names = ("PYTHONPATH", "GRADD_DIR", "GRADD_BIN", "GRADD_GROUP_BYTES")
variables = {name: os.environ[name] for name in names}
ray.init(num_cpus=2, runtime_env={"env_vars": variables}, include_dashboard=False)
TorchTrainer(
    loop,
    train_loop_config={"folder": folder},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=folder),
).fit()
"""


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.usefixtures("daemon")
def test_torch_trainer_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "GRADD_GROUP_BYTES": "9217"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert own["kind"] == "DistributedDataParallel" and own["stats"]["in_torch"] == {}
    assert all(map(torch.equal, own["gradients"], other["gradients"]))
    for ours, theirs in zip(own["gradients"], ranks.in_one_process(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
