"""Tiny models of DeepSeek-OCR 1 and 2, and what they write. transformers has the second one. Of the first it has the
parts: Segment Anything's encoder, CLIP's layers and the text model. They are put together here as its own code does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPEncoder
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as second
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.media.items import picture
from ridgeline.media.layout import Processor
from ridgeline.media.processors import processor_of
from tests.driving import ask_with, likeliest
from tests.vision.families.family import IMAGE, TEXT

FIRST, SECOND = "deepseek_ocr", "deepseek_ocr2"
MIXTURE: dict[str, Any] = {
    **{**TEXT, "max_position_embeddings": 4096, "num_key_value_heads": 4, "tie_word_embeddings": False},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
}
SAM: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 128, "patch_size": 2},
    **{"output_channels": 16, "global_attn_indexes": [1], "mlp_ratio": 2.0},
}
CONFIG: dict[str, Any] = {
    "text_config": {**MIXTURE, "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.5},
    "vision_config": {
        "sam_config": {**SAM, "downsample_channels": [12, 24]},
        "encoder_config": {
            **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"num_key_value_heads": 1, "vocab_size": 8, "max_position_embeddings": 1024},
        },
    },
    "image_token_id": IMAGE,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, Any] = {  # the first one's config.json, whose text is there twice
    **{**MIXTURE, "first_k_dense_replace": 1, "topk_method": "greedy", "use_mla": False},
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "vision_config": {
        "image_size": 128,
        "width": {
            "clip-l-14-224": {"heads": 2, "image_size": 28, "layers": 2, "patch_size": 7, "width": 20},
            "sam_vit_b": {
                **{"downsample_channels": [12, 20], "global_attn_indexes": [1], "heads": 2, "layers": 2, "width": 32},
                **{"patch_size": 2, "output_channels": 16, "mlp_ratio": 2.0},
            },
        },
    },
}
FILES: dict[str, dict[str, Any]] = {
    FIRST: {
        "config.json": PUBLISHED,
        "processor_config.json": {"processor_class": "DeepseekVLV2Processor", "patch_size": 2, "downsample_ratio": 4},
    },
    SECOND: {
        "config.json": {**CONFIG, "model_type": SECOND},
        "preprocessor_config.json": {"size": {"height": 128, "width": 128}, "tile_size": 96},
        "processor_config.json": {"patch_size": 2, "downsample_ratio": 4},
    },
}
SIZES = ((50, 70), (97, 200), (180, 90))


class FirstTowers(nn.Module):
    """The towers of the first one."""

    def __init__(self) -> None:
        super().__init__()
        sam = second.DeepseekOcr2SamVisionConfig(**SAM, downsample_channels=[12, 20])
        sam._attn_implementation = "eager"
        clip = transformers.CLIPVisionConfig(
            hidden_size=20, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, hidden_act="quick_gelu"
        )
        clip._attn_implementation = "eager"
        self.sam, self.clip = second.DeepseekOcr2SamVisionEncoder(sam), CLIPEncoder(clip)
        self.classed, self.norm = nn.Parameter(torch.empty(20)), nn.LayerNorm(20)
        self.table = nn.Embedding(17, 20)
        self.map = nn.Linear(40, 64)
        self.newline, self.separator = nn.Parameter(torch.empty(64)), nn.Parameter(torch.empty(64))

    def views(self, pixels: Tensor) -> Tensor:
        """Return the places of views: [views, y, x, numbers]."""
        found = self.sam(pixels).last_hidden_state
        x, side = found.flatten(2).mT, found.shape[3]
        table = self.table.weight[1:].float().T.reshape(1, 20, 4, 4)
        table = nn.functional.interpolate(table, (side, side), mode="bicubic", antialias=True).flatten(2)[0].T
        classed = torch.cat((self.classed.expand(len(x), 1, -1), x), 1)
        seen = self.norm(classed + torch.cat((self.table.weight[:1], table.to(x.dtype))))
        read = self.clip(inputs_embeds=seen).last_hidden_state[:, 1:]
        return self.map(torch.cat((read, x), -1)).unflatten(1, (side, side))

    def forward(self, tiles: Tensor | None, shape: tuple[int, int], whole: Tensor) -> Tensor:
        rows = []
        for pixels, (tall, wide) in ((tiles, shape), (whole, (1, 1))):
            if pixels is None:
                continue
            x = self.views(pixels).unflatten(0, (tall, wide)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
            rows.append(torch.cat((x, self.newline.expand(len(x), 1, -1)), 1).flatten(0, 1))
        return torch.cat((*rows, self.separator[None]))


@cache
def build(name: str) -> tuple[Any, FirstTowers | None]:
    """Return transformers' model of the second one, whose text model both have, and the towers of the first one."""
    config = transformers.DeepseekOcr2Config(**CONFIG)
    if name == FIRST:
        config.text_config.routed_scaling_factor = 1.0
    model = transformers.DeepseekOcr2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    towers = FirstTowers().eval() if name == FIRST else None
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for part in (model, towers):
            for key, parameter in () if part is None else part.named_parameters():
                mean = 1.0 if parameter.ndim == 1 and "norm" in key and key.endswith("weight") else 0.0
                parameter.normal_(mean, 0.3 if parameter.ndim > 2 and "experts" in key else 0.15, generator=generator)
        model.get_output_embeddings().weight[IMAGE] = 0  # so that it writes no placeholder of a picture
    return model, towers


