"""Prompts with videos through the whole engine, from frames to tokens, beside transformers' models."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import Request
from ridgeline.media.items import clip
from tests.driving import ask, disturbed, rig
from tests.vision import clips, folders, tiny
from tests.vision.clips import Part, asked, by_transformers, filmed
from tests.vision.families.family import IMAGE
from tests.vision.test_pictures import words

TinyModel = Callable[[str], Path]
DENSE = [each for each in clips.FAMILIES if not each.endswith("moe")]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def requests(family: str) -> list[tuple[Request, tuple[Part, ...]]]:
    """The clips have 3, 2 and 1 pairs of frames."""
    a, b, c, still = filmed(1), filmed(2, 4, height=32, width=40), filmed(3, 1), tiny.drawn("qwen2_vl", 1)
    made: dict[str, tuple[Part, ...]] = {
        "in the middle": (words(7, 1), a, words(5, 2)),
        "first": (b, words(3, 3)),
        "last, behind a picture": (still, words(6, 4), b),
        "two": (words(2, 5), a, words(1, 6), b, words(9, 6)),
        "one frame": (words(30, 7), c, words(4, 8), still, words(3, 9)),
    }
    if family.startswith("glm"):  # frames have the placeholder of pictures, so transformers takes one kind in a prompt
        made = {name: parts for name, parts in made.items() if not any(part is still for part in parts)}
    return [(asked(family, name, *parts), parts) for name, parts in made.items()]


@pytest.mark.parametrize("family", clips.FAMILIES)
@pytest.mark.parametrize("chunk", [8, 64])  # all clips are cut by chunks of 8
def test_tokens_are_those_of_transformers(family: str, chunk: int, tiny_vision: TinyModel) -> None:
    with rig(tiny_vision(family), max_num_batched_tokens=chunk) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
    for each, parts in requests(family):
        assert outcomes[each.id].tokens == by_transformers(family, each, parts), each.id


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_a_gpu_writes_what_transformers_writes(family: str, tiny_vision: TinyModel) -> None:
    with rig(tiny_vision(family), device="cuda", block_size=16, max_num_batched_tokens=64) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
    for each, parts in requests(family):
        assert outcomes[each.id].tokens == by_transformers(family, each, parts), each.id


@pytest.mark.parametrize("family", DENSE)
def test_preemption_and_aborts_change_no_token(family: str, tiny_vision: TinyModel) -> None:
    wanted = requests(family)
    with rig(tiny_vision(family), max_num_batched_tokens=16) as own:
        own.add(*(replace(each, id=f"{each.id}{again}") for again in ("", " again") for each, _ in wanted))
        left = disturbed(own, Random(1), gives_way=0.3, leaves=0.02)
    for each, parts in wanted:
        for name in {each.id, f"{each.id} again"} - left:
            assert own.outcomes[name].tokens == by_transformers(family, each, parts), name


@pytest.mark.parametrize("family", DENSE)
def test_a_second_turn_costs_no_work_of_the_tower(family: str, tiny_vision: TinyModel) -> None:
    """Pairs of frames with a time of their own are encoded one by one, so that no step needs all of a video."""
    a, turn = filmed(1), words(6, 4)
    first, second = (words(6, 1), a, words(4, 2)), (words(6, 1), a, words(4, 2), turn)
    with rig(tiny_vision(family)) as own:
        part, cache = own.runner.inserted, own.engine.scheduler.cache
        assert part._pictures is not None
        own.run(asked(family, "first", *first))
        assert part._pictures.encoded == (3 if family.startswith(("qwen3", "glm")) else 1)
        encoded, hits = part._pictures.encoded, cache.hit_tokens
        own.run(asked(family, "second", *second))
        assert part._pictures.encoded == encoded
        known = len(asked(family, "x", *first).prompt_token_ids) - 4 * family.startswith("qwen3_5")  # of states
        assert cache.hit_tokens - hits >= known // 4 * 4
        own.run(asked(family, "another", words(6, 1), filmed(9), words(4, 2)))
        assert part._pictures.encoded > encoded
    for name, parts in (("first", first), ("second", second)):
        assert own.outcomes[name].tokens == by_transformers(family, asked(family, name, *parts), parts)


@pytest.mark.parametrize("family", DENSE)
def test_scores_are_those_of_transformers(family: str, tiny_vision: TinyModel) -> None:
    with rig(tiny_vision(family), max_num_batched_tokens=16) as own:
        made = [(replace(e, params=e.params.replace(prompt_logprobs=0)), p) for e, p in requests(family)]
        own.run(*(each for each, _ in made))
    for each, parts in made:
        ids = list(each.prompt_token_ids)
        index = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        exact = clips.scores(tiny.build(family), family, ids, parts)[:-1].log_softmax(-1)[index]
        ours = torch.tensor([float(one.logprob) for one in own.outcomes[each.id].prompt])
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def qwen3(tiny_vision: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("qwen3")
    copytree(tiny_vision("qwen3_vl"), folder, dirs_exist_ok=True)
    folders.complete("qwen3_vl", folder)
    with LLM(
        folder,
        dtype="float32",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        limit_mm_per_prompt={"video": 2},
    ) as llm:
        yield llm


def described(llm: LLM, video: object, **more: Any) -> RequestOutput:
    prompt: Any = {"prompt": "What of <|video_pad|>?", "multi_modal_data": {"video": video}, **more}
    [output] = llm.generate([prompt], GREEDY)
    return output


def test_videos_of_the_offline_api(qwen3: LLM, tmp_path: Path) -> None:
    """An array with metadata is a video, of which the processor sees two frames a second; frames alone are all seen."""
    film = np.random.default_rng(5).integers(0, 256, (16, 16, 24, 3), dtype=np.uint8)
    metadata = {"fps": 4.0, "total_num_frames": 16}
    output = described(qwen3, (film, metadata))
    text = qwen3.get_tokenizer().decode(list(output.prompt_token_ids), skip_special_tokens=False)
    assert [part.split(" seconds>")[0] for part in text.split("<") if "seconds" in part] == ["0.2", "1.2", "2.5", "3.5"]
    seen = np.linspace(0, 15, 8).round().astype(int)  # as transformers' processor chooses them
    part = clip(film[seen], seen / 4, 4.0, 16)
    assert output.outputs[0].token_ids == by_transformers("qwen3_vl", output_request(output), [part])
    chosen = described(qwen3, (film[seen], metadata | {"frames_indices": list(seen)}))
    given = described(qwen3, (film[seen], {"fps": 2.0, "do_sample_frames": False}))
    assert chosen.prompt_token_ids == output.prompt_token_ids
    assert chosen.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(given.prompt_token_ids) == len(output.prompt_token_ids)
    frames = described(qwen3, [Image.fromarray(each) for each in film[:3]])
    assert frames.prompt_token_ids == described(qwen3, film[:3]).prompt_token_ids
    assert list(frames.prompt_token_ids).count(clips.VIDEO) == 2 * 6
    less = described(qwen3, (film, metadata), mm_processor_kwargs={"num_frames": 4})
    assert list(less.prompt_token_ids).count(clips.VIDEO) == 2 * 6
    small = described(qwen3, (film, metadata), mm_processor_kwargs={"max_pixels": 8 * 64, "min_pixels": 64})
    assert list(small.prompt_token_ids).count(clips.VIDEO) == 4


def output_request(output: RequestOutput) -> Request:
    return ask("x", list(output.prompt_token_ids))


def test_a_chat_about_a_file(qwen3: LLM, tmp_path: Path) -> None:
    """Pictures and videos of a prompt come by kind, and in a chat in their order."""
    from tests.media.make_corpus import coded_video  # PyAV may be missing where GPUs run the other tests

    file = tmp_path / "film.mp4"
    file.write_bytes(coded_video("libx264", "mp4", 24, 24, 16))
    url = "data:video/mp4;base64," + b64encode(file.read_bytes()).decode()
    still = tiny.drawn("qwen3_vl", 0)
    asked = [{"type": "video", "video": file}, {"type": "image", "image": still}, {"type": "text", "text": "Why?"}]
    [one] = qwen3.chat([{"role": "user", "content": asked}], GREEDY)
    [two] = qwen3.chat(
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, *asked[1:]]}], GREEDY
    )
    assert one.prompt_token_ids == two.prompt_token_ids
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    ids = list(one.prompt_token_ids)
    assert ids.count(clips.VIDEO) == 2 * 6  # 4 of 24 frames of 16 x 24
    assert ids.index(clips.VIDEO) < ids.index(IMAGE)
    text = "a <|video_pad|> b <|image_pad|> c"
    data = {"image": still, "video": file}
    [mixed] = qwen3.generate([{"prompt": text, "multi_modal_data": data}], GREEDY)  # type: ignore[list-item]
    assert list(mixed.prompt_token_ids).count(clips.VIDEO) == 2 * 6


def test_what_is_wrong_with_a_video_is_said(qwen3: LLM) -> None:
    film = np.zeros((4, 16, 24, 3), np.uint8)
    for video, more, said in (
        (film.astype(np.float32), {}, "of uint8, or a list of pictures of one size, got float32"),
        ((film, {"fps": 2, "frames_indices": [1, 2]}), {}, "frames_indices of its 4 frames"),
        ([film] * 3, {}, "3 items of video, of at most 2"),
        ([film] * 2, {}, r"1 places for videos \('<\|video_pad\|>'\), and there are 2"),
        (b"no video", {}, "video"),
        (film, {"mm_processor_kwargs": {"patch_size": 3}}, "'patch_size' cannot be set in a request"),
        (film, {"mm_processor_kwargs": {"max_pixels": 1 << 40}}, "max_pixels is a number from 1 to"),
        (film, {"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "exclude each other"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            described(qwen3, video, **more)


def test_a_tower_may_be_left_out(tiny_vision: TinyModel) -> None:
    each = asked("qwen3_5", "text", words(20, 3))
    with rig(tiny_vision("qwen3_5"), hf_overrides={"vision_config": None}) as own:
        assert own.runner.decoder.tower is None
        assert own.run(each)["text"].tokens == by_transformers("qwen3_5", each, [])
