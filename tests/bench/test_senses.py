"""Pictures and sentences that two shipped models learn from: what captions say is what pixels show, what is held out
is never drawn or said in training, and features are those of transformers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from ridgeline.kernels.small.log_mel.op import mel_filters
from ridgeline_bench.scripts.senses import beside, chunks, drawn, hear, networks, see, split, spoken
from ridgeline_bench.scripts.senses.drawn import Artist, DrawnPicture, facts_of, right_facts


def color_names(picture: DrawnPicture) -> np.ndarray:
    """The nearest of the colors and the picture's ground, for each pixel: a name, or "" for the ground."""
    pixels = np.asarray(picture.image, dtype=np.int32)
    names = ["", *drawn.COLORS]
    ground = np.median(pixels.reshape(-1, 3), 0)
    palette = np.array([ground, *drawn.COLORS.values()])
    return np.array(names)[((pixels[:, :, None] - palette) ** 2).sum(-1).argmin(-1)]


@pytest.mark.parametrize("measuring", [False, True])
def test_captions_of_shapes_say_where_which_color_is(measuring: bool) -> None:
    artist, random = Artist(measuring=measuring), Random(1)
    for _ in range(40):
        picture = artist.draw(random, "shapes")
        facts = facts_of(picture.caption)
        names = color_names(picture)
        for number, place in enumerate(drawn.PLACES):
            row, column = divmod(number, 3)
            cell = names[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            found = {color for color in drawn.COLORS if (cell == color).sum() > 14}
            told = {color for color in drawn.COLORS if f"{place} is {color}" in facts}
            assert told <= found
            if not told:
                assert (cell == "").mean() > 0.98


def test_captions_of_bars_say_how_high_which_color_is() -> None:
    artist, random = Artist(), Random(2)
    for _ in range(40):
        picture = artist.draw(random, "bars")
        pixels = color_names(picture)
        for color, height in re.findall(r"(\w+) (\d)", picture.caption.partition(": ")[2]):
            same = pixels[:, 13:] == color  # right of the axis
            columns = (same[1:] & same[:-1]).sum(0)  # lines behind bars are one pixel high
            assert abs(columns.max() - 8.5 * int(height)) < 4


@pytest.mark.parametrize("kind", drawn.KINDS)
def test_patches_are_told_the_parts_that_are_drawn_there(kind: str) -> None:
    """Patches with a part have ink, but for corners; those that are half ink have a part; parts are the caption's."""
    artist, random, words = Artist(), Random(3), see.tokenizer()
    pictures = [artist.draw(random, kind) for _ in range(30)]
    inked, found = list[bool](), list[float]()
    numbers, places = see.parts_of(torch.from_numpy(see.encoded(pictures, words, random)["parts"]))
    for picture, number_P, place_P in zip(pictures, numbers.numpy(), places.numpy(), strict=True):
        pixels = np.asarray(picture.image, dtype=np.int32)
        ink = np.abs(pixels - np.median(pixels.reshape(-1, 3), 0)).max(-1) > 60
        share_P = ink.reshape(drawn.SIDE // see.PATCH, see.PATCH, -1, see.PATCH).mean((1, 3)).flatten()
        inked += (share_P[number_P > 0] > 0).tolist()
        assert number_P[share_P > 0.5].all()
        told = {place: drawn.PARTS[number - 1] for number, place in zip(number_P, place_P, strict=True) if place}
        said = {
            "shapes": lambda text: [f"{a} {b}" for a, b in re.findall(r"a (\w+) \w+ (\w+)", text)],
            "bars": lambda text: [f"bar {each}" for each in re.findall(r"\d", text)],
        }.get(kind, lambda text: list(re.findall(r"[A-Z\d]+", text)[0]))
        true = said(picture.caption)
        assert all(true[place - 1] == part for place, part in told.items())
        found.append(len(told) / len(true))
    assert np.mean(inked) > 0.8
    assert np.mean(found) > 0.95  # a thin letter between two others may have no patch


@pytest.mark.parametrize("noise", [hear.crackle, hear.whistles, hear.training_noise, hear.other_noise])
def test_noises_are_equally_loud(noise: Callable[[int, int, torch.device], torch.Tensor]) -> None:
    torch.manual_seed(0)
    found = noise(12, 16_000, torch.device("cpu")).square().mean(1)
    torch.testing.assert_close(found, torch.ones(12), atol=1e-3, rtol=0)


def test_facts_too_many_are_wrong_ones() -> None:
    true = "2 shapes: a small red circle at the top, a large blue star at the left."
    assert right_facts(true, true) == 1
    assert right_facts(true.replace("red", "green"), true) == 6 / 7
    assert right_facts(true[:-1] + ", a large blue star at the right.", true) == 7 / 10
    assert right_facts("", true) == right_facts("red", true) == 0
    assert right_facts("the word CAT.", "the word CAR.") == 0


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("word", lambda text: not split.unseen_word(re.findall(r"[A-Z]+", text)[0])),
        ("number", lambda text: len(text) < 15 or not split.held_out("number", re.findall(r"\d+", text)[0])),
        ("shapes", lambda text: not any(drawn.unseen_pair(*pair) for pair in re.findall(r"a \w+ (\w+) (\w+)", text))),
    ],
)
def test_what_is_held_out_is_drawn_to_measure_alone(kind: str, seen: Callable[[str], bool]) -> None:
    random = Random(3)
    training = [Artist().draw(random, kind).caption for _ in range(120)]
    measured = [Artist(measuring=True).draw(random, kind).caption for _ in range(40)]
    assert all(map(seen, training))
    assert not any(map(seen, measured))


