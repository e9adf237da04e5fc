"""Pictures reach the model through every API, and bad ones end their request with one sentence and nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from ridgeline.core.settings.serving import ServeConfig
from ridgeline.media.bounds import MediaBounds
from ridgeline.serving import owner
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.media import MediaPart, MediaReader
from ridgeline.serving.stored.records import StoredFile, new_id
from ridgeline.serving.stored.store import NoSuchEntry, Store
from ridgeline.transport import zmq
from ridgeline.transport.messages import decode_from_face
from tests.media.make_corpus import png, saved
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread
from tests.vision import folders, tiny
from tests.vision.families.family import IMAGE

CORPUS = Path(__file__).parents[1] / "media" / "corpus"
PIXELS = [np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8) for number in range(3)]
FILES = [saved(Image.fromarray(pixels), "png") for pixels in PIXELS]
TEXTS = [base64.b64encode(data).decode() for data in FILES]
URLS = [f"data:image/png;base64,{text}" for text in TEXTS]


@pytest.fixture(scope="module")
def sighted(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny LLaVA, which reads files below its own folder."""
    folder = folders.complete("llava", tiny.save("llava", tmp_path_factory.mktemp("llava")))
    (folder / "shown.png").write_bytes(FILES[0])
    socket = tmp_path_factory.mktemp("sighted") / "socket"
    with (
        engine_in_a_thread(socket, model=str(folder), kv_cache_memory=8 << 20, enable_mm_embeds=True),
        start_server(
            folder,
            socket,
            allowed_local_media_path=str(folder),
            allowed_media_domains=("pictures.example",),
            limit_mm_per_prompt={"image": 2, "video": 0},
            batch_dir=str(tmp_path_factory.mktemp("files")),
        ) as running,
    ):
        yield running


def post(server: Server, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE)


def image(url: object, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(server: Server, *parts: Any, **body: Any) -> httpx.Response:
    given: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **body}
    return post(server, model=MODEL, messages=[{"role": "user", "content": list(parts)}], **given)


TEXT = {"type": "text", "text": "Hi"}
NO_FILE = "file-" + "0" * 32
LARGE = f"data:image/png;base64,{base64.b64encode(png(1024, 1024, bytes(1024 * 3073))).decode()}"


def test_vectors_of_a_request_count_as_decoded_media_do(sighted: Server) -> None:
    """For as long as the request is there, and no longer."""
    nothing_is_held(sighted)
    room, large = sighted.api.media._decoders.room, torch.randn(16, 64)
    part = {"type": "image_embeds", "image_embeds": vectors(large)}
    messages = [{"role": "user", "content": [part, TEXT]}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 64, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", sighted.url + "/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert room.taken == large.nbytes
        assert sum(1 for _ in lines)
    nothing_is_held(sighted)
    room.most, before = 1000, room.most
    try:
        answer = chat(sighted, part, TEXT)
        assert (answer.status_code, "4096 bytes decoded, of at most 500" in answer.text) == (400, True)
    finally:
        room.most = before


def vectors(vectors_LM: torch.Tensor) -> str:
    return base64.b64encode(save({"image_embeds": vectors_LM})).decode()


def by_transformers(ids: list[int], pictures: list[np.ndarray], tokens: int = 6) -> list[int]:
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        found = tiny.build("llava").generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **tiny.inputs("llava", pictures),
        )
    return [int(token) for token in found[0, len(ids) :]]


def test_a_chat_with_pictures_says_what_transformers_says(sighted: Server) -> None:
    answer = chat(sighted, image(URLS[0]), TEXT, image(URLS[1], uuid="second"))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    ids = told["prompt_token_ids"]
    assert ids.count(IMAGE) == 2 * 16
    assert told["usage"]["prompt_tokens"] == len(ids)
    assert told["choices"][0]["token_ids"] == by_transformers(ids, PIXELS[:2])


