"""The plan's number of threads decides, not the setting that the process inherits for OpenMP.

torchrun sets OMP_NUM_THREADS to 1 for its trainers, and the daemon is started by one of them. Each
case runs one attention in a process of its own, because OpenMP reads its settings once: same
scratch, same threads at work, same bits, whatever the environment says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PYTHONPATH

THREADS = 2

CHILD = """
import hashlib, json, os, sys
import numpy as np
from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer

def tasks():
    return len(os.listdir("/proc/self/task"))

w = Writer()
scores = w("Mul", w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2])), w.constant(0.3))
y = w("MatMul", w("Softmax", scores, axis=-1), "v")
shapes = {n: (1, 16, 512, 64) for n in "qkv"}  # large enough for all threads
model = w.model(shapes, [y])
rng = np.random.default_rng(0)
feed = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
plan = E.Plan(model, feed, list(feed), [y], [y], threads=int(sys.argv[1]))
before = tasks()
run = E.Run(plan)
out = run.forward(feed)
grads = run.backward({y: np.ones((1, 16, 512, 64), np.float32)})
bits = b"".join(a.tobytes() for a in (*out.values(), *grads.values()))
print(json.dumps([plan.info.n_launches_forward, plan.info.arena_bytes, tasks() - before,
                  hashlib.sha256(bits).hexdigest()]))
"""


def _run(threads: int, **settings: str) -> list:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    env |= {"PYTHONPATH": PYTHONPATH, "OPENBLAS_NUM_THREADS": "1", **settings}
    command = [sys.executable, "-c", CHILD, str(threads)]
    return json.loads(subprocess.check_output(command, env=env, text=True, timeout=60))


@pytest.mark.quick
def test_the_plan_decides_how_many_threads_attention_takes() -> None:
    free = _run(THREADS)
    assert free[0] == 2, "attention and a small copy: nothing else opens a parallel region"
    assert free[2] == THREADS - 1
    for inherited in ("1", "3"):
        assert _run(THREADS, OMP_NUM_THREADS=inherited) == free


@pytest.mark.slow
def test_scratch_grows_with_the_plans_threads_and_bits_stay() -> None:
    one, two, four = (_run(n, OMP_NUM_THREADS="2") for n in (1, 2, 4))
    assert [one[2], two[2], four[2]] == [0, 1, 3]
    assert two[1] - one[1] == (four[1] - two[1]) / 2 > 0
    assert one[3] == two[3] == four[3]


def test_the_daemon_does_not_keep_what_its_starter_had_set(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import torch

    from gradd import ORTModule

    limits = {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1", "OMP_MAX_ACTIVE_LEVELS": "0"}
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # what the user may have set stands
    daemon = request.getfixturevalue("daemon")
    module = ORTModule(torch.nn.Linear(256, 256))
    module(torch.randn(512, 256)).sum().backward()
    settings = Path(f"/proc/{daemon.worker()}/environ").read_bytes().split(b"\0")
    assert not [s for s in settings if s.startswith(tuple(n.encode() for n in limits))]
    assert b"OMP_WAIT_POLICY=passive" in settings
    names = [
        Path(f"/proc/{daemon.worker()}/task/{t}/comm").read_text().strip()
        for t in os.listdir(f"/proc/{daemon.worker()}/task")
    ]
    # Workers of OpenMP have the name of the thread that made them: the plan's two are there.
    assert names.count("gradd-engine") == 2, names
    assert np.isfinite(module.weight.grad.numpy()).all()
