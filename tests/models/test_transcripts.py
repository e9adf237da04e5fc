"""Transcripts beside transformers' own generation and processors, and the rules of segments beside made-up tokens."""

from __future__ import annotations

import itertools
import random
import wave
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import WhisperTimeStampLogitsProcessor

from ridgeline import LLM
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan import token_bits
from ridgeline.core.plan.sounds import SpeechRules
from ridgeline.engine.speech import SpeechMask
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.media.rates import resampled
from ridgeline.parallel.axis import ALONE
from ridgeline.text.speech.cuts import cut_at_silence
from ridgeline.text.speech.formats import srt, vtt
from ridgeline.text.speech.recogniser import Recogniser, SpeechAnswer, SpeechAsk, SpeechOptions, SpokenText
from ridgeline.text.speech.segments import SpokenSegment, parts_of, rest_of
from ridgeline.worker.speech import SpeechScores
from ridgeline.worker.vocabulary import Vocabulary
from tests import whispers as oracle
from tests.command import run_here

KIND = "multilingual"
PLAIN = {"compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = oracle.save(KIND, tmp_path_factory.mktemp(KIND))
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=8) as found:
        yield found


def recogniser(llm: LLM) -> Recogniser:
    return llm._transcripts()._recogniser


def theirs(samples: np.ndarray, **options: Any) -> list[int]:
    """Return the tokens that transformers generates behind the start, without the end."""
    model = oracle.build(KIND)
    features = oracle.extractor(KIND)(samples, sampling_rate=oracle.RATE, return_tensors="pt").input_features
    options = {"task": "transcribe", **options}
    found = model.generate(features, do_sample=False, num_beams=1, max_new_tokens=32, **options)
    return [int(token) for token in found[0] if token != oracle.ids(KIND)["<|endoftext|>"]]


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("timed", [True, False])
def test_tokens_are_those_of_transformers(llm: LLM, timed: bool) -> None:
    """Greedily, with its processors: suppressed tokens, times in pairs, the mass of all times. It begins a new window
    behind two times, and so ends the first one there."""
    times, options = recogniser(llm).tokens.times, SpeechOptions(language="nl", timed=timed, max_tokens=28, **PLAIN)
    compared = 0
    for samples in oracle.sounds(8):
        asks = next(recogniser(llm).recognise(samples, options, SpokenText("", 1.0)))
        [result] = llm._running.finish([llm._jobs.make(ask, ask.params) for ask in asks], use_tqdm=False)
        want = theirs(samples, language="nl", return_timestamps=timed)[:28]
        pair = next((n for n, (a, b) in enumerate(pairwise(want)) if min(a, b) >= times), len(want))
        assert list(result.outputs[0].token_ids[: pair + 1]) == want[: pair + 1]
        compared += pair
    assert compared > (12 if timed else 100)


def test_languages_are_those_that_transformers_detects(llm: LLM) -> None:
    model, named = oracle.build(KIND), oracle.ids(KIND)
    for samples in oracle.sounds(4):
        features = oracle.extractor(KIND)(samples, sampling_rate=oracle.RATE, return_tensors="pt").input_features
        want = int(model.detect_language(features)[0])
        found = llm.transcribe((samples, oracle.RATE), max_tokens=1, timed=False, **PLAIN)
        assert named[f"<|{found.language}|>"] == want


def test_masks_are_those_of_transformers_processor() -> None:
    """Random outputs that follow the rules so far."""
    vocab, end, times = 120, 60, 80
    choose = random.Random(5)
    rules = SpeechRules(timestamps=times, no_timestamps=79, end=end, latest=10)
    config = type("Config", (), {
        "no_timestamps_token_id": 79, "eos_token_id": end, "bos_token_id": end, "max_initial_timestamp_index": 10,
        "is_multilingual": True,
    })()  # fmt: skip
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=2, _detect_timestamp_from_logprob=False)
    for _ in range(40):
        mask, tokens = SpeechMask(rules, vocab), [1, 2]
        for _ in range(12):
            scores = processor(torch.tensor([tokens]), torch.zeros(1, vocab))[0]
            want = torch.isfinite(scores).numpy()
            got = token_bits.unpacked(mask.allowed(), vocab)
            assert (got == want).all()
            text = [t for t in range(end) if got[t]]
            timed = [t for t in range(times, vocab) if got[t]]
            token = choose.choice((timed or text) if choose.random() < 0.5 else (text or timed))
            tokens.append(token)
            mask.accept(token)


