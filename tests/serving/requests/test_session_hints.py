"""Hints that a session comes back, in the words of every API, as seconds for which the cache keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.serving.apis.anthropic import bodies as anthropic
from ridgeline.serving.apis.openai import response_bodies as responses
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody
from ridgeline.serving.requests.fields import examine
from ridgeline.serving.requests.kept import kept_for
from ridgeline.serving.requests.validation import parse
from ridgeline.text.parsers.choose import Forms

USER = {"role": "user", "content": "Hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TEXT: dict[str, Any] = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        ({"prompt_cache_key": "x"}, 300.0),
        ({"prompt_cache_retention": "in_memory"}, 300.0),
        ({"prompt_cache_key": "x", "prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt_cache_key": "x", "prompt_cache_ttl": 7.5}, 7.5),
    ],
)
def test_openais_hints(fields: dict[str, Any], seconds: float) -> None:
    for model, data in ((ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "Hi"})):
        assert examine(model, data | fields) == [], "none is named as ignored"
        assert kept_for(parse(model, data | fields)) == seconds
    body = parse(responses.ResponsesBody, {"input": "Hi"} | fields)
    chat, ignored = responses.chat_of(body, responses.input_items(body), later=True)
    assert (kept_for(chat), ignored) == (seconds, [])
    assert chat.prompt_cache_key == fields.get("prompt_cache_key")


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"messages": [USER]}, 0.0),
        ({"messages": [USER], **MARK}, 300.0),
        ({"messages": [USER], **HOUR}, 3600.0),
        ({"messages": [{"role": "user", "content": [TEXT, TEXT | MARK]}]}, 300.0),
        ({"messages": [{"role": "user", "content": [TEXT | MARK]}], "system": [TEXT | HOUR]}, 3600.0),
        ({"messages": [USER], "tools": [{"name": "f", "input_schema": {"type": "object"}} | MARK]}, 300.0),
        ({"messages": [{"role": "user", "content": [TEXT | {"cache_control": None}]}]}, 0.0),
        ({"messages": [USER], "prompt_cache_ttl": 9.0, **MARK}, 9.0),
    ],
)
def test_anthropics_marks(body: dict[str, Any], seconds: float) -> None:
    asked = parse(anthropic.MessagesBody, {"max_tokens": 5, **body})
    chat, ignored = anthropic.chat_of(asked, Forms(None, None), later=True)
    assert (kept_for(chat), ignored) == (seconds, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_retention": "48h"},
        {"prompt_cache_ttl": 0},
        {"prompt_cache_ttl": 1e300},
        {"prompt_cache_key": "x" * 100_000},
    ],
)
def test_hints_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse(ChatBody, {"messages": [USER], **fields})
