"""ORTTrainer under torchrun with two processes (gloo): the losses of Trainer, equal ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PYTHONPATH

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from helpers.trainers.hugging_face import losses, make_trainer

folder = Path(sys.argv[1])
for kind in ("torch", "gradd"):
    trainer = make_trainer(kind, folder, max_steps=4, gradient_accumulation_steps=2)
    trainer.train()
    result = {
        "losses": losses(trainer),
        "wrapped": type(trainer.model_wrapped).__name__,
        "sum": float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters())),
    }
    if kind == "gradd":
        result["stats"] = trainer.gradd_stats()
    (folder / f"{kind}-{trainer.args.process_index}.json").write_text(json.dumps(result))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
# A thread of torch that waits for an interpreter which ends aborts the process now and then.
os._exit(0)
"""


def launch(folder: Path) -> dict[str, list[dict]]:
    """What both ranks report of each kind of trainer."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(script), str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        kind: [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]
        for kind in ("torch", "gradd")
    }


@pytest.mark.usefixtures("daemon")
def test_two_processes_train_as_with_trainer(tmp_path: Path) -> None:
    plain, ours = launch(tmp_path).values()
    assert ours[0]["wrapped"] == plain[0]["wrapped"] == "DistributedDataParallel"
    # Ranks that are not synchronised drift apart silently: compare all of their weights.
    assert ours[0]["sum"] == ours[1]["sum"]
    assert len(ours[0]["losses"]) == 4
    for a, b in zip(plain[0]["losses"], ours[0]["losses"], strict=True):
        assert abs(a - b) < 1e-5
    for rank in ours:
        assert not rank["stats"]["fallbacks"] and rank["stats"]["forwards"] >= 8
