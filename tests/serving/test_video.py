"""Videos in chats over HTTP: decoded, sampled, seen and bounded by what a request says."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.media.make_corpus import coded_video
from tests.serving.conftest import MODEL, Server, StartServer, engine_in_a_thread
from tests.serving.test_media import chat
from tests.vision import clips, folders, tiny

TEXT = {"type": "text", "text": "Hi"}
FILM = coded_video("libx264", "mp4", 30, 24, 16)  # ten frames a second


@pytest.fixture(scope="module")
def filmed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny Qwen3-VL."""
    folder = folders.complete("qwen3_vl", tiny.save("qwen3_vl", tmp_path_factory.mktemp("qwen3")))
    socket = tmp_path_factory.mktemp("filmed") / "socket"
    with (
        engine_in_a_thread(socket, model=str(folder), kv_cache_memory=8 << 20),
        start_server(folder, socket, limit_mm_per_prompt={"video": 1}, batch_dir=None) as running,
    ):
        yield running


def shown(data: bytes = FILM) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}


def seconds(server: Server, answer: Any) -> list[str]:
    text = server.api.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    return [part.split(" seconds>")[0] for part in text.split("<") if " seconds>" in part]


def test_a_video_is_seen_as_its_request_says(filmed: Server) -> None:
    """Each pair of frames of 16 x 24 pixels is six vectors."""
    told = chat(filmed, shown(), TEXT).json()
    assert seconds(filmed, told) == ["0.3", "1.5", "2.6"]  # of frames 0, 6, 12, 17, 23 and 29
    assert told["prompt_token_ids"].count(clips.VIDEO) == 3 * 6
    assert told["usage"]["prompt_tokens"] == len(told["prompt_token_ids"])
    again = chat(filmed, shown(), TEXT).json()
    assert again["choices"][0]["token_ids"] == told["choices"][0]["token_ids"]
    more = chat(filmed, shown(), TEXT, mm_processor_kwargs={"fps": 3}).json()
    assert more["prompt_token_ids"].count(clips.VIDEO) == 5 * 6
    fewer = chat(filmed, shown(), TEXT, media_io_kwargs={"video": {"num_frames": 3}}).json()
    assert seconds(filmed, fewer) == ["0.7", "2.9"]
    small = chat(filmed, shown(), TEXT, mm_processor_kwargs={"size": {"shortest_edge": 64, "longest_edge": 384}}).json()
    assert small["prompt_token_ids"].count(clips.VIDEO) == 3


def test_a_bad_video_gets_one_sentence(filmed: Server) -> None:
    for answer, words in (
        (chat(filmed, shown(), TEXT, shown()), "2 parts of video, of at most 1 (--limit-mm-per-prompt)"),
        (chat(filmed, shown(FILM[:400]), TEXT), "messages.0.content.0: "),
        (chat(filmed, shown(), TEXT, mm_processor_kwargs={"merge_size": 3}), "'merge_size' cannot be set in a request"),
        (chat(filmed, shown(), TEXT, mm_processor_kwargs={"num_frames": 1e9}), "num_frames is a number from 1 to 1024"),
    ):
        assert answer.status_code == 400
        assert words in answer.text
    assert MODEL in chat(filmed, TEXT).text
