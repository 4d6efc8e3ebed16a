"""`make demo`, or `gradd demo` of the wheels: a small Llama learns Python's standard library.

A byte-pair tokenizer and a Llama of 11 million parameters are trained on the sources of the running
Python. Plain `transformers.Trainer` takes the first steps in a process of its own, then
`ORTTrainer` trains with the same seed and data, its forward and backward passes in the daemon. The
end shows both loss curves, times, the memory of both processes, a generated sample and, if
matplotlib is installed, a picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BATCH = 8
_IN_CHECKOUT = (Path(__file__).resolve().parents[4] / "Makefile").exists()


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; the exit status is 0 when both curves agree."""
    options = _parse(argv)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.plain_steps_only:
        return _plain_process(out, options)
    started = time.monotonic()
    print(f"gradd demo: a small Llama learns Python's standard library ({_machine()})\n")
    tokenizer = _prepare_data(out, options.characters)
    plain = _run_plain(out, options)
    ours, trainer = _run_ours(out, options, started + 60 * options.minutes)
    return _finish(out, options, started, tokenizer, plain, ours, trainer=trainer)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    prog, out = ("make demo", "build/demo") if _IN_CHECKOUT else ("gradd demo", "gradd-demo")
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=out, help="folder for tokenizer, model, picture")
    parser.add_argument("--steps", type=int, default=240, help="steps through the daemon")
    parser.add_argument("--compare", type=int, default=25, help="steps with plain Trainer")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop training after this time")
    parser.add_argument("--characters", type=int, default=6_000_000, help="of text to learn from")
    parser.add_argument("--plain-steps-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


# ---------------------------------------------------------------- data


def _prepare_data(out: Path, limit: int) -> Any:
    import numpy as np

    from . import demo_data

    print("1. text and tokenizer", flush=True)
    texts = demo_data.read_corpus(limit)
    characters = sum(map(len, texts))
    print(f"  {len(texts)} source files, {characters / 1e6:.1f} million characters", flush=True)
    began = time.monotonic()
    tokenizer = demo_data.train_tokenizer(texts)
    tokens = demo_data.encode(tokenizer, texts)
    tokenizer.save(str(out / "tokenizer.json"))
    np.save(out / "tokens.npy", tokens)
    print(
        f"  byte-pair tokenizer: {tokenizer.get_vocab_size()} entries in "
        f"{time.monotonic() - began:.1f} s; {len(tokens) / 1e6:.1f} million tokens",
        flush=True,
    )
    return tokenizer


# ---------------------------------------------------------------- the two runs


def _train(trainer_class: Any, arguments_class: Any, out: Path, curve: Any, **run: Any) -> Any:
    """Builds the same trainer around either class and trains; fills `curve`."""
    import numpy as np
    from transformers import PrinterCallback
    from transformers.utils import logging

    from . import demo_data, demo_report, memory

    logging.disable_progress_bar()
    arguments = arguments_class(
        output_dir=str(out / "checkpoints"),
        max_steps=run["schedule"],
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=demo_data.SEED,
        disable_tqdm=True,
    )
    progress = demo_report.Progress(
        curve, run["steps"], BATCH * demo_data.BLOCK, run.get("deadline", float("inf"))
    )
    trainer = trainer_class(
        model=demo_data.build_model(),
        args=arguments,
        train_dataset=demo_data.Blocks(np.load(out / "tokens.npy")),
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    with memory.PeakSampler(_processes) as sampler:
        trainer.train()
    names = list(sampler.peaks)
    curve.peaks_mib = dict(zip(names, memory.in_mib(sampler.peaks.values()), strict=True))
    curve.peaks_mib["sum"] = memory.in_mib([sampler.peak_sum])[0]
    return trainer


def _processes() -> dict[str, int]:
    """Ids of the processes involved: this trainer, and the daemon if there is a connection."""
    from .memory import worker_pid

    found = {"trainer": os.getpid()}
    daemon = worker_pid()
    if daemon:
        found["daemon"] = daemon
    return found


def _plain_process(out: Path, options: argparse.Namespace) -> int:
    """The body of the child process: plain Trainer, result in a file."""
    from transformers import Trainer, TrainingArguments

    from .demo_report import Curve

    curve = Curve("plain Trainer")
    # On a slow machine the comparison gets shorter, not the demo longer.
    limit = time.monotonic() + 60 * options.minutes / 4
    run = {"schedule": options.steps, "steps": options.compare, "deadline": limit}
    _train(Trainer, TrainingArguments, out, curve, **run)
    (out / "plain.json").write_text(json.dumps(asdict(curve)))
    return 0


def _run_plain(out: Path, options: argparse.Namespace) -> Any:
    from .demo_report import Curve

    print(f"\n2. plain Trainer, PyTorch eager, {options.compare} steps to compare with", flush=True)
    command = [sys.executable, "-m", "optimum.gradd.demo", "--plain-steps-only"]
    command += ["--out", str(out), "--steps", str(options.steps)]
    command += ["--compare", str(options.compare), "--minutes", str(options.minutes)]
    subprocess.run(command, check=True)
    return Curve(**json.loads((out / "plain.json").read_text()))


def _run_ours(out: Path, options: argparse.Namespace, deadline: float) -> tuple[Any, Any]:
    from . import ORTTrainer, ORTTrainingArguments
    from .demo_report import Curve

    print(f"\n3. ORTTrainer, forward and backward in the daemon, {options.steps} steps", flush=True)
    curve = Curve("ORTTrainer")
    trainer = _train(
        ORTTrainer,
        ORTTrainingArguments,
        out,
        curve,
        schedule=options.steps,
        steps=options.steps,
        deadline=deadline,
    )
    return curve, trainer


# ---------------------------------------------------------------- the end


def _finish(
    out: Path,
    options: argparse.Namespace,
    started: float,
    tokenizer: Any,
    plain: Any,
    ours: Any,
    *,
    trainer: Any,
) -> int:
    from . import demo_data, demo_report

    tokens = BATCH * demo_data.BLOCK
    if len(ours.losses) < options.steps:
        print(f"  (stopped after {len(ours.losses)} steps: the time limit of --minutes)")
    print("\n4. results")
    worst = demo_report.print_losses(plain, ours)
    demo_report.print_costs(plain, ours, tokens)
    print(f"\n  loss of ORTTrainer: {ours.losses[0]:.2f} -> {ours.losses[-1]:.2f}")
    _print_sample(tokenizer, trainer.model)
    trainer.save_model(str(out / "model"))
    picture: Path | str = out / "demo.png"
    if importlib.util.find_spec("matplotlib") is None:
        picture = "none: matplotlib is not installed"
    else:
        demo_report.draw(plain, ours, tokens, Path(picture))
    print(f"\n  picture: {picture}\n  model:   {out / 'model'} (from_pretrained reads it)")
    _print_next()
    print(f"\ndone in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0 if worst < 1e-3 else 1


def _print_sample(tokenizer: Any, model: Any) -> None:
    import torch

    prompt = "def read"
    ids = torch.tensor([tokenizer.encode("\n" + prompt).ids])
    torch.manual_seed(1)
    model.eval()
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=90,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            eos_token_id=None,
            pad_token_id=0,
        )
    text = tokenizer.decode(made[0].tolist()).strip("\n")
    print(f"\n  a sample, continued from {prompt!r} (a few minutes old, so it babbles Python):\n")
    for line in [row for row in text.split("\n") if row.strip()][:14]:
        print(f"  | {line}")


_NEXT = """
    make bench ARGS=--quick     five workloads against torch eager and torch.compile
    build/bin/gradd ps          the daemon and its sessions
    make demo ARGS="--steps 1000 --minutes 20"
    make test                   everything that is checked"""
_NEXT_INSTALLED = """
    gradd ps                    the daemon and its sessions
    gradd demo --steps 1000 --minutes 20"""


def _print_next() -> None:
    print(
        f"""
  next:{_NEXT if _IN_CHECKOUT else _NEXT_INSTALLED}
  in a script of your own:
    from optimum.gradd import ORTTrainer as Trainer, ORTTrainingArguments as TrainingArguments"""
    )


if __name__ == "__main__":
    sys.exit(main())