def test_no_speech_is_a_softmax_at_the_start(llm: LLM) -> None:
    named, [samples] = oracle.ids(KIND), oracle.sounds(1)
    found = llm.transcribe((samples, oracle.RATE), language="de", max_tokens=4, timed=False)
    want = oracle.logprobs(oracle.build(KIND), KIND, samples, [named["<|startoftranscript|>"]])[0]
    assert found.segments[0].no_speech_prob == pytest.approx(float(want[named["<|nospeech|>"]].exp()), rel=1e-3)


def test_windows_that_run_together_are_those_that_run_alone(llm: LLM) -> None:
    samples = np.concatenate([*oracle.sounds(3), np.zeros(1600, np.float32), *oracle.sounds(2)])
    found = llm.transcribe((samples, oracle.RATE), language="de", max_tokens=16, **PLAIN)
    windows = cut_at_silence(samples, oracle.RATE)
    assert len(windows) > 3
    assert found.seconds == len(samples) / oracle.RATE
    for start, end in windows:
        alone = llm.transcribe((samples[start:end], oracle.RATE), language="de", max_tokens=16, **PLAIN)
        ours = [each for each in found.segments if each.seek == start // 160]
        assert [each.tokens for each in ours] == [each.tokens for each in alone.segments]
        assert [each.start - start / oracle.RATE for each in ours] == pytest.approx(
            [each.start for each in alone.segments], abs=2e-3
        )


def test_a_prompt_stands_before_the_start_and_the_last_text_before_the_next_window(llm: LLM) -> None:
    one, asked = recogniser(llm), list[SpeechAsk]()
    known, found = one.tokens, SpokenText("", 0.0)
    samples = np.concatenate(oracle.sounds(3))
    options = SpeechOptions(language="de", prompt="w5", condition_on_previous_text=True, **PLAIN)
    asking = one.recognise(samples, options, found)
    asks, times = next(asking), known.times
    written = [times, 65, 66, times + 20, times + 20, 67, times + 40, times + 40]
    spelled = llm.get_tokenizer().encode(" w5", False)
    try:
        while True:
            asked += asks
            asks = asking.send([SpeechAnswer([*written, known.end], [-0.1] * 9)])
    except StopIteration:
        pass
    assert asked[0].prompt == (known.before, *spelled, *known.prefix("de", "transcribe", timed=True))
    assert asked[1].prompt == (known.before, *spelled, *written[:7], *known.prefix("de", "transcribe", timed=True))
    assert [each.start for each in found.segments[:4]] == [0.0, 0.4, 0.8, 1.2]  # each begins where speech ended


def scripted(
    llm: LLM, options: SpeechOptions, answers: list[tuple[list[int], float, float]]
) -> tuple[SpokenText, list[float]]:
    """Return the transcript of one window, and the temperatures asked for. answers: tokens, the mean log-probability,
    and the probability that nobody speaks, of each question."""
    one, found, asked = recogniser(llm), SpokenText("", 1.0), list[float]()
    asking = one.recognise(oracle.sounds(1)[0], options, found)
    try:
        asks = next(asking)
        for tokens, average, silent in answers:
            asked.append(asks[0].params.temperature)
            given = [SpeechAnswer([*tokens, one.tokens.end], [average] * (len(tokens) + 1))]
            given += [SpeechAnswer([0], [0.0], [float(np.log(silent))]) for _ in asks[1:]]
            asks = asking.send(given)
    except StopIteration:
        return found, asked
    return found, [*asked, asks[0].params.temperature]


def test_bad_texts_are_decoded_again_at_higher_temperatures(llm: LLM) -> None:
    text, again = llm.get_tokenizer().encode("some words here", False), [65] * 90
    plain = SpeechOptions(language="de", timed=False)
    assert scripted(llm, plain, [(text, -0.5, 0.1)])[1] == [0.0]
    assert scripted(llm, plain, [(text, -1.5, 0.1), (text, -0.9, 0.1)])[1] == [0.0, 0.2]
    found, asked = scripted(llm, plain, [(again, -0.1, 0.1), (again, -0.1, 0.1), (text, -0.5, 0.1)])
    assert asked == [0.0, 0.2, 0.4]
    assert found.segments[0].temperature == 0.4
    found, asked = scripted(llm, plain, [(text, -1.5, 0.9)])
    assert asked == [0.0]  # nobody speaks
    assert found.segments == []
    assert scripted(llm, plain, [(text, -0.5, 0.9)])[0].text == "some words here"
    assert scripted(llm, replace(plain, temperature=0.3), [(text, -1.5, 0.1)])[1] == [0.3]


def test_tokens_become_segments_as_in_whispers_code(llm: LLM) -> None:
    known = recogniser(llm).tokens
    t = known.times
    two = [t, 65, t + 10, t + 10, 66, t + 30]
    parts, goes_on = parts_of(two, known, 1.0)
    assert ([(p.start, p.end) for p in parts], goes_on) == ([(0.0, 0.2), (0.2, 0.6)], 1.0)
    parts, goes_on = parts_of([*two[:4], 66], known, 1.0)
    assert ([(p.start, p.end, p.tokens) for p in parts], goes_on) == ([(0.0, 0.2, [t, 65, t + 10])], 0.2)
    parts, goes_on = parts_of([t, 65, 66], known, 1.0)
    assert ([(p.start, p.end) for p in parts], goes_on) == ([(0.0, 1.0)], 1.0)
    parts, goes_on = parts_of([t, 65, t + 45], known, 1.0)
    assert ([(p.start, p.end) for p in parts], goes_on) == ([(0.0, 0.9)], 1.0)
    for tokens, times in (([t + 27, 65, t + 45], (0.54, 0.9)), ([t + 27, 65], (0.54, 1.0)), ([65, t + 45], (0.0, 0.9))):
        parts, goes_on = parts_of(tokens, known, 1.0)  # Whisper's own code has 0.0 in place of 0.54
        assert ([(p.start, p.end) for p in parts], goes_on) == ([times], 1.0)
    assert [(p.start, p.end, p.tokens) for p in rest_of([*two[:4], 66], known, 1.0)][1:] == [(0.2, 1.0, [t + 10, 66])]


def test_long_sounds_are_cut_where_they_are_quiet() -> None:
    generator = np.random.default_rng(1)
    samples = generator.standard_normal(100_000).astype(np.float32)
    samples[28_000:29_000] = 0
    samples[57_000:58_500] *= 0.01
    windows = cut_at_silence(samples, 30_000)
    assert windows[0][0] == 0
    assert windows[-1][1] == len(samples)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(windows))
    assert all(0 < end - start <= 30_000 for start, end in windows)
    assert 27_000 < windows[0][1] < 30_000
    assert 56_000 < windows[1][1] < 59_500
    assert cut_at_silence(samples[:30_000], 30_000) == [(0, 30_000)]


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_keep_what_both_can_hold(rate: int) -> None:
    """A tone below both rates' halves comes out as it is there; one above is gone."""
    time, wanted = np.arange(rate) / rate, np.arange(16_000) / 16_000
    found = resampled(np.sin(2 * np.pi * 1000 * time), rate, 16_000)
    assert len(found) == 16_000
    assert np.abs(found - np.sin(2 * np.pi * 1000 * wanted))[200:-200].max() < 1e-3
    if rate > 16_000:
        assert np.abs(resampled(np.sin(2 * np.pi * 9500 * time), rate, 16_000))[200:-200].max() < 2e-3


