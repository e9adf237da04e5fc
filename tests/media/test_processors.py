"""Processors of pictures beside transformers': sizes, pixels and token ids at odd sizes of pictures, bit for bit.

transformers' processors of prompts import torchvision, which is not wanted here. So the methods that write the text of
a picture are taken from their source, one by one, and get what they ask of `self`.
"""

from __future__ import annotations

import ast
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.kernels.pictures.patches.op import PATCHES
from ridgeline.media.items import clip
from ridgeline.media.layout import NEWLINE, PLACEHOLDER, Layout, Processor, VideoProcessor
from ridgeline.media.processors import PROCESSORS, processor_of
from ridgeline.text.media_prompt import placed_items

THEIRS = Path(transformers.__file__).parent / "models"


def taken(path: str, name: str, *, owner: str = "", **given: Any) -> Callable[..., Any]:
    """Return a function, or a method of the class `owner`, of transformers' source."""
    tree: ast.AST = ast.parse((THEIRS / path).read_text())
    if owner:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner)
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list = []
    found.returns = None
    for argument in [*found.args.args, *found.args.kwonlyargs, *filter(None, [found.args.kwarg])]:
        argument.annotation = None
    space: dict[str, Any] = {"math": math, "np": np, **given}
    exec(compile(ast.Module([found], []), path, "exec"), space)
    return space[name]


@cache
def tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of bytes, which joins line ends and letters of "ab" as real ones do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate([*letters, "ĊĊ", "ĊĊĊ", "ĠH", "ab"])}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "H"), ("a", "b")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


@dataclass(frozen=True)
class Family:
    """files: those of the model's folder. source: module and class of transformers' processor of pixels.

    text: the text of one picture, of what that processor returned.
    given: its settings, where they are not those of preprocessor_config.json.
    """

    files: Mapping[str, Mapping[str, Any]]
    source: str
    special: tuple[str, ...]
    text: Callable[[Any, Any], str] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return tokenizer(self.special).encode(text, add_special_tokens=False).ids

    @property
    def ours(self) -> Processor:
        return processor_of(self.files, self.encode)

    @property
    def theirs(self) -> Any:
        module, _, name = self.source.partition(":")
        own = self.files.get("preprocessor_config.json", {})
        own = {key: value for key, value in own.items() if key != "processor_class"}
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)(**own, **self.given)


def config(model_type: str, patch: int, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "vision_config": {"patch_size": patch}, **more}


def method(path: str, owner: str, name: str = "replace_image_token", **own: Any) -> Callable[[Any, Any], str]:
    def text(theirs: Any, found: Any) -> str:
        return taken(path, name, owner=owner)(SimpleNamespace(image_processor=theirs, **own), found, 0)

    return text


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def onevision_text(theirs: Any, found: Any) -> str:
    from transformers.image_processing_utils import select_best_resolution

    path, owner = "llava_onevision/processing_llava_onevision.py", "LlavaOnevisionProcessor"
    own = SimpleNamespace(
        image_processor=theirs,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        image_token="<image>",
    )
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        call = taken(path, name, owner=owner, select_best_resolution=select_best_resolution)
        setattr(own, name, lambda *given, call=call: call(own, *given))
    return taken(path, "replace_image_token", owner=owner)(own, found, 0)


def next_text(theirs: Any, found: Any) -> str:
    from transformers.image_processing_utils import select_best_resolution

    path, owner = "llava_next/processing_llava_next.py", "LlavaNextProcessor"
    own = SimpleNamespace(
        image_processor=theirs,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token="<image>",
    )
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        call = taken(path, name, owner=owner, select_best_resolution=select_best_resolution)
        setattr(own, name, lambda *given, call=call: call(own, *given))
    return taken(path, "replace_image_token", owner=owner)(own, found, 0)


