"""Pictures that layers of cross attention see, through the whole engine, beside transformers' Llama 3.2 Vision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.request import Request
from ridgeline.media.items import picture
from ridgeline.media.processors import processor_of
from ridgeline.perf.footprint import parameters
from ridgeline.text.media_prompt import expanded
from tests.driving import disturbed, rig
from tests.vision import crossed
from tests.vision.test_pictures import words

Asked = tuple[Request, list[np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crossed.save(tmp_path_factory.mktemp("mllama"))


def request(name: str, *parts: list[int] | np.ndarray, **params: object) -> Asked:
    return crossed.asked(name, *parts, **params), [part for part in parts if isinstance(part, np.ndarray)]


def requests() -> list[Asked]:
    a, b, c, d, e = (crossed.drawn(number) for number in range(5))
    return [
        request("first", a, words(5, 2)),
        request("of two tiles behind words", words(7, 1), b, words(5, 3)),
        request("last", words(6, 4), c),
        request("none", words(12, 10)),
        request("two, apart", words(2, 5), d, words(3, 6), e, words(9, 6)),
        request("three, two of them together", words(2, 5), a, b, words(4, 6), c, words(3, 6)),
        request("long", words(40, 7), b, words(30, 8), a, words(3, 9)),
    ]


@pytest.mark.parametrize("chunk", [8, 64])
def test_tokens_are_those_of_transformers(chunk: int, folder: Path) -> None:
    with rig(folder, max_num_batched_tokens=chunk) as own:
        outcomes = own.run(*(each for each, _ in requests()))
        for each, pictures in requests():
            assert outcomes[each.id].tokens == crossed.by_transformers(each, pictures), each.id


@pytest.mark.gpu
def test_a_gpu_writes_what_transformers_writes(folder: Path) -> None:
    """Rows that decode replay graphs, which find the pictures' keys by the slot."""
    with rig(folder, device="cuda", block_size=16, max_num_batched_tokens=64) as own:
        outcomes = own.run(*(each for each, _ in requests()))
        for each, pictures in requests():
            assert outcomes[each.id].tokens == crossed.by_transformers(each, pictures), each.id


def test_two_ranks_see_what_one_sees(folder: Path) -> None:
    """Each has the whole tower, and half of the heads of the layers that see it."""
    with rig(folder, max_num_batched_tokens=16, tensor_parallel_size=2) as own:
        outcomes = own.run(*(each for each, _ in requests()))
        for each, pictures in requests():
            assert outcomes[each.id].tokens == crossed.by_transformers(each, pictures), each.id


def test_preemption_and_aborts_change_no_token(folder: Path) -> None:
    wanted = requests()
    with rig(folder, max_num_batched_tokens=16) as own:
        own.add(*(replace(each, id=f"{each.id}{again}") for again in ("", " again") for each, _ in wanted))
        left = disturbed(own, Random(1), gives_way=0.3, leaves=0.02)
        for each, pictures in wanted:
            for name in {each.id, f"{each.id} again"} - left:
                assert own.outcomes[name].tokens == crossed.by_transformers(each, pictures), name
        assert own.engine.scheduler.cache.usage == 0


def test_pictures_are_shared_by_what_they_show(folder: Path) -> None:
    """A picture enters the hash of its prefix though one token stands for it, and a run of pictures is encoded once."""
    a, b = crossed.drawn(1), crossed.drawn(4)
    with rig(folder, max_num_batched_tokens=64) as own:
        cache, part = own.engine.scheduler.cache, own.runner.inserted.pictures
        assert part is not None

        def run(name: str, *parts: list[int] | np.ndarray) -> tuple[int, int]:
            encoded, hits = part.encoded, cache.hit_tokens
            each, pictures = request(name, *parts)
            own.run(each)
            assert own.outcomes[name].tokens == crossed.by_transformers(each, pictures)
            return part.encoded - encoded, cache.hit_tokens - hits

        assert run("first", words(6, 1), a, words(4, 2)) == (1, 0)
        assert run("again", words(6, 1), a, words(4, 2)) == (0, 6 + 1 + 3)
        assert run("other words before", words(5, 3), a, words(4, 2)) == (0, 0)
        assert run("another picture", words(6, 1), b, words(4, 2)) == (1, 4)
        assert run("the next turn", words(6, 1), a, words(4, 2), b, words(2, 5)) == (0, 6 + 1 + 4)
        assert run("both together", words(6, 1), a, b, words(2, 5)) == (2, 4)
        cache.sounds.forget()
        assert run("forgotten", words(6, 1), a, words(9, 9)) == (1, 4)
        cache.forget_prefixes()
        assert run("after all", words(6, 1), a, words(9, 9)) == (1, 0)