def test_subtitles_are_written_as_their_formats_say() -> None:
    each = SpokenSegment(0, 0, 3661.5, 3662.25, " a --> b ", [], 0.0, 0.0, 1.0, 0.0)
    assert srt([each]) == "1\n01:01:01,500 --> 01:01:02,250\na -> b\n\n"
    assert vtt([each]) == "WEBVTT\n\n01:01:01.500 --> 01:01:02.250\na -> b\n\n"


def test_what_cannot_be_transcribed_is_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    sound = (oracle.sounds(1)[0], oracle.RATE)
    for wishes, match in (
        ({"language": "klingon"}, "language is 'klingon'.*it knows en, de"),
        ({"beams": 5}, "no beams"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            llm.transcribe(sound, **wishes)
    (tmp_path / "x.wav").write_bytes(b"RIFF nothing")
    with pytest.raises(InvalidRequest, match="sound"):
        llm.transcribe(tmp_path / "x.wav")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        llm.transcribe(tmp_path / "y.wav")


def test_a_time_comes_where_all_times_together_are_likelier_than_any_text() -> None:
    """Scores of rows with times, without them, and of others, beside transformers' processor."""
    vocab, times = 120, 80
    rules = SpeechRules(timestamps=times, no_timestamps=79, end=60)
    config = type("Config", (), {"no_timestamps_token_id": 79, "eos_token_id": 60, "bos_token_id": 60})()
    scores = torch.randn(24, vocab, generator=torch.Generator().manual_seed(3))
    scores[:, :60] += torch.linspace(-1, 3, 24)[:, None]
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    want = processor(torch.tensor([[1, 2, times + 1, 7]] * 24), scores)
    mask = SpeechMask(rules, vocab)
    for token in (times + 1, 7):
        mask.accept(token)
    speech = {n: rules if n % 3 else None if n % 2 else replace(rules, timestamps=0) for n in range(24)}
    masks = {n: mask.allowed() for n in range(24) if n % 3}
    given = scores.clone()
    step: Any = SimpleNamespace(
        plan=SimpleNamespace(rows=SimpleNamespace(slots_R=np.arange(24))), masks=masks,
        device=SimpleNamespace(logits_RU=given),
    )  # fmt: skip
    slots: Any = SimpleNamespace(
        forms={n: SimpleNamespace(speech=each) for n, each in speech.items()}, device=torch.device("cpu")
    )
    ops = Ops(Platform(device_type="cpu"))
    SpeechScores(ops, slots, Vocabulary(vocab, ALONE, ops)).before_sample(step)
    for n in range(24):
        assert torch.equal(given[n], want[n] if n % 3 else scores[n])
    told = [bool(torch.isinf(given[n, :times]).all()) for n in masks]
    assert any(told)
    assert not all(told)


def test_the_command_writes_subtitles_and_refuses_what_is_no_format(llm: LLM, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(oracle.RATE)
        file.writeframes((oracle.sounds(1)[0].clip(-1, 1) * 32767).astype("<i2").tobytes())
    model = ("--model", llm.assembly.folder, "--device", "cpu", "--dtype", "float32", "--max-tokens", 6)
    ran = run_here(
        "transcribe", tmp_path / "x.wav", *model, "--format", "srt", "--language", "de", "--temperature", 1e-4
    )
    want = llm.transcribe(tmp_path / "x.wav", language="de", max_tokens=6, temperature=1e-4)
    assert (ran.returncode, ran.stdout) == (0, srt(want.segments))
    assert "1.0 s of sound" in ran.stderr
    for wrong, match in (
        (("x.wav", "--format", "xml"), "text, srt, vtt, json"),
        (("none.wav",), "is no file"),
        (("x.wav", "--guidance-scale", "2"), "guidance_scale is not for transcripts"),
    ):
        ran = run_here("transcribe", tmp_path / wrong[0], *wrong[1:], *model[:2])
        assert (ran.returncode, match in ran.stderr) == (2, True), ran.stderr
