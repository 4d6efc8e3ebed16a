"""The benchmark's arithmetic and its rule for printing a speed-up; one quick run of a worker."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PYTHONPATH

from helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import networks  # noqa: E402
import report  # noqa: E402
import stats  # noqa: E402
import workloads  # noqa: E402

pytestmark = pytest.mark.one_in(8)


@pytest.mark.quick
def test_interval_covers_the_median_and_shrinks_with_samples() -> None:
    noise = np.random.default_rng(1)
    few = stats.median_interval(10 + noise.normal(size=10))
    many = stats.median_interval(10 + noise.normal(size=1000))
    assert few.low <= few.value <= few.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert abs(many.value - 10) < 0.2


@pytest.mark.quick
def test_speedup_is_printed_only_when_the_interval_excludes_one() -> None:
    noise = np.random.default_rng(2)
    base = 100 + 10 * noise.normal(size=40)
    same = stats.speedup_text(stats.ratio_interval(base, 100 + 10 * noise.normal(size=40)))
    assert same.startswith("no difference shown")
    faster = stats.speedup_text(stats.ratio_interval(base, base / 2))
    assert faster.startswith("2.00x")
    slower = stats.speedup_text(stats.ratio_interval(base / 2, base))
    assert slower.startswith("0.50x")  # a slow-down is said as plainly
    with pytest.raises(ValueError, match="paired"):
        stats.ratio_interval([1.0], [1.0, 2.0])


@pytest.mark.quick
def test_interval_over_starts_covers_what_rounds_do_not_show() -> None:
    noise = np.random.default_rng(3)
    starts, rounds = 6, 20
    quiet = 1 + 1e-3 * noise.normal(size=(2, starts, rounds))
    offsets = np.linspace(-0.03, 0.03, starts)[:, None]  # of a whole start
    slow, fast = quiet[0] * np.exp(offsets), quiet[1]
    one = stats.ratio_interval(slow[0], fast[0])
    assert one.high < 1  # sure of itself, and wrong
    all_ = stats.ratio_interval(slow.ravel(), fast.ravel(), starts)
    assert abs(all_.value - 1) < 1e-3
    by_hand = 2.571 * offsets.std(ddof=1) / np.sqrt(starts)  # Student's t, 5 degrees of freedom
    assert abs(np.log(all_.high) - by_hand) < 1e-3 and abs(np.log(all_.low) + by_hand) < 1e-3
    with pytest.raises(ValueError, match="evenly"):
        stats.ratio_interval([1.0] * 5, [1.0] * 5, 2)


@pytest.mark.quick
def test_an_ended_run_keeps_the_starts_that_were_done(monkeypatch: Any) -> None:
    import argparse

    import run

    def once(name: str, precision: str, options: Any, env: dict, start: int) -> dict[str, Any]:
        if start == 2:
            sys.exit(143)  # what SIGTERM becomes
        return {"engines": {"gradd": {"ms": {"fwd+bwd": [float(start)]}}}, "failed": {}}

    monkeypatch.setattr(run, "_measure_once", once)
    monkeypatch.setattr(run, "stop_daemons", lambda env: None)
    result = run.measure("mlp", "fp32", argparse.Namespace(starts=5), {})
    assert result["starts"] == 2
    assert result["engines"]["gradd"]["ms"]["fwd+bwd"] == [0.0, 1.0]


@pytest.mark.quick
def test_pool_takes_all_starts_of_all_files(tmp_path: Path, capsys: Any) -> None:
    import pool

    def file(name: str, starts: int, plain: list[float], workload: str = "mlp") -> str:
        ours = {"ms": {"fwd+bwd": [1.0] * len(plain)}}
        engines = {"gradd": ours, "plain": {"ms": {"fwd+bwd": plain}}}
        result = {"workload": workload, "precision": "fp32", "starts": starts, "engines": engines}
        (tmp_path / name).write_text(json.dumps({"results": [result]}))
        return str(tmp_path / name)

    files = [file("a", 2, [1.0, 1.0, 2.0, 2.0]), file("b", 1, [4.0] * 3), file("c", 1, [1], "sft")]
    assert pool.main(files) == 0
    low, high = 2 * np.exp(np.array([-1, 1]) * 4.303 * np.log(2) / np.sqrt(3))
    lines = capsys.readouterr().out.splitlines()
    interval = f"2.000 ({low:.3f}-{high:.3f})"
    assert lines[2] == f"| mlp fp32 | fwd+bwd | 3 | {interval} | {interval} |"
    assert lines[3].endswith("| 1 | one start has no interval | one start has no interval |")


@pytest.mark.quick
def test_shortest_quarter_does_not_see_slow_moments() -> None:
    fast = np.array([[1.0, 9, 1, 9, 9, 1, 9, 9], [3, 1, 9, 9, 9, 9, 9, 9]])
    assert stats.shortest_quarter(fast).tolist() == [1, 2]
    assert stats.shortest_quarter(fast[:, :3]).tolist() == [1, 1], "one sample at least"
    slow = 2 * np.flip(fast, axis=1)
    ratios = stats.start_ratios(slow.ravel(), fast.ravel(), 2, of=stats.shortest_quarter)
    assert ratios == [2, 2]


@pytest.mark.quick
@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (10, 2.228), (15, 2.131), (30, 2.042)])
def test_student(freedom: int, t: float) -> None:
    assert abs(stats._student(freedom) - t) < 2e-3


@pytest.mark.quick
def test_starts_are_collected_and_an_engine_that_fails_is_left_out() -> None:
    import run

    def result(ms: list[float], failed: dict[str, str]) -> dict[str, Any]:
        engine = {"ms": {"fwd+bwd": ms}, "first_s": ms[0]}
        names = {"eager", "gradd"} - set(failed)
        return {"engines": {n: json.loads(json.dumps(engine)) for n in names}, "failed": failed}

    both = result([1.0, 2.0], {})
    run._add_start(both, result([3.0, 4.0], {}))
    assert both["engines"]["eager"] == {"ms": {"fwd+bwd": [1.0, 2.0, 3.0, 4.0]}, "first_s": 1.0}
    run._add_start(both, result([5.0, 6.0], {"gradd": "why"}))
    assert list(both["engines"]) == ["eager"] and both["failed"] == {"gradd": "why"}
    run._add_start(both, result([7.0, 8.0], {}))  # it must not come back
    assert len(both["engines"]["eager"]["ms"]["fwd+bwd"]) == 8 and list(both["engines"]) == [
        "eager"
    ]


@pytest.mark.slow
def test_table_names_failures_and_keeps_intervals(tmp_path: Path) -> None:
    machine: dict[str, Any] = {"cpu": "Some CPU 9", "threads": 2, "torch": "x", "commit": "c"}
    machine |= {"cores": 2, "date": "2026-01-01", "stolen": 0.061, "load_before": 1.5}
    engine = {"first_s": 1.0, "loss": 2.0, "ms": {"fwd+bwd": [10.0, 11.0, 12.0]}}
    engine |= {"memory": {"above": 3 * 2**20}, "first_memory": {"above": 5 * 2**20}}
    fast = {**engine, "ms": {"fwd+bwd": [5.0, 5.5, 6.0]}}
    result = {
        "workload": "llama",
        "precision": "bf16",
        "what": "w",
        "tokens": 1,
        "failed": {"compile": "x\nno compiler"},
    }
    result["engines"] = {"eager": engine, "gradd": fast}
    paths = report.write(tmp_path, machine, [result], quick=True)
    text = paths[1].read_text()
    assert "llama bf16, compile failed: no compiler" in text and "2.00x" in text
    assert "3 MiB | 5 MiB" in text
    assert "Other processes were at work (load 1.5 before)." in " ".join(text.split())
    assert "The hypervisor took 6% of the processors' time." in " ".join(text.split())
    assert json.loads(paths[0].read_text())["results"][0]["workload"] == "llama"
    assert paths[2].read_text().count("<svg") == 1
    assert paths[0].name == "some-cpu-9-2-cores-quick.json" and "2026-01-01" in text
    later = report.write(tmp_path, {**machine, "date": "2026-02-02"}, [result], quick=True)
    assert later == paths and "2026-02-02" in paths[1].read_text()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.quick
def test_a_table_of_trainers_has_what_they_do_in_a_second(tmp_path: Path) -> None:
    machine: dict[str, Any] = {"cpu": "Some CPU 9", "threads": 2, "torch": "x", "cores": 2}
    engine = {"first_s": 1.0, "loss": 2.0, "ms": {"whole step": [100.0, 100.0, 100.0]}}
    engine |= {"losses": [2.0, 1.0], "in_torch": {}}
    fast = {**engine, "ms": {"whole step": [50.0, 50.0, 50.0]}, "losses": [2.0, 1.001]}
    result = {"workload": "bert", "precision": "fp32", "what": "Some text", "failed": {}}
    result |= {"tokens": 1024, "sequences": 8, "engines": {"Trainer": engine, "ORTTrainer": fast}}
    text = report.table({**machine, "date": "2026-01-01"}, [result])
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][1:4] == ["whole step", "samples/s", "tokens/s"] and "Some text." in text
    assert rows[1][2:4] == ["80.0 (80.0-80.0)", "10,240 (10,240-10,240)"]
    assert rows[2][2:4] == ["160.0 (160.0-160.0)", "20,480 (20,480-20,480)"]
    assert rows[3][0] == "| Trainer / ORTTrainer" and rows[3][1].startswith("2.00x")
    assert "Losses of 2 steps differ by at most 1e-03 of their size; no fallback." in text
    fast["in_torch"] = {"graph_break": 3}
    assert "in PyTorch: graph_break (3)." in report.table({**machine, "date": "d"}, [result])
    paths = report.write(tmp_path, {**machine, "date": "d"}, [result], False, "trainers")
    assert [p.name for p in paths][2] == "some-cpu-9-2-cores-trainers.svg"
    assert "160.0 samples/s" in paths[2].read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, apart", [("llama_lora", 1e-5), ("trl_dpo", 1e-5), ("lightning", 2e-3)]
)
def test_trainers_take_turns(name: str, apart: float, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--trainers", "--quick", "--rounds", "2"]
    command += ["--only", name, "--samples", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = tmp_path.glob("*-trainers-part-quick.json")
    (result,) = json.loads(path.read_text())["results"]
    ours, theirs = result["engines"]["ORTTrainer"], result["engines"]["Trainer"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=apart)
    assert len(ours["losses"]) == 9 and not ours["in_torch"]
    assert len(ours["ms"]["whole step"]) == len(theirs["ms"]["whole step"]) == 2
    assert ours["memory"]["peaks"].keys() >= {"trainer", "daemon"}
    assert theirs["memory"]["state"] == ours["memory"]["state"] > 0


@pytest.mark.parametrize("name", workloads.NAMES)
def test_workloads_are_what_they_say(name: str) -> None:
    load = workloads.make(name, quick=True)
    module, batch = load.build()
    labels = batch["labels"]
    assert labels.numel() == load.tokens
    share = float((labels != workloads.IGNORE).float().mean())
    expected = {"sft": 0.3, "bert": 0.15}.get(name, 1.0)
    assert abs(share - expected) < 0.05
    if name == "sft":
        assert abs(float(batch["attention_mask"].float().mean()) - 0.5) < 0.03
    frozen = sum(not p.requires_grad for p in module.parameters())
    assert (frozen > 0) == (name == "lora")
    out = module(**batch)
    assert float(out["loss"].detach()) > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", networks.NAMES)
def test_networks_train(name: str) -> None:
    load = workloads.make(name, quick=True)
    module, batch = load.build()
    assert {len(x) for x in batch.values()} == {load.tokens}
    out = module.train()(**batch)
    loss = out["loss"] if isinstance(out, dict) else out[0]
    loss.backward()
    trained = [p for p in module.parameters() if p.requires_grad]
    assert math.isfinite(loss) and all(p.grad is not None for p in trained)


def test_worker_answers_in_lines_of_json() -> None:
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / "worker.py"), "eager", "mlp", "quick", "fp32"],
        input='{"do": "warm", "steps": 2}\n{"do": "time", "steps": 3}\n'
        '{"do": "optimizer"}\n{"do": "memory", "steps": 2}\n{"do": "end"}\n',
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    ready, warm, timed, _, memory = map(json.loads, process.stdout.splitlines())
    assert ready == {"ready": True} and abs(warm["loss"] - 2.35) < 0.1
    assert len(timed["ms"]) == 3 and min(timed["ms"]) > 0
    assert warm["memory"]["peak"] >= warm["memory"]["base"] > 0
    weights = 4 * (784 * 500 + 500 + 5000 + 10)
    assert memory["state"] == 4 * weights and memory["peak"] >= memory["base"]


@pytest.mark.nightly
def test_recognition_asks_for_both_plans_of_the_captured_graph(tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    bench.write_text(
        '#!/bin/sh\ntest -s "$1" || exit 1\necho "$@" >> "$0.log"\n'
        'case "$*" in *"--plain 1"*) echo "best 4.00 ms, launches alone 3.00 ms";;'
        '*) echo "best 4.00 ms, launches alone 2.00 ms";; esac\n'
    )
    bench.chmod(0o700)
    command = [sys.executable, str(BENCHMARKS / "recognition.py"), "--bench", str(bench)]
    command += ["--quick", "--only", "mlp", "--precision", "fp32", "--starts", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "| mlp fp32 | 3 | 1.500 (1.500-1.500) |", done.stderr
    calls = Path(f"{bench}.log").read_text().splitlines()
    assert [c.endswith("--plain 1") for c in calls] == [True, False, False, True, True, False]
    assert all("x=64x784" in c and "--ids 10 " in c for c in calls)


@pytest.mark.nightly
def test_both_plans_in_one_trainer(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "together.py"), "--quick", "--only", "mlp"]
    command += ["--precision", "bf16", "--starts", "2", "--rounds", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    (result,) = json.loads(path.read_text())["results"]
    assert result["starts"] == 2
    gradd, plain = (result["engines"][name] for name in ("gradd", "plain"))
    assert len(gradd["ms"]["fwd+bwd"]) == len(plain["ms"]["fwd+bwd"]) == 6  # a sample per turn
    assert gradd["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert done.stdout.count("  fwd+bwd ") == 2  # a line per start


@pytest.mark.nightly
def test_the_table_of_messages() -> None:
    command = [sys.executable, str(BENCHMARKS / "messages.py"), "5"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_SELF_CHECK": "0"}
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr[-2000:]
    assert [line.split()[0] for line in said.stdout.splitlines()] == [
        *("verb", "forward", "backward", "step")
    ]


@pytest.mark.nightly
def test_models_of_real_sizes_in_small() -> None:
    """Both engines train the same; wrapping and every step are measured."""
    command = [sys.executable, str(BENCHMARKS / "real_sizes.py"), "--only", "small", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    ours, eager = map(json.loads, done.stdout.splitlines())
    assert (ours["engine"], eager["engine"]) == ("gradd", "eager")
    assert {"wrap", "step 1", "step 2"} == set(ours["phases"])
    assert ours["phases"]["step 2"]["peak_mib"] > ours["parameters_mib"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-2)