def test_other_tenants_share_nothing(folder: Path) -> None:
    each, _ = request("x", words(5, 1), crossed.drawn(1), words(3, 2))
    with rig(folder, max_num_batched_tokens=64) as own:
        for salt in ("a", "b", "a"):
            own.run(replace(each, id=f"{salt}{len(own.outcomes)}", cache_salt=salt))
        assert own.runner.inserted.pictures is not None
        assert own.runner.inserted.pictures.encoded == 2


def test_several_completions_share_pictures(folder: Path) -> None:
    each, pictures = request("x", words(7, 1), crossed.drawn(1), words(5, 2))
    with rig(folder, max_num_batched_tokens=64) as own:
        own.run(*(replace(each, id=str(index)) for index in range(3)))
        assert own.runner.inserted.pictures is not None
        assert own.runner.inserted.pictures.encoded == 1
        assert all(found.tokens == crossed.by_transformers(each, pictures) for found in own.outcomes.values())


def test_the_first_tile_and_the_rest_of_a_picture_matter(folder: Path) -> None:
    """So that the oracle says something: other pixels, and other tiles, give other tokens."""
    a, rest = crossed.drawn(4), crossed.drawn(4)
    rest[12:, 12:] = 255 - rest[12:, 12:]
    first, second = (crossed.by_transformers(*request("x", words(5, 1), each, words(3, 2))) for each in (a, rest))
    assert first != second


def test_more_pictures_than_there_may_be_are_refused(folder: Path) -> None:
    many = [part for _ in range(9) for part in (crossed.drawn(0), words(2, 1))]
    with rig(folder) as own, pytest.raises(InvalidRequest, match="9 pictures in 9 places, whose 106 keys"):
        own.engine.check(crossed.asked("x", *many))
    with rig(folder) as own, pytest.raises(InvalidRequest, match="33 pictures in 1 places"):
        own.engine.check(crossed.asked("x", *[crossed.drawn(0)] * 33, words(2, 1)))


@pytest.mark.parametrize("setting", [{"enable_lora": True}, {"kv_offloading_size": 0.01}, {"cpu_offload_gb": 0.001}])
def test_what_does_not_go_with_cross_attention_is_refused(setting: dict[str, object], folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="cross attention"), rig(folder, **setting):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores_are_those_of_transformers(dtype: torch.dtype, folder: Path) -> None:
    """In bfloat16 both differ from float32, and we by at most twice as much on average."""
    oracle = crossed.build()
    rounded = oracle if dtype is torch.float32 else crossed.rounded(dtype)
    with rig(folder, dtype=str(dtype).removeprefix("torch."), max_num_batched_tokens=16) as own:
        asked = [(replace(e, params=e.params.replace(prompt_logprobs=0)), p) for e, p in requests()]
        own.run(*(each for each, _ in asked))
    for each, pictures in asked:
        ids = list(each.prompt_token_ids)
        index = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        exact = crossed.scores(oracle, ids, pictures, len(ids))[:-1].log_softmax(-1)[index]
        ours = torch.tensor([float(one.logprob) for one in own.outcomes[each.id].prompt])
        if dtype is torch.float32:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)
            continue
        theirs = crossed.scores(rounded, ids, pictures, len(ids))[:-1].float().log_softmax(-1)[index]
        assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean() + 1e-3, each.id


def test_sizes_are_those_of_transformers(folder: Path) -> None:
    with rig(folder) as own:
        spec = own.runner.decoder.spec
    assert parameters(spec).total == sum(each.numel() for each in crossed.build().parameters())


def test_prompts_have_one_token_for_a_picture(folder: Path) -> None:
    """The special token may lie behind the vocabulary, so a known id takes its place."""

    class Letters:
        added: ClassVar[dict[str, int]] = {"<|image|>": 400}

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            parts = text.split("<|image|>")
            ids = [[ord(letter) for letter in part] for part in parts]
            return [token for n, part in enumerate(ids) for token in ([400, *part] if n else part)]

    files = {
        "config.json": {**crossed.CONFIG, "model_type": "mllama"},
        "preprocessor_config.json": crossed.PREPROCESSOR,
    }
    pixels = crossed.drawn(1)
    prompt = expanded("ab<|image|>cd", Letters(), processor_of(files, Letters().encode), [picture(pixels)])  # type: ignore[arg-type]
    assert prompt.token_ids == [97, 98, 0, 99, 100]
    [own] = prompt.inserted
    each, pictures = request("x", [97, 98], pixels, [99, 100])
    assert (own.start, own.count, own.across) == (2, 1, each.inserted[0].across)
    asked = replace(each, prompt_token_ids=tuple(prompt.token_ids), inserted=prompt.inserted)
    with rig(folder, max_num_batched_tokens=64) as rigged:
        assert rigged.run(asked)["x"].tokens == crossed.by_transformers(each, pictures)