def test_every_color_and_every_shape_has_one_pair_that_is_held_out() -> None:
    pairs = [(color, shape) for color in drawn.COLORS for shape in drawn.SHAPES if drawn.unseen_pair(color, shape)]
    assert sorted(color for color, _ in pairs) == sorted(drawn.COLORS)
    assert sorted(shape for _, shape in pairs) == sorted(drawn.SHAPES)


def test_words_and_numbers_are_spelled_in_single_letters() -> None:
    words = see.tokenizer()
    for text in ("the word QUARTZ.", "the number 90210."):
        own = re.findall(r"[A-Z0-9]+", text)[0]
        tokens = words.encode(text).tokens
        assert [token for token in tokens if token in own] == list(own)
        assert words.decode(words.encode(text).ids) == text


def test_special_tokens_of_speech_follow_those_of_text_as_in_whisper_s_vocabularies() -> None:
    tokens = hear.SpokenTokens.made()
    text = {token for word in spoken.words() for token in tokens.words.encode(f" {word}").ids}
    assert max(text) < tokens.end < tokens.begins < tokens.untimed
    assert tokens.words.id_to_token(tokens.untimed + 1) == "<|0.00|>"
    assert tokens.words.get_vocab_size() == tokens.untimed + 1 + 50 * hear.WINDOW + 1


def test_sentences_held_out_are_never_said_in_training() -> None:
    random = Random(4)
    training = {spoken.sentence(random) for _ in range(2000)}
    measured = {spoken.sentence(random, measuring=True) for _ in range(200)}
    assert not training & measured
    assert {word for text in training | measured for word in text.split()} == set(spoken.words())


