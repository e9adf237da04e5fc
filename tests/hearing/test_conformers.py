"""Conformers that hear, beside transformers' modules with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.core.specs.listener import ListenerSpec
from ridgeline.core.specs.spectra import GEMMA_3N
from ridgeline.media.items import picture, sound
from ridgeline.media.processors import processor_of
from ridgeline.models import model_config
from ridgeline.models.config import Config
from ridgeline.models.gemma_sounds import gemma3n_listener, gemma4_listener
from ridgeline.models.phi4_sounds import phi4_listener
from ridgeline.text.media_prompt import placed_items
from tests.driving import ask, rig
from tests.hearing import tiny
from tests.vision import tiny as pictures
from tests.vision.families.family import IMAGE

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda name: tiny.save(name, tmp_path_factory.mktemp(name)))


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", tiny.CONFORMERS)
def test_bfloat16_is_as_near_as_transformers_is(name: str, folder: Folder) -> None:
    """Both differ from float32, and we by at most twice as much on average, over prompts with sounds of all lengths."""
    a, b, c, d = tiny.sounds(name)
    prompts = ([words(7, 1), a, words(5, 2), d], [b, words(9, 3)], [words(4, 4), c, words(2, 5), a, words(3, 6)])
    asked = [tiny.asked(name, str(n), *parts, prompt_logprobs=0) for n, parts in enumerate(prompts)]
    with rig(folder(name), dtype="bfloat16", max_num_batched_tokens=96, max_model_len=512) as own:
        own.run(*asked)
    oracle = tiny.build(name)
    rounded, we, they = deepcopy(oracle).to(torch.bfloat16), [], []
    for each, parts in zip(asked, prompts, strict=True):
        ids, given = list(each.prompt_token_ids), [part for part in parts if isinstance(part, np.ndarray)]
        index = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        exact, theirs = (
            tiny.scores(model, name, ids, given)[:-1].float().log_softmax(-1)[index] for model in (oracle, rounded)
        )
        ours = torch.tensor([float(one.logprob) for one in own.outcomes[each.id].prompt])
        we.append((ours - exact).abs())
        they.append((theirs - exact).abs())
    assert torch.cat(we).mean() <= 2 * torch.cat(they).mean() + 1e-3


def test_a_long_sound_is_heard_by_rows_of_positions(folder: Folder) -> None:
    """Its last row is filled up with zeros, which are seen too; another sound beside it changes nothing."""
    draw = np.random.default_rng(3)
    long, short = (draw.standard_normal(n).astype(np.float32) * 0.1 for n in (42 * tiny.RATE, tiny.RATE))
    model = tiny.build("Phi4Multimodal")
    with rig(folder("Phi4Multimodal")) as own, torch.inference_mode():
        listener = own.runner.decoder.listener
        assert listener is not None
        samples, frames = torch.zeros(2, len(long) + 800), []
        for row, each in zip(samples, (long, short), strict=True):
            row[: len(each)] = torch.from_numpy(each)
            frames.append(listener.spec.stem.frames_of(len(each)))
        found = listener(samples, frames).split([tiny.vectors("Phi4Multimodal", each) for each in (long, short)])
        for each, ours in zip((long, short), found, strict=True):
            row = torch.full((1, len(ours)), tiny.AUDIO)
            torch.testing.assert_close(ours, tiny.embedded_by_phi(model, row, [each])[0], rtol=1e-4, atol=2e-4)


def test_sounds_beside_pictures_have_a_projector_of_their_own(folder: Folder) -> None:
    """The same sound in a prompt without a picture has other vectors, also if both are asked for at once."""
    name, like = "Phi4Multimodal", "phi4_multimodal"
    pixels, samples = pictures.drawn(like, 0), tiny.sounds()[1]
    seen, heard = pictures.asked(like, "", pixels).inserted[0], tiny.asked(name, "", samples).inserted[0]
    assert heard.heard is not None
    beside = replace(heard, key=b"b" * 16, name="beside", heard=replace(heard.heard, beside=True))
    before, between, behind = words(4, 1), words(3, 2), words(2, 3)
    tokens = [*before, *[IMAGE] * seen.count, *between, *[tiny.AUDIO] * heard.count, *behind]
    places = len(before), len(before) + seen.count + len(between)
    parts = tuple(replace(each, start=start) for each, start in zip((seen, beside), places, strict=True))
    mixed = replace(ask("mixed", tokens, max_tokens=6), inserted=parts)
    alone = tiny.asked(name, "alone", before, samples, behind, max_tokens=6)
    with rig(folder(name), max_num_batched_tokens=512, max_model_len=512) as own:
        found = own.run(mixed, alone)
    assert found["alone"].tokens == tiny.by_transformers(name, alone, [samples], tokens=6)
    model, ids = tiny.build(name), tokens
    for _ in range(6):
        row = torch.tensor([ids])
        with torch.inference_mode():
            x = model.model.embed_tokens_extend.image_embed(
                row, model.model.embed_tokens(row), **_picture(like, pixels)
            )
            spoken = tiny.embedded_by_phi(model, row, [samples], "vision")
            x = torch.where((row == tiny.AUDIO)[..., None], spoken, x)
            ids = [*ids, int(model(inputs_embeds=x).logits[0, -1].argmax())]
    assert found["mixed"].tokens == ids[-6:]


def _picture(like: str, pixels: np.ndarray) -> dict[str, Any]:
    given = pictures.inputs(like, [pixels])
    return {key: given[key] for key in ("image_pixel_values", "image_sizes", "image_attention_mask")}


def _processor(kind: str, **own: Any) -> Any:
    config = {"model_type": kind, "audio_config": {}, "vision_config": {}}
    files = {"config.json": config, "processor_config.json": {"feature_extractor": own}}
    return processor_of(files, lambda text: ())


@pytest.mark.parametrize("samples", [481, 640, 1600, 16_000, 16_001, 16_161, 30 * 16_000 - 1])
def test_vectors_are_counted_as_transformers_counts_them(samples: int) -> None:
    heard = np.random.default_rng(0).standard_normal(samples).astype(np.float32)
    gemma = transformers.Gemma4AudioFeatureExtractor()([heard], return_tensors="pt").input_features_mask[0]
    layout = _processor("gemma4").sound(samples)
    assert layout.pieces == ("<|audio>", int(gemma[::2][::2].sum()), "<audio|>")
    phi = transformers.Phi4MultimodalFeatureExtractor()(heard, sampling_rate=16_000, return_tensors="pt")
    layout = _processor("phi4_multimodal").sound(samples)
    assert layout.pieces == (int(phi.audio_embed_sizes),)
    assert _processor("phi4_multimodal").sound(samples, pictures=1).beside
    if samples > 512:
        layout = _processor("gemma3n").sound(samples)
        assert layout.pieces == ("\n\n<start_of_audio>", 189, "\n\n")
        found = transformers.Gemma3nAudioFeatureExtractor()([heard], return_tensors="pt").input_features_mask[0]
        assert found.all()
        assert len(found) == GEMMA_3N.frames_of(samples)


def test_a_prompt_tells_its_sounds_of_its_pictures() -> None:
    """So their vectors, which another projector makes, have other names."""
    rules, heard = _processor("phi4_multimodal"), sound(tiny.sounds()[0], tiny.RATE)
    [alone], [_, beside] = (
        placed_items(rules, [heard]),
        placed_items(rules, [picture(np.zeros((9, 9, 3), "u1")), heard]),
    )
    [[(first, key)], [(second, other)]] = alone.seen, beside.seen
    assert isinstance(first, HeardSound)
    assert isinstance(second, HeardSound)
    assert (first.beside, second.beside) == (False, True)
    assert key != other
    assert alone.layout.pieces == beside.layout.pieces


def test_sounds_and_files_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"has 31\.0 s, and this model hears 30 s"):
        _processor("gemma4").sound(31 * tiny.RATE)
    for kind, least in (("gemma4", 161), ("phi4_multimodal", 400), ("gemma3n", 513)):
        assert _processor(kind).sound(least).placeholders == (189 if kind == "gemma3n" else 1)
        with pytest.raises(InvalidRequest, match=f"has {least - 1} samples, which are too few"):
            _processor(kind).sound(least - 1)
    with pytest.raises(InvalidConfig, match=r"mel_floor is 0\.1"):
        _processor("gemma4", mel_floor=0.1)
    files = {"config.json": {"model_type": "gemma3n"}, "processor_config.json": {"audio_seq_length": 100}}
    with pytest.raises(InvalidConfig, match="audio_seq_length is 100"):
        processor_of(files, lambda text: ())
    with pytest.raises(InvalidRequest, match="sees no pictures"):
        _processor("gemma3n").layout(8, 8)
    with pytest.raises(InvalidConfig, match="hop_length is 80"):
        _processor("phi4_multimodal", hop_length=80)


@pytest.mark.parametrize(
    ("listener", "name", "value"),
    [
        (phi4_listener, "chunk_size", 18),
        (phi4_listener, "bias_symmetric", True),
        (phi4_listener, "time_reduction", 6),
        (phi4_listener, "ext_pw_out_channel", 512),
        (phi4_listener, "num_blocks", 2**24),
        (gemma4_listener, "attention_context_right", 2),
        (gemma4_listener, "attention_context_left", 12),
        (gemma4_listener, "gradient_clipping", 10.0),
        (gemma4_listener, "subsampling_conv_channels", [64, 32]),
        (gemma4_listener, "hidden_act", "relu"),
    ],
)
def test_other_conformers_are_refused(
    listener: Callable[[Config, int], ListenerSpec], name: str, value: object
) -> None:
    with pytest.raises(ModelLoadError, match=name):
        listener(Config({name: value}), 64)


def test_sizes_are_those_of_the_published_models() -> None:
    """As transformers' classes count them, and with the numbers that standardize Phi-4's bands."""
    phi = phi4_listener(Config({}), 3072)
    assert phi.parameters == 466_432_256 + 2 * 80
    with torch.device("meta"):
        tower = transformers.Gemma4AudioModel(transformers.Gemma4AudioConfig())
    gemma, bounds = gemma4_listener(Config({}), 2304), sum(each.numel() for each in tower.buffers() if each.ndim == 0)
    capped = sum("softcap" in key for key, _ in tower.named_buffers())
    assert gemma.parameters == sum(each.numel() for each in tower.parameters()) + 1536 * 2304 + bounds - capped


def test_sizes_and_refusals_of_gemma_3n() -> None:
    whole = {"audio_config": {}, "text_config": {"vocab_size": 262_400}}
    with torch.device("meta"):
        tower = transformers.Gemma3nAudioEncoder(transformers.Gemma3nAudioConfig())
    own = 128 * 1536 + 2 * 1536 + 1536 * 2048  # the table, two norms and the map of what embeds sounds
    found = gemma3n_listener(Config(whole), 2048)
    assert found.parameters == sum(each.numel() for each in tower.parameters()) + own
    for name, value in (
        ("sscp_conv_stride_size", [[2, 1], [2, 2]]),
        ("sscp_conv_kernel_size", 3),
        ("attention_context_right", 1),
        ("vocab_size", 64),
    ):
        entry = {f"conf_{name}" if name.startswith("att") else name: value}
        with pytest.raises(ModelLoadError, match=name):
            gemma3n_listener(Config({**whole, "audio_config": entry}), 2048)
    with pytest.raises(ModelLoadError, match="audio_soft_tokens_per_image"):
        gemma3n_listener(Config({**whole, "audio_soft_tokens_per_image": 100}), 2048)


def test_a_model_without_a_part_for_sounds_takes_none() -> None:
    model = pictures.build("gemma4_e2b")
    assert model_config({**model.config.to_dict(), "architectures": [type(model).__name__]}).spec.listener is None
    files = {"config.json": {"model_type": "gemma4", "audio_config": None}}
    assert not hasattr(processor_of(files, lambda text: ()), "sound_marker")
