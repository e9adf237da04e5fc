"""DeepSeek-OCR 1 and 2 through the whole engine, beside the parts that transformers has of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.request import Request
from ridgeline.media.processors import processor_of
from ridgeline.models import model_config
from ridgeline.perf.footprint import parameters
from tests.driving import rig
from tests.vision import deepseek_ocr as ocr
from tests.vision.families.family import IMAGE

Folder = Callable[[str], Path]
Asked = tuple[Request, list[np.ndarray]]
BOTH = (ocr.FIRST, ocr.SECOND)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda name: ocr.save(name, tmp_path_factory.mktemp(name)))


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


def request(name: str, request_id: str, *parts: list[int] | np.ndarray, **params: object) -> Asked:
    asked = ocr.asked(name, request_id, *parts, **params)
    return asked, [part for part in parts if isinstance(part, np.ndarray)]


def requests(name: str, **params: object) -> list[Asked]:
    small, wide, tall = (ocr.drawn(number) for number in range(3))
    return [
        request(name, "small", words(7, 1), small, words(5, 2), **params),
        request(name, "two", wide, words(3, 3), small, words(4, 4), **params),
        request(name, "tall", words(6, 5), tall, **params),
        request(name, "none", words(12, 6), **params),
    ]


def run(name: str, folder: Path, chunk: int, device: str = "cpu") -> None:
    every = requests(name)[1::2] if (chunk, device) == (1024, "cpu") else requests(name)
    more = {"device": device, "block_size": 16} if device == "cuda" else {}
    with rig(folder, max_num_batched_tokens=chunk, max_model_len=2048, **more) as own:
        outcomes = own.run(*(each for each, _ in every))
        for each, pictures in every:
            assert outcomes[each.id].tokens == ocr.written(name, each, pictures), each.id


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("chunk", [pytest.param(96, marks=pytest.mark.thorough), 1024])
def test_tokens_are_those_of_the_published_model(name: str, chunk: int, folder: Folder) -> None:
    run(name, folder(name), chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOTH)
def test_a_gpu_reads_what_the_published_model_reads(name: str, folder: Folder) -> None:
    run(name, folder(name), 1024, "cuda")


@pytest.mark.parametrize("name", BOTH)
def test_a_picture_is_encoded_once_and_found_again(name: str, folder: Folder) -> None:
    small = ocr.drawn(0)
    with rig(folder(name), max_num_batched_tokens=1024, max_model_len=2048) as own:
        part, cache_ = own.runner.inserted, own.engine.scheduler.cache
        assert part._pictures is not None
        for number, (before, hits) in enumerate(((words(6, 1), 0), (words(6, 1), 1), (words(5, 3), 0))):
            known = cache_.hit_tokens
            each, pictures = request(name, str(number), before, small, words(4, 2))
            assert own.run(each)[each.id].tokens == ocr.written(name, each, pictures)
            assert (cache_.hit_tokens > known + 200) == bool(hits)
        assert part._pictures.encoded == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_published_model(name: str, dtype: torch.dtype, folder: Folder) -> None:
    """In bfloat16 both differ from float32, and we by at most twice as much on average."""
    kind = str(dtype).removeprefix("torch.")
    asked = requests(name, prompt_logprobs=0)[:2]
    with rig(folder(name), dtype=kind, max_num_batched_tokens=1024, max_model_len=2048) as own:
        own.run(*(each for each, _ in asked))
    we, they = list[torch.Tensor](), list[torch.Tensor]()
    for each, pictures in asked:
        ids = list(each.prompt_token_ids)
        index = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        exact, theirs = (
            ocr.scores(name, ids, pictures, own_dtype)[:-1].float().log_softmax(-1)[index]
            for own_dtype in (torch.float32, dtype)
        )
        ours = torch.tensor([float(one.logprob) for one in own.outcomes[each.id].prompt])
        if dtype is torch.float32:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)
        we.append((ours - exact).abs())
        they.append((theirs - exact).abs())
    assert torch.cat(we).mean() <= 2 * torch.cat(they).mean() + 1e-3


def test_parameters_are_counted(folder: Folder) -> None:
    model, _ = ocr.build(ocr.SECOND)
    spec = model_config({**model.config.to_dict(), "architectures": [type(model).__name__]}).spec
    assert parameters(spec).total == sum(each.numel() for each in model.parameters())
    text = sum(p.numel() for key, p in model.named_parameters() if "language_model" in key or "lm_head" in key)
    _, towers = ocr.build(ocr.FIRST)
    assert towers is not None
    assert parameters(model_config(ocr.PUBLISHED).spec).total == text + sum(p.numel() for p in towers.parameters())


def test_other_towers_and_views_are_refused() -> None:
    sam = {**ocr.SAM, "downsample_channels": [12, 24]}
    for name, value in (("use_rel_pos", False), ("window_size", 65), ("global_attn_indexes", [2]), ("image_size", 126)):
        vision = {**ocr.CONFIG["vision_config"], "sam_config": {**sam, name: value}}
        config = {**ocr.CONFIG, "vision_config": vision, "architectures": ["DeepseekOcr2ForConditionalGeneration"]}
        with pytest.raises(ModelLoadError, match=name):
            model_config(config)
    with pytest.raises(ModelLoadError, match="topk_method"):
        model_config({**ocr.PUBLISHED, "topk_method": "group_limited_greedy"})
    files = {
        **ocr.FILES[ocr.SECOND],
        "preprocessor_config.json": {"size": {"height": 64, "width": 64}, "tile_size": 96},
    }
    with pytest.raises(InvalidConfig, match="queries for 144 or 256"):
        processor_of(files, lambda text: ())
    many = {**ocr.FILES[ocr.SECOND], "preprocessor_config.json": {"max_patches": 2**24}}
    with pytest.raises(InvalidConfig, match="2 and 16777216 in the model's preprocessor files"):
        processor_of(many, lambda text: ())
    other = {"config.json": {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekVLV2ForCausalLM"]}}
    with pytest.raises(InvalidConfig, match="only DeepSeek-OCR runs"):
        processor_of(other, lambda text: ())


@pytest.mark.parametrize("size", [(640, 640), (641, 640), (3000, 1000), (1000, 3001), (777, 778)])
def test_the_first_ones_vectors_are_counted_by_tiles(size: tuple[int, int]) -> None:
    """Of its mode "Gundam": 16 lines of the whole and 10 of each row of tiles, all of which end with a vector."""
    files = {"config.json": ocr.PUBLISHED, "processor_config.json": {"patch_size": 16, "downsample_ratio": 4}}
    layout = processor_of(files, lambda text: ()).layout(*size)
    wide, tall = ocr.shape(size[1], size[0], 640) if max(size) > 640 else (0, 0)
    assert layout.pieces == (16 * 17 + 1 + 10 * tall * (10 * wide + (wide > 0)),)
    assert len(layout.views) == wide * tall + 1
    assert IMAGE not in layout.token_ids