def distance(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """The edit distance by its definition."""

    @cache
    def between(a: int, b: int) -> int:
        if not a or not b:
            return a + b
        return min(between(a - 1, b) + 1, between(a, b - 1) + 1, between(a - 1, b - 1) + (ours[a - 1] != theirs[b - 1]))

    return between(len(ours), len(theirs))


def test_word_errors_are_the_edit_distance() -> None:
    random = Random(5)
    for _ in range(200):
        ours, theirs = (tuple(random.choices("ab", k=random.randint(1, 7))) for _ in range(2))
        assert spoken.errors(" ".join(ours), " ".join(theirs)) == (distance(ours, theirs), len(theirs))


def test_features_are_those_of_transformers() -> None:
    samples_NS = torch.randn((2, 16_000 * hear.WINDOW), generator=torch.Generator().manual_seed(0)) * 0.1
    ours = hear.features(samples_NS, torch.from_numpy(mel_filters(hear.BANDS)), torch.float32)
    extractor = WhisperFeatureExtractor(chunk_length=hear.WINDOW)
    theirs = extractor(list(samples_NS.numpy()), sampling_rate=16_000, return_tensors="pt").input_features
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # both in float32; logarithms of sums of 201 squares


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.1])
def test_sounds_at_another_speed_have_another_pitch(speed: float) -> None:
    time_S = torch.arange(spoken.RATE) / spoken.RATE
    found = hear.resampled(torch.sin(2 * math.pi * 441 * time_S)[None], speed)[0]
    assert len(found) == round(16_000 / speed)
    at = torch.arange(len(found)) / len(found)
    torch.testing.assert_close(found[500:-500], torch.sin(2 * math.pi * 441 * at)[500:-500], atol=0.01, rtol=0)