def save(name: str, folder: Path) -> Path:
    """Save a model as the hub would hold it."""
    model, towers = build(name)
    if towers is None:
        model.save_pretrained(folder)
        return folder
    found = dict[str, Tensor]()
    for key, value in model.state_dict().items():
        if key.startswith(("model.language_model.", "lm_head.")):
            found |= _apart(key.replace("model.language_model.", "model."), value)
    ours = {
        **{"sam.layers.": "sam_model.blocks.", "sam.patch_embed.projection.": "sam_model.patch_embed.proj."},
        **{"sam.neck.conv1.": "sam_model.neck.0.", "sam.neck.layer_norm1.": "sam_model.neck.1."},
        **{"sam.neck.conv2.": "sam_model.neck.2.", "sam.neck.layer_norm2.": "sam_model.neck.3."},
        **{"sam.proj.conv1.": "sam_model.net_2.", "sam.proj.conv2.": "sam_model.net_3."},
        **{"sam.pos_embed": "sam_model.pos_embed", "clip.layers.": "vision_model.transformer.layers."},
        **{"classed": "vision_model.embeddings.class_embedding", "norm.": "vision_model.pre_layrnorm."},
        **{"table.": "vision_model.embeddings.position_embedding.", "map.": "projector.layers."},
        **{"newline": "image_newline", "separator": "view_seperator"},
    }
    joined = dict[str, list[Tensor]]()
    for key, value in towers.state_dict().items():
        [start] = [each for each in ours if key.startswith(each)]
        theirs = f"model.{ours[start]}{key.removeprefix(start)}"
        if start == "sam.layers.":
            theirs = theirs.replace("layer_norm", "norm")
        for each in "qkv":
            theirs = theirs.replace(f".{each}_proj.", ".qkv_proj.")
        joined.setdefault(theirs, []).append(value)
    for theirs, values in joined.items():  # keys, queries and values are stored in the order of their names
        k, *others = values
        found[theirs] = torch.cat((others[1], k, others[0])) if len(others) == 2 else k
    found["model.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(20, 3, 7, 7)  # which is not used
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return folder


def _apart(key: str, value: Tensor) -> dict[str, Tensor]:
    """Return a text model's tensor, or those of each expert."""
    if ".experts." not in key:
        return {key: value}
    start, _, name = key.rpartition(".")
    parts = {"down_proj": value} if name == "down_proj" else dict(
        zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True)
    )  # fmt: skip
    return {
        f"{start}.{index}.{part}.weight": each for part, values in parts.items() for index, each in enumerate(values)
    }


def processor(name: str) -> Processor:
    return processor_of(FILES[name], lambda text: ())


