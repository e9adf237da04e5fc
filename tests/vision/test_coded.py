"""Pictures that are tokens: a VQ-VAE's codes, beside transformers' Chameleon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.layers.encoder.coded import CodedTower
from ridgeline.models import model_config
from ridgeline.parallel.axis import Axis
from ridgeline.worker.pictures import TowerMemory
from tests.driving import rig
from tests.vision import tiny
from tests.vision.families.family import IMAGE
from tests.vision.families.others import CODES

TinyModel = Callable[[str], Path]
OWN = "chameleon"


def test_the_tokens_of_a_picture_are_those_of_transformers(tiny_vision: TinyModel) -> None:
    """They are what the worker keeps, eight bytes each."""
    pictures = [tiny.drawn(OWN, number) for number in range(3)]
    theirs = tiny.build(OWN).get_image_tokens(tiny.inputs(OWN, pictures)["pixel_values"])
    with rig(tiny_vision(OWN), max_num_batched_tokens=64) as own:
        for number, each in enumerate(pictures):
            request = tiny.asked(OWN, str(number), [5, 6], each)
            own.run(request)
            kept = own.runner.inserted.stored[request.inserted[0].name]
            assert kept[:, 0].tolist() == theirs[number].tolist()
            assert kept.dtype is torch.int64
    assert len(theirs.unique()) > 6
    assert not torch.equal(theirs[0], theirs[1])


def test_a_picture_is_read_as_its_tokens_are(tiny_vision: TinyModel) -> None:
    """A caller who knows the tokens may write them into a prompt."""
    a = tiny.drawn(OWN, 0)
    codes = tiny.build(OWN).get_image_tokens(tiny.inputs(OWN, [a])["pixel_values"])[0].tolist()
    with rig(tiny_vision(OWN), max_num_batched_tokens=64) as own:
        shown, spelled = tiny.asked(OWN, "shown", [5, 6], a, [7]), tiny.asked(OWN, "spelled", [5, 6, *codes, 7])
        outcomes = own.run(shown, spelled)
    assert outcomes["shown"].tokens == outcomes["spelled"].tokens == tiny.by_transformers(OWN, shown, [a])


def test_norms_behind_layers_write_what_transformers_writes(tiny_vision: TinyModel) -> None:
    """As in the larger size, here with heads that share no keys and with biases."""
    a, b = (tiny.drawn(OWN, number) for number in range(2))
    with rig(tiny_vision("chameleon_swin"), max_num_batched_tokens=16) as own:
        for name, parts in {"two": ([5, 6], a, [7], b, [8]), "none": ([5, 6, 9, 11],)}.items():
            each = tiny.asked("chameleon_swin", name, *parts)
            own.run(each)
            pictures = [part for part in parts if not isinstance(part, list)]
            assert own.outcomes[name].tokens == tiny.by_transformers("chameleon_swin", each, pictures)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_pictures_are_never_written(ranks: int, tiny_vision: TinyModel) -> None:
    """Others are as likely as in transformers, which is more than with all tokens in the sum."""
    a, oracle = tiny.drawn(OWN, 0), tiny.build(OWN)
    request = tiny.asked(OWN, "x", [5, 6], a, [7, 8], max_tokens=24, logprobs=0)
    with rig(tiny_vision(OWN), max_num_batched_tokens=64, tensor_parallel_size=ranks) as own:
        own.run(request)
        tokens, scored = zip(*own.outcomes["x"].scored, strict=True)
    ids = [*request.prompt_token_ids, *tokens]
    rows = torch.arange(len(ids) - len(tokens) - 1, len(ids) - 1), torch.tensor(tokens)
    wanted = tiny.scores(oracle, OWN, ids, [a]).log_softmax(-1)[rows]
    torch.testing.assert_close(torch.tensor(scored), wanted, rtol=1e-4, atol=1e-3)
    with torch.inference_mode():
        hidden = oracle.model(input_ids=torch.tensor([ids]), **tiny.inputs(OWN, [a])).last_hidden_state[0]
        every = oracle.lm_head(hidden).log_softmax(-1)
    assert (wanted - every[rows]).max() > 0.01
    assert not {*tokens} & {*range(IMAGE, IMAGE + CODES + 1)}


def test_ranks_take_the_codes_of_the_first(tiny_vision: TinyModel) -> None:
    """A rank that chose otherwise has the first one's tokens; the first one sends its own."""
    with rig(tiny_vision(OWN)) as own:
        tower = own.runner.decoder.tower
        assert isinstance(tower, CodedTower)
        patches = torch.rand(16, 48, generator=torch.Generator().manual_seed(0))
        plain = tower(patches, [(4, 4)])
        first = torch.arange(16.0)[:, None] % CODES
        sent = list[torch.Tensor]()
        for rank in range(2):

            def summed(x: torch.Tensor, others: torch.Tensor = first * rank) -> torch.Tensor:
                sent.append(x)
                return x + others

            tower.ranks = cast("Axis", SimpleNamespace(rank=rank, size=2, all_reduce=summed))
            found = tower(patches, [(4, 4)])
            assert torch.equal(found, tower.tokens[first[:, 0].long()][:, None] if rank else plain)
        assert torch.equal(tower.tokens[sent[0][:, 0].long()][:, None], plain)
        assert not sent[1].any()


def test_memory_is_planned_for_one_picture_and_for_tokens(tiny_vision: TinyModel) -> None:
    sizes = StepSizes(device_type="cpu", itemsize=4, max_tokens=32, max_seqs=4, longest=64)
    tower = model_config(json.loads((tiny_vision(OWN) / "config.json").read_text())).spec.tower
    assert tower is not None
    reserved = TowerMemory(tower).reserve(sizes)
    assert reserved.held == 8 * (4 * 32 + 16384)
    assert reserved.passing > 16384 * 48 * 8 + 4 * 16 * 16 * 64  # the rows, and a tensor at the full size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vocabulary_map": None}, "has no vocabulary_map"),
        ({"vocabulary_map": {"<image>": 300}}, "no token for code 0 of 16"),
        ({"vocabulary_map": {"IMGIMGAZ": 320}}, "tokens below 320"),
        ({"vq_config": {"double_latent": True}}, "double_latent"),
        ({"vq_config": {"base_channels": 48, "num_embeddings": 16}}, "multiples of 32"),
    ],
)
def test_configs_that_do_not_run_are_refused(changed: dict[str, object], words: str, tiny_vision: TinyModel) -> None:
    config = json.loads((tiny_vision(OWN) / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=words):
        model_config({**config, **changed})
