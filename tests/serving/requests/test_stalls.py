"""What one client sends must not keep the event loop from the others: the loop's own lateness, measured within it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.apis.grpc.bounds import MOST_FIELDS, check_message
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grpc.proto import kserve_pb2
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.observed.watchdog import Watchdog
from ridgeline.serving.requests import bounded_json
from ridgeline.serving.requests.bounded_json import (
    MOST_CONTAINERS,
    MOST_TEXTS,
    MOST_VALUES,
    SLICE,
    UNREAD,
    Size,
    decode,
    decode_body,
)
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.structure import _one_of
from ridgeline_bench.scripts.attacks.http_cases import ask, make, make_plain
from tests.serving.conftest import MODEL, Server, StartServer

FaceOf = Callable[..., AbstractAsyncContextManager[ApiServer]]
TEXT = {"model": MODEL, "prompt": "x", "max_tokens": 1}
MOST = 0.5  # seconds that the loop may be late; before there were bounds these bodies took 1 s to 14 s


async def lateness(work: Awaitable[Any]) -> tuple[Any, float]:
    """The work's result, and how much too late a task that sleeps came at the most. While this process has no core
    nothing of it is late."""
    worst, over = 0.0, False

    async def sleeper() -> None:
        nonlocal worst
        while not over:
            began, spent = time.monotonic(), time.process_time()
            await asyncio.sleep(0.005)
            worst = max(worst, min(time.monotonic() - began - 0.005, time.process_time() - spent))

    watching = asyncio.create_task(sleeper())
    result = await work
    over = True
    await watching
    return result, worst


def arguments(text: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    return {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}], "max_tokens": 1}


LISTS = "[" + "[]," * (6 << 20) + "[]]"
HOSTILE: dict[str, tuple[str, Callable[[], str], int]] = {
    "unknown field": ("/v1/completions", lambda: json.dumps(TEXT)[:-1] + f', "x": {LISTS}}}', 400),
    "arguments": ("/v1/chat/completions", lambda: json.dumps(arguments(LISTS)), 400),
    "logit_bias": (
        "/v1/completions",
        lambda: json.dumps(TEXT | {"logit_bias": dict.fromkeys(map(str, range(1 << 20)), 1)}),
        400,
    ),
    "ids": ("/v1/completions", lambda: json.dumps(TEXT | {"prompt": [5] * (1 << 20)}), 400),
    "negative": (
        "/v1/completions",
        lambda: json.dumps(TEXT | {"negative_prompt": [5] * (1 << 20), "guidance_scale": 2}),
        400,
    ),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": [100] * (1 << 20)}), 200),
    "text": ("/v1/completions", lambda: json.dumps(TEXT | {"prompt": "ab " * 80_000}), 400),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_holds_the_loop_up(api_server_of: FaceOf, name: str) -> None:
    path, make_body, status = HOSTILE[name]
    body = make_body().encode()

    async def main() -> tuple[httpx.Response, float]:
        async with api_server_of() as api:
            transport = httpx.ASGITransport(wrap(create_app(api), api), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                await client.post(path, json={})  # imports, and what is made once
                return await lateness(client.post(path, content=body))

    answer, late = asyncio.run(main())
    assert answer.status_code == status, answer.text[:300]
    assert late < MOST


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_reference_is_made_beside_the_loop(api_server_of: FaceOf, path: str) -> None:
    async def main() -> tuple[bool, int]:
        async with api_server_of() as api:
            app = create_app(api)
            made, here = app.openapi, threading.get_ident()
            where = list[bool]()

            def noted() -> dict[str, Any]:
                where.append(threading.get_ident() == here)
                return made()

            app.openapi = noted  # type: ignore[method-assign]
            transport = httpx.ASGITransport(wrap(app, api), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                status = (await client.get(path)).status_code
                return where == [False], status

    beside, status = asyncio.run(main())
    assert status == 200
    assert beside


def test_many_completions_start_in_many_turns_of_the_loop(api_server_of: FaceOf) -> None:
    """The fourth longest turn in CPU time, because garbage may be collected in a few of them."""
    body = {"model": MODEL, "prompt": ["x"] * 64, "n": 64, "max_tokens": 64}

    async def main() -> list[float]:
        async with api_server_of() as api:
            transport = httpx.ASGITransport(wrap(create_app(api), api), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                await client.post("/v1/completions", json=TEXT)
                asked, turns = asyncio.create_task(client.post("/v1/completions", json=body)), list[float]()
                while api.service.admission.open_requests < 64 * 64:
                    assert not asked.done(), asked.result().text
                    began = time.thread_time()
                    await asyncio.sleep(0)
                    turns.append(time.thread_time() - began)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                return sorted(turns)

    assert asyncio.run(main())[-4] < 0.02


# ---- what is counted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (b"[" + b"[]," * (MOST_CONTAINERS - 2) + b"[]]", None),
        (b"[" + b"[]," * MOST_CONTAINERS + b"[]]", "lists and objects"),
        (b"[" + b"1," * MOST_VALUES + b"1]", None),
        (b"[" + b"1," * (MOST_VALUES + 1) + b"1]", "values"),
        (b"[" + b'"a",' * (MOST_TEXTS - 1) + b'"a"]', None),
        (b"[" + b'"a",' * MOST_TEXTS + b'"a"]', "strings"),
        (b'"' + b"[{,]}" * (1 << 20) + b'"', None),
        (b'"' + b'[\\",' * (1 << 20) + b'"', None),
        (b'"' + b"[,\\\\" * (1 << 20) + b'"', None),
        (b'"' + b"\\" * 4 * SLICE + b'",[' + b"[]," * MOST_CONTAINERS, "lists and objects"),
    ],
)
def test_what_json_holds_is_counted_outside_of_its_strings(text: bytes, refused: str | None) -> None:
    for shift in (0, 1, 2):  # the bounds of slices fall elsewhere
        if refused is None:
            Size().add(b" " * shift + text)
        else:
            with pytest.raises(BadRequest, match=refused):
                Size().add(b" " * shift + text)


def test_sizes_of_several_texts_add_up() -> None:
    size, text = Size(), b"[" + b"[]," * (MOST_CONTAINERS // 2) + b"[]]"
    assert len(decode(text, size)) == MOST_CONTAINERS // 2 + 1
    with pytest.raises(BadRequest, match="lists and objects"):
        decode(text, size)


def test_large_bodies_are_read_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"prompt": ['é\\"x'], "n": 2, "other": [1], "stop": None, "seed": 2**64 - 1, "top_p": 0.5}
    data = json.dumps(value).encode()
    known = {name: value[name] for name in ("prompt", "n", "stop")}
    assert decode_body(data, known.keys()) == value
    monkeypatch.setattr(bounded_json, "INLINE_BYTES", 0)
    assert decode_body(data, known.keys()) == known | dict.fromkeys(("other", "seed", "top_p"), UNREAD)
    for wrong in (b"[1]", b'{"prompt": tru}', b'{"a": 1', b'{"prompt": 1e999}', b'{"prompt": ' + b"[" * 5000):
        with pytest.raises(BadRequest):
            decode_body(wrong, known.keys())


ESCAPES = st.sampled_from(
    ["\\", '"', "\\n", "\\\\", "/", "\\u00e9", "\\ud83d\\ude00", "é", "😀", "x", "[{,", "\\u005c", '\\"']
)
SPELLED = st.lists(ESCAPES, max_size=60).map("".join)


@given(texts=st.lists(SPELLED, min_size=1, max_size=4), shift=st.integers(0, 9), mistake=st.booleans())
def test_long_strings_are_decoded_in_pieces_as_in_one(texts: list[str], shift: int, mistake: bool) -> None:
    first, *rest = ['"' + text + '"' for text in texts]
    data = f'{{"a": [{", ".join(rest)}], "b": {{"c": {first}, {first}: [1, null]}}, "n": 1}}'
    data = " " * shift + data + "x" * mistake
    raw, whole = data.encode(), dict[str, Any]()
    with contextlib.suppress(msgspec.DecodeError):
        whole = msgspec.json.decode(raw)
    with (
        mock.patch.object(bounded_json, "LONG", 12),
        mock.patch.object(bounded_json, "SLICE", 16),
        mock.patch.object(bounded_json, "INLINE_BYTES", 0),
    ):
        for read in (decode, lambda raw: decode_body(raw, {"a", "b", "n"})):
            if not whole:
                with pytest.raises(BadRequest):
                    read(raw)
            else:
                assert read(raw) == whole


def test_no_call_decodes_much_of_a_long_string() -> None:
    """The decoder keeps the interpreter from all other threads until it returns."""
    text, longest, checked = '\\n"é' * (2 << 20), 0, bounded_json._checked

    def noted(read: Callable[[Any], Any], data: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(bytes(data)))
        return checked(read, data)

    body = json.dumps(arguments(json.dumps(text, ensure_ascii=False)), ensure_ascii=False).encode()
    with mock.patch.object(bounded_json, "_checked", noted):
        found = decode_body(body, {"messages"})
        call = found["messages"][0]["tool_calls"][0]["function"]["arguments"]
        assert decode(call.encode()) == text
    assert longest <= SLICE + 2


@pytest.mark.parametrize(
    "value",
    ["x" * (1 << 25), [["x" * (1 << 25)]], {"a": list(range(1 << 20))}, 10**20_000],
    ids=lambda value: type(value).__name__,
)
def test_no_more_of_a_wrong_value_is_looked_at_than_is_shown(value: Any) -> None:
    def seconds() -> float:
        began = time.process_time()
        assert len(shortened(value)) <= 81
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.02  # garbage may be collected meanwhile


def test_protobuf_fields_are_counted_before_they_are_built() -> None:
    read = kserve_pb2.ModelInferRequest.FromString
    empty = kserve_pb2.ModelInferRequest.InferInputTensor()
    full = kserve_pb2.ModelInferRequest.InferInputTensor()
    full.contents.bytes_contents.extend([b""] * (MOST_FIELDS + 1))
    for wrong in ([empty] * (MOST_FIELDS + 1), [full]):
        with pytest.raises(BadRequest, match="fields"):
            check_message(kserve_pb2.ModelInferRequest(inputs=wrong).SerializeToString(), read)
    many = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(1 << 20)))
    check_message(many.SerializeToString(), inference_pb2.GenerateRequest.FromString)
    check_message(b"\xff" * (1 << 20), read)  # no protobuf: its reader says so
    free = inference_pb2.GenerateRequest()
    free.chat.chat_template_kwargs.update({"x": [1] * 100_000})
    with pytest.raises(BadRequest, match="chat_template_kwargs"):
        check_message(free.SerializeToString(), inference_pb2.GenerateRequest.FromString)


# ---- what holds the loop up is told ---------------------------------------------------------------------------------


def test_the_watchdog_names_what_held_the_loop_up(caplog: pytest.LogCaptureFixture) -> None:
    def hold_up() -> None:
        began = time.thread_time()  # a busy machine takes longer, and that is no stall
        while time.thread_time() - began < 0.6:
            pass

    async def main() -> Watchdog:
        watchdog = Watchdog()
        watchdog.start(asyncio.get_running_loop())
        await asyncio.sleep(0.1)
        hold_up()
        await asyncio.sleep(0.2)
        watchdog.stop()
        return watchdog

    with caplog.at_level(logging.WARNING):
        watchdog = asyncio.run(main())
    assert watchdog.stalls >= 1
    assert watchdog.seconds > 0.3
    assert any("hold_up (test_stalls.py:" in record.getMessage() for record in caplog.records)


# ---- choices --------------------------------------------------------------------------------------------------------


def test_as_many_choices_as_a_body_may_name(server: Server) -> None:
    choices = [f"{'abcdefgh'[i % 8]}{i}" for i in range(4096)]
    body = TEXT | {"structured_outputs": {"choice": choices}, "max_tokens": 16, "temperature": 1, "seed": 3}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in choices


@pytest.mark.parametrize("choices", [["a", "ab"], ["", "x"], ['é\n"q"', "\\d", "/x/"]])
def test_a_choice_is_taken_word_by_word(server: Server, choices: list[str]) -> None:
    assert _one_of(choices).count("CHOICE") == 2
    body = TEXT | {"structured_outputs": {"choice": choices}, "max_tokens": 16, "temperature": 1, "n": 4, "seed": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert {choice["text"] for choice in answer.json()["choices"]} <= set(choices)


# ---- mutated requests -----------------------------------------------------------------------------------------------


def test_no_mutated_request_breaks_the_server(start_server: StartServer) -> None:
    with start_server() as closed:  # a mutated order must not pause the engine
        host, _, port = closed.url.removeprefix("http://").partition(":")
        address = (host, int(port))
        found = {number: ask(address, make(number)) for number in range(120)}
        alive = ask(address, make_plain(""))
    assert not [number for number, status in found.items() if status in ("500", "hung")]
    assert {"200", "400", "404"} <= set(found.values()), "the cases reach nothing"
    assert alive == "200"


STARVED = """
import asyncio, os, sys, time
from ridgeline.serving.observed.watchdog import Watchdog, starved

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [os.fork() for _ in range(4)]
if 0 in busy:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass
    os._exit(0)
os.nice(10)

async def main():
    watchdog, began = Watchdog(), starved()
    watchdog.start(asyncio.get_running_loop())
    late, due = 0.0, time.monotonic()
    while time.monotonic() < due + 2 and late < 0.3:
        begun = time.monotonic()
        await asyncio.sleep(0.002)
        late += max(0.0, time.monotonic() - begun - 0.1)
        spent = time.process_time() + 0.002
        while time.process_time() < spent:
            pass
    watchdog.stop()
    print(late, starved() - began, watchdog.seconds)

try:
    asyncio.run(main())
finally:
    for child in busy:
        os.kill(child, 9)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not tell of waits")
def test_a_machine_without_a_free_core_is_no_stall_of_the_loop() -> None:
    """The least of five processes on one core is late by what the others take."""
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=120, check=True)
    late, waited, counted = map(float, done.stdout.split())
    if late < 0.2:
        pytest.skip("this machine's scheduler kept nobody waiting")
    assert waited > late
    assert counted < 0.75 * late  # a machine that others use too is late for other reasons as well
    assert done.stderr.count("held up") <= 1