def test_vectors_stand_in_the_place_of_a_picture(sighted: Server) -> None:
    vectors_LM = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    answer = chat(sighted, {"type": "image_embeds", "image_embeds": vectors(vectors_LM)}, TEXT)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    model, ids = tiny.build("llava"), torch.tensor(told["prompt_token_ids"])
    x_TM = model.get_input_embeddings()(ids.where(ids != IMAGE, 0)).detach()
    x_TM[ids == IMAGE] = vectors_LM
    mask = torch.ones(1, len(ids), dtype=torch.long)
    with torch.inference_mode():
        found = model.generate(
            inputs_embeds=x_TM[None], attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    assert told["choices"][0]["token_ids"] == found[0].tolist()


def test_each_api_shows_the_same_picture(sighted: Server) -> None:
    wanted = chat(sighted, image(URLS[0]), TEXT).json()["choices"][0]["message"]["content"]
    greedy: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    shown = [
        {"type": "input_image", "image_url": URLS[0], "detail": "auto"},
        {"type": "input_text", "text": "Hi"},
    ]
    answer = post(
        sighted, "/v1/responses", input=[{"role": "user", "content": shown}], max_output_tokens=6, **greedy
    ).json()
    assert answer["output"][-1]["content"][0]["text"] == wanted
    source = {"type": "base64", "media_type": "image/jpeg", "data": TEXTS[0]}  # the type lies, and means nothing
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "Hi"}]
    answer = post(
        sighted, "/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=6, **greedy
    ).json()
    assert answer["content"][0]["text"] == wanted
    options = {"temperature": 0, "num_predict": 6}
    message = {"role": "user", "content": "Hi", "images": [TEXTS[0]]}
    answer = post(sighted, "/api/chat", model=MODEL, messages=[message], options=options, stream=False).json()
    assert wanted.startswith(answer["message"]["content"])  # which ends at the model's own end
    answer = post(
        sighted, "/api/generate", model=MODEL, prompt="Hi", images=[TEXTS[0]], options=options, stream=False
    ).json()
    assert wanted.startswith(answer["response"])


