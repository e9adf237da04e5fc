"""instructor against the server: every mode that holds an answer to a class."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.serving.clients.asked import QUESTION, Weather, needs
from tests.serving.conftest import MODEL, Server

pytestmark = needs("instructor")
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 300,
    "max_retries": 0,
}


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_answers_are_of_their_class(server: Server, mode: str) -> None:
    import instructor

    client = instructor.from_openai(server.client, mode=instructor.Mode[mode])
    answer, whole = client.chat.completions.create_with_completion(response_model=Weather, **ASKED)
    assert isinstance(answer, Weather)
    assert whole.usage.completion_tokens > 0
    *pieces, last = client.chat.completions.create_partial(response_model=Weather, **ASKED)
    assert pieces
    assert last.city == answer.city
    assert last.days == answer.days


def test_coroutines(server: Server) -> None:
    import instructor

    async def ask() -> Weather:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await instructor.from_openai(client).chat.completions.create(response_model=Weather, **ASKED)

    assert isinstance(asyncio.run(ask()), Weather)
