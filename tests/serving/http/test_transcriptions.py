"""Transcriptions over HTTP, by OpenAI's client, beside the same model in this process."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from ridgeline import LLM
from ridgeline.text.speech.formats import srt, text, vtt
from tests import whispers as oracle
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

PLAIN = {"compression_ratio_threshold": 1e9, "logprob_threshold": -1e9, "no_speech_threshold": 1.0}
BOUND = 400_000


def wav(samples: np.ndarray, rate: int = oracle.RATE) -> bytes:
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return held.getvalue()


SOUND = wav(np.concatenate([*oracle.sounds(2), np.zeros(2000, np.float32), *oracle.sounds(2)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("multilingual", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(start_server: StartServer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("engine")
    with (
        engine_in_a_thread(home / "engine", model=str(folder), max_num_seqs=8, dtype="float32"),
        start_server(folder, home / "engine", audio_file_bytes=BOUND, audio_seconds=10) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=8) as found:
        yield found


def create(server: Server, face: str = "transcriptions", **options: Any) -> Any:
    extra = {**PLAIN, **options.pop("extra_body", {})}
    given = {"model": MODEL, "file": ("x.wav", SOUND), "language": "de", "extra_body": extra, **options}
    if face == "translations":
        del given["language"]
    return getattr(server.client.audio, face).create(**given)


@pytest.mark.dealt
@pytest.mark.few(3)
@pytest.mark.parametrize("form", ["json", "text", "srt", "vtt", "verbose_json"])
def test_transcripts_are_those_of_the_model_in_every_format(form: str, server: Server, llm: LLM) -> None:
    timed = form in ("srt", "vtt", "verbose_json")
    want = llm.transcribe(SOUND, language="de", timed=timed, **PLAIN)
    answer = create(server, response_format=form)
    assert len(want.segments) > 3
    if form == "json":
        assert answer.text == want.text
        assert answer.usage.model_dump() == {"type": "duration", "seconds": 4}
    elif form == "verbose_json":
        assert (answer.text, answer.language, answer.duration) == (want.text, "german", want.seconds)
        for ours, theirs in zip(answer.segments, want.segments, strict=True):
            assert (ours.text, ours.tokens, ours.seek) == (theirs.text, theirs.tokens, theirs.seek)
            assert (ours.start, ours.end) == (theirs.start, theirs.end)
            assert abs(ours.avg_logprob - theirs.avg_logprob) < 1e-4
            assert abs(ours.no_speech_prob - theirs.no_speech_prob) < 1e-4
    else:
        write = {"text": text, "srt": srt, "vtt": vtt}[form]
        assert answer == write(want.segments)


def test_words_have_times_where_they_are_asked_for(server: Server, llm: LLM) -> None:
    answer = create(server, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    want = llm.transcribe(SOUND, language="de", word_timestamps=True, **PLAIN)
    words = [word for segment in want.segments for word in segment.words]
    assert [(each.word, each.start, each.end) for each in answer.words] == [(w.word, w.start, w.end) for w in words]
    assert len(words) > 3
    assert [each.text for each in answer.segments] == [each.text for each in want.segments]
    assert create(server, response_format="verbose_json").words is None


def test_a_stream_has_deltas_and_the_whole_at_its_end(server: Server, llm: LLM) -> None:
    events = list(create(server, stream=True))
    want = llm.transcribe(SOUND, language="de", timed=False, **PLAIN)
    assert [event.type for event in events] == ["transcript.text.delta"] * len(want.segments) + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == want.text


def test_translations_and_told_languages(server: Server, llm: LLM) -> None:
    answer = create(server, "translations", response_format="verbose_json")
    want = llm.transcribe(SOUND, task="translate", **PLAIN)
    assert (answer.text, answer.task) == (want.text, "translate")
    told = create(server, response_format="verbose_json", language=openai.NOT_GIVEN)
    assert told.language == {"en": "english", "de": "german", "fr": "french", "nl": "dutch"}[want.language]


@pytest.mark.dealt
def test_prompts_temperatures_and_windows_in_turn(server: Server, llm: LLM) -> None:
    wishes = {"condition_on_previous_text": True, "prompt": "w4 w7"}
    answer = create(server, prompt="w4 w7", extra_body={"condition_on_previous_text": "true"})
    assert answer.text == llm.transcribe(SOUND, language="de", **wishes, **PLAIN).text
    assert answer.text != create(server).text
    seeded = [create(server, temperature=0.8, extra_body={"seed": 5, "max_completion_tokens": 7}).text for _ in "12"]
    sampling = {"seed": 5}
    want = llm.transcribe(SOUND, language="de", temperature=0.8, timed=False, max_tokens=7, sampling=sampling, **PLAIN)
    assert seeded == [want.text, want.text]


def post(
    server: Server, fields: dict[str, Any], content: bytes = SOUND, face: str = "transcriptions"
) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/audio/{face}", data=fields, files={"file": ("x.wav", content)}, timeout=PATIENCE
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"timestamp_granularities[]": ["word"], "stream": "true"}, "a stream has no times of words"),
        ({"timestamp_granularities[]": ["segment"]}, "needs response_format verbose_json"),
        ({"response_format": "xml"}, "response_format"),
        ({"language": "klingon"}, "language is 'klingon'"),
        ({"include[]": ["logprobs"]}, "include is not supported"),
        ({"use_beam_search": "true"}, "use_beam_search"),
        ({"temperature": "7"}, "temperature must be from 0 to 2"),
        ({"stream": "true", "response_format": "srt"}, "a stream has no response_format srt"),
        ({"stream": "perhaps"}, "stream"),
        ({"unknown": "1"}, "unknown"),
        ({"model": "other"}, "other does not exist|'other' does not exist"),
        ({"top_p": "3"}, "top_p must be"),
    ],
)
def test_what_is_not_here_is_refused_by_name(fields: dict[str, Any], match: str, server: Server) -> None:
    import re

    answer = post(server, fields)
    assert answer.status_code in (400, 404)
    assert re.search(match, answer.json()["error"]["message"])


def test_files_are_bounded_before_they_are_read(server: Server) -> None:
    slow = oracle.RATE // 2
    for content, status, match in (
        (b"", 400, "empty"),
        (SOUND[:30], 400, "sound"),
        (b"RIFF\xff\xff\xff\x7fWAVEfmt " + b"\xff" * 64, 400, "sound"),
        (b"#!/bin/sh", 400, "sound"),
        (wav(np.zeros(11 * slow, np.float32), slow), 400, "10 s"),
        (b"x" * (BOUND + 1), 400, f"{BOUND} bytes"),
        (b"x" * (BOUND + (1 << 20)), 413, "--audio-file-bytes"),
    ):
        answer = post(server, {}, content)
        assert (answer.status_code, match in answer.json()["error"]["message"]) == (status, True), answer.text
    bare = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"file": "x"}, timeout=PATIENCE)
    assert bare.status_code == 400
    assert "multipart/form-data" in bare.json()["error"]["message"]


def test_other_routes_refuse_a_model_that_hears(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "w4"}, timeout=PATIENCE)
    assert answer.status_code == 400
    assert "reads sounds" in answer.json()["error"]["message"]


def test_the_document_shows_the_forms(server: Server) -> None:
    document = json.loads(httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).text)
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert {"file", "language", "timestamp_granularities"} <= form["schema"]["properties"].keys()
