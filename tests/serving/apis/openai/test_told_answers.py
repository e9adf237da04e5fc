"""Items of Responses and blocks of Messages, told in pieces that are cut anywhere, join to the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from msgspec import json as wire
from msgspec import to_builtins

from ridgeline.serving.apis.anthropic.messages import Blocks
from ridgeline.serving.apis.openai.response_items import Output, Scores
from ridgeline.serving.generation.pieces import Piece, split
from ridgeline.text.outputs import CompletionOutput, Logprob
from ridgeline.text.parsers.choose import choose
from ridgeline.text.parsers.events import CallDelta, Content, Event
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL

CALLS = [("f", {"a": "é\n"}), ("g", {})]
TEXT = "<think>\nhm\n</think>\n\nI look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    for name, arguments in CALLS
)


def events_of(cut: int) -> Iterator[Event]:
    forms = choose("hermes", "qwen3", [], [])
    reader = forms.reader("", {}, calls=True, forced=False, most=None, added={})
    yield from reader.read(TEXT[:cut], ended=False)
    yield from reader.read(TEXT[cut:], ended=True)


def test_items_join_to_the_whole_wherever_the_text_is_cut() -> None:
    for cut in range(len(TEXT) + 1):
        output, items, open_at = Output("key"), list[dict[str, Any]](), -1
        told = [told for event in events_of(cut) for told in output.take(event)] + list(output.end("completed"))
        for event in map(to_builtins, told):
            place = event["output_index"]
            match event["type"].removeprefix("response."):
                case "output_item.added":
                    assert (place, open_at) == (len(items), place - 1), "one at a time, in order"
                    items.append(json.loads(json.dumps(event["item"])))
                    open_at = place
                case "content_part.added":
                    items[place]["content"].append(dict(event["part"]))
                case "output_text.delta" | "reasoning_text.delta":
                    items[place]["content"][0]["text"] += event["delta"]
                case "function_call_arguments.delta":
                    items[place]["arguments"] += event["delta"]
                case "output_item.done":
                    assert event["item"] == items[place] | {"status": "completed"}
                case "content_part.done":
                    assert event["part"] == items[place]["content"][0]
                case "output_text.done" | "reasoning_text.done":
                    assert event["text"] == items[place]["content"][0]["text"]
                case "function_call_arguments.done":
                    assert event["arguments"] == items[place]["arguments"]
                case other:
                    raise AssertionError(other)
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        assert [(item["name"], json.loads(item["arguments"])) for item in items[2:]] == CALLS
        assert [item | {"status": "completed"} for item in items] == output.items
        assert len({item["id"] for item in items}) == len({item["call_id"] for item in items[2:]}) + 2 == 4


def test_blocks_join_to_the_whole_wherever_the_text_is_cut() -> None:
    for cut in range(len(TEXT) + 1):
        blocks, found, texts = Blocks(), list[dict[str, Any]](), list[str]()
        told = [told for event in events_of(cut) for told in blocks.take(event)] + list(blocks.end())
        for event in map(to_builtins, told):
            assert event["index"] == len(found) - (event["type"] != "content_block_start")
            if event["type"] == "content_block_start":
                found.append(dict(event["content_block"]))
                texts.append("")
            elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
                [text] = [value for name, value in event["delta"].items() if name != "type"]
                texts[-1] += text
        assert [block["type"] for block in found] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block["type"] for block in blocks.items] == [block["type"] for block in found]
        assert texts[:2] == [blocks.items[0]["thinking"], blocks.items[1]["text"]] == ["hm", "I look.\n"]
        assert [json.loads(text or "{}") for text in texts[2:]] == [arguments for _, arguments in CALLS]
        assert [(block["name"], block["input"]) for block in blocks.items[2:]] == CALLS


def test_a_call_that_is_cut_off_is_an_object_of_what_is_there() -> None:
    cut = {
        "": {},
        '{"a": 1, "b': {"a": 1},
        '{"a": "so f': {"a": "so f"},
        '{"a": [1, 2': {"a": [1, 2]},
        "7": {"arguments": 7},
    }
    for text, value in cut.items():
        blocks = Blocks()
        for event in (Content("x"), CallDelta(0, "f", ""), CallDelta(0, None, text)):
            list(blocks.take(event))
        list(blocks.end())
        assert blocks.items[1]["input"] == value


def test_each_text_has_the_logprobs_of_its_own_tokens_however_many_come_at_once() -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    token = tokenizer.encode("a")[-1]
    output = CompletionOutput(0, token_ids=[token] * 3)
    output.logprobs = [{token: Logprob(-float(place), 1, "a")} for place in range(3)]  # type: ignore[assignment]
    for cut in range(4):
        scores, found = Scores(tokenizer, 0), list[float]()
        for count in (cut, 3 - cut):
            for piece in split(Piece("a" * count, [token] * count, output, [1] * count)) if count else ():
                scores.add(piece)
                found += [wire.decode(entry)["logprob"] for entry in scores.take(piece.text)]
        assert found == [0, -1, -2]