PAD = "<|image_pad|>"
SPLITS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
FAMILIES: dict[str, Family] = {
    "clip": Family(
        {
            "config.json": config("clip", 8),
            "preprocessor_config.json": {"size": {"shortest_edge": 32}, "crop_size": square(32)},
        },
        "clip.image_processing_pil_clip:CLIPImageProcessorPil",
        (),
    ),
    "siglip": Family(
        {"config.json": config("siglip", 8), "preprocessor_config.json": {"size": square(40)}},
        "siglip.image_processing_pil_siglip:SiglipImageProcessorPil",
        (),
    ),
    "siglip2": Family(
        {"config.json": config("siglip2", 8), "preprocessor_config.json": {"patch_size": 8, "max_num_patches": 24}},
        "siglip2.image_processing_pil_siglip2:Siglip2ImageProcessorPil",
        (),
    ),
    "llava": Family(
        {
            "config.json": config("llava", 7, vision_feature_select_strategy="default"),
            "preprocessor_config.json": {"size": {"shortest_edge": 28}, "crop_size": square(28)},
        },
        "llava.image_processing_pil_llava:LlavaImageProcessorPil",
        ("<image>",),
        lambda theirs, found: "<image>" * 16,
    ),
    "llava in a square": Family(
        {
            "config.json": config("llava", 7),
            "preprocessor_config.json": {"size": {"shortest_edge": 28}, "crop_size": square(28), "do_pad": True},
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "patch_size": 7,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "full",
            },
        },
        "llava.image_processing_pil_llava:LlavaImageProcessorPil",
        ("<image>",),
        lambda theirs, found: "<image>" * 17,
    ),
    "qwen2": Family(
        {
            "config.json": config("qwen2_vl", 4),
            "preprocessor_config.json": {
                "patch_size": 4,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "min_pixels": 16 * 64,
                "max_pixels": 100 * 64,
            },
        },
        "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        (PAD,),
        method("qwen2_vl/processing_qwen2_vl.py", "Qwen2VLProcessor", image_token=PAD),
    ),
    "qwen3": Family(
        {
            "config.json": config("qwen3_vl", 16),
            "preprocessor_config.json": {
                "patch_size": 16,
                "size": {"shortest_edge": 4096, "longest_edge": 65536},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
        },
        "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        (PAD,),
        method("qwen3_vl/processing_qwen3_vl.py", "Qwen3VLProcessor", image_token=PAD),
    ),
    "glm": Family(
        {
            "config.json": config("glm4v", 4),
            "preprocessor_config.json": {"patch_size": 4, "size": {"shortest_edge": 2048, "longest_edge": 20000}},
        },
        "glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil",
        ("<|image|>",),
        method("glm4v/processing_glm4v.py", "Glm4vProcessor", image_token="<|image|>"),
    ),
    "paddle": Family(
        {
            "config.json": config("paddleocr_vl", 4),
            "preprocessor_config.json": {"patch_size": 4, "min_pixels": 1024, "max_pixels": 6400},
        },
        "paddleocr_vl.image_processing_pil_paddleocr_vl:PaddleOCRVLImageProcessorPil",
        ("<|IMAGE_PLACEHOLDER|>",),
        method("paddleocr_vl/processing_paddleocr_vl.py", "PaddleOCRVLProcessor", image_token="<|IMAGE_PLACEHOLDER|>"),
    ),
    "gemma3": Family(
        {"config.json": config("gemma3", 8, mm_tokens_per_image=4), "preprocessor_config.json": {"size": square(32)}},
        "gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil",
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        method(
            "gemma3/processing_gemma3.py",
            "Gemma3Processor",
            full_image_sequence="\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
        ),
    ),
    "gemma3 with crops": Family(
        {
            "config.json": config("gemma3", 8, mm_tokens_per_image=4),
            "preprocessor_config.json": {
                "size": square(32),
                "do_pan_and_scan": True,
                "pan_and_scan_min_crop_size": 20,
                "pan_and_scan_max_num_crops": 4,
                "pan_and_scan_min_ratio_to_activate": 1.2,
            },
        },
        "gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil",
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        method(
            "gemma3/processing_gemma3.py",
            "Gemma3Processor",
            full_image_sequence="\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
        ),
    ),
    "gemma4": Family(
        {
            "config.json": config("gemma4", 4),
            "preprocessor_config.json": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        },
        "gemma4.image_processing_pil_gemma4:Gemma4ImageProcessorPil",
        ("<|image>", "<|image|>", "<image|>"),
        method(
            "gemma4/processing_gemma4.py",
            "Gemma4Processor",
            image_token="<|image|>",
            boi_token="<|image>",
            eoi_token="<image|>",
        ),
    ),
    "internvl": Family(
        {
            "config.json": config("internvl", 8),
            "preprocessor_config.json": {"size": square(32), "crop_to_patches": True, "max_patches": 6},
            "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
        },
        "got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        ("<img>", "<IMG_CONTEXT>", "</img>"),
        method(
            "internvl/processing_internvl.py",
            "InternVLProcessor",
            start_image_token="<img>",
            end_image_token="</img>",
            image_token="<IMG_CONTEXT>",
            image_seq_length=4,
        ),
    ),
    "pixtral": Family(
        {
            "config.json": config("mistral3", 4, spatial_merge_size=2),
            "preprocessor_config.json": {"size": {"longest_edge": 64}, "patch_size": 8},
            "processor_config.json": {"patch_size": 4, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
        },
        "pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        method(
            "pixtral/processing_pixtral.py",
            "PixtralProcessor",
            patch_size=4,
            spatial_merge_size=2,
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
        ),
    ),
    "idefics3": Family(
        {
            "config.json": config("idefics3", 6, scale_factor=3),
            "preprocessor_config.json": {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 36}},
        },
        "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
        ("<fake_token_around_image>", "<image>", "<global-img>", *SPLITS),
        lambda theirs, found: taken(
            "idefics3/processing_idefics3.py", "replace_image_token", owner="Idefics3Processor"
        )(
            SimpleNamespace(
                fake_image_token="<fake_token_around_image>",
                global_image_tag="<global-img>",
                image_token="<image>",
                image_seq_len=4,
            ),
            found,
            0,
        ),
        call={"return_row_col_info": True},
    ),
    "smolvlm without splits": Family(
        {
            "config.json": config("smolvlm", 6, scale_factor=3),
            "preprocessor_config.json": {
                "size": {"longest_edge": 90},
                "max_image_size": {"longest_edge": 36},
                "do_image_splitting": False,
            },
        },
        "smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
        ("<fake_token_around_image>", "<image>", "<global-img>"),
        lambda theirs, found: "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>",
    ),
    "paligemma": Family(
        {
            "config.json": config("paligemma", 8),
            "preprocessor_config.json": {"size": square(32), "image_seq_length": 16},
        },
        "siglip.image_processing_pil_siglip:SiglipImageProcessorPil",
        ("<image>",),
        method("paligemma/processing_paligemma.py", "PaliGemmaProcessor", image_token="<image>", image_seq_length=16),
    ),
    "blip2": Family(
        {
            "config.json": {**config("blip-2", 8), "num_query_tokens": 4},
            "preprocessor_config.json": {"size": square(32)},
        },
        "blip.image_processing_pil_blip:BlipImageProcessorPil",
        ("<image>",),
        lambda theirs, found: "<image>" * 4,
    ),
    "chameleon": Family(
        {
            "config.json": {"model_type": "chameleon", "vq_config": {"channel_multiplier": [1, 2, 2]}},
            "preprocessor_config.json": {"size": {"shortest_edge": 32}, "crop_size": square(32)},
        },
        "chameleon.image_processing_pil_chameleon:ChameleonImageProcessorPil",
        ("<racm3:break>", "<image>", "<eoss>"),
        method(
            "chameleon/processing_chameleon.py",
            "ChameleonProcessor",
            **{"image_start_token": "<racm3:break>", "image_end_token": "<eoss>", "image_token": "<image>"},
            image_seq_length=64,
        ),
    ),
    "mllama": Family(
        {
            "config.json": config("mllama", 8),
            "preprocessor_config.json": {"size": square(32), "max_image_tiles": 4},
        },
        "mllama.image_processing_pil_mllama:MllamaImageProcessorPil",
        ("<|image|>",),
        lambda theirs, found: "<|image|>",
    ),
    "minicpm": Family(
        {
            "config.json": config("minicpmv4_6", 2),
            "preprocessor_config.json": {"patch_size": 2, "scale_resolution": 32, "use_image_id": False},
        },
        "minicpmv4_6.image_processing_pil_minicpmv4_6:MiniCPMV4_6ImageProcessorPil",
        (PAD, "<image>", "</image>", "<slice>", "</slice>"),
        lambda theirs, found: taken(
            "minicpmv4_6/processing_minicpmv4_6.py", "replace_image_token", owner="MiniCPMV4_6Processor"
        )(
            SimpleNamespace(
                image_start_token="<image>",
                image_end_token="</image>",
                slice_start_token="<slice>",
                slice_end_token="</slice>",
                image_token=PAD,
                slice_mode=True,
            ),
            found,
            0,
            image_token_divisor=16,
        ),
    ),
    "deepseek_ocr2": Family(
        {
            "config.json": config("deepseek_ocr2", 4),
            "preprocessor_config.json": {"size": square(48), "tile_size": 32},
            "processor_config.json": {"patch_size": 4, "downsample_ratio": 2},
        },
        "deepseek_ocr2.image_processing_pil_deepseek_ocr2:DeepseekOcr2ImageProcessorPil",
        ("<image>",),
        lambda theirs, found: taken(
            "deepseek_ocr2/processing_deepseek_ocr2.py", "_expand_image_tokens", owner="DeepseekOcr2Processor"
        )(
            SimpleNamespace(image_processor=theirs, patch_size=4, downsample_ratio=2, image_token="<image>"),
            ["<image>"],
            found["num_local_patches"],
        )[0],
    ),
    "llava_next": Family(
        {
            "config.json": config("llava_next", 8),
            "preprocessor_config.json": {
                "size": {"shortest_edge": 32},
                "crop_size": square(32),
                "image_grid_pinpoints": [[32 * a, 32 * b] for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))],
            },
        },
        "llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil",
        ("<image>",),
        next_text,
    ),
    "llava_onevision": Family(
        {
            "config.json": config("llava_onevision", 8, vision_aspect_ratio="anyres_max_2"),
            "preprocessor_config.json": {
                "size": square(32),
                "image_grid_pinpoints": [[32 * a, 32 * b] for a in range(1, 4) for b in range(1, 4)],
            },
            "processor_config.json": {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"},
        },
        "llava_onevision.image_processing_pil_llava_onevision:LlavaOnevisionImageProcessorPil",
        ("<image>",),
        onevision_text,
    ),
}


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return a picture of smooth colors with sharp edges and noise."""
    random = np.random.default_rng([height, width, seed])
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([y * 255 // max(1, height - 1), x * 255 // max(1, width - 1), (x + y) * 5 % 256], -1)
    noise = random.integers(0, 256, (height, width, 3))
    return np.where((x // 5 + y // 7)[..., None] % 2, smooth, noise).astype(np.uint8)


def patches(pixels: np.ndarray, layout: Layout, processor: Processor) -> np.ndarray:
    """Return the rows that a tower reads, by the op's reference."""
    height, width = pixels.shape[:2]
    flat = torch.from_numpy(pixels).flatten()
    return PATCHES.reference(flat, [(height, width)], layout.views, processor.patching, torch.float32).numpy()


