"""Pictures in prompts and chats of the offline API, from a folder as the hub would hold it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from PIL import Image

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.media.items import picture
from ridgeline.media.layout import Processor
from ridgeline.text.media_prompt import MediaPrompt, expanded, expanded_ids, prompt_with
from tests.driving import likeliest
from tests.media.make_corpus import saved
from tests.vision import folders, tiny
from tests.vision.families.family import IMAGE

TinyModel = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def loaded(family: str, tiny_vision: TinyModel, folder: Path) -> LLM:
    copytree(tiny_vision(family), folder, dirs_exist_ok=True)
    folders.complete(family, folder)
    return LLM(folder, dtype="float32", device="cpu", block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def llava(tiny_vision: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with loaded("llava", tiny_vision, tmp_path_factory.mktemp("llava")) as llm:
        yield llm


def written(family: str, llm: LLM, ids: list[int], *pictures: np.ndarray) -> str:
    """Return what transformers writes behind a prompt of the offline API."""
    model = tiny.build(family)
    found = likeliest(ids, 8, lambda known: tiny.scores(model, family, known, pictures))
    return llm.get_tokenizer().decode(found)


def processor_in(llm: LLM) -> Processor:
    return llm._jobs.media.processor()


def test_a_prompt_with_pictures_is_what_transformers_makes_of_it(llava: LLM) -> None:
    a, b = tiny.drawn("llava", 1), tiny.drawn("llava", 2)
    prompt = "What is <image> beside <image>?"
    forms = [[Image.fromarray(a), b], [picture(a), Image.fromarray(b).convert("RGBA")]]
    outputs = llava.generate([{"prompt": prompt, "multi_modal_data": {"image": form}} for form in forms], GREEDY)
    ids = list(outputs[0].prompt_token_ids)
    assert ids.count(IMAGE) == 32
    assert len(ids) == len("What is  beside ?") + 32
    for output in outputs:
        assert output.prompt_token_ids == ids
        assert output.outputs[0].text == written("llava", llava, ids, a, b)


def test_a_chat_with_pictures_and_its_second_turn(llava: LLM) -> None:
    a = tiny.drawn("llava", 3)
    first = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image.fromarray(a)}, words("Which?")]}
    scheduler = llava.engine.scheduler  # type: ignore[attr-defined]
    misses = scheduler.pictures.misses
    [one] = llava.chat([first], GREEDY)
    ids = list(one.prompt_token_ids)
    assert llava.get_tokenizer().decode(ids, skip_special_tokens=False).startswith("[user] <image><image>")
    assert one.outputs[0].text == written("llava", llava, ids, a)
    [two] = llava.chat(
        [first, {"role": "assistant", "content": "That."}, {"role": "user", "content": "And now?"}], GREEDY
    )
    assert two.outputs[0].text == written("llava", llava, list(two.prompt_token_ids), a)
    assert scheduler.pictures.misses == misses + 1  # the second turn runs no tower
    url = "data:image/png;base64," + base64.b64encode(saved(Image.fromarray(a), "png")).decode()
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, words("Which?")]}]
    text = [{"role": "user", "content": "Which?"}]
    outputs = llava.chat([[first], text, shown, shown], GREEDY)  # whose pictures threads read
    assert [each.outputs[0].text for each in (outputs[0], *outputs[2:])] == [one.outputs[0].text] * 3
    [alone] = llava.chat(text, GREEDY)
    assert outputs[1].outputs[0].text == alone.outputs[0].text


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_a_text_that_spells_a_placeholder_is_text(llava: LLM) -> None:
    a, tokenizer = tiny.drawn("llava", 4), llava.get_tokenizer()
    spelled = {"role": "user", "content": [{"type": "image", "image": a}, words("the tag <image> means")]}
    [output] = llava.chat([spelled], GREEDY)
    ids = list(output.prompt_token_ids)
    assert ids.count(IMAGE) == 16
    assert "the tag <image> means" in tokenizer.decode(ids)  # which leaves special tokens out
    assert output.outputs[0].text == written("llava", llava, ids, a)


def test_prompts_may_be_token_ids(llava: LLM) -> None:
    a, tokenizer = tiny.drawn("llava", 5), llava.get_tokenizer()
    text = "See <image> here."
    ids = tokenizer.encode(text)
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": a}}
    [output] = llava.generate([prompt], GREEDY)  # type: ignore[list-item]
    processor = processor_in(llava)
    assert list(output.prompt_token_ids) == expanded(text, tokenizer, processor, [picture(a)]).token_ids
    assert output.outputs[0].text == written("llava", llava, list(output.prompt_token_ids), a)


def test_what_does_not_fit_is_refused_in_one_sentence(llava: LLM) -> None:
    a = tiny.drawn("llava", 6)
    for prompt, said in (
        ({"prompt": "none", "multi_modal_data": {"image": a}}, "0 places for pictures .* and there are 1"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": a}}, "2 places"),
        ({"prompt": "<image>", "multi_modal_data": {"image": a.astype(np.float32)}}, "of uint8, got float32"),
        ({"prompt": "<image>", "multi_modal_data": {"sound": a}}, "multi_modal_data is"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": a}}, "0 places"),
    ):
        good = {"prompt": "<image>", "multi_modal_data": {"image": a}}
        for prompts in ([prompt], [good, prompt]):  # which are read by threads
            with pytest.raises(InvalidRequest, match=said):
                llava.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_keys_tell_pictures_salts_and_settings_apart(llava: LLM) -> None:
    tokenizer, processor = llava.get_tokenizer(), processor_in(llava)

    def key(pixels: np.ndarray) -> bytes:
        [own] = expanded("<image>", tokenizer, processor, [picture(pixels)]).inserted
        return own.key

    a = tiny.drawn("llava", 7)
    other = a.copy()
    other[0, 0, 0] ^= 1
    wide = np.zeros((28, 56, 3), np.uint8)
    keys = {key(a), key(other), key(wide), key(wide.reshape(56, 28, 3))}
    assert len(keys) == 4
    assert all(len(each) == 32 for each in keys)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_pictures_of_any_size(family: str, tiny_vision: TinyModel, tmp_path: Path) -> None:
    """A picture of an odd size is resized; transformers gets what the op makes of it."""
    with loaded(family, tiny_vision, tmp_path / family) as llm:
        a = np.random.default_rng(2).integers(0, 256, (21, 37, 3), dtype=np.uint8)
        processor = processor_in(llm)
        view = processor.layout(21, 37).views[0]
        seen = np.asarray(Image.fromarray(a).resize((view.width, view.height), Image.Resampling.BICUBIC))
        [output] = llm.chat([{"role": "user", "content": [{"type": "image", "image": a}, words("Which?")]}], GREEDY)
        ids = list(output.prompt_token_ids)
        assert ids.count(IMAGE) == view.width * view.height // 64
        assert output.outputs[0].text == written(family, llm, ids, seen)


def test_ids_and_texts_agree(llava: LLM) -> None:
    tokenizer, processor, a = llava.get_tokenizer(), processor_in(llava), picture(tiny.drawn("llava", 8))
    template = llava._chat_template
    assert template is not None
    messages = [{"role": "user", "content": [words("x"), {"type": "image"}]}]
    prompt = prompt_with(template, tokenizer, processor, messages, [a], add_generation_prompt=True)
    assert isinstance(prompt, MediaPrompt)
    same = expanded_ids(tokenizer.encode(template.render(messages)), tokenizer, processor, [a])
    assert same.token_ids == prompt.token_ids
    assert same.inserted == prompt.inserted
    [own] = prompt.inserted
    assert prompt.token_ids[own.start : own.end] == [IMAGE] * own.count
