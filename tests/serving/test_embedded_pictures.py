"""/v1/embeddings and /pooling give texts and pictures of a tiny CLIP the vectors of transformers; wrong mixes are one
sentence each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tests.media.make_corpus import saved
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread
from tests.vision import embedders, folders, tiny

PIXELS = embedders.drawn(((31, 75), (50, 22)))
URLS = [
    f"data:image/png;base64,{base64.b64encode(saved(Image.fromarray(pixels), 'png')).decode()}" for pixels in PIXELS
]
PICTURES = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
TEXT = {"type": "text", "text": "a photo of the cat"}


@pytest.fixture(scope="module")
def clip(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = embedders.save("CLIP", tmp_path_factory.mktemp("clip"))
    socket = tmp_path_factory.mktemp("embeds") / "socket"
    with (
        engine_in_a_thread(socket, model=str(folder), kv_cache_memory=8 << 20),
        start_server(folder, socket, limit_mm_per_prompt={"image": 1}, batch_dir=None) as running,
    ):
        yield running


def post(server: Server, *parts: Any, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": list(parts)}], **body} if parts else body
    return httpx.post(server.url + path, json={"model": MODEL, **given}, timeout=PATIENCE)


def vector(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["data"]
    return np.array(found["embedding" if "embedding" in found else "data"])


def test_texts_and_pictures_have_the_vectors_of_transformers(clip: Server) -> None:
    for part, pixels in zip(PICTURES, PIXELS, strict=True):
        wanted = embedders.of_picture("CLIP", pixels)
        for path in ("/v1/embeddings", "/pooling"):
            np.testing.assert_allclose(vector(post(clip, part, path=path)), wanted, atol=1e-5)
    wanted = embedders.of_text("CLIP", TEXT["text"])
    for found in (post(clip, TEXT), post(clip, input=TEXT["text"])):
        np.testing.assert_allclose(vector(found), wanted, atol=1e-5)


def test_cohere_gets_the_same_vectors_of_pictures(clip: Server) -> None:
    wanted = [embedders.of_picture("CLIP", pixels) for pixels in PIXELS]
    answer = post(clip, path="/v2/embed", images=URLS).json()
    np.testing.assert_allclose(answer["embeddings"]["float"], wanted, atol=1e-5)
    assert answer["meta"]["billed_units"]["images"] == len(URLS)
    assert answer["texts"] == []
    mixed = [{"content": [TEXT]}, {"content": [PICTURES[1]]}]
    answer = post(clip, path="/v2/embed", inputs=mixed).json()
    wanted = [embedders.of_text("CLIP", TEXT["text"]), wanted[1]]
    np.testing.assert_allclose(answer["embeddings"]["float"], wanted, atol=1e-5)
    assert answer["texts"] == [TEXT["text"]]
    refused = post(clip, path="/v2/embed", images=[URLS[0], "data:image/png;base64,AAAA"])
    assert refused.status_code == 400
    assert "send a request for each" in post(clip, path="/v2/embed", inputs=[{"content": [TEXT, PICTURES[0]]}]).text


def test_wrong_mixes_are_refused(clip: Server) -> None:
    for parts, told in (
        ((TEXT, PICTURES[0]), "the message has 1 texts and 1 pictures; send a request for each"),
        ((*PICTURES,), "2 parts of image, of at most 1 (--limit-mm-per-prompt)"),
        (({"type": "input_audio", "input_audio": {"data": ""}},), "reads text and pictures alone"),
        (({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},), "messages.0.content.0"),
    ):
        answer = post(clip, *parts)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
    many = [{"role": "user", "content": [TEXT]}] * 2
    assert "there are 2 messages; send one" in post(clip, messages=many).text
    assert "token_embed is not for pictures" in post(clip, PICTURES[0], path="/pooling", task="token_embed").text


def test_metrics_count_pictures_and_those_that_no_encoder_sees_again(clip: Server) -> None:
    def told() -> dict[str, float]:
        lines = httpx.get(clip.url + "/metrics", timeout=PATIENCE).text.splitlines()
        found = (line.partition("{") for line in lines if not line.startswith("#"))
        return {name: float(rest.rpartition(" ")[2]) for name, brace, rest in found if brace}

    pixels = np.full((40, 40, 3), 9, np.uint8)
    url = f"data:image/png;base64,{base64.b64encode(saved(Image.fromarray(pixels), 'png')).decode()}"
    before = told()
    for _ in range(3):
        vector(post(clip, {"type": "image_url", "image_url": {"url": url}}))
    vector(post(clip, TEXT))
    after = told()
    moved = {name: after[name] - before.get(name, 0) for name in after}
    assert moved["vllm:mm_cache_queries_total"] == 3
    assert moved["vllm:mm_cache_hits_total"] == 2
    assert moved["ridgeline:encoder_pictures_total"] == 1
    assert moved["ridgeline:encoder_patches_total"] == 16
    assert moved["ridgeline:encoder_seconds_total"] > 0
    assert after["ridgeline:pictures_waiting"] == 0


def test_a_server_with_a_tower_alone_gives_its_vectors(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folders.complete("llava", tiny.save("llava", tmp_path_factory.mktemp("llava")))
    socket, settings = tmp_path_factory.mktemp("tower") / "socket", {"mm_encoder_only": True, "dtype": "float32"}
    with (
        engine_in_a_thread(socket, model=str(folder), kv_cache_memory=8 << 20, **settings),
        start_server(folder, socket, batch_dir=None) as running,
    ):
        [pixels] = embedders.drawn(((28, 28),))
        url = f"data:image/png;base64,{base64.b64encode(saved(Image.fromarray(pixels), 'png')).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = post(running, part, path="/pooling", encoding_format="bytes", embed_dtype="float32")
        assert answer.status_code == 200, answer.text
        [told] = json.loads(answer.headers["metadata"])["data"]
        assert (told["shape"], len(answer.content)) == ([16, 64], 16 * 64 * 4)
        with torch.inference_mode():
            wanted_LM = tiny.build("llava").get_image_features(**tiny.inputs("llava", [pixels])).pooler_output[0]
        np.testing.assert_allclose(np.frombuffer(answer.content, "<f4").reshape(16, 64), wanted_LM, atol=2e-5)
        for refused in (post(running, TEXT, path="/pooling"), post(running, PICTURES[0])):
            assert refused.status_code == 400, refused.text