def raster(images: np.ndarray, side: int) -> np.ndarray:
    """Return the patches of images [n, 3, height, width], line by line."""
    number, _, height, width = images.shape
    cut = images.reshape(number, 3, height // side, side, width // side, side)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * side * side)


def squares(rows: np.ndarray, height: int, width: int, merge: int) -> np.ndarray:
    """Return patches line by line, height x width of each view, in squares that become one token."""
    cut = rows.reshape(-1, height // merge, merge, width // merge, merge, rows.shape[1])
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(rows.shape)


def their_rows(name: str, found: Any, layout: Layout, side: int, merge: int) -> np.ndarray:
    """Return transformers' pixel values as rows, without what only fills up a batch."""
    values = np.asarray(found["pixel_values"])
    if name in ("qwen2", "qwen3", "glm"):
        return values
    if name == "paddle":
        ((_, height, width),) = found["image_grid_thw"]
        return squares(values.reshape(len(values), -1), int(height), int(width), merge)
    if name == "siglip2":
        return values[0][: np.prod(found["spatial_shapes"][0])]
    if name == "gemma4":
        view = layout.views[0]  # the tower spreads 0 … 1 to -1 … 1
        return squares(
            2 * values[0][: found["num_soft_tokens_per_image"][0] * 9] - 1, view.height // side, view.width // side, 3
        )
    if name == "minicpm":
        rows = values[0].reshape(3, side, -1, side).transpose(2, 0, 1, 3).reshape(-1, 3 * side * side)
        sizes = [(int(height), int(width)) for height, width in found["target_sizes"]]
        parts = np.split(rows, np.cumsum([height * width for height, width in sizes])[:-1])
        return np.concatenate([squares(own, *size, merge) for own, size in zip(parts, sizes, strict=True)])
    if name == "deepseek_ocr2":
        tiles = np.asarray(found["pixel_values_local"]) if "pixel_values_local" in found else values[:0]
        return np.concatenate([raster(tiles, side), raster(values, side)])
    if name == "mllama":
        values = values[0, 0, : len(layout.views)]
    elif values.ndim == 5:
        values = values[0]
    rows = raster(values, side)
    if merge == 1:
        return rows
    return squares(rows, values.shape[2] // side, values.shape[3] // side, merge)


def tokens_of(family: Family, prompt: str, layout: Layout, processor: Processor) -> list[int]:
    """Return a prompt's ids: the text with one placeholder for each run, tokenized, and runs spelled out."""
    runs = [piece for piece in layout.pieces if isinstance(piece, int)]
    text = "".join(processor.placeholder if isinstance(piece, int) else piece for piece in layout.pieces)
    (one,) = family.encode(processor.placeholder)
    ids: list[int] = []
    for each in family.encode(prompt.replace(processor.marker, text)):
        ids += [one] * runs.pop(0) if each == one and runs else [each]
    assert not runs
    return ids


@pytest.mark.few(14)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(height=st.integers(1, 150), width=st.integers(1, 150))
@example(height=50, width=50)
@example(height=149, width=30)
@example(height=31, width=150)
def test_sizes_pixels_and_tokens_are_those_of_transformers(name: str, height: int, width: int) -> None:
    family = FAMILIES[name]
    processor, theirs, pixels = family.ours, family.theirs, picture(height, width)
    try:
        found = theirs(pixels, input_data_format="channels_last", **family.call)
    except ValueError:
        with pytest.raises(InvalidRequest):
            processor.layout(height, width)
        return
    layout = processor.layout(height, width)
    rows = their_rows(name, found, layout, processor.patching.rows, processor.patching.merge)
    np.testing.assert_array_equal(patches(pixels, layout, processor), rows)
    assert layout.order is None or max(layout.order) < len(rows)
    if family.text is None:
        assert layout.pieces == layout.token_ids == ()
        return
    text = family.text(theirs, found)
    prompt = f"\nab{processor.marker}\nab"
    theirs_ids = family.encode(prompt.replace(processor.marker, text))
    assert tokens_of(family, prompt, layout, processor) == theirs_ids
    (one,) = family.encode(processor.placeholder)
    alone = [one if each == PLACEHOLDER else each for each in layout.token_ids]
    assert alone == family.encode(text)
    assert name == "mllama" or layout.placeholders == alone.count(one)


@pytest.mark.parametrize(
    ("name", "pictures"), [("clip", 1), ("llava", 1), ("llava in a square", 1), ("llava_onevision", 2)]
)
def test_long_pictures_do_not_grow_without_bound(name: str, pictures: int) -> None:
    """The tables of a line of 65,536 pixels that becomes 336 wide are gigabytes, and so is the square around it."""
    for height, width in ((1 << 16, 1), (1, 1 << 16), (201, 1)):
        with pytest.raises(InvalidRequest, match="200 times as long"):
            FAMILIES[name].ours.layout(height, width, pictures)
    FAMILIES[name].ours.layout(200, 1, pictures)


def test_a_square_around_a_picture_has_a_bound() -> None:
    with pytest.raises(InvalidRequest, match="longer than 16384"):
        FAMILIES["llava in a square"].ours.layout(1 << 16, 1 << 10)


@pytest.mark.parametrize(("name", "options", "count"), [
    ("qwen2", {"num_frames": 1}, 2), ("qwen2", {"max_frames": 1}, 2), ("qwen3", {"num_frames": 1}, 1),
    ("glm", {"fps": 0.001}, 2), ("glm", {"fps": 0.005}, 2),
])  # fmt: skip
def test_settings_of_few_frames_choose_few(name: str, options: dict[str, Any], count: int) -> None:
    """Not all of them, and not none."""
    family = FAMILIES[name]
    processor = processor_of(family.files, family.encode, options)
    assert isinstance(processor, VideoProcessor)
    assert len(processor.chosen(9000, 25.0)) == count
    assert processor.chosen(1, 25.0)[0] == 0


def test_several_pictures_of_llava_onevision_are_squares() -> None:
    family = FAMILIES["llava_onevision"]
    processor, pixels = family.ours, picture(50, 31)
    layout = processor.layout(50, 31, pictures=2)
    found = family.theirs([[pixels, picture(20, 20)]], input_data_format="channels_last")
    np.testing.assert_array_equal(patches(pixels, layout, processor), raster(found["pixel_values"][0], 8))
    assert layout.order == (*range(16), NEWLINE)
    assert layout.placeholders == 17


@settings(max_examples=20, deadline=None)
@given(height=st.integers(1, 150), width=st.integers(1, 150))
def test_vectors_of_llava_onevision_are_used_in_the_order_of_its_model(height: int, width: int) -> None:
    from transformers.models.llava_onevision import modeling_llava_onevision as model

    family = FAMILIES["llava_onevision"]
    layout = family.ours.layout(height, width)
    number = 16 * len(layout.views)
    x = torch.arange(number, dtype=torch.float32).view(len(layout.views), 16, 1)
    points = family.files["preprocessor_config.json"]["image_grid_pinpoints"]
    settings = SimpleNamespace(vision_config=SimpleNamespace(image_size=32, patch_size=8), image_grid_pinpoints=points)
    (packed,), _ = model.LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=settings), [x], [[height, width]], torch.tensor([-1.0]), "anyres_max_2"
    )
    order = torch.tensor(layout.order)
    if layout.shrunk:
        (rows, columns), smaller = layout.shrunk
        grid = order[16:].float().view(1, 1, rows, columns)
        grid = torch.nn.functional.interpolate(grid, smaller, mode="bilinear")[0, 0]
        order = torch.cat([order[:16].float(), torch.nn.functional.pad(grid, (0, 1), value=-1).flatten()])
    torch.testing.assert_close(order.float(), packed[:, 0], atol=1e-4, rtol=1e-6)
    assert layout.placeholders == len(packed)


CLIPS = st.integers(2, 9), st.integers(1, 150), st.integers(1, 150)
VIDEO = "<|video_pad|>"


@settings(max_examples=20, deadline=None)
@given(*CLIPS)
def test_videos_of_qwen3_have_the_times_of_their_frames(frames: int, height: int, width: int) -> None:
    bounds = {"shortest_edge": 4096, "longest_edge": 40000}
    files = {
        "config.json": config("qwen3_vl", 8),
        "preprocessor_config.json": {"patch_size": 8, "temporal_patch_size": 2},
        "video_preprocessor_config.json": {"size": bounds, "patch_size": 8},
    }
    family = Family(files, "", ("<|vision_start|>", VIDEO, PAD, "<|vision_end|>"))
    path = "qwen3_vl/video_processing_qwen3_vl.py"
    size = taken(path, "smart_resize")(frames, height, width, 2, 16, *bounds.values())
    processor = family.ours
    assert isinstance(processor, VideoProcessor)
    indices = [3 * each for each in range(frames)]
    layout = processor.video([each / 7.5 for each in indices], height, width, 2.5)
    steps = -(-frames // 2)
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token=VIDEO,
        _calculate_timestamps=lambda *given: taken(
            "qwen3_vl/processing_qwen3_vl.py", "_calculate_timestamps", owner="Qwen3VLProcessor"
        )(None, *given),
    )
    grid = np.array([[steps, size[0] // 8, size[1] // 8]])
    metadata = SimpleNamespace(fps=7.5, frames_indices=indices)
    text = taken("qwen3_vl/processing_qwen3_vl.py", "replace_video_token", owner="Qwen3VLProcessor")(
        own, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0
    )
    assert "".join(VIDEO * each if isinstance(each, int) else each for each in layout.pieces) == text
    assert layout.grids == ((1, size[0] // 16, size[1] // 16),) * steps
    assert [view.frames for view in layout.views][-1] == (2 * steps - 2, frames - 1)
    assert all((view.height, view.width) == size for view in layout.views)


@given(frames=st.integers(4, 3000), fps=st.floats(1, 60))
def test_frames_of_videos_are_chosen_as_by_transformers(frames: int, fps: float) -> None:
    metadata = SimpleNamespace(total_num_frames=frames, fps=fps)
    for name, files in (("qwen2_vl", "qwen2_5_vl"), ("qwen3_vl", "qwen3_vl")):
        processor = Family({"config.json": config(files, 14)}, "", (PAD,)).ours
        call = taken(
            f"{name}/video_processing_{name}.py",
            "sample_frames",
            owner=f"Qwen{name[4]}VLVideoProcessor",
            torch=torch,
        )
        own = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=4, max_frames=768)
        assert isinstance(processor, VideoProcessor)
        found = [int(each) for each in call(own, metadata, fps=2.0)]
        chosen = list(processor.chosen(frames, fps))
        assert chosen == found[: len(chosen)]
        assert len(found) - len(chosen) in (0, 1)  # rounding may bring torch's range one frame past the last


@given(frames=st.integers(2, 9000), fps=st.floats(1, 30))
def test_frames_of_glms_videos_are_chosen_as_by_transformers(frames: int, fps: float) -> None:
    processor = Family({"config.json": config("glm4v", 14)}, "", (PAD,)).ours
    assert isinstance(processor, VideoProcessor)
    call = taken("glm4v/video_processing_glm4v.py", "sample_frames", owner="Glm4vVideoProcessor")
    metadata = SimpleNamespace(total_num_frames=frames, fps=fps, duration=None)
    found = call(SimpleNamespace(fps=2, max_duration=300), metadata)
    assert processor.chosen(frames, fps) == tuple(map(int, found))


@given(height=st.integers(1, 2000), width=st.integers(1, 2000))
def test_pictures_of_kimi_have_the_sizes_of_transformers(height: int, width: int) -> None:
    files = {
        "config.json": config("kimi_k25", 14),
        "preprocessor_config.json": {"patch_size": 14, "max_patches": 60, "size": {"max_height": 20, "max_width": 20}},
    }
    layout = Family(files, "", ("<|media_pad|>",)).ours.layout(height, width)
    size, padded = taken("kimi_k25/image_processing_kimi_k25.py", "navit_resize")(height, width, 14, 2, 60, 20)
    (view,) = layout.views
    assert (view.height, view.width) == size
    assert (view.window.rows, view.window.columns) == padded
    assert layout.placeholders == padded[0] // 28 * padded[1] // 28


def test_a_request_replaces_settings_of_the_files() -> None:
    family = FAMILIES["qwen2"]
    small = processor_of(family.files, family.encode, {"min_pixels": 64, "max_pixels": 640})
    assert small.layout(300, 300).placeholders < family.ours.layout(300, 300).placeholders


def test_every_processor_is_tested_and_others_are_refused_by_name() -> None:
    tested = {type(family.ours) for family in FAMILIES.values()}
    beside = {"Qwen25VL", "Qwen3VL", "KimiVL", "KimiK25", "Qwen2Audio", "Qwen2_5Omni", "Qwen3Omni"}
    beside |= {
        "Phi4",
        "gemma4",
        "InstructBlipPictures",
        "DeepseekOcr",
        "Gemma3nSounds",
    }  # in tests/vision and tests/hearing
    assert {PROCESSORS[name].__name__ for name in PROCESSORS} - beside <= {each.__name__ for each in tested}
    with pytest.raises(InvalidConfig, match="'blip-9'"):
        processor_of({"config.json": {"model_type": "blip-9"}}, lambda text: [])


@pytest.mark.parametrize(("name", "size"), [("qwen2", (1, 201)), ("pixtral", (1, 150)), ("deepseek_ocr2", (150, 1))])
def test_shapes_that_leave_nothing_are_refused_with_their_size(name: str, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{size[1]}x{size[0]} pixels"):
        FAMILIES[name].ours.layout(*size)


def test_items_for_more_tokens_than_any_context_are_refused() -> None:
    """Before their ids are in memory: 80 videos of 1,024 frames may ask for 1.4 million tokens each."""
    family = FAMILIES["qwen2"]
    options = {"min_pixels": 1 << 21, "max_pixels": 1 << 26}
    films = [clip(np.zeros((256, 4, 4, 3), np.uint8), np.arange(256.0), 1.0)] * 64
    with pytest.raises(InvalidRequest, match="take more than 2097152 tokens"):
        placed_items(processor_of(family.files, family.encode, options), films)
