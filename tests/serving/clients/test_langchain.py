"""langchain-openai against the server: chat, streams, tools, structured output, plain completions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serving.clients.asked import PROMPT, QUESTION, Weather, needs, offline
from tests.serving.conftest import MODEL, Server

pytestmark = needs("langchain_openai")


def settings(server: Server, **others: Any) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "model": MODEL, "max_retries": 0, **others}


@pytest.fixture
def chat(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**settings(server, temperature=0, max_tokens=24, stream_usage=True))


def test_a_chat_is_the_same_whole_and_streamed(chat: Any) -> None:
    whole = chat.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 24
    assert whole.response_metadata["finish_reason"] == "length"
    pieces = list(chat.stream([("system", "Be brief."), ("human", QUESTION)]))
    assert len(pieces) > 3
    joined = sum(pieces[1:], pieces[0])
    assert joined.content == whole.content
    assert joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


def test_batches_and_coroutines(chat: Any) -> None:
    questions = [QUESTION, "And in Lima?"]
    alone = [chat.invoke(question).content for question in questions]
    assert [answer.content for answer in chat.batch(questions)] == alone

    async def ask() -> list[str]:
        return [answer.content for answer in await chat.abatch(questions)]

    assert asyncio.run(ask()) == alone


def test_logprobs_are_told(chat: Any) -> None:
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(told) == 24
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in told)


def test_tools_are_called(chat: Any) -> None:
    caller = chat.bind_tools([Weather], tool_choice="Weather").bind(max_tokens=200)
    [call] = caller.invoke(QUESTION).tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    pieces = list(caller.stream(QUESTION))
    [streamed] = sum(pieces[1:], pieces[0]).tool_calls
    assert streamed["args"] == call["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_its_class(chat: Any, method: str) -> None:
    chat.max_tokens = 200
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_a_conversation_with_a_tools_answer_goes_on(chat: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    call = {"name": "Weather", "args": {"city": "Oslo", "days": 1}, "id": "call-1"}
    messages = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("rain", tool_call_id="call-1")]
    assert chat.bind_tools([Weather], tool_choice="none").invoke(messages).content


def test_completions_are_the_offline_ones(server: Server) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(**settings(server, temperature=0, max_tokens=12))
    assert model.invoke(PROMPT) == offline(12)
    assert "".join(model.stream(PROMPT)) == offline(12)


def test_a_refusal_says_why(chat: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.bind(temperature=-1).invoke(QUESTION)