def uploaded(server: Server, data: bytes, purpose: str = "vision") -> str:
    files = {"file": ("shown.bin", data), "purpose": (None, purpose)}
    answer = httpx.post(server.url + "/v1/files", files=files, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["purpose"] == purpose
    return str(answer.json()["id"])


def test_an_uploaded_file_is_shown_by_each_api_until_it_is_deleted(sighted: Server) -> None:
    name = uploaded(sighted, FILES[0])
    wanted = chat(sighted, image(URLS[0]), TEXT).json()["choices"][0]["message"]["content"]
    data = {"type": "file", "file": {"file_data": "\n".join(TEXTS[0][at : at + 76] for at in range(0, 9999, 76))}}
    for part in (
        {"type": "input_image", "file_id": name, "detail": "high"},
        {"type": "image_url", "file_id": name},
        {"type": "file", "file": {"file_id": name}},
        {"type": "input_file", "file_id": name},
        {"type": "file", "file": {"file_data": URLS[0], "filename": "a.pdf"}},  # whose name means nothing
        data,
    ):
        answer = chat(sighted, part, TEXT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == wanted
    greedy: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    asked: dict[str, Any] = {"max_output_tokens": 6, **greedy}
    for kind in ("input_image", "input_file"):
        shown = [{"type": kind, "file_id": name}, {"type": "input_text", "text": "Hi"}]
        answer = post(sighted, "/v1/responses", input=[{"role": "user", "content": shown}], **asked)
        assert answer.json()["output"][-1]["content"][0]["text"] == wanted
    kept = answer.json()["id"]
    later = post(sighted, "/v1/responses", input="Hi", previous_response_id=kept, **asked)
    assert later.status_code == 200
    blocks = [{"type": "image", "source": {"type": "file", "file_id": name}}, {"type": "text", "text": "Hi"}]
    messages = [{"role": "user", "content": blocks}]
    told = post(sighted, "/v1/messages", messages=messages, max_tokens=6, **greedy).json()
    assert told["content"][0]["text"] == wanted

    assert httpx.delete(f"{sighted.url}/v1/files/{name}", timeout=PATIENCE).json()["deleted"]
    for part, path in (
        ({"type": "input_image", "file_id": name}, "messages.0.content.1"),
        ({"type": "file", "file": {"file_id": name}}, "messages.0.content.1"),
    ):
        gone = chat(sighted, TEXT, part)
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, f"{path}.file_id")
        assert gone.json()["error"]["message"] == f"{path}: No such File object: {name}"
    assert post(sighted, "/v1/responses", input="Hi", previous_response_id=kept, **asked).status_code == 404
    gone = post(sighted, "/v1/messages", messages=messages, max_tokens=6, **greedy)
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found_error")
    assert gone.json()["error"]["message"].startswith("messages.0.content.0.source: No such File object")


def test_a_file_of_requests_is_no_picture(sighted: Server) -> None:
    answer = chat(sighted, {"type": "input_image", "file_id": uploaded(sighted, FILES[0], "batch")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.content.0.file_id")
    assert "the file's purpose is batch, not vision or user_data" in answer.text
    many = [{"type": "file", "file": {"file_id": NO_FILE}}] * 300
    assert "300 files, of at most 130" in chat(sighted, *many).text


def test_a_file_belongs_to_the_one_who_sent_it(tmp_path: Path) -> None:
    """Reading it, and learning its kind. A long one is read no further than files may be."""
    store = Store(tmp_path, 1 << 30)
    reader = MediaReader(ServeConfig(), store)
    name = new_id("file-")
    path = store.begin(len(FILES[0]))
    path.write_bytes(FILES[0])
    record = StoredFile(id=name, bytes=len(FILES[0]), created_at=0, filename="a", purpose="user_data", owner="mine")
    store.add(path, record)
    part = MediaPart("image", "here", file=name)

    async def read(owned: str) -> tuple[list[str], list[Any]]:
        owner.set_to(owned)
        return await reader.kinds([part], ("image", "audio")), await reader.read([part])

    kinds, [picture] = asyncio.run(read("mine"))
    assert (kinds, picture.pixels_HWC.shape) == (["image"], (28, 28, 3))
    for other in ("other", ""):
        with pytest.raises(NoSuchEntry, match=f"here: No such File object: {name}"):
            asyncio.run(read(other))
    reader._bounds = MediaBounds(file_bytes=100)
    with pytest.raises(BadRequest, match="the file has more than 100 bytes"):
        asyncio.run(read("mine"))
    store.delete_file(name, "mine")
    with pytest.raises(NoSuchEntry):
        asyncio.run(read("mine"))


def test_a_file_below_the_folder_is_read(sighted: Server) -> None:
    folder = sighted.api.folder
    assert chat(sighted, image(f"file://{folder}/shown.png"), TEXT).status_code == 200
    assert "not below the folder" in chat(sighted, image("file:///etc/passwd"), TEXT).text


def test_a_uuid_belongs_to_the_bytes_first_seen_and_to_a_salt(sighted: Server) -> None:
    first = chat(sighted, image(URLS[0], uuid="a"), TEXT, cache_salt="x")
    assert first.status_code == 200
    again = chat(sighted, {"type": "image_url", "image_url": None, "uuid": "a"}, TEXT, cache_salt="x")
    assert again.json()["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]
    other = chat(sighted, image(URLS[1], uuid="a"), TEXT, cache_salt="x")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "messages.0.content.0")
    assert "belongs to other bytes" in other.text
    assert chat(sighted, image(URLS[1], uuid="a"), TEXT, cache_salt="y").status_code == 200
    assert "no file is kept" in chat(sighted, {"type": "image_url", "uuid": "b"}, TEXT, cache_salt="x").text
    assert "1 to 128 characters" in chat(sighted, image(URLS[0], uuid="u" * 129), TEXT).text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("data:image/png;base64,AAAA"), "the form of no known file"),
        (image(URLS[0][:-40]), "truncated|cannot be read|no base64"),
        (image("https://example.com/a.png"), "none of this server's --allowed-media-domains"),
        (image("a.png"), "is no URL that is taken"),
        (image(5), "is a URL or an object with url"),
        ({"type": "image_url"}, "is a URL or an object with url"),
        ({"type": "image_url", "image_url": {"url": URLS[0], "detail": "fine"}}, "detail is one of auto, low, high"),
        ({"type": "input_image", "file_id": "../../etc"}, "file_id is the id of a file of /v1/files"),
        ({"type": "input_image", "file_id": NO_FILE, "image_url": URLS[0]}, "file_id stands by itself"),
        ({"type": "input_image", "file_id": NO_FILE, "uuid": "u"}, "file_id stands by itself"),
        ({"type": "image_embeds", "file_id": NO_FILE}, "file_id stands by itself"),
        ({"type": "file", "file_id": NO_FILE}, "file is an object with file_id or file_data"),
        ({"type": "file", "file": {"file_id": NO_FILE, "file_data": "x"}}, "send one of them"),
        ({"type": "file", "file": {"file_data": ""}}, "is a data: URL or base64"),
        ({"type": "file", "file": {"file_data": "JVBERi0xLjc="}}, "the file is PDF, which is not taken; send JPEG"),
        ({"type": "input_file", "file_data": "%%%%"}, "are no base64"),
        ({"type": "input_file", "file_url": URLS[0]}, "file_url is not taken; send image_url"),
        ({"type": "image"}, "image is not taken; send one of image_url, input_image"),
        ({"type": "image_embeds", "image_embeds": "x"}, "are no base64"),
        ({"type": "image_embeds", "image_embeds": ["x"]}, "is base64 of a safetensors file"),
        ({"type": "image_embeds", "image_embeds": vectors(torch.zeros(16, 63))}, "and the model's have 64"),
        ({"type": "audio_embeds", "audio_embeds": "x"}, "audio_embeds is not taken here; the model has none"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "reads text and pictures alone"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "reads text and pictures alone"),
    ],
)
def test_a_bad_part_gets_one_sentence_that_names_it(sighted: Server, part: dict[str, Any], words: str) -> None:
    answer = chat(sighted, TEXT, part)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith("messages.0.content.1")
    assert any(each in error["message"] for each in words.split("|")), error["message"]


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.glob("picture-bad-*")))
def test_a_bad_file_ends_its_request_alone(sighted: Server, name: str) -> None:
    data = base64.b64encode((CORPUS / name).read_bytes()).decode()
    answer = chat(sighted, image(f"data:image/png;base64,{data}"), TEXT)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages.0.content.0: ")
    assert len(answer.json()["error"]["message"]) < 350


