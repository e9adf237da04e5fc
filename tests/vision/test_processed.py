"""Pictures of odd sizes from processor to tokens, beside transformers' processor and model of the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.chameleon.image_processing_pil_chameleon import ChameleonImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.media.items import picture
from ridgeline.media.processors import processor_of
from tests.driving import ask, rig
from tests.vision import tiny
from tests.vision.families.family import IMAGE, TILES

INPUTS = (
    *("pixel_values", "pixel_attention_mask", "image_sizes", "batch_num_images", "target_sizes"),
    "image_position_ids",
)
BREAK = 302  # stands for all text of a picture's part
SETTINGS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        Gemma3ImageProcessorPil,
        {
            **{"size": {"height": 24, "width": 24}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8},
            **{"pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2},
        },
        {"image_seq_length": 9},
    ),
    "gemma4": (Gemma4ImageProcessorPil, {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}, {}),
    "chameleon": (
        ChameleonImageProcessorPil,
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        {},
    ),
    "paligemma": (SiglipImageProcessorPil, {"size": {"height": 12, "width": 12}}, {}),
    "internvl": (
        GotOcr2ImageProcessorPil,
        {"size": {"height": 24, "width": 24}, "crop_to_patches": True, "max_patches": 6},
        {"image_seq_length": 9},
    ),
    "idefics3": (
        Idefics3ImageProcessorPil,
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 16},
    ),
    "llava_onevision": (LlavaOnevisionImageProcessorPil, TILES, {"vision_aspect_ratio": "anyres_max_1"}),
    "minicpmv4_6": (
        MiniCPMV4_6ImageProcessorPil,
        {"patch_size": 4, "scale_resolution": 48, "slice_mode": False, "use_image_id": False},
        {},
    ),
    "mistral3": (
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 40}, "patch_size": 8},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
}


def asked(family: str, name: str, pictures: Sequence[np.ndarray]) -> Request:
    _, settings, own = SETTINGS[family]
    files = {
        "config.json": {**tiny.FAMILIES[family].config, "model_type": family},
        "preprocessor_config.json": settings,
        "processor_config.json": own,
    }
    processor = processor_of(files, lambda text: [BREAK])
    tokens, inserted = [5, 6, 7], list[Inserted]()
    for number, pixels in enumerate(pictures):
        height, width, _ = pixels.shape
        layout, first = processor.layout(height, width, len(pictures), number), 0
        shown = ShownPictures(
            (Pixels(height, width, pixels.tobytes()),), layout.views, processor.patching, layout.order, layout.shrunk
        )
        key = bytes([len(pictures), *picture(pixels).digest[:15]])  # a layout may depend on their number
        for piece in layout.pieces:
            if isinstance(piece, str):
                tokens.append(BREAK)
                continue
            inserted.append(Inserted(start=len(tokens), count=piece, key=key, name=key.hex(), first=first, shown=shown))
            tokens += [IMAGE] * piece
            first += piece
    return replace(ask(name, [*tokens, 8, 9], max_tokens=8), inserted=tuple(inserted))


@pytest.mark.parametrize("family", SETTINGS)
def test_odd_pictures_become_the_tokens_of_transformers(family: str, tiny_vision: Callable[[str], Path]) -> None:
    """Idefics' become 3 to 5 splits of 32 x 32, InternVL's 3 to 7 tiles of 24 x 24, and Mistral's 2 to 5 lines of
    squares of 8 x 8. Gemma 3's have up to 3 crops. OneVision's become up to 6 tiles, of which the patches of 3 and more
    are interpolated."""
    kind, settings, _ = SETTINGS[family]
    draw = np.random.default_rng(3)
    a, b, c = (draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((31, 75), (50, 22), (17, 29)))
    prompts = {"a": [a], "b": [b], "c": [c], "c and b": [c, b]}
    if family == "minicpmv4_6":
        del prompts["c and b"]  # transformers' class takes several pictures of one size alone
    room = max(80 if family == "gemma4" else 32, tiny.FAMILIES[family].chunk)
    with rig(tiny_vision(family), max_num_batched_tokens=room) as own:
        requests = [asked(family, name, pictures) for name, pictures in prompts.items()]
        outcomes = own.run(*requests)
    for request, pictures in zip(requests, prompts.values(), strict=True):
        given = kind(**settings)([pictures], input_data_format="channels_last", return_tensors="pt")
        ids = torch.tensor([request.prompt_token_ids])
        inputs = {name: given[name] for name in INPUTS if name in given} | tiny.types(family, ids)
        with torch.inference_mode():
            found = tiny.build(family).generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **inputs,
            )
        assert outcomes[request.id].tokens == found[0, ids.shape[1] :].tolist(), request.id
