"""Tiny random vision-language models of transformers, as folders, and what they write: the oracle of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.kernels.pictures.views import Box, Patching, View
from ridgeline.media.items import picture
from ridgeline.media.processors import processor_of
from tests.driving import ask_with, likeliest
from tests.vision.families import FAMILIES
from tests.vision.families.family import IMAGE
from tests.vision.kimi import as_on_the_hub

MADE = ("pixel_values", "image_sizes", "image_pixel_values", "image_attention_mask")  # by processors of tiles
# Other ways of attention leave caps of logits out, and let the patches of Phi-4's tower see those before them alone
# if all of its tiles are full
PLAIN = "paligemma_2", "phi4_multimodal"


@cache
def build(name: str) -> Any:
    """Return the oracle in float32. The same numbers on every call."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.name}Config")(**family.config)
    how = {"attn_implementation": "eager"} if name in PLAIN else {}
    kind = "ForCausalLM" if name == "phi4_multimodal" else "ForConditionalGeneration"
    model = getattr(transformers, f"{family.name}{kind}")._from_config(config, **how).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            mean = 1.0 if parameter.ndim == 1 and key.endswith("weight") else 0.0
            std = 0.3 if parameter.ndim >= 2 and "layers." in key and "vision" not in key else 0.2
            parameter.normal_(mean, std, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith(("put_min", "put_max")):  # the bounds of clipped maps cut a third of the numbers
                bound = 1 + torch.rand((), generator=generator)
                buffer.copy_(bound if key.endswith("max") else -bound)
            if ".std_" in key:
                buffer.normal_(0.5, 0.2, generator=generator)
        model.get_output_embeddings().weight[IMAGE] = 0  # so that it writes no placeholder of a picture
    return model


def save(name: str, folder: Path) -> Path:
    """Save `build(name)` as the hub would hold it."""
    build(name).save_pretrained(folder)
    if name.startswith("kimi"):
        as_on_the_hub(name, folder)
    return folder


def drawn(name: str, number: int) -> np.ndarray:
    """Return a picture of a size that the family takes."""
    sizes = FAMILIES[name].sizes
    height, width = sizes[number % len(sizes)]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def shown(name: str, pixels: np.ndarray) -> ShownPictures:
    height, width, _ = pixels.shape
    own = Pixels(height, width, pixels.tobytes())
    if (processor := FAMILIES[name].processor) is not None:
        config = {**FAMILIES[name].config, "model_type": name}
        files = {"config.json": config, "preprocessor_config.json": processor[1]}
        ours = processor_of(files, lambda text: (), read=lambda text: ())
        layout = ours.layout(height, width)
        return ShownPictures((own,), layout.views, ours.patching, layout.order, layout.shrunk, read(name, pixels))
    view = View(height, width, Box(0, 0, height, width))
    return ShownPictures((own,), (view,), FAMILIES[name].patching)


def read(name: str, pixels: np.ndarray) -> tuple[int, ...]:
    """Return the tokens that a tower reads beside a picture, of several lengths."""
    count = 1 + len(pixels) % 9 if pixels[0, 0, 0] % 2 else 3
    return tuple(int(each) % 50 for each in pixels.flat[:count]) if name == "instructblip" else ()


def asked(name: str, request_id: str, *parts: list[int] | np.ndarray, max_tokens: int = 8, **params: Any) -> Request:
    """Return a request whose prompt is made of tokens and pictures."""
    merge = FAMILIES[name].patching.merge

    def placed(part: np.ndarray, start: int) -> tuple[list[int], list[Inserted]]:
        own, key = shown(name, part), picture(part).digest[:16]
        rows, columns = own.grids[0]
        grid = (1, rows // merge, columns // merge) if FAMILIES[name].grids else None
        vectors = Inserted(start=start, count=own.vectors, key=key, name=key.hex(), shown=own, grid=grid)
        return [IMAGE] * own.vectors, [vectors]

    return ask_with(request_id, parts, placed, max_tokens=max_tokens, **params)


def patches(name: str, pixels: np.ndarray) -> Tensor:
    """Return a picture's patches as transformers' processors make them: [T, X]."""
    how = FAMILIES[name].patching
    x = (torch.from_numpy(pixels).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
    x = x.permute(2, 0, 1)[None].repeat(how.frames, 1, 1, 1)
    merge, side = how.merge, how.rows
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    if name == "paddleocr_vl":  # its projector merges lines
        return x.reshape(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)
    x = x.reshape(how.frames, 3, rows // merge, merge, side, columns // merge, merge, side)
    return x.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)


def inputs(name: str, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return what transformers' model takes of pictures."""
    if not pictures:
        return {}
    how = FAMILIES[name].patching
    if (processor := FAMILIES[name].processor) is not None:
        kind, settings = processor
        found = kind(**settings)(list(pictures), input_data_format="channels_last", return_tensors="pt")
        return {key: found[key] for key in MADE if key in found} | texts(name, pictures)
    if name.startswith("gemma4"):
        return packed(how, pictures)
    if name.startswith("kimi"):
        return lines(how, pictures)
    if FAMILIES[name].padded:
        return padded(name, how, pictures)
    if not FAMILIES[name].grids:
        x = (torch.from_numpy(np.stack(pictures)).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        return {"pixel_values": x.permute(0, 3, 1, 2)}
    grids = [[1, each.shape[0] // how.rows, each.shape[1] // how.columns] for each in pictures]
    return {
        "pixel_values": torch.cat([patches(name, each) for each in pictures]),
        "image_grid_thw": torch.tensor(grids),
    }


def texts(name: str, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the texts that a tower reads, filled up to the longest."""
    each = [torch.tensor(read(name, own)) for own in pictures]
    if not all(map(len, each)):
        return {}
    masks = [torch.ones_like(own) for own in each]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (each, masks))
    return {"qformer_input_ids": ids, "qformer_attention_mask": mask}


def packed(how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return Gemma 4's patches, line by line, with columns and lines, as a batch that is filled up with zeros."""
    side, most = how.rows, max(each.shape[0] * each.shape[1] for each in pictures) // how.rows**2
    batch, places = torch.zeros(len(pictures), most, 3 * side**2), torch.full((len(pictures), most, 2), -1)
    for index, each in enumerate(pictures):
        rows, columns = each.shape[0] // side, each.shape[1] // side
        x = torch.from_numpy(each).float().view(rows, side, columns, side, 3).transpose(1, 2) * how.scale
        batch[index, : rows * columns] = x.reshape(rows * columns, -1)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[index, : rows * columns] = torch.stack([column.flatten(), row.flatten()], 1)
    return {"pixel_values": batch, "image_position_ids": places}


def lines(how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the patches of pictures line by line, as MoonViT takes them: [T, 3, side, side], and the pictures' lines
    and columns."""
    side, found, grids = how.rows, [], []
    for each in pictures:
        x = (torch.from_numpy(each).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        x = x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3)
        grids.append([1, *x.shape[:2]])
        found.append(x.flatten(0, 1))
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


def padded(name: str, how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return a batch of pictures of several sizes, with zeros below and to the right."""
    most = np.max([each.shape for each in pictures], axis=0)
    batch = torch.zeros(len(pictures), 3, int(most[0]), int(most[1]))
    for index, each in enumerate(pictures):
        x = (torch.from_numpy(each).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        batch[index, :, : each.shape[0], : each.shape[1]] = x.permute(2, 0, 1)
    sizes = torch.tensor([each.shape[:2] for each in pictures])
    if name == "minicpmv4_6":
        _, _, height, width = batch.shape
        rows = batch.unflatten(2, (-1, how.rows)).permute(1, 3, 0, 2, 4).flatten(2)[None]
        return {"pixel_values": rows, "target_sizes": torch.tensor([[height // 4, width // 4]] * len(batch))}
    if name == "idefics3":
        return {"pixel_values": batch[None]}
    return {"pixel_values": batch} | ({"image_sizes": sizes} if name in ("mistral3", "llava_pixtral") else {})


_WRITTEN: dict[tuple[object, ...], list[int]] = {}  # by what was asked


def by_transformers(name: str, request: Request, pictures: Sequence[np.ndarray], tokens: int = 8) -> list[int]:
    """Return the likeliest tokens by transformers' model, which runs anew for each of them: with its cache, tokens
    behind a picture that ends a prompt count as the picture's."""
    known = name, request.prompt_token_ids, tuple(picture(each).digest for each in pictures), tokens
    if known not in _WRITTEN:
        model, prompt = build(name), request.prompt_token_ids
        _WRITTEN[known] = likeliest(prompt, tokens, lambda ids: scores(model, name, ids, pictures, len(prompt)))
    return _WRITTEN[known]


def types(name: str, row: Tensor, prompt: int | None = None) -> dict[str, Tensor]:
    """Return what tells transformers' model which of a row's tokens see each other both ways: pictures, or so many of
    the prompt (None: all)."""
    if name.startswith("paligemma"):
        return {"token_type_ids": (torch.arange(row.shape[1]) >= (prompt or row.shape[1]))[None].int()}
    kind = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(name)
    return {} if kind is None else {kind: (row == IMAGE).int()}


def scores(
    model: Any, name: str, ids: Sequence[int], pictures: Sequence[np.ndarray], prompt: int | None = None
) -> Tensor:
    """Return the scores of all tokens by a model of transformers: [T, V]. prompt: so many belong to it (None: all)."""
    row = torch.tensor([list(ids)])
    given = inputs(name, pictures)
    if name in ("blip-2", "instructblip") and not given:
        model = model.language_model  # as a whole it wants pictures
    if FAMILIES[name].grids:
        model.model.rope_deltas = None
        if given:
            given["mm_token_type_ids"] = (row == IMAGE).int()
    given |= types(name, row, prompt)
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given.items()}
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0]
    return found
