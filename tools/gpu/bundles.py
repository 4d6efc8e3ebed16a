"""Small training graphs with inputs, and the loss and gradients that PyTorch gives on the CPU.

    bundles.py make FOLDER [NAME ...]                write them (a machine with gradd and torch)
    bundles.py compare FOLDER BENCH DEVICE           run each in the engine, without a client

A bundle is a folder: model.onnx, case.json, data/NAME.bin for each input and, of each parameter,
expected/NAME.bin, the gradient in f64, rounded to f32. BENCH is the program bench_engine.
Gradients in f32 agree if

    |difference| <= 1e-4 * max(largest entry of its own, 1e-4 * largest entry of all)

or if they are within four times PyTorch's own error in f32. In bf16 the distance of a gradient from
the one in f64, relative to its length or 1e-4 of the longest, may be twice that of PyTorch's bf16,
or of one rounding. The loss is judged alike (f32: 1e-5). Prints a line of JSON for each.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROUNDING, FLOOR, WORSE, TWICE = 2.0**-9, 1e-4, 4.0, 2.0
FEW = {"num_attention_heads": 2, "num_key_value_heads": 1}
LONG = {"max_position_embeddings": 256}
# Family of the tests' models, what differs from them, rows and tokens of a row.
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "mlp": ("mlp_ce", {}, 12, 0),
    "llama": ("llama", {}, 2, 24),
    "llama head 64": ("llama", {"head_dim": 64, **LONG}, 2, 150),
    "llama head 128": ("llama", {**FEW, "head_dim": 128, **LONG}, 2, 150),
    "gpt2": ("gpt2", {}, 2, 24),
    "bert": ("bert_mlm", {}, 2, 24),
}


# ---- making ----


def _gradients(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    out = model(**batch)
    loss = out[0] if isinstance(out, tuple) else out.loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {n: g.double().numpy() for n, g in found.items()}


def _converted(batch: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def _bytes(tensor: Any) -> bytes:
    import torch

    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _captured(model: Any, batch: dict[str, Any], folder: Path) -> list[str]:
    """Writes model.onnx; the names of its inputs."""
    import onnx

    from gradd import DebugOptions, ORTModule

    options = DebugOptions(save_onnx=True, onnx_prefix=str(folder / "made"))
    ORTModule(copy.deepcopy(model), options, strict=True)(**batch)
    (made,) = folder.glob("made_torch_exported_*.onnx")
    made.rename(folder / "model.onnx")
    for plan in folder.glob("made_execution_model_*.onnx"):
        plan.unlink()
    return [value.name for value in onnx.load(folder / "model.onnx").graph.input]


def make(name: str, dtype_name: str, folder: Path) -> None:
    """One bundle; the weights that the graph starts from are rounded to the type."""
    import torch

    from helpers.models import families

    family, over, rows, length = CASES[name]
    dtype = getattr(torch, dtype_name)
    module, make_batch = families.build(family, **over)
    model, batch = module.to(dtype), _converted(make_batch(rows, length, 1), dtype)
    for part in ("data", "expected"):
        (folder / part).mkdir(parents=True)
    names = _captured(model, batch, folder)
    exact_loss, exact = _gradients(copy.deepcopy(model).double(), _converted(batch, torch.double))
    loss, own = _gradients(copy.deepcopy(model), batch)
    there = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    for input_name in names:
        values = _bytes({**there, **batch}[input_name])
        (folder / "data" / f"{input_name}.bin").write_bytes(values)
    given = {k: list(v.shape) for k, v in batch.items() if k in names}
    for parameter, gradient in exact.items():
        (folder / "expected" / f"{parameter}.bin").write_bytes(
            gradient.astype(np.float32).tobytes()
        )
    case = {
        "name": name,
        "dtype": dtype_name,
        "inputs": given,
        "loss": exact_loss,
        "loss_off": abs(loss - exact_loss),
        "gradients": {n: _own_error(own[n], exact[n], dtype_name) for n in exact},
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1))


def _own_error(own: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """PyTorch's own: the largest difference, in bf16 the length of all."""
    return float(np.abs(own - exact).max() if dtype == "float32" else np.linalg.norm(own - exact))


