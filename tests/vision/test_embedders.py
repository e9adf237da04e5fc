"""Pictures and texts as vectors of one space, beside transformers' models and processors of the same files.

float32, on vectors of length 1: 1e-5 is a hundred roundings. Resized pixels are equal to those of PIL, so no more is
needed for pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM, PoolingParams
from ridgeline.core.errors import InvalidRequest
from tests.vision import embedders, folders, tiny

TEXTS = ["A photo, of the  cat", "dog", "one two red blue car", "the the the the the the"]
SIZES = ((31, 75), (50, 22), (28, 28), (17, 29), (90, 64))
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 5, "block_size": 4, "debug_checks": True}


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    opened: list[LLM] = []

    @cache
    def build(family: str) -> LLM:
        opened.append(LLM(embedders.save(family, tmp_path_factory.mktemp(family)), **SMALL))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


def shown(pixels: np.ndarray) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": pixels}}


@pytest.mark.parametrize("family", embedders.CONFIGS)
def test_pictures_of_unlike_sizes_and_texts_have_the_vectors_of_transformers(
    family: str, open_llm: Callable[[str], LLM]
) -> None:
    pictures = embedders.drawn(SIZES)
    prompts: list[Any] = [*map(shown, pictures[:2]), *TEXTS, *map(shown, pictures[2:]), shown(pictures[0])]
    found = [each.outputs.embedding for each in open_llm(family).embed(prompts, use_tqdm=False)]
    wanted = [embedders.of_picture(family, each) for each in pictures]
    wanted[2:2] = [embedders.of_text(family, text) for text in TEXTS]
    wanted.append(wanted[0])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.01  # they are told apart


@pytest.mark.parametrize("family", embedders.CONFIGS)
def test_raw_vectors_are_cut_and_not_normalised(family: str, open_llm: Callable[[str], LLM]) -> None:
    [picture] = embedders.drawn(SIZES[:1])
    params = PoolingParams(use_activation=False, dimensions=8)
    [found] = open_llm(family).embed(shown(picture), pooling_params=params, use_tqdm=False)
    own = np.array(found.outputs.embedding)
    wanted = embedders.of_picture(family, picture)[:8]
    np.testing.assert_allclose(own / np.linalg.norm(own), wanted / np.linalg.norm(wanted), atol=1e-5)
    assert abs(np.linalg.norm(own) - 1) > 1e-3


def test_wrong_mixes_are_refused_in_one_sentence(open_llm: Callable[[str], LLM]) -> None:
    llm, [one, two] = open_llm("CLIP"), embedders.drawn(SIZES[:2])
    for prompt, why in (
        ({"prompt": "a cat", "multi_modal_data": {"image": one}}, "embeds a text or a picture, and a prompt has both"),
        ({"prompt": "", "multi_modal_data": {"image": [one, two]}}, "embedded by itself here, and this prompt has 2"),
        ({"prompt": "", "multi_modal_data": {"audio": (np.zeros(160, np.float32), 16000)}}, "takes no sounds"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            llm.embed(prompt, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="token_embed is not for pictures"):
        llm.encode(shown(one), pooling_task="token_embed", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="13 tokens and the model takes 12"):
        llm.embed("cat " * 11, use_tqdm=False)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_decoders_that_see_pictures_pool_prompts_with_them(family: str, tmp_path: Path) -> None:
    """At the last token, behind the final norm. 2e-5: three layers of a decoder stand behind those of the tower."""
    folder = folders.complete(family, tiny.save(family, tmp_path))
    pictures = [tiny.drawn(family, number) for number in (0, 1)]
    marker = folders.MARKERS[family]
    prompts: list[Any] = [
        {"prompt": f"Hi {marker} and", "multi_modal_data": {"image": pictures[0]}},
        "Hi there",
        {"prompt": f"{marker} {marker}?", "multi_modal_data": {"image": pictures}},
    ]
    with LLM(folder, runner="pooling", max_num_batched_tokens=24, **SMALL) as llm:
        found = llm.embed(prompts, use_tqdm=False)
    model, seen = tiny.build(family), []
    hook = model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0][0, -1]))
    for each, shown in zip(found, (pictures[:1], [], pictures), strict=True):
        tiny.scores(model, family, each.prompt_token_ids, shown)
        own = embedders.unit(seen[-1])
        np.testing.assert_allclose(each.outputs.embedding, own, atol=2e-5)
    hook.remove()