def test_more_pictures_than_the_limit_are_refused(sighted: Server) -> None:
    answer = chat(sighted, *(image(url) for url in URLS))
    assert answer.status_code == 400
    assert "3 parts of image, of at most 2 (--limit-mm-per-prompt)" in answer.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"picture": {}}, "is an object of settings for image, video, audio"),
        ({"image": {"rgba_background_color": [0, 0, 300]}}, "three whole numbers from 0 to 255"),
        ({"image": {"image_mode": "L"}}, "may be RGB alone"),
        ({"video": {"num_frames": "many"}}, "num_frames is a number"),
    ],
)
def test_settings_of_decoding_are_checked(sighted: Server, given: Any, words: str) -> None:
    answer = chat(sighted, image(URLS[0]), media_io_kwargs=given)
    assert answer.status_code == 400
    assert words in answer.text


def test_text_that_spells_a_placeholder_is_text(sighted: Server) -> None:
    answer = chat(sighted, {"type": "text", "text": "a <image> b"}, image(URLS[0])).json()
    ids = answer["prompt_token_ids"]
    assert ids.count(IMAGE) == 16
    assert b"<image>" in bytes(sighted.api.tokenizer.decode([i for i in ids if i != IMAGE]), "utf-8")


def test_a_model_of_texts_says_that_it_reads_text_alone(server: Server) -> None:
    for part in (image(URLS[0]), {"type": "input_audio", "input_audio": {}}, {"type": "image"}, {"type": "file"}):
        answer = chat(server, TEXT, part)
        assert answer.status_code == 400
        assert f"{part['type']} is not supported, because the model reads text alone." in answer.text
        assert answer.json()["error"]["param"] == "messages.0.content.1"


def test_a_bomb_stalls_no_other_client(sighted: Server) -> None:
    """Pictures that take the decoders' time are sent by one client, while another one's ticks of the event loop are
    watched: no work on the first one's pictures happens there. The bound is far above what a busy machine adds."""
    heavy = base64.b64encode(png(8000, 8000, bytes(8000 * 24_001))).decode()
    gaps: list[float] = []

    async def watch() -> None:
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)

    done = threading.Event()
    watching = asyncio.run_coroutine_threadsafe(watch(), sighted.loop)
    try:
        answer = chat(sighted, image(f"data:image/png;base64,{heavy}"), TEXT)
    finally:
        done.set()
        watching.result(PATIENCE)
    assert answer.status_code == 200
    assert sorted(gaps)[-3] < 1.0


def test_a_request_may_have_more_pixels_than_a_message(sighted: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures of 48 MB each. They travel by name, and their memory is given back when the request is done."""
    sizes = list[int]()
    receive = decode_from_face
    monkeypatch.setattr(zmq, "decode_from_face", lambda body: (sizes.append(len(body)), receive(body))[1])
    url = f"data:image/png;base64,{base64.b64encode(png(4000, 4000, bytes(4000 * 12_001))).decode()}"
    answer = chat(sighted, image(url), TEXT, image(url))
    assert answer.status_code == 200, answer.text
    black = [np.zeros((28, 28, 3), np.uint8)] * 2
    told = answer.json()
    assert told["choices"][0]["token_ids"] == by_transformers(told["prompt_token_ids"], black)
    assert 0 < max(sizes) < 1 << 16
    nothing_is_held(sighted)


def test_a_client_that_leaves_gives_its_memory_back(sighted: Server) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [image(URLS[0]), {"type": "image_url", "image_url": {"url": LARGE}}]}],
        "model": MODEL, "max_tokens": 90, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", sighted.url + "/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                break
        assert sighted.api.media._decoders.room.taken >= 3 << 20
    nothing_is_held(sighted)


def test_no_memory_is_kept_for_requests_that_ended(sighted: Server) -> None:
    assert chat(sighted, image(URLS[2]), TEXT).status_code == 200
    nothing_is_held(sighted)


def nothing_is_held(sighted: Server) -> None:
    """Wait until no memory of pictures is taken."""
    sighted.wait_idle()
    room = sighted.api.media._decoders.room
    deadline = time.monotonic() + PATIENCE
    while room.taken and time.monotonic() < deadline:
        time.sleep(0.05)
    assert room.taken == 0


def test_counting_tokens_counts_pictures(sighted: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": TEXTS[0]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Hi"}]}]
    counted = post(sighted, "/v1/messages/count_tokens", model=MODEL, messages=messages).json()["input_tokens"]
    assert counted == chat(sighted, image(URLS[0]), TEXT).json()["usage"]["prompt_tokens"]
    assert json.dumps(counted).isdigit()