@pytest.mark.dealt
def test_examples_of_speech_learn_text_times_and_silence() -> None:
    """Sounds of 1 s, one or two in a window, are loud where their times say."""
    tokens = hear.SpokenTokens.made()
    store = hear.TensorStore(4, torch.device("cpu"))
    text = tokens.words.encode(" turn on the red fan").ids
    ids = torch.zeros((4, hear.LENGTH), dtype=torch.int16)
    ids[:, : len(text)] = torch.tensor(text)
    store.add(
        samples=torch.randint(-9000, 9000, (4, hear.ROOM), dtype=torch.int16),
        counts=torch.full((4,), spoken.RATE, dtype=torch.int32),
        ids=ids,
        lengths=torch.full((4,), len(text), dtype=torch.int16),
        begins=torch.tensor([0, spoken.RATE // 2, *[hear.NEVER] * (hear.MOST_WORDS - 2)]).repeat(4, 1),
        said=torch.arange(5, 5 + hear.MOST_WORDS, dtype=torch.int16).repeat(4, 1),
    )
    torch.manual_seed(0)
    batch = hear.batch_of(store, 96, tokens)
    kinds = Counter[str]()
    lists = (batch.ids_NT.tolist(), batch.learnt_NT.tolist(), batch.words_NF.tolist())
    for window, row, learnt, heeded in zip(batch.windows_NS, *lists, strict=True):
        told = [token for token, counted in zip(row, learnt, strict=True) if counted]
        sentences = told.count(text[0])
        changes = [each for each, _ in groupby(heeded) if each]
        assert changes == [5, 6] * sentences
        assert all(19 * sentences <= heeded.count(each) <= 32 * sentences for each in {*heeded} - {0})  # half a second
        kinds[f"{sentences} {row[1] == tokens.untimed}"] += 1
        if not sentences:
            assert (row[1], told) == (tokens.silent, [tokens.silent, tokens.end])
        elif row[1] == tokens.untimed:
            assert told == [*text * sentences, tokens.end]
        else:
            times = [told[at : at + len(text) + 2] for at in range(0, len(told) - 1, len(text) + 2)]
            assert len(times) == sentences
            assert all(part[1:-1] == text for part in times)
            assert told[-1] == tokens.end
            inside = torch.zeros(len(window), dtype=torch.bool)
            for part in times:
                begin, stop = (round((part[at] - tokens.untimed - 1) * 0.02 * 16_000) for at in (0, -1))
                inside[begin + 200 : stop - 200] = True
                assert heeded[begin // hear.FRAME + 2] == 5
                assert heeded[stop // hear.FRAME - 3] == 6
            assert window[inside].square().mean() > 1.4 * window[~inside].square().mean()
    assert set(kinds) == {"0 False", "1 True", "1 False", "2 True", "2 False"}


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(1)


def shaken(network: torch.nn.Module) -> None:
    """Norms and biases that are not those of a new network."""
    with torch.no_grad():
        for each in network.parameters():
            each.add_(0.1 * torch.randn_like(each))


@pytest.mark.usefixtures("seeded")
def test_passes_of_the_seeing_model_are_those_of_transformers() -> None:
    model = see.SeeingModel(300)
    shaken(model)
    pixels, ids = torch.randn(2, 3, see.SIDE, see.SIDE), torch.randint(2, 300, (2, 9))
    vectors = (see.SIDE // see.PATCH) ** 2
    whole = torch.cat((torch.ones((2, vectors), dtype=torch.long), ids), 1)
    with torch.no_grad():
        theirs = model.whole(input_ids=whole, pixel_values=pixels).logits[:, vectors:]
        ours = model(model.seen(pixels)[0], ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)  # float32, 9 layers


@pytest.mark.usefixtures("seeded")
def test_a_q_former_and_a_projector_learn_by_the_same_patches() -> None:
    artist, random, words = Artist(), Random(3), see.tokenizer()
    pictures = [artist.draw(random) for _ in range(2)]
    batch = {name: torch.from_numpy(each) for name, each in see.encoded(pictures, words, random).items()}
    for queries, count in ((True, see.QUERIES), (False, (see.SIDE // see.PATCH) ** 2)):
        model = see.SeeingModel(words.get_vocab_size(), queries=queries, beside=True)
        seen, patches = model.seen(torch.randn(2, 3, see.SIDE, see.SIDE))
        assert (seen.shape[1], patches.shape[1]) == (count, (see.SIDE // see.PATCH) ** 2)
        sum(see.loss_of(model, batch, Random(0))).backward()
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
    assert len(see.answers(model, words, pictures[:1], [see.DESCRIBE])) == 1


@pytest.mark.usefixtures("seeded")
def test_passes_of_the_recogniser_are_those_of_transformers() -> None:
    model = transformers.WhisperForConditionalGeneration(hear.config(hear.SpokenTokens.made())).eval()
    shaken(model)
    features, ids = torch.randn(2, hear.BANDS, 100 * hear.WINDOW), torch.randint(2, 300, (2, 9))
    with torch.no_grad():
        theirs = model(input_features=features, decoder_input_ids=ids).logits
        states = networks.listened(model.model.encoder, features)
        ours = model.proj_out(networks.written(model.model.decoder, ids, states))
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)  # float32, 6 layers


def numbered(random: Random) -> dict[str, np.ndarray]:
    return {"number": np.array([random.random()])}


def test_chunks_are_read_once_each(tmp_path: Path) -> None:
    makers = chunks.Makers(tmp_path / "chunks", numbered, processes=2, most=5, seed=3)
    found = list[float]()
    while makers.at_work or any((tmp_path / "chunks").iterdir()):
        found += [float(each["number"][0]) for each in islice(makers.new(), 2)]
    makers.close()
    assert sorted(found) == sorted(Random(f"3 {number}").random() for number in range(5))


def test_a_projector_beside_a_q_former_is_stored_and_drawn() -> None:
    end = {
        "parameters": 7,
        "captions": {"bars": {"facts": 0.25}, "word": {"facts": 0.5}},
        "answers": {"bars": {"right": 0.75}},
    }
    report = {
        "device": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc", "batch": 8, "steps": 100, "seconds": 3.0,
        "log": [
            {"step": 50, "projector": 2.0, "qformer": 3.0, "seconds": 1}, {"step": 100, "projector": 1, "qformer": 1.5}
        ],
        "projector": end, "qformer": end | {"parameters": 9},
    }  # fmt: skip
    first, _, last = lines = list(beside.lines_of(report))
    assert (first["projector"], first["qformer"], first["machine"]["commit"]) == (2.0, 3.0, "abc")
    assert last["qformer"] == {"parameters": 9, "facts": {"bars": 0.25, "word": 0.5}, "answers": {"bars": 0.75}}
    shown = beside.drawing(lines)
    assert shown.count("Q-Former") >= 2
    assert "100 equal steps of 8 pictures" in shown
    assert "1 bars, 2 word" in shown
