"""Small networks of the kinds that devices train, exported by torch.onnx, with their batches.

Each is a module whose forward gives scores, the first axis that of the labels; MODELS names them.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
from torch import nn

CLASSES = 7
Batch = tuple[np.ndarray, ...]


@dataclass
class Network:
    """A module with what its training needs.

    Attributes:
        module: In training mode, with its first values.
        inputs: Of a batch of some rows, by a seed.
        labels: How many labels a row has.
        classes: How many scores a label has.
        trained: Whether a parameter of this name is trained.
    """

    module: nn.Module
    inputs: Callable[[np.random.Generator, int], Batch]
    labels: tuple[int, ...] = ()
    classes: int = CLASSES
    trained: Callable[[str], bool] = field(default=lambda name: True)

    def batch(self, seed: int, rows: int) -> Batch:
        """Inputs, and labels behind them."""
        rng = np.random.default_rng(seed)
        inputs = self.inputs(rng, rows)
        shape = (rows * int(np.prod(self.labels)),) if self.flat() else (rows, *self.labels)
        return (*inputs, rng.integers(0, self.classes, shape))

    def flat(self) -> bool:
        """Whether the scores of all positions of a text stand in one axis."""
        return len(self.labels) == 1

    def proto(self, rows: int, dynamo: bool) -> onnx.ModelProto:
        """The module as an ONNX model of any number of rows."""
        example = tuple(torch.tensor(x) for x in self.inputs(np.random.default_rng(0), rows))
        names = [f"x{i}" for i in range(len(example))]
        module, file = copy.deepcopy(self.module), io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if dynamo:
                rows_of = [{0: torch.export.Dim("rows", min=2)} for _ in example]
                program = torch.onnx.export(
                    module,
                    example,
                    dynamo=True,
                    input_names=names,
                    output_names=["scores"],
                    dynamic_shapes=tuple(rows_of),
                    verbose=False,
                    optimize=False,
                )
                return program.model_proto
            torch.onnx.export(
                module,
                example,
                file,
                dynamo=False,
                input_names=names,
                output_names=["scores"],
                training=torch.onnx.TrainingMode.TRAINING,
                do_constant_folding=False,
                opset_version=17,
                dynamic_axes={name: {0: "rows"} for name in names},
            )
        return onnx.load_from_string(file.getvalue())


def images(size: int) -> Callable[[np.random.Generator, int], Batch]:
    return lambda rng, rows: (rng.standard_normal((rows, 3, size, size)).astype(np.float32),)


def words(length: int, vocabulary: int) -> Callable[[np.random.Generator, int], Batch]:
    """Words but 0: for torch that is padding, without a gradient of its row, which ONNX lacks."""
    return lambda rng, rows: (rng.integers(1, vocabulary, (rows, length)),)


# ---- convolutions -------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze and excitation, with a hard sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, max(width // 4, 4), 1)
        self.up = nn.Conv2d(max(width // 4, 4), width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * (nn.functional.relu6(self.up(torch.relu(self.down(pooled))) + 3) / 6)


class Inverted(nn.Module):
    """An inverted residual block: expand, depthwise, project."""

    def __init__(
        self,
        size: tuple[int, int],
        stride: int,
        grow: int,
        act: type,
        squeeze: bool,
        kernel: int = 3,
    ) -> None:
        super().__init__()
        into, out = size
        wide = into * grow
        layers = [nn.Conv2d(into, wide, 1, bias=False), nn.BatchNorm2d(wide), act()]
        depthwise = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        layers += [depthwise, nn.BatchNorm2d(wide), act()]
        if squeeze:
            layers.append(Squeeze(wide))
        layers += [nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and into == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobile_net(
    blocks: list[tuple], act: type, stem: int, head: int, dropout: float = 0.0
) -> nn.Module:
    """A stem, inverted residual blocks, pooling and a classifier."""
    layers = [nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), act()]
    width = stem
    for out, stride, grow, own, squeeze, kernel in blocks:
        layers.append(Inverted((width, out), stride, grow, own, squeeze, kernel))
        width = out
    layers += [nn.Conv2d(width, head, 1, bias=False), nn.BatchNorm2d(head), act()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(head, CLASSES))


def mobile_net_v2(wide: int = 8, size: int = 32) -> Network:
    relu = nn.ReLU6
    blocks = [
        (wide, 1, 1, relu, False, 3),
        (wide, 2, 6, relu, False, 3),
        (wide, 1, 6, relu, False, 3),
        (2 * wide, 2, 6, relu, False, 3),
        (2 * wide, 1, 6, relu, False, 3),
    ]
    return Network(mobile_net(blocks, relu, wide, 4 * wide), images(size))


def mobile_net_v3(wide: int = 8, size: int = 32) -> Network:
    relu, swish = nn.ReLU, nn.Hardswish
    blocks = [
        (wide, 2, 1, relu, True, 3),
        (wide, 1, 4, relu, False, 3),
        (2 * wide, 2, 4, swish, True, 5),
        (2 * wide, 1, 4, swish, True, 5),
    ]
    return Network(mobile_net(blocks, swish, wide, 4 * wide), images(size))


def efficient_net_lite(wide: int = 8, size: int = 32) -> Network:
    relu = nn.ReLU6
    blocks = [
        (wide, 1, 1, relu, False, 3),
        (wide, 2, 6, relu, False, 5),
        (2 * wide, 2, 6, relu, False, 3),
        (2 * wide, 1, 6, relu, False, 5),
    ]
    return Network(mobile_net(blocks, relu, wide, 4 * wide), images(size))


class UNet(nn.Module):
    """Down twice by pooling, up twice by interpolation, with what was there beside it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.into = self._pair(3, wide)
        self.low = self._pair(wide, 2 * wide)
        self.lowest = self._pair(2 * wide, 4 * wide)
        self.up1 = self._pair(6 * wide, 2 * wide)
        self.up2 = self._pair(3 * wide, wide)
        self.head = nn.Conv2d(wide, CLASSES, 1)

    @staticmethod
    def _pair(into: int, out: int) -> nn.Module:
        layers = [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool, grow = nn.functional.max_pool2d, nn.functional.interpolate
        a = self.into(x)
        b = self.low(pool(a, 2))
        c = self.lowest(pool(b, 2))
        b = self.up1(torch.cat([grow(c, scale_factor=2.0, mode="bilinear"), b], 1))
        return self.head(self.up2(torch.cat([grow(b, scale_factor=2.0, mode="nearest"), a], 1)))


def u_net(wide: int = 4, size: int = 16) -> Network:
    return Network(UNet(wide), images(size), (size, size))


class Scores(nn.Module):
    """The logits of a model of transformers, those of all positions in one axis."""

    def __init__(self, model: nn.Module, **arguments: object) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x, **self.arguments).logits
        return logits.reshape(-1, logits.shape[-1])


