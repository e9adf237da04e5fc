"""litellm against the server, as an OpenAI-like endpoint and as a hosted vLLM."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.serving.clients.asked import PROMPT, QUESTION, Weather, needs, offline
from tests.serving.conftest import MODEL, Server

pytestmark = needs("litellm")
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 24,
        "max_retries": 0,
    }


def test_a_chat_is_the_same_whole_streamed_and_awaited(litellm: Any, asked: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, **asked)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    pieces = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked))
    content = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert content == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == 24
    awaited = asyncio.run(litellm.acompletion(messages=MESSAGES, **asked))
    assert awaited.choices[0].message.content == content


def test_tools_are_called(litellm: Any, asked: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked |= {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    [call] = litellm.completion(**asked).choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)), messages=MESSAGES)
    [streamed] = built.choices[0].message.tool_calls
    assert streamed.function.name == "weather"
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_structured_output_is_of_its_class(litellm: Any, asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, response_format=Weather, **asked | {"max_tokens": 200})
    Weather.model_validate_json(answer.choices[0].message.content)


def test_completions_are_the_offline_ones(litellm: Any, asked: dict[str, Any]) -> None:
    asked["model"] = asked["model"].replace("openai/", "text-completion-openai/")
    answer = litellm.text_completion(prompt=PROMPT, **asked | {"max_tokens": 12})
    assert answer.choices[0].text == offline(12)


def test_a_router_spreads_over_two_names(litellm: Any, asked: dict[str, Any]) -> None:
    first = {name: value for name, value in asked.items() if name not in ("temperature", "max_tokens")}
    second = first | {"model": first["model"].replace(MODEL, "alias")}
    router = litellm.Router(model_list=[{"model_name": "any", "litellm_params": p} for p in (first, second)])
    answers = [router.completion("any", MESSAGES, temperature=0, max_tokens=4) for _ in range(4)]
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_a_refusal_says_why(litellm: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **asked | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(messages=MESSAGES, **asked | {"model": asked["model"].replace(MODEL, "nobody")})
