"""Long answers are made and sent piece by piece, and are what they would be in one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.http import pieces
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.http.pieces import PIECE, InPieces, encoded, json_pieces, json_response
from ridgeline.serving.shares import INLINE_ENTRIES
from tests.serving.conftest import MODEL

LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, width=16) | st.text(max_size=3)
PLAIN = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


def postponed(value: Any, draw: st.DrawFn) -> Any:
    """The same value, of which some lists come one by one and some parts are made when they are reached."""
    if isinstance(value, list):
        made = [postponed(each, draw) for each in value]
        value = iter(made) if draw(st.booleans()) else made
    elif isinstance(value, dict):
        value = {name: postponed(each, draw) for name, each in value.items()}
    return (lambda: value) if draw(st.integers(0, 3)) == 0 else value


@given(st.data())
def test_pieces_join_to_the_json_of_the_whole(data: st.DataObject) -> None:
    value = data.draw(PLAIN)
    assert b"".join(json_pieces(lambda: postponed(value, data.draw))) == msgspec.json.encode(value)
    told = msgspec.json.encode({"x": encoded(postponed(value, data.draw))})
    assert told == msgspec.json.encode({"x": value})


def test_no_more_is_made_than_is_taken() -> None:
    made = 0

    def rows() -> Iterator[str]:
        nonlocal made
        for _ in range(10_000):
            made += 1
            yield "x" * 1024

    found = json_pieces(lambda: {"rows": rows(), "end": 1})
    first = next(found)
    assert PIECE <= len(first) < 2 * PIECE
    assert made < 512
    whole = first + b"".join(found)
    assert json.loads(whole) == {"rows": ["x" * 1024] * 10_000, "end": 1}


def test_what_json_has_no_form_for_is_refused() -> None:
    with pytest.raises(TypeError, match="JSON has no form"):
        list(json_pieces(lambda: {"x": object()}))


async def sent(response: Response, *, after: Callable[[int], Any] = lambda count: None) -> list[Message]:
    """What a response sends to a client that stays."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)
        if (waiting := after(len(messages))) is not None:
            await waiting

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await response({"type": "http"}, receive, send)
    return messages


def test_long_answers_come_in_pieces_and_short_ones_at_once() -> None:
    async def main() -> None:
        for size in (0, INLINE_ENTRIES + 1):
            short = await json_response(size, lambda: {"x": iter([1, 2])})
            assert (short.body, short.headers["content-length"]) == (b'{"x":[1,2]}', "11")
        rows = ["x" * 1024] * 3000
        long = await json_response(INLINE_ENTRIES + 1, lambda: {"x": iter(rows)})
        assert isinstance(long, InPieces)
        start, *bodies = await sent(long)
        assert start["status"] == 200
        assert dict(start["headers"]) == {b"content-type": b"application/json"}
        assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
        assert max(len(body["body"]) for body in bodies) < 2 * PIECE
        assert json.loads(b"".join(body["body"] for body in bodies)) == {"x": rows}
        with pytest.raises(ZeroDivisionError):  # before anything is sent
            await json_response(INLINE_ENTRIES + 1, lambda: {"x": 1 // 0})

    asyncio.run(main())


def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "STALLED", 0.05)
    made = list[int]()

    def rows() -> Iterator[str]:
        for i in range(3000):
            made.append(i)
            yield "x" * 1024

    async def main() -> list[Message]:
        long = await json_response(INLINE_ENTRIES + 1, lambda: {"x": rows()})
        return await asyncio.wait_for(sent(long, after=lambda count: asyncio.sleep(60) if count == 3 else None), 30)

    assert len(asyncio.run(main())) == 3  # the last of which says that more comes, so the connection is closed
    assert len(made) < 3000


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_echo_with_logprobs_is_that_of_its_prompts_alone(
    api_server_of: Callable[..., AbstractAsyncContextManager[ApiServer]], stream: bool
) -> None:
    prompts = [[100 + i, *range(200, 500)] for i in range(3)]
    body = {"model": MODEL, "max_tokens": 2, "echo": True, "logprobs": 20, "temperature": 0, "prompt_logprobs": 3}
    if stream:
        body |= {"stream": True}
        del body["prompt_logprobs"]

    async def chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        if not stream:
            yield json.loads(answer.text)
            return
        for line in answer.text.split("\n\n"):
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    async def main() -> None:
        async with api_server_of() as api:
            transport = httpx.ASGITransport(wrap(create_app(api), api))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

                async def ask(prompt: Any) -> dict[int, list[Any]]:
                    answer = await client.post("/v1/completions", json=body | {"prompt": prompt})
                    assert answer.status_code == 200, answer.text
                    assert ("content-length" in answer.headers) == (not stream and prompt != prompts)
                    found: dict[int, list[Any]] = {}
                    async for chunk in chunks(answer):
                        for choice in chunk["choices"]:
                            found.setdefault(choice.pop("index"), []).append(choice)
                    return found

                together, alone = await ask(prompts), [(await ask(prompt))[0] for prompt in prompts]
                assert list(map(len, together.values())) == list(map(len, alone))
                for number, want in enumerate(alone):
                    for mine, its in zip(together[number], want, strict=True):
                        assert_close(mine, its)
                    tops = [top for choice in want for top in choice["logprobs"]["top_logprobs"]]
                    assert tops[0] is None
                    assert len(tops) == len(prompts[0]) + 2
                    assert all(20 <= len(top) <= 21 for top in tops[1:])

    asyncio.run(main())


def assert_close(mine: Any, its: Any) -> None:
    """Equal but for rounding, which depends on what else a step computes."""
    assert type(mine) is type(its)
    if isinstance(mine, float):
        assert mine == pytest.approx(its, abs=1e-3)
    elif isinstance(mine, dict):
        assert len(mine) == len(its)
        for name in mine.keys() & its.keys():
            assert_close(mine[name], its[name])
    elif isinstance(mine, list):
        assert len(mine) == len(its)
        for one, other in zip(mine, its, strict=True):
            assert_close(one, other)
    else:
        assert mine == its