def mobile_vit(size: int = 32) -> Network:
    from transformers import MobileViTConfig, MobileViTForImageClassification

    config = MobileViTConfig(
        image_size=size,
        num_labels=CLASSES,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 12, 16, 16, 24, 32],
        num_attention_heads=2,
        expand_ratio=2.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )
    return Network(Scores(MobileViTForImageClassification(config)), images(size))


# ---- texts --------------------------------------------------------------------------------------


def distil_bert(
    length: int = 24, vocabulary: int = 50, width: int = 16, layers: int = 6
) -> Network:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        dim=width,
        hidden_dim=2 * width,
        n_layers=layers,
        n_heads=2,
        dropout=0.0,
        attention_dropout=0.0,
    )
    module = Scores(DistilBertForMaskedLM(config))
    return Network(module, words(length, vocabulary), (length,), vocabulary)


def mobile_bert(length: int = 24, vocabulary: int = 50, layers: int = 6) -> Network:
    from transformers import MobileBertConfig, MobileBertForMaskedLM

    config = MobileBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        embedding_size=16,
        true_hidden_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = Scores(MobileBertForMaskedLM(config))
    return Network(module, words(length, vocabulary), (length,), vocabulary)


def smol_lm2_lora(length: int = 12, vocabulary: int = 50, width: int = 18) -> Network:
    """SmolLM2's shape: 9 heads, 3 of keys, a tied head; adapters of rank 2 are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4 * width,
        intermediate_size=8 * width,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        use_cache=False,
    )
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    module = Scores(get_peft_model(LlamaForCausalLM(config), lora))
    return Network(
        module, words(length, vocabulary), (length,), vocabulary, lambda name: "lora_" in name
    )


class Keyboard(nn.Module):
    """The next word, by a GRU."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, 2 * width, batch_first=True)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.gru(self.words(x))[0])
        return scores.reshape(-1, scores.shape[-1])


def gru_keyboard(length: int = 12, vocabulary: int = 50, width: int = 8) -> Network:
    module = Keyboard(vocabulary, width)
    return Network(module, words(length, vocabulary), (length,), vocabulary)


MODELS: dict[str, Callable[[], Network]] = {
    "MobileNetV2": mobile_net_v2,
    "MobileNetV3": mobile_net_v3,
    "EfficientNet-lite": efficient_net_lite,
    "MobileViT": mobile_vit,
    "U-Net": u_net,
    "DistilBERT": distil_bert,
    "MobileBERT": mobile_bert,
    "SmolLM2 with LoRA": smol_lm2_lora,
    "GRU": gru_keyboard,
}
