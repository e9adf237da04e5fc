"""llama-index's OpenAILike against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serving.clients.asked import PROMPT, QUESTION, Weather, needs, offline
from tests.serving.conftest import MODEL, Server

pytestmark = needs("llama_index")


@pytest.fixture
def model(server: Server) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=2048,
        max_tokens=24,
        temperature=0,
        max_retries=0,
    )


def test_a_chat_is_the_same_whole_streamed_and_awaited(model: Any) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    whole = model.chat(messages).message.content
    assert whole
    pieces = list(model.stream_chat(messages))
    assert len(pieces) > 3
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == whole
    assert asyncio.run(model.achat(messages)).message.content == whole


def test_completions_are_the_offline_ones(model: Any) -> None:
    model.is_chat_model, model.max_tokens = False, 12
    assert model.complete(PROMPT).text == offline(12)
    assert list(model.stream_complete(PROMPT))[-1].text == offline(12)


def test_tools_are_called(model: Any) -> None:
    from llama_index.core.tools import FunctionTool

    def weather(city: str, days: int) -> str:
        """Tell the weather of a city."""
        return f"{city}: {days} days of rain"

    model.max_tokens = 400
    tool = FunctionTool.from_defaults(weather, fn_schema=Weather)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    Weather.model_validate(call.tool_kwargs)


def test_structured_output_is_of_its_class(model: Any) -> None:
    from llama_index.core.prompts import PromptTemplate

    model.max_tokens = 200
    assert isinstance(model.structured_predict(Weather, PromptTemplate(QUESTION)), Weather)
