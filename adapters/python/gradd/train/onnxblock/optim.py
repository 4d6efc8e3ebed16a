"""Optimizers as blocks: models with one node that says kind and constants.

`gradd.train.Optimizer` reads them, and so does ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import onnx

from gradd.train.onnxblock import blocks
from gradd.train.onnxblock.training import ForwardBlock

_DOMAIN = "com.microsoft"


class ClipGradNorm(blocks.Block):
    """Scales gradients so that their norm, all together, is at most `max_norm`.

    Args:
        max_norm: The greatest norm.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = float(max_norm)

    def build(self, gradients_name: str) -> str:
        """Adds the node; returns the name of the scaled gradients."""
        output = self.add_node(
            "InplaceClipGradNorm",
            [gradients_name],
            stem="clip_grad_norm_output",
            domain=_DOMAIN,
            max_norm=self._max_norm,
        )
        self.base.graph.value_info.append(
            onnx.helper.make_tensor_sequence_value_info(output, onnx.TensorProto.FLOAT, None)
        )
        return output


class _Optimizer(ForwardBlock):
    """An optimizer of all parameters; a subclass says which node."""

    moments: tuple[str, ...] = ("first_order_moments",)

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    def node(self, gradients: str) -> str:
        """Adds the optimizer's node; returns the name of its output."""
        raise NotImplementedError

    def build(self, parameters: tuple[list[onnx.TensorProto], list[onnx.TensorProto]]) -> str:
        """Adds the inputs and the node.

        Args:
            parameters: What TrainingBlock.parameters() returned.

        Raises:
            RuntimeError: None of them is trained.
        """
        trained = parameters[0]
        if not trained:
            raise RuntimeError("no parameter requires a gradient: there is nothing to optimize")
        inputs = self.base.graph.input
        inputs.extend(
            [
                onnx.helper.make_tensor_value_info("learning_rate", onnx.TensorProto.FLOAT, [1]),
                onnx.helper.make_tensor_value_info("step", onnx.TensorProto.INT64, [1]),
            ]
        )
        for name in ("params", "gradients", *self.moments):
            kind = trained[0].data_type
            inputs.append(onnx.helper.make_tensor_sequence_value_info(name, kind, None))
        gradients = self._clip_grad("gradients") if self._clip_grad else "gradients"
        done = self.node(gradients)
        flag = onnx.helper.make_tensor_value_info(done, onnx.TensorProto.BOOL, [1])
        self.base.graph.output.append(flag)
        return done


class AdamW(_Optimizer):
    """AdamW as transformers has it: the decay follows the update.

    Args:
        bias_correction: Whether the first steps make up for moments that begin at zero.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters, times the learning rate.
        clip_grad: What happens to the gradients before; None = nothing.
    """

    moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]),
            "beta": float(betas[1]),
            "epsilon": float(eps),
            "weight_decay": float(weight_decay),
            "correct_bias": int(bool(bias_correction)),
            "adam_mode": 1,
        }

    def node(self, gradients: str) -> str:
        inputs = ["learning_rate", "step", "params", gradients, *self.moments]
        return self.add_node(
            "AdamWOptimizer", inputs, stem="adamw.updated_flag", domain=_DOMAIN, **self._attributes
        )


class SGD(_Optimizer):
    """Stochastic gradient descent.

    With momentum or weight decay the model has attributes that ONNX Runtime does not know, and
    refuses.

    Args:
        clip_grad: What happens to the gradients before; None = nothing.
        momentum: Decay of the sum of gradients that a step follows; 0 = the gradient alone.
        weight_decay: Times the parameter, added to the gradient.
    """

    def __init__(
        self,
        clip_grad: ClipGradNorm | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(clip_grad)
        ours = {"momentum": float(momentum), "weight_decay": float(weight_decay)}
        self._attributes = {name: value for name, value in ours.items() if value}

    def node(self, gradients: str) -> str:
        inputs = ["learning_rate", gradients, "params"]
        return self.add_node(
            "SGDOptimizerV2", inputs, stem="update_completed", domain=_DOMAIN, **self._attributes
        )
