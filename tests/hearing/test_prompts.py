"""Sounds in prompts and chats, from a folder as the hub would hold it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from tests.hearing import folders, tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.complete(tiny.save(folders.NAME, tmp_path_factory.mktemp("hearing")))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", device="cpu", max_num_seqs=4, max_model_len=1024) as found:
        yield found


def test_a_prompt_with_sounds_is_what_transformers_makes_of_it(llm: LLM) -> None:
    a, b, *_ = tiny.sounds()
    text = "Hear <|audio_bos|><|AUDIO|><|audio_eos|> and <|AUDIO|>!"
    [found] = llm.generate([{"prompt": text, "multi_modal_data": {"audio": [(a, tiny.RATE), b]}}], GREEDY)
    ids = list(found.prompt_token_ids)
    assert ids.count(tiny.AUDIO) == tiny.vectors(folders.NAME, a) + tiny.vectors(folders.NAME, b)
    assert list(found.outputs[0].token_ids) == folders.written(ids, a, b)


def test_chats_take_sounds_and_files(llm: LLM, tmp_path: Path) -> None:
    samples = tiny.sounds()[0]
    (tmp_path / "said.wav").write_bytes(folders.spoken(samples))
    text = {"type": "text", "text": "What is said?"}
    for given in ((folders.heard(samples), tiny.RATE), str(tmp_path / "said.wav")):
        [found] = llm.chat([{"role": "user", "content": [{"type": "audio", "audio": given}, text]}], GREEDY)
        ids = list(found.prompt_token_ids)
        assert ids.count(tiny.AUDIO) == tiny.vectors(folders.NAME, samples)
        assert list(found.outputs[0].token_ids) == folders.written(ids, folders.heard(samples))


def test_what_the_model_does_not_take_is_refused_in_one_sentence(llm: LLM) -> None:
    picture, long = np.zeros((28, 28, 3), np.uint8), np.zeros(31 * tiny.RATE, np.float32)
    with pytest.raises(InvalidRequest, match="takes no pictures"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"image": picture}}], GREEDY)
    with pytest.raises(InvalidRequest, match=r"has 31\.0 s, and this model hears 30 s"):
        llm.generate([{"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": long}}], GREEDY)
    with pytest.raises(InvalidRequest, match="2 places for sounds"):
        llm.generate([{"prompt": "<|AUDIO|><|AUDIO|>", "multi_modal_data": {"audio": tiny.sounds()[0]}}], GREEDY)
