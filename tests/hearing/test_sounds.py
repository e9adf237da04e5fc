"""Prompts with sounds through the whole engine, beside transformers' models with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.cli.models import describe_listener
from ridgeline.core.plan.request import Request
from ridgeline.core.specs.stem import SoundStem
from ridgeline.models import model_config
from ridgeline.perf.footprint import parameters
from tests.driving import ask, rig
from tests.hearing import tiny
from tests.vision import tiny as pictures
from tests.vision.families.family import IMAGE

Folder = Callable[[str], Path]
Asked = tuple[Request, list[np.ndarray]]
MODELS = list(tiny.CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda name: tiny.save(name, tmp_path_factory.mktemp(name)))


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


def request(name: str, request_id: str, *parts: list[int] | np.ndarray, **params: object) -> Asked:
    asked = tiny.asked(name, request_id, *parts, **params)
    return asked, [part for part in parts if isinstance(part, np.ndarray)]


def requests(name: str) -> list[Asked]:
    a, b, c, d = tiny.sounds(name)
    return [
        request(name, "in the middle", words(7, 1), a, words(5, 2)),
        request(name, "first", b, words(3, 3)),
        request(name, "last", words(6, 4), c),
        request(name, "two", words(2, 5), a, words(1, 6), d, words(9, 6)),
        request(name, "again", b, words(4, 8)),
        request(name, "none", words(12, 10)),
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [16, 256])  # all sounds but one are cut by chunks of 16
def test_tokens_are_those_of_transformers(name: str, chunk: int, folder: Folder) -> None:
    with rig(folder(name), max_num_batched_tokens=chunk, max_model_len=512) as own:
        outcomes = own.run(*(each for each, _ in requests(name)))
        for each, given in requests(name):
            assert outcomes[each.id].tokens == tiny.by_transformers(name, each, given), each.id
        listener = own.runner.inserted._sounds
        assert listener is not None
        assert chunk < 256 or listener.encoded == 4  # each sound once, where the vectors of all are kept


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_hears_what_transformers_hears(name: str, folder: Folder) -> None:
    with rig(folder(name), device="cuda", block_size=16, max_num_batched_tokens=256, max_model_len=512) as own:
        outcomes = own.run(*(each for each, _ in requests(name)))
        for each, given in requests(name):
            assert outcomes[each.id].tokens == tiny.by_transformers(name, each, given), each.id


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["Qwen2Audio", *tiny.CONFORMERS])
def test_log_probabilities_are_those_of_transformers(name: str, folder: Folder) -> None:
    """To the rounding of float32, as those of Whisper (`tests/models/test_whisper.py`)."""
    asked, given = request(name, "scored", words(4, 1), tiny.sounds()[1], words(3, 2), logprobs=0)
    with rig(folder(name), max_num_batched_tokens=64, max_model_len=512) as own:
        found = own.run(asked)["scored"]
    ids = [*asked.prompt_token_ids, *found.tokens]
    want = tiny.scores(tiny.build(name), name, ids, given).log_softmax(-1)[len(asked.prompt_token_ids) - 1 : -1]
    for place, (token, logprob) in enumerate(found.scored):
        assert abs(float(want[place, token]) - logprob) < 3e-4


@pytest.mark.parametrize(
    "division",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param(
            {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 1}, marks=pytest.mark.thorough
        ),
    ],
)
def test_two_ranks_hear_what_one_hears(folder: Folder, division: dict[str, Any]) -> None:
    name = "Qwen2Audio"
    with rig(folder(name), max_num_batched_tokens=64, max_model_len=512, **division) as own:
        outcomes = own.run(*(each for each, _ in requests(name)[:2]))
        for each, given in requests(name)[:2]:
            assert outcomes[each.id].tokens == tiny.by_transformers(name, each, given), each.id


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted(name: str) -> None:
    model = tiny.build(name)
    spec = model_config({**model.config.to_dict(), "architectures": [type(model).__name__]}).spec
    assert spec.listener is not None
    tied = ("lm_head.",) if spec.tie_word_embeddings else ()
    total = sum(each.numel() for key, each in model.state_dict().items() if not key.startswith((*spec.unused, *tied)))
    keys = 32 * len(spec.listener.layers) * isinstance(spec.listener.stem, SoundStem)  # biases that are zero here
    assert parameters(spec).total == total + keys


@pytest.mark.parametrize(("name", "like"), [("Qwen2_5OmniThinker", "qwen2_5_vl"), ("Qwen3OmniMoeThinker", "qwen3_vl")])
def test_pictures_and_sounds_stand_in_one_prompt(name: str, like: str, folder: Folder) -> None:
    """A sound's positions just count, behind the farthest of a picture's."""
    pixels, samples = pictures.drawn(like, 1), tiny.sounds()[1]
    seen = pictures.asked(like, "", pixels).inserted[0]
    heard = tiny.asked(name, "", samples).inserted[0]
    before, between, behind = [*words(4, 1), 305], [306, *words(3, 2), 302], [303, *words(2, 3)]
    tokens = [*before, *[IMAGE] * seen.count, *between, *[tiny.AUDIO] * heard.count, *behind]
    places = len(before), len(before) + seen.count + len(between)
    parts = tuple(replace(each, start=start) for each, start in zip((seen, heard), places, strict=True))
    asked = replace(ask("mixed", tokens, max_tokens=6), inserted=parts)
    with rig(folder(name), max_num_batched_tokens=32, max_model_len=512) as own:
        found = own.run(asked)["mixed"].tokens
    model, ids = tiny.build(name), tokens
    given = {**tiny.inputs(name, [samples]), **pictures.inputs(like, [pixels])}
    for _ in range(6):
        row = torch.tensor([ids])
        model.rope_deltas = None
        with torch.inference_mode():
            scores = model(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0, -1]
        ids = [*ids, int(scores.argmax())]
    assert found == ids[-6:]


def test_the_command_that_describes_models_names_the_listener() -> None:
    model = tiny.build("Qwen2Audio")
    config = model_config({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert config.spec.listener is not None
    assert describe_listener(config.spec) == {
        "listener": f"2 layers, 32 wide, {config.spec.listener.parameters:,} parameters",
        "seconds of the longest sound": 30,
    }
