"""Times of words beside transformers' own, and dynamic time warping and words by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from ridgeline import LLM
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.sounds import waveform
from ridgeline.text.speech.words import token_ends, warped, words_of
from tests import whispers as oracle

KIND = "multilingual"
PLAIN = {"compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None}
LISTED = ((1, 0), (2, 1), (2, 2))  # as `oracle.build` has them
UPPER = tuple((layer, head) for layer in (1, 2) for head in range(3))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = oracle.save(KIND, tmp_path_factory.mktemp(KIND))
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=8) as found:
        yield found


def theirs(samples: np.ndarray, prefix: Sequence[int], tokens: Sequence[int], heads: object) -> tuple[np.ndarray, list]:
    """Return the smoothed weights of tokens, float64 [T, F], and their times by transformers, from its attention."""
    model, frames = oracle.build(KIND), len(samples) // 160
    features = oracle.extractor(KIND)(samples, sampling_rate=oracle.RATE, return_tensors="pt").input_features
    ids = torch.tensor([[*prefix, *tokens]])
    with torch.inference_mode():
        crossed = model(input_features=features, decoder_input_ids=ids, output_attentions=True).cross_attentions
        output = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(crossed,))
        times = model._extract_token_timestamps(output, heads, num_frames=frames, num_input_ids=len(prefix))
        chosen = torch.stack([crossed[layer][0, head, len(prefix) :, : frames // 2] for layer, head in heads])
        chosen = (chosen - chosen.mean(1, keepdim=True)) / chosen.std(1, keepdim=True, unbiased=False)
    return _median_filter(chosen, 7).mean(0).double().numpy(), times[0, len(prefix) : -1].tolist()


@pytest.mark.parametrize("heads", [LISTED, (), ((1, 0), (2, 1), (2, 2), (7, 0), (0, 9))])
def test_tokens_have_the_times_of_transformers(llm: LLM, heads: tuple[tuple[int, int], ...]) -> None:
    """With the model's heads, without any, and with some that it has not. The windows run in one step. Weights are
    compared to some roundings of float32 over a frame's deviation; a way that is as cheap may be another."""
    recogniser = llm._transcripts()._recogniser
    known, generator = recogniser.tokens, np.random.default_rng(7)
    recogniser.tokens = replace(known, heads=heads)
    prefix, windows = known.prefix("nl", "transcribe", timed=True), oracle.sounds(4)
    texts = [[known.times, *generator.integers(60, 290, 9 + 5 * n).tolist(), known.times + 30] for n in range(4)]
    asks = [recogniser._reread(waveform(each), prefix, text) for each, text in zip(windows, texts, strict=True)]
    results = llm._running.finish([llm._jobs.make(ask, ask.params) for ask in asks], use_tqdm=False)
    recogniser.tokens, same = known, list[bool]()
    for samples, text, result in zip(windows, texts, results, strict=True):
        aligned = result.outputs[0].aligned
        assert aligned is not None
        want_TF, times = theirs(samples, prefix, text, LISTED if heads else UPPER)
        assert aligned.shape == want_TF.shape == (len(text), len(samples) // 320)
        assert np.abs(aligned - want_TF).max() < 1e-3
        same += np.isclose(token_ends(aligned), times, atol=1e-6).tolist()
    assert len(same) > 60
    assert np.mean(same) > 0.95


def test_ways_are_those_of_transformers() -> None:
    generator = np.random.default_rng(0)
    for rows, columns in ((1, 1), (1, 5), (5, 1), (7, 30), (40, 13), (3, 3)):
        for digits in (0, 6):  # with many equal sums, and without
            cost = generator.standard_normal((rows, columns)).round(digits)
            for ours, want in zip(warped(cost), _dynamic_time_warping(cost), strict=True):
                assert ours.tolist() == want.tolist()


def test_a_way_enters_each_token_where_its_frames_begin() -> None:
    weights = np.full((3, 10), -1, np.float32)
    weights[0, :2] = weights[1, 2:7] = weights[2, 7:] = 1
    assert token_ends(weights) == pytest.approx([0.0, 0.04, 0.14])
    assert token_ends(np.zeros((2, 0), np.float32)) == [0.0, 0.0]


def spelled(pieces: Sequence[bytes], language: str) -> list[tuple[str, float, float]]:
    """Return words of pieces that take a second each."""
    spans = [(float(n), n + 1.0) for n in range(len(pieces))]

    def text_of(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    return [(each.word, each.start, each.end) for each in words_of(range(len(pieces)), spans, text_of, language)]


def test_words_end_at_spaces_and_keep_the_marks_around_them() -> None:
    pieces = [b" He", b"llo", b",", b' "', b"you", b'!"', b" \xe2\x82", b"\xac", b"5", b" (", b"so", b")"]
    want = [("Hello,", 0, 3), ('"you!"', 3, 6), ("\u20ac5", 6, 9), ("(so)", 9, 12)]
    assert spelled(pieces, "en") == want
    assert spelled([], "en") == []
    assert spelled([b" cut", b"\xe2"], "en") == [("cut\ufffd", 0, 2)]


def test_characters_are_words_in_languages_without_spaces() -> None:
    pieces = ["\u4f60".encode(), "\u597d".encode()[:1], "\u597d".encode()[1:], "\u3002".encode()]
    assert spelled(pieces, "zh") == [("\u4f60", 0, 1), ("\u597d\u3002", 1, 4)]
    assert len(spelled(pieces, "en")) == 1


@pytest.mark.dealt
def test_transcripts_have_the_words_of_their_segments(llm: LLM) -> None:
    """In order, within the sound; windows that run together have those that they have alone."""
    samples = np.concatenate([*oracle.sounds(3), np.zeros(1600, np.float32), *oracle.sounds(2)])
    wishes = {"language": "de", "max_tokens": 16, **PLAIN}
    plain = llm.transcribe((samples, oracle.RATE), **wishes)
    for in_turn in (False, True):
        found = llm.transcribe(
            (samples, oracle.RATE), word_timestamps=True, condition_on_previous_text=in_turn, **wishes
        )
        words = [word for segment in found.segments for word in segment.words]
        assert len(words) > 3
        for segment in found.segments:
            said = "".join(word.word for word in segment.words)
            assert said.replace(" ", "") == "".join(segment.text.split(" ")).strip()
        assert all(0 <= word.start <= word.end <= found.seconds for word in words)
        if not in_turn:
            assert [replace(each, words=[]) for each in found.segments] == plain.segments
    with pytest.raises(InvalidRequest, match="word_timestamps needs timed"):
        llm.transcribe((samples, oracle.RATE), word_timestamps=True, timed=False)


def test_a_text_that_fills_the_context_has_times(llm: LLM) -> None:
    recogniser = llm._transcripts()._recogniser
    prefix = recogniser.tokens.prefix("de", "transcribe", timed=True)
    ask = recogniser._reread(waveform(oracle.sounds(1)[0]), prefix, [70] * 64)
    [result] = llm._running.finish([llm._jobs.make(ask, ask.params)], use_tqdm=False)
    aligned = result.outputs[0].aligned
    assert aligned is not None
    assert (len(ask.prompt), len(aligned)) == (63, 60)
    assert np.isfinite(aligned).all()