def drawn(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)


def asked(name: str, request_id: str, *parts: list[int] | np.ndarray, max_tokens: int = 3, **params: Any) -> Request:
    def placed(part: np.ndarray, start: int) -> tuple[list[int], list[Inserted]]:
        rules, (height, width, _) = processor(name), part.shape
        layout, key = rules.layout(height, width), picture(part).digest[:16]
        own = ShownPictures((Pixels(height, width, part.tobytes()),), layout.views, rules.patching, layout.order)
        return [IMAGE] * own.vectors, [Inserted(start=start, count=own.vectors, key=key, name=key.hex(), shown=own)]

    return ask_with(request_id, parts, placed, max_tokens=max_tokens, **params)


def shape(width: int, height: int, edge: int = 80) -> tuple[int, int]:
    """Return the columns and rows of the tiles of the first one: the nearest shape of 2 to 9 tiles."""
    shapes = sorted({(a, b) for a in range(1, 10) for b in range(1, 10) if 2 <= a * b <= 9}, key=lambda s: s[0] * s[1])
    best = min(abs(width / height - a / b) for a, b in shapes)
    equal = [each for each in shapes if abs(width / height - each[0] / each[1]) == best]
    large = [each for each in equal if width * height > 0.5 * edge**2 * each[0] * each[1]]
    return large[-1] if large else equal[0]


def _pixels(image: Image.Image) -> Tensor:
    return (torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255 - 0.5) / 0.5


_FEATURES: dict[tuple[str, torch.dtype, bytes], Tensor] = {}  # a picture's vectors, since a model runs for each token


def features(name: str, pixels: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a picture's vectors."""
    known = name, dtype, picture(pixels).digest
    if known not in _FEATURES:
        model, towers = (None if part is None else _as(part, dtype) for part in build(name))
        assert model is not None
        with torch.inference_mode():
            if towers is not None:
                image, (height, width, _) = Image.fromarray(pixels), pixels.shape
                wide, tall = shape(width, height) if max(height, width) > 80 else (1, 1)
                resized = image.resize((80 * wide, 80 * tall))
                boxes = [(80 * c, 80 * r, 80 * c + 80, 80 * r + 80) for r in range(tall) for c in range(wide)]
                tiles = torch.stack([_pixels(resized.crop(box)) for box in boxes]).to(dtype)
                whole = _pixels(ImageOps.pad(image, (128, 128), color=(127, 127, 127)))[None].to(dtype)
                _FEATURES[known] = towers(tiles if max(height, width) > 80 else None, (tall, wide), whole)
            else:
                rules = DeepseekOcr2ImageProcessorPil(**FILES[SECOND]["preprocessor_config.json"])
                found = rules([pixels], input_data_format="channels_last", return_tensors="pt")
                local = found["pixel_values_local"].to(dtype) if "pixel_values_local" in found else None
                given = model.model.get_image_features(
                    found["pixel_values"].to(dtype), local, found["num_local_patches"], return_dict=True
                )
                [_FEATURES[known]] = given.pooler_output
    return _FEATURES[known]


@cache
def _as(part: nn.Module, dtype: torch.dtype) -> Any:
    if dtype is torch.float32:
        return part
    from copy import deepcopy

    return deepcopy(part).to(dtype)


def scores(name: str, ids: Sequence[int], pictures: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the scores of all tokens: [T, V]."""
    row, model = torch.tensor([list(ids)]), _as(build(name)[0], dtype)
    with torch.inference_mode():
        x = model.get_input_embeddings()(row).clone()
        if pictures:
            x[row == IMAGE] = torch.cat([features(name, each, dtype) for each in pictures])
        hidden = model.model.language_model(inputs_embeds=x).last_hidden_state
        found: Tensor = model.lm_head(hidden)[0]
    return found


def written(name: str, request: Request, pictures: Sequence[np.ndarray], tokens: int = 3) -> list[int]:
    return likeliest(request.prompt_token_ids, tokens, lambda ids: scores(name, ids, pictures))
