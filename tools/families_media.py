"""Tiny models that see or hear, and batches for them, for tools/families.py.

As families_sizes.py does it for text: the sizes that a configuration is known to name are made
small. What a class takes is found by trying: forms() lists the usual inputs of its task, and the
first one that PyTorch trains with is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Form = Callable[[Any, int, torch.Generator], Batch]  # of a model, rows and chance
TASKS = ("image", "segmentation", "video", "audio", "ctc", "speech", "contrastive", "image_text")
SIDE = 64  # pixels of an image
SAMPLES = 6400  # of a sound
FRAMES = 64  # of a spectrogram
IMAGE_TOKEN = 317
WORDS = 6
SIZES: dict[str, Any] = {
    **dict.fromkeys(("image_size", "img_size", "input_size"), SIDE),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 16),
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN),
    **dict.fromkeys(("video_token_id", "video_token_index"), IMAGE_TOKEN + 1),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), IMAGE_TOKEN + 2),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), IMAGE_TOKEN - 1),
    "projection_dim": 64,
    "mm_tokens_per_image": 4,
    "max_source_positions": FRAMES // 2,
    "max_length": FRAMES,
    "context_size": 8,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_frames": 4,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "projector_hidden_size": 64,
}
_FEATURES = ("get_image_features", "get_video_features")
_PATCH = 8  # pixels, where a configuration has larger ones
_DEPTHS = ("depths", "depth", "num_block_repeats", "stage_num_blocks")
_CHANNELS = ("conv_dim", "conv_channels", "tdnn_dim")
_ROTARY = ("rope_parameters", "rope_scaling")
_SECTIONS = {"mrope_section": [2, 3, 3]}  # of time, height and width in half a head
_RANDOM = ("mask_time_prob", "mask_feature_prob")  # of an augmentation that draws with NumPy


def families() -> dict[str, dict[str, Any]]:
    """Model classes by task and family, as transformers lists them."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
        "video": auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
        "audio": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
        "ctc": auto.MODEL_FOR_CTC_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "contrastive": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "image_text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def shrunk(default: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The entries of a default configuration that are to be others, with their new values.

    Args:
        default: The default configuration.
        sizes: What families_sizes.shrunk() says of it: it knows no lists but those of layers. In a
            pyramid of stages widths and heads of the stages go together, so they stay as they are.
    """
    pyramid = any(isinstance(default.get(name), list) for name in (*_DEPTHS, "hidden_sizes"))
    values = {
        name: value
        for name, value in sizes.items()
        if not isinstance(default[name], list) and (not pyramid or value in (0.0, False))
    }
    for name, value in default.items():
        if name == "image_grid_pinpoints" and value is not None:
            values[name] = [[SIDE, 2 * SIDE]]
        elif name in SIZES and value is not None:
            small = SIZES[name]
            values[name] = [small] * len(value) if isinstance(value, (list, tuple)) else small
        elif name == "patch_size" and isinstance(value, int) and value > _PATCH and not pyramid:
            values[name] = _PATCH
        elif name == "window_size" and isinstance(value, int):
            values[name] = 2 if pyramid else value
        elif name in _DEPTHS and isinstance(value, list):
            values[name] = [min(v, at + 2) for at, v in enumerate(value)]
        elif name in _CHANNELS and isinstance(value, list):
            values[name] = [32] * len(value)
        elif name in _ROTARY and isinstance(value, dict) and "rope_type" in value:
            if "mrope_section" in value or "partial_rotary_factor" not in value:
                values[name] = value | _SECTIONS
        elif name in _RANDOM:
            values[name] = 0.0
        elif "drop" in name and isinstance(value, list):
            values[name] = [0.0] * len(value)
    return values


def forms(task: str) -> Iterator[Form]:
    """The usual inputs of a task, the most frequent ones first."""
    yield from _FORMS[task]


def setting(model: Any, name: str, default: Any = None) -> Any:
    """A value of the configuration, or of its part for images or sounds."""
    config = model.config
    parts = ("vision_config", "audio_config", "encoder", "encoder_config", "backbone_config")
    for part in (config, *(getattr(config, p, None) for p in parts)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def pixels(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    """Images of shape (rows, channels, height, width), f32."""
    side = setting(model, "image_size", SIDE)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    channels = setting(model, "num_channels") or setting(model, "in_channels") or 3
    channels = channels if isinstance(channels, int) else 3
    return torch.randn(rows, channels, height, width, generator=chance)


def classes(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    """A class for each row, i64."""
    return torch.randint(0, model.config.num_labels, (rows,), generator=chance)


def words(rows: int, chance: torch.Generator, count: int = WORDS) -> torch.Tensor:
    """Token ids of shape (rows, count), i64."""
    return torch.randint(3, 30, (rows, count), generator=chance)


def _image(model: Any, rows: int, chance: torch.Generator) -> Batch:
    return {
        model.main_input_name: pixels(model, rows, chance),
        "labels": classes(model, rows, chance),
    }


def _image_as_tokens(model: Any, rows: int, chance: torch.Generator) -> Batch:
    return {"input_ids": words(rows, chance, 32), "labels": classes(model, rows, chance)}


def _segmentation(model: Any, rows: int, chance: torch.Generator) -> Batch:
    images = pixels(model, rows, chance)
    shape = (rows, *images.shape[2:])
    labels = torch.randint(0, model.config.num_labels, shape, generator=chance)
    return {"pixel_values": images, "labels": labels}


def _video(model: Any, rows: int, chance: torch.Generator) -> Batch:
    images = pixels(model, rows, chance)
    frames = setting(model, "num_frames", 4)
    video = torch.randn(rows, frames, *images.shape[1:], generator=chance)
    return {model.main_input_name: video, "labels": classes(model, rows, chance)}


def _sound(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    """(rows, samples)."""
    return torch.randn(rows, SAMPLES, generator=chance)


def _spectrogram(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    """(rows, frames, features)."""
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
    features = next(filter(None, (setting(model, n) for n in names)), 80)
    return torch.randn(rows, FRAMES, features, generator=chance)


def _turned(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    """(rows, features, frames), as Whisper has it."""
    return _spectrogram(model, rows, chance).transpose(1, 2).contiguous()


_SOUNDS = (_sound, _spectrogram, _turned)


def _heard(sound: Callable[..., torch.Tensor], labels: Callable[..., torch.Tensor]) -> Form:
    def form(model: Any, rows: int, chance: torch.Generator) -> Batch:
        heard = sound(model, rows, chance)
        return {model.main_input_name: heard, "labels": labels(model, rows, chance)}

    return form


def _text(model: Any, rows: int, chance: torch.Generator) -> torch.Tensor:
    return words(rows, chance)


def _with_a_mask(sound: Callable[..., torch.Tensor], labels: Callable[..., torch.Tensor]) -> Form:
    """A sound of which all frames count."""

    def form(model: Any, rows: int, chance: torch.Generator) -> Batch:
        found = _heard(sound, labels)(model, rows, chance)
        shape = found[model.main_input_name].shape[:2]
        return {**found, "attention_mask": torch.ones(shape, dtype=torch.long)}

    return form


def _contrastive(model: Any, rows: int, chance: torch.Generator) -> Batch:
    ids = words(rows, chance)
    images = pixels(model, rows, chance)
    return {"input_ids": ids, "pixel_values": images, "return_loss": True}


def _contrastive_patches(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """Patches of an image one after the other, as Siglip 2 has them."""
    side, patch = 4, setting(model, "patch_size")
    width = setting(model, "num_channels", 3) * patch * patch
    return {
        "input_ids": words(rows, chance),
        "pixel_values": torch.randn(rows, side * side, width, generator=chance),
        "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * rows),
        "return_loss": True,
    }


def _contrastive_video(model: Any, rows: int, chance: torch.Generator) -> Batch:
    images = pixels(model, rows, chance)
    frames = setting(model, "num_frames", 4)
    video = torch.randn(rows, frames, *images.shape[1:], generator=chance)
    return {"input_ids": words(rows, chance), "pixel_values_videos": video, "return_loss": True}


def _captioned(deep: bool = False, sized: bool = False) -> Form:
    """An image in front of a text: as many tokens of images as the model has features.

    Args:
        deep: Images are (rows, images of a row, channels, height, width).
        sized: Beside them goes their height and width.
    """

    def form(model: Any, rows: int, chance: torch.Generator) -> Batch:
        images = pixels(model, rows, chance)
        shown = {"image_sizes": torch.tensor([images.shape[2:]] * rows)} if sized else {}
        shown["pixel_values"] = images[:, None] if deep else images
        found = _with_images(rows, _features(model, shown) // rows, chance)
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            found["token_type_ids"] = (found["input_ids"] == IMAGE_TOKEN).long()
        return {**shown, **found}

    return form


def _tiled(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """An image twice as wide as high, in two tiles and as a whole, as LLaVA-NeXT has it."""
    tiles = torch.stack([pixels(model, rows, chance) for _ in range(3)], 1)
    sizes = torch.tensor([[tiles.shape[-2], 2 * tiles.shape[-1]]] * rows)
    shown = {"pixel_values": tiles, "image_sizes": sizes}
    return {**shown, **_with_images(rows, _features(model, shown) // rows, chance)}


def _features(model: Any, shown: Batch) -> int:
    """How many features a model makes of images, or of a video."""
    both = [(o, n) for o in (model, model.base_model) for n in _FEATURES if hasattr(o, n)]
    owner, name = next(iter(both), (model, _FEATURES[0]))
    with torch.no_grad():
        found = getattr(owner, name)(**shown)
    whole = getattr(found, "last_hidden_state", None)
    found = getattr(found, "pooler_output", found)
    found = whole if found is None else found
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _gridded(typed: bool = False, square: bool = False) -> Form:
    """Patches one after the other and a grid for each image, as Qwen2-VL has it.

    Args:
        typed: Beside the tokens goes what each stands for.
        square: A patch has axes for its channels, rows and columns.
    """

    def form(model: Any, rows: int, chance: torch.Generator) -> Batch:
        patch, merge = setting(model, "patch_size"), setting(model, "spatial_merge_size", 1)
        side = 4 * merge
        frames = setting(model, "temporal_patch_size") or setting(model, "patch_temporal", 1)
        width = setting(model, "in_channels", 3) * frames
        shape = (width, patch, patch) if square else (width * patch * patch,)
        patches = torch.randn(rows * side * side, *shape, generator=chance)
        grid = torch.tensor([[1, side, side]] * rows)
        shown = {"pixel_values": patches, "image_grid_thw": grid}
        if "image_merge_sizes" in inspect.signature(model.forward).parameters:
            shown["image_merge_sizes"] = torch.tensor([merge] * rows)
        found = _with_images(rows, _features(model, shown) // rows, chance)
        if typed:
            found["mm_token_type_ids"] = (found["input_ids"] == IMAGE_TOKEN).long()
        return {**shown, **found}

    return form


def _pooled(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """Patches of which four make a token, by their numbers, as Molmo 2 has it."""
    patch, side = setting(model, "patch_size"), SIDE // setting(model, "patch_size")
    numbers = (
        torch.arange(side * side).view(side // 2, 2, side // 2, 2).transpose(1, 2).reshape(-1, 4)
    )
    count = len(numbers)
    shown = {
        "pixel_values": torch.randn(rows, side * side, 3 * patch * patch, generator=chance),
        "image_token_pooling": torch.cat([numbers + i * side * side for i in range(rows)]),
        "image_grids": torch.tensor([[side // 2, side // 2, 0, 0]] * rows),
    }
    found = _with_images(rows, count, chance)
    return {**shown, **found, "mm_token_type_ids": (found["input_ids"] == IMAGE_TOKEN).long()}


def _asked(video: bool = False) -> Form:
    """An image, or a video, and a text that the model reads with it, as InstructBLIP has it."""

    def form(model: Any, rows: int, chance: torch.Generator) -> Batch:
        images = pixels(model, rows, chance)
        shown = {"pixel_values": torch.stack([images] * 4, 1) if video else images}
        shown["qformer_input_ids"] = words(rows, chance)
        return {**shown, **_with_images(rows, _features(model, shown) // rows, chance)}

    return form


def _boxed(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """Words with their places in an image, as UDOP has it."""
    ids = words(rows, chance)
    corners = torch.rand(*ids.shape, 2, generator=chance) / 2
    boxes = torch.cat([corners, corners + 0.25], -1)
    shown = {"pixel_values": pixels(model, rows, chance), "input_ids": ids, "bbox": boxes}
    return {**shown, "attention_mask": torch.ones_like(ids), "labels": words(rows, chance)}


def _caption_only(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """No token stands for an image."""
    ids = words(rows, chance)
    return {"pixel_values": pixels(model, rows, chance), "input_ids": ids, "labels": ids.clone()}


def _decoded(model: Any, rows: int, chance: torch.Generator) -> Batch:
    """An image for the encoder, labels for the decoder."""
    return {"pixel_values": pixels(model, rows, chance), "labels": words(rows, chance)}


def _with_images(rows: int, count: int, chance: torch.Generator) -> Batch:
    text = words(rows, chance)
    ids = torch.cat([torch.full((rows, count), IMAGE_TOKEN), text], 1)
    labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


_FORMS: dict[str, tuple[Form, ...]] = {
    "image": (_image, _image_as_tokens),
    "segmentation": (_segmentation,),
    "video": (_video,),
    "audio": tuple(_heard(s, classes) for s in _SOUNDS),
    "ctc": (*(_heard(s, _text) for s in _SOUNDS), _with_a_mask(_spectrogram, _text)),
    "speech": tuple(_heard(s, _text) for s in _SOUNDS),
    "contrastive": (_contrastive, _contrastive_patches, _contrastive_video),
    "image_text": (
        *(_captioned(deep=deep, sized=sized) for sized in (False, True) for deep in (False, True)),
        *(_gridded(typed=True), _gridded(), _gridded(typed=True, square=True), _tiled),
        *(_pooled, _asked(), _asked(video=True), _caption_only, _boxed, _decoded),
    ),
}
