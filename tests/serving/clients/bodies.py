"""What programs sent and were told, without what is private or another's text: for tests that send it again.

requests = stored(RECORD.read_text().splitlines(), {"/home/of/a/run": "/home/user"})
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

BODIES = Path(__file__).parent / "sent"
PROSE = frozenset({"text", "description", "content", "instructions", "output", "title", "$comment"})
SHORT = 60  # characters that are not prose yet
KEPT_HEADERS = ("anthropic-beta", "anthropic-version")
BILL = "x-anthropic-billing-header"
IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,}")
NAMED = re.compile(r"\b(call|chatcmpl|conv|fc|msg|ctc|rs|resp|toolu|at|ses|prt)_[0-9A-Za-z_]{12,}")


def stored(lines: Iterable[str], paths: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the first and the last of the requests that offer tools, and the first that does not."""
    entries = [json.loads(line) for line in lines]
    asked = [entry for entry in entries if entry["method"] == "POST"]
    offering = [entry for entry in asked if '"tools"' in entry["body"]]
    plain = [entry for entry in asked if entry not in offering]
    chosen = [*plain[:1], *offering[:1], *offering[1:][-1:]]
    return [redacted(entry, paths) for entry in chosen]


def redacted(entry: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Return one request as it is kept: what was sent, what was left out by name, and what was told."""
    text, parts = entry["body"], json.dumps(told(entry["path"], entry["answer"]))
    for path, shown in paths.items():
        text, parts = text.replace(path, shown), parts.replace(path, shown)
    for place, name in enumerate(dict.fromkeys(found[0] for found in NAMED.finditer(text))):
        text = text.replace(name, f"{name.partition('_')[0]}_{place}")
    sent = {name.lower(): value for name, value in entry["sent"].items()}
    return {
        "path": entry["path"],
        "headers": {name: sent[name] for name in KEPT_HEADERS if name in sent},
        "body": _shortened(json.loads(text)),
        "ignored": sorted(ignored(entry["headers"])),
        "told": json.loads(parts),
    }


def _shortened(value: Any, key: str = "") -> Any:
    """Return a value whose prose is told by its length alone, and whose ids are zeros."""
    if isinstance(value, dict):
        return {name: _shortened(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(BILL):
        return f"{BILL}: version=0;"
    if key in PROSE and len(value) > SHORT:
        return f"Text of {len(value)} characters."
    if value.startswith("{") and len(value) > SHORT and key != "arguments":
        return "{}"  # what the program tells its maker
    return IDS.sub(lambda found: re.sub("[0-9a-f]", "0", found[0]), value)


def ignored(headers: Mapping[str, str]) -> list[str]:
    """Return what an answer's header names."""
    return list(filter(None, headers.get("ridgeline-ignored", "").split(", ")))


def told(path: str, answer: str) -> list[list[Any]]:
    """Return the parts of an answer: ["text", text] and ["call", name, arguments], as the route tells them. Only chats
    and responses may be whole; all may be streams."""
    events = [json.loads(data) for data in _data(answer)]
    if answer.startswith("{"):
        whole = json.loads(answer)
        events = [{"response": whole, "choices": [{"delta": each["message"]} for each in whole.get("choices", ())]}]
    if "/messages" in path:
        return list(_of_messages(events))
    return list(_of_responses(events) if "/responses" in path else _of_chat(events))


def _data(answer: str) -> Iterator[str]:
    for line in answer.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")


def _of_chat(events: list[dict[str, Any]]) -> Iterator[list[Any]]:
    text, calls = "", dict[int, list[str]]()
    for event in events:
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for place, call in enumerate(choice["delta"].get("tool_calls") or []):
                made = calls.setdefault(call.get("index", place), ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
    if text:
        yield ["text", text]
    for name, arguments in calls.values():
        yield ["call", name, json.loads(arguments)]


def _of_messages(events: list[dict[str, Any]]) -> Iterator[list[Any]]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"told": ""}
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["told"] += delta.get("text") or delta.get("partial_json") or ""
    for block in blocks.values():
        if block["type"] == "tool_use":
            yield ["call", block["name"], json.loads(block["told"])]
        else:
            yield ["text", block["told"]]


def _of_responses(events: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for item in events[-1]["response"]["output"]:
        if item["type"] == "message":
            yield ["text", item["content"][0]["text"]]
        elif item["type"] == "function_call":
            yield ["call", _full(item), json.loads(item["arguments"])]
        elif item["type"] == "custom_tool_call":
            yield ["call", _full(item), {"input": item["input"]}]
        else:
            yield [item["type"], item["arguments"]]


def _full(item: Mapping[str, Any]) -> str:
    return "__".join(filter(None, (item.get("namespace"), item["name"])))