# ---- comparing ----


def _floats(file: Path, dtype: str) -> np.ndarray:
    """In f64."""
    if dtype == "float32":
        return np.fromfile(file, np.float32).astype(np.float64)
    return (
        (np.fromfile(file, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    )


def _times_of_limit(case: dict[str, Any], got: np.ndarray, want: np.ndarray, own: float) -> float:
    """How many times its limit a gradient is off."""
    if case["dtype"] == "float32":
        limit = 1e-4 * max(float(np.abs(want).max()), FLOOR * case["largest"])
        return float(np.abs(got - want).max()) / max(limit, WORSE * own)
    scale = max(float(np.linalg.norm(want)), FLOOR * case["longest"])
    return float(np.linalg.norm(got - want)) / (TWICE * max(own, ROUNDING * scale))


def _judge(folder: Path, found: Path) -> dict[str, Any]:
    case = json.loads((folder / "case.json").read_text())
    dtype = case["dtype"]
    expected = {n: _floats(folder / "expected" / f"{n}.bin", "float32") for n in case["gradients"]}
    case["largest"] = max(float(np.abs(g).max()) for g in expected.values())
    case["longest"] = max(float(np.linalg.norm(g)) for g in expected.values())
    files = sorted(found.glob("*.bin"))
    got_loss = next(f for f in files if f.stem == "loss")
    width = "float32" if got_loss.stat().st_size == 4 else dtype
    loss = float(_floats(got_loss, width)[0])
    relative = 1e-5 if dtype == "float32" else TWICE * ROUNDING
    limit = max(relative * abs(case["loss"]), WORSE * case["loss_off"])
    off = {"loss": abs(loss - case["loss"]) / limit}
    for name, want in expected.items():
        file = found / f"{name}.bin"
        if not file.exists():
            off[name] = float("inf")
            continue
        off[name] = _times_of_limit(case, _floats(file, dtype), want, case["gradients"][name])
    worst = max(off, key=lambda n: off[n] if off[n] == off[n] else float("inf"))
    held = all(value <= 1 for value in off.values())
    return {
        "bundle": case["name"],
        "dtype": dtype,
        "held": held,
        "worst": worst,
        "of_limit": round(off[worst], 3) if np.isfinite(off[worst]) else None,
        "loss": loss,
        "expected_loss": case["loss"],
    }


def compare(folder: Path, bench: str, device: str) -> dict[str, Any]:
    """Runs one bundle on the device, and says how far it is off."""
    case = json.loads((folder / "case.json").read_text())
    shapes = [f"{k}={'x'.join(map(str, v))}" for k, v in case["inputs"].items()]
    with tempfile.TemporaryDirectory() as found:
        data = ["--data", str(folder / "data"), "--save", found, "--repeat", "0"]
        command = [bench, str(folder / "model.onnx"), "--device", device, *data, *shapes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            failed = said[-1] if said else f"status {done.returncode}"
            return {"bundle": case["name"], "dtype": case["dtype"], "held": False, "failed": failed}
        return _judge(folder, Path(found))


def _each(folders: list[Path], work: Callable[[Path], dict[str, Any]]) -> int:
    bad = not folders
    for folder in folders:
        found = work(folder)
        bad |= not found["held"]
        print(json.dumps(found), flush=True)
    return int(bad)


def main() -> int:
    """Exit status 1: a bundle was not held, or there is none."""
    what, folder, *more = sys.argv[1:]
    if what == "compare":
        bench, device = more
        folders = sorted(path.parent for path in Path(folder).glob("*/case.json"))
        return _each(folders, lambda path: compare(path, bench, device))
    for name in more or CASES:
        for dtype in ("float32", "bfloat16"):
            make(name, dtype, Path(folder) / f"{name.replace(' ', '-')}-{dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
