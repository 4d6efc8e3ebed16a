"""`python -m gradd.train artifacts model.onnx ...`: the files for a training on a device."""

from __future__ import annotations

import argparse
import math
import sys
from fnmatch import fnmatchcase
from pathlib import Path

LOSSES = {
    "cross_entropy": "CrossEntropyLoss",
    "mse": "MSELoss",
    "l1": "L1Loss",
    "bce_with_logits": "BCEWithLogitsLoss",
    "none": None,  # the model's first output is the loss
}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "none": None}
FLOATS = (1, 10, 11, 16)  # ONNX's f32, f16, f64 and bf16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="gradd artifacts", description="Write the files for a training on a device."
    )
    made.add_argument("model", type=Path, help="an ONNX model")
    made.add_argument("--loss", choices=LOSSES, default="none", help="on its outputs (none)")
    made.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(adamw)")
    made.add_argument(
        "--train",
        action="append",
        required=True,
        metavar="PATTERN",
        help="initializers to train: 'head.*'; may be repeated",
    )
    made.add_argument("--out", type=Path, default=Path(), help="the folder, which is made (.)")
    made.add_argument("--prefix", default="", help="of the files' names")
    made.add_argument("--outputs", nargs="*", default=[], help="more outputs behind the loss")
    made.add_argument("--loss-inputs", nargs="*", default=[], help="values that the loss gets")
    made.add_argument("--estimate", action="store_true", help="print what the training takes")
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="(1 8 32)")
    made.add_argument("--dim", action="append", default=[], help="size of another: sequence=128")
    made.add_argument("--budget", type=int, default=0, help="most bytes of activations")
    made.add_argument("--nominal", action="store_true", help="a checkpoint without values as well")
    return made


def artifacts(options: argparse.Namespace) -> str:
    """Writes the files; returns what to print.

    Raises:
        SystemExit: The package onnx is missing, or no initializer matches.
    """
    try:
        import onnx
    except ImportError:
        sys.exit("gradd artifacts: making artifacts needs the package onnx: pip install onnx")
    from gradd.train import artifacts as made

    graph = onnx.load(options.model, load_external_data=False).graph
    sizes = {t.name: math.prod(t.dims) for t in graph.initializer if t.data_type in FLOATS}
    for pattern in options.train:
        if not any(fnmatchcase(name, pattern) for name in sizes):
            sys.exit(f"gradd artifacts: no initializer of floats matches {pattern!r}")
    statistics = {
        name
        for node in graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    }
    named = [n for n in sizes if any(fnmatchcase(n, p) for p in options.train)]
    trained = [n for n in named if n not in statistics]
    # Single numbers are constants of operators; larger ones can be thawed on the device.
    frozen = [n for n, k in sizes.items() if n not in trained and (k > 1 or n in statistics)]
    options.out.mkdir(parents=True, exist_ok=True)
    loss, optimizer = LOSSES[options.loss], OPTIMIZERS[options.optimizer]
    made.generate_artifacts(
        str(options.model),
        requires_grad=trained,
        frozen_params=frozen,
        loss=made.LossType[loss] if loss else None,
        optimizer=made.OptimType[optimizer] if optimizer else None,
        artifact_directory=options.out,
        prefix=options.prefix,
        additional_output_names=options.outputs or None,
        nominal_checkpoint=options.nominal,
        loss_input_names=options.loss_inputs or None,
    )
    said = f"{len(trained)} parameters to train, {len(frozen)} frozen; files in {options.out}"
    if left := len(named) - len(trained):
        said += f"\n{left} running statistics of batch norms match as well: these are not trained"
    return f"{said}\n{estimate(options)}" if options.estimate else said


def estimate(options: argparse.Namespace) -> str:
    """The table of --estimate."""
    from gradd.train import estimating

    optimizer = options.out / f"{options.prefix}optimizer_model.onnx"
    sizes = dict(text.split("=", 1) for text in options.dim)
    return estimating.estimate(
        options.out / f"{options.prefix}training_model.onnx",
        options.out / f"{options.prefix}checkpoint",
        optimizer if OPTIMIZERS[options.optimizer] else None,
        options.batch,
        sizes={name: int(size) for name, size in sizes.items()},
        budget=options.budget,
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs the command `artifacts`."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] != ["artifacts"]:
        sys.exit("usage: python -m gradd.train artifacts MODEL [options]")
    try:
        print(artifacts(parser().parse_args(given[1:])))
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        sys.exit(f"gradd artifacts: {error}")


if __name__ == "__main__":
    main()
