"""Reasoning as clients see it. The embedded model does not reason, so a budget makes it stop and a grammar says what
follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.serving.http import answers
from tests.serving.conftest import MODEL, Server, StartServer
from tests.serving.http.test_http import events
from tests.serving.requests.test_tool_calls import TOOLS, fits

BUDGET, ANSWER = 6, "It rains."
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 60,
    "temperature": 0.7,
    "seed": 5,
    "thinking_token_budget": BUDGET,
    "structured_outputs": {"choice": [ANSWER]},
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@pytest.fixture(scope="module")
def thinker(start_server: StartServer) -> Iterator[Server]:
    with start_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as running:
        yield running


def post(server: Server, **asked: Any) -> httpx.Response:
    body = {name: value for name, value in (ASKED | asked).items() if value is not None}
    if not body.get("stream"):
        body.pop("stream_options", None)
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response


def whole(server: Server, **asked: Any) -> tuple[str | None, str | None, int, answers.Chat]:
    answer = msgspec.json.decode(post(server, **asked).content, type=answers.Chat)
    message, usage = answer.choices[0].message, answer.usage
    assert message.reasoning == message.reasoning_content
    return message.reasoning or None, message.content, usage.completion_tokens_details.reasoning_tokens, answer


def streamed(server: Server, **asked: Any) -> tuple[str | None, str | None, int]:
    told = events(post(server, stream=True, **asked))[:-1]
    chunks = [msgspec.json.decode(event, type=answers.ChatChunk) for event in told]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = "".join(delta.reasoning or "" for delta in deltas)
    assert reasoning == "".join(delta.reasoning_content or "" for delta in deltas)
    counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    return reasoning or None, "".join(delta.content or "" for delta in deltas) or None, counts[-1]


def test_a_budget_ends_reasoning_and_a_grammar_follows(thinker: Server) -> None:
    reasoning, content, tokens, answer = whole(thinker)
    assert (content, tokens, answer.choices[0].finish_reason) == (ANSWER, BUDGET, "stop")
    assert reasoning
    assert "think>" not in reasoning
    assert streamed(thinker) == (reasoning, content, tokens)
    assert whole(thinker, include_reasoning=False)[:3] == (None, ANSWER, BUDGET)
    assert streamed(thinker, include_reasoning=False) == (None, ANSWER, BUDGET)


def test_a_response_tells_its_reasoning_unless_the_client_wants_none(thinker: Server) -> None:
    asked = {name: value for name, value in ASKED.items() if name not in ("messages", "max_tokens", "stream_options")}
    for wanted, kinds in ((None, ["reasoning", "message"]), (False, ["message"])):
        body = {**asked, "input": ASKED["messages"], "include_reasoning": wanted, "stream": True}
        answer = httpx.post(f"{thinker.url}/v1/responses", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert ("response.reasoning_text.delta" in answer.text) is (wanted is None)
        done = json.loads(answer.text.strip().rpartition("data: ")[2])["response"]
        assert [item["type"] for item in done["output"]] == kinds
        assert done["output"][-1]["content"][0]["text"] == ANSWER
        assert done["usage"]["output_tokens_details"]["reasoning_tokens"] == BUDGET


def test_several_choices_count_together_and_the_likeliest_keep_their_own(thinker: Server) -> None:
    *_, tokens, answer = whole(thinker, n=2)
    assert tokens == 2 * BUDGET
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    *_, answer = whole(thinker, n=1, best_of=3)
    assert answer.choices[0].message.content == ANSWER


def test_reasoning_without_an_end_is_all_reasoning(thinker: Server) -> None:
    reasoning, content, tokens, answer = whole(thinker, thinking_token_budget=None, max_tokens=8)
    assert reasoning
    assert (content, tokens, answer.choices[0].finish_reason) == (None, 8, "length")
    assert whole(thinker, thinking_token_budget=0)[:3] == (None, ANSWER, 0)


def test_forced_calls_come_behind_the_reasoning(thinker: Server) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "structured_outputs": None}
    reasoning, content, tokens, answer = whole(thinker, max_tokens=200, **asked)
    [call] = answer.choices[0].message.tool_calls or []
    assert fits(call.function.name, json.loads(call.function.arguments))
    assert (content, tokens, answer.choices[0].finish_reason) == (None, BUDGET, "tool_calls")
    assert reasoning


def test_a_budget_without_a_parser_is_refused(server: Server) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ASKED | {"stream": True}, timeout=120)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in response.json()["error"]["message"]
