"""A tower that reads the prompt beside a picture (InstructBLIP), from a folder as the hub would hold it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from string import ascii_letters

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.models import model_config
from ridgeline.text.media_folder import FolderProcessors
from ridgeline.text.tokenizer import Tokenizer
from tests.driving import likeliest, rig
from tests.vision import folders, tiny
from tests.vision.families.family import IMAGE

TinyModel = Callable[[str], Path]
NAME = "instructblip"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def words(folder: Path) -> None:
    """Put the tower's tokenizer there: of 47 letters, between two further tokens."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2} | {each: n for n, each in enumerate(ascii_letters[:47], 3)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def folder(tiny_vision: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(NAME)
    copytree(tiny_vision(NAME), found, dirs_exist_ok=True)
    folders.complete("llava", found)
    (found / "processor_config.json").write_text(json.dumps({"processor_class": "InstructBlipProcessor"}))
    how = tiny.FAMILIES[NAME].patching
    image = {"image_mean": how.mean, "image_std": how.std, "size": {"height": 28, "width": 28}}
    (found / "preprocessor_config.json").write_text(json.dumps(image))
    words(found / "qformer_tokenizer")
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", device="cpu", block_size=4, max_num_seqs=4, max_num_batched_tokens=64) as found:
        yield found


def written(folder: Path, ids: list[int], text: str, *pictures: np.ndarray) -> list[int]:
    """Return what transformers writes, with the text as the tower reads it."""
    model = tiny.build(NAME)
    read = Tokenizer.from_folder(folder / "qformer_tokenizer").encode(text)
    given = tiny.inputs(NAME, pictures) | {"qformer_input_ids": torch.tensor([read] * len(pictures))}
    given.pop("qformer_attention_mask")

    def scores(known: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(input_ids=torch.tensor([known]), **given).logits[0]
        return found

    return likeliest(ids, 6, scores)


def test_the_tower_reads_the_prompt(llm: LLM, folder: Path) -> None:
    """As text, and as tokens: a picture's vectors are kept for each text apart."""
    a, b = tiny.drawn(NAME, 0), tiny.drawn(NAME, 0)[::-1].copy()
    held = llm.engine.scheduler.pictures  # type: ignore[attr-defined]
    before = held.misses
    asked = [("<image>What is that", [a]), ("<image>Which", [a]), ("one <image> or <image>", [a, b])]
    for text, pictures in asked:
        [found] = llm.generate([{"prompt": text, "multi_modal_data": {"image": pictures}}], GREEDY)
        ids = list(found.prompt_token_ids)
        assert ids.count(IMAGE) == 6 * len(pictures)
        want = written(folder, ids, text.replace("<image>", ""), *pictures)
        assert list(found.outputs[0].token_ids) == want, text
    assert held.misses == before + 4
    tokens = llm.get_tokenizer().encode(asked[0][0], add_special_tokens=False)
    prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": a}}
    [again] = llm.generate([prompt], GREEDY)
    want = written(folder, list(again.prompt_token_ids), "What is that", a)
    assert list(again.outputs[0].token_ids) == want
    assert held.misses == before + 4  # the text is that of the first


def test_views_without_a_text_run_beside_others(folder: Path) -> None:
    """Each picture's vectors are those of a run by itself, whatever the others' texts are."""
    a, b = (tiny.shown(NAME, tiny.drawn(NAME, number)) for number in range(2))
    asked = {"none": replace(a, text=()), "some": replace(b, text=(1, 7, 9, 2)), "one": replace(a, text=(4,))}
    with rig(folder) as own:
        pictures = own.runner.inserted._pictures
        assert pictures is not None
        together, apart = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        with torch.inference_mode():
            pictures.encode(asked, together)
            for name, each in asked.items():
                pictures.encode({name: each}, apart)
    for name, each in together.items():
        torch.testing.assert_close(each, apart[name], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together["none"], together["one"], atol=1e-2)


def test_texts_that_are_too_long_are_refused_beside_pictures_alone(llm: LLM) -> None:
    long = "a" * 23
    with pytest.raises(InvalidRequest, match="has 25 tokens of the tower's tokenizer, which reads 24"):
        llm.generate([{"prompt": f"<image>{long}", "multi_modal_data": {"image": tiny.drawn(NAME, 0)}}], GREEDY)
    assert len(llm.generate([long], GREEDY)[0].outputs[0].token_ids) == 6


def test_a_folder_without_the_towers_tokenizer_sees_nothing(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    rmtree(tmp_path / "qformer_tokenizer")
    assert FolderProcessors.of(tmp_path, Tokenizer.from_folder(tmp_path)) is None


def test_a_folder_with_wrong_numbers_for_pictures_sees_nothing(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer, path = Tokenizer.from_folder(tmp_path), tmp_path / "preprocessor_config.json"
    for changed in {}, {"size": {"height": 0, "width": "x"}}, {"size": 1.5}, {"size": "x"}:
        path.write_text(json.dumps({**json.loads((folder / path.name).read_text()), **changed}))
        assert (FolderProcessors.of(tmp_path, tokenizer) is None) == bool(changed)


def test_other_text_models_are_refused() -> None:
    config = {**tiny.build(NAME).config.to_dict(), "architectures": ["InstructBlipForConditionalGeneration"]}
    with pytest.raises(ModelLoadError, match="an InstructBLIP of 't5'"):
        model_config({**config, "text_config": {"model_type": "t5"}})
