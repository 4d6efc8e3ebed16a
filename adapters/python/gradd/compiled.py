"""torch.compile around a wrapped module: what runs in the daemon is not there to be compiled.

Dynamo cuts its graphs at a function with the mark of torch.compiler.disable(), which would import
torch._dynamo (seconds) for everybody. The mark alone says nothing about the frames below: they are
skipped by the strategy that its evaluator keeps with the function's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def left_alone(function: Callable[..., Any], why: str) -> None:
    """Takes a function, and all that it calls, out of dynamo's reach.

    Args:
        function: A plain function.
        why: Shown where fullgraph=True does not allow to cut the graph.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why
    evaluator = torch._C._dynamo.eval_frame
    skip = evaluator._FrameAction.SKIP
    evaluator.set_code_exec_strategy(function.__code__, evaluator._FrameExecStrategy(skip, skip))
