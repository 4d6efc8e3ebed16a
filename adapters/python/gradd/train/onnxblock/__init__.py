"""Blocks that build training models: the interface of ONNX Runtime's onnxblock.

Needs the package onnx.
"""

from gradd.train.onnxblock import blocks, loss, optim
from gradd.train.onnxblock.blocks import Block
from gradd.train.onnxblock.files import load_checkpoint_to_model, save_checkpoint
from gradd.train.onnxblock.graphs import base, custom_op_library, empty_base
from gradd.train.onnxblock.training import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
