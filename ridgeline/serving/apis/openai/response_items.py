"""The items of a response, and the events that are sent while they are written.

output = Output(key)
for event in reader.read(text, ended=False):
    for told in output.take(event):
        ...
output.end("completed")
output.items
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Raw

from ridgeline.serving.apis.openai.response_tools import Known, as_input, as_object
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.http import shapes
from ridgeline.serving.http.answers import ResponseEvent
from ridgeline.serving.http.items import Item, Items
from ridgeline.serving.http.pieces import encoded
from ridgeline.text.parsers.events import CallDelta, Content, Event, Reasoning
from ridgeline.text.tokenizer import Tokenizer


class Output(Items[ResponseEvent]):
    """The items of one response. `key` is what its name and the items' have in common, and `known` as in
    `response_tools`."""

    def __init__(self, key: str, known: Mapping[str, Known] | None = None) -> None:
        super().__init__()
        self._key, self._known = key, known or {}

    def end(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """Yield the events that end the answer. Without anything it is a message without text."""
        if not self.items:
            yield from self.take(Content(""))
        yield from self._close(status)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _told(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, output_index=len(self.items) - 1, item_id=self.items[-1]["id"], **fields)

    def _told_whole(self, kind: str) -> ResponseEvent:
        place = len(self.items) - 1
        return ResponseEvent(type=f"response.output_item.{kind}", output_index=place, item=_copy(self.items[-1]))

    def _begin(self, event: Event) -> Iterator[ResponseEvent]:
        name = f"{self._key}_o{len(self.items)}"
        if isinstance(event, CallDelta):
            item: Item = self._call(event.name or "", name) | {"call_id": event.id or f"call_{name}"}
        elif isinstance(event, Reasoning):
            item = {"id": f"rs_{name}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{name}", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self.items.append(item)
        yield self._told_whole("added")
        if not isinstance(event, CallDelta):
            text = isinstance(event, Content)
            part: Item = {"type": "output_text" if text else "reasoning_text", "text": ""}
            if text:
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._told("response.content_part.added", content_index=0, part=_copy(part))

    def _call(self, called: str, name: str) -> Item:
        """Return the item of a call that begins. The input of a custom tool and of a search comes when it is whole."""
        known = self._known.get(called, Known(called))
        kinds: dict[str, tuple[str, str, Item]] = {
            "function": ("fc", "function_call", {"arguments": "", "name": known.name}),
            "custom": ("ctc", "custom_tool_call", {"input": "", "name": known.name}),
            "search": ("tsc", "tool_search_call", {"arguments": {}, "execution": "client"}),
        }
        prefix, kind, fields = kinds[known.kind]
        space = {} if known.namespace is None else {"namespace": known.namespace}
        return {"id": f"{prefix}_{name}", "type": kind, "status": "in_progress", **fields, **space}

    def _grow(self, event: Event, text: str, logprobs: list[Raw] | None) -> ResponseEvent | None:
        if isinstance(event, CallDelta):
            if self.items[-1]["type"] != "function_call":
                return None
            return self._told("response.function_call_arguments.delta", delta=text)
        if isinstance(event, Reasoning):
            return self._told("response.reasoning_text.delta", content_index=0, delta=text)
        self.items[-1]["content"][0]["logprobs"] += logprobs or ()
        return self._told("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs or [])

    def _end(self, item: Item, text: str, status: str) -> Iterator[ResponseEvent]:
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._told("response.function_call_arguments.done", arguments=text, name=item["name"])
        elif item["type"] == "custom_tool_call":
            item["input"] = text = as_input(text)
            yield self._told("response.custom_tool_call_input.delta", delta=text)
            yield self._told("response.custom_tool_call_input.done", input=text)
        elif item["type"] == "tool_search_call":
            item["arguments"] = as_object(text)
        else:
            part = item["content"][0]
            part["text"] = text
            scored = {"logprobs": list(part["logprobs"])} if "logprobs" in part else {}
            yield self._told(f"response.{part['type']}.done", content_index=0, text=text, **scored)
            yield self._told("response.content_part.done", content_index=0, part=_copy(part))
        yield self._told_whole("done")


def _copy(item: Item) -> Item:
    """Return an item as it is now."""
    return {name: [_copy(each) for each in value] if name == "content" else value for name, value in item.items()}


class Scores:
    """The logprobs of an answer's text, without those of tokens that are reasoning, calls or tags.

    The reader says which text is content, and not which tokens that was. So tokens wait until their text is sent, and
    those before it are dropped. Entries are kept as JSON, which takes less memory than what it is made of.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._waiting: list[tuple[str, Raw]] = []
        self._told = 0

    def add(self, piece: Piece) -> None:
        """Add the token of a piece, if it has one."""
        output, start = piece.output, self._told
        assert output.logprobs is not None
        self._told = end = start + len(piece.token_ids)
        entries = shapes.between(output.logprobs, start, end)
        told = shapes.chat_logprobs(self._tokenizer, piece.token_ids, entries, self._top).content
        self._waiting += [(piece.text, encoded(each)) for each in told]

    def take(self, text: str) -> list[Raw]:
        """Return the entries of the tokens that wrote this part of the content."""
        place = "".join(each for each, _ in self._waiting).rfind(text)
        if place < 0:
            return []
        found, begin, rest = list[Raw](), 0, list[tuple[str, Raw]]()
        for each, entry in self._waiting:
            end = begin + len(each)
            if begin >= place + len(text):
                rest.append((each, entry))
            elif end > place or begin == end == place:
                found.append(entry)
            begin = end
        self._waiting = rest
        return found
