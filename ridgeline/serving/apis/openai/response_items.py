"""The items of a response, and the events that tell of them as they are written.

output = Output(key)
for event in reader.read(text, ended=False):
    for told in output.take(event):
        ...
output.end("completed")
output.items
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from ridgeline.serving.generation.service import Piece
from ridgeline.serving.http import shapes
from ridgeline.serving.http.answers import ResponseEvent
from ridgeline.serving.http.pieces import encoded
from ridgeline.text.parsers.events import CallDelta, Content, Event, Reasoning
from ridgeline.text.tokenizer import Tokenizer

Item = dict[str, Any]


class Output:
    """The items of one response. `key` is what its name and the items' have in common."""

    def __init__(self, key: str) -> None:
        self.items: list[Item] = []
        self._key = key
        self._open: type[Content] | type[Reasoning] | int | None = None  # of a call its index
        self._pieces: list[str] = []

    def take(self, event: Event, logprobs: list[Raw] | None = None) -> Iterator[ResponseEvent]:
        """Yield the events for what the model wrote. `logprobs` are those of the tokens of a text."""
        kind = event.index if isinstance(event, CallDelta) else type(event)
        if kind != self._open:
            yield from self._close("completed")
            yield from self._begin(event)
            self._open = kind
        text = event.arguments if isinstance(event, CallDelta) else event.text
        if not text:
            return
        self._pieces.append(text)
        if isinstance(event, CallDelta):
            yield self._told("response.function_call_arguments.delta", delta=text)
        elif isinstance(event, Reasoning):
            yield self._told("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            if logprobs is not None:
                self._part["logprobs"] += logprobs
            yield self._told("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs or [])

    def end(self, status: str) -> Iterator[ResponseEvent]:
        """Yield the last events. An answer without anything is a message without text."""
        if not self.items:
            yield from self._begin(Content(""))
            self._open = Content
        yield from self._close(status)

    # ---- inside -----------------------------------------------------------------------------------------------

    @property
    def _item(self) -> Item:
        return self.items[-1]

    @property
    def _part(self) -> Item:
        part: Item = self._item["content"][0]
        return part

    def _told(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, output_index=len(self.items) - 1, item_id=self._item["id"], **fields)

    def _told_whole(self, kind: str) -> ResponseEvent:
        place = len(self.items) - 1
        return ResponseEvent(type=f"response.output_item.{kind}", output_index=place, item=_copy(self._item))

    def _begin(self, event: Event) -> Iterator[ResponseEvent]:
        name = f"{self._key}_o{len(self.items)}"
        if isinstance(event, CallDelta):
            item: Item = {"id": f"fc_{name}", "type": "function_call", "status": "in_progress", "arguments": ""}
            item |= {"call_id": event.id or f"call_{name}", "name": event.name or ""}
        elif isinstance(event, Reasoning):
            item = {"id": f"rs_{name}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{name}", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self.items.append(item)
        self._pieces = []
        yield self._told_whole("added")
        if not isinstance(event, CallDelta):
            text = isinstance(event, Content)
            part: Item = {"type": "output_text" if text else "reasoning_text", "text": ""}
            if text:
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._told("response.content_part.added", content_index=0, part=_copy(part))

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        if self._open is None:
            return
        item, text = self._item, "".join(self._pieces)
        item["status"] = status
        if isinstance(self._open, int):
            item["arguments"] = text
            yield self._told("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = self._part
            part["text"] = text
            if self._open is Content:
                yield self._told(
                    "response.output_text.done", content_index=0, text=text, logprobs=list(part["logprobs"])
                )
            else:
                yield self._told("response.reasoning_text.done", content_index=0, text=text)
            yield self._told("response.content_part.done", content_index=0, part=_copy(part))
        self._open = None
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

    def add(self, piece: Piece, texts: list[str]) -> None:
        """Add the tokens of a piece, with the text that each brought."""
        output, start = piece.output, self._told
        assert output.logprobs is not None
        self._told = end = start + len(texts)
        ids, entries = output.token_ids[start:end], shapes.between(output.logprobs, start, end)
        told = shapes.chat_logprobs(self._tokenizer, ids, entries, self._top).content
        self._waiting += zip(texts, map(encoded, told), strict=True)

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


def texts_of(piece: Piece) -> list[str]:
    """Return the text of a piece token by token. What came without a token of its own belongs to the last."""
    texts, begin = list[str](), 0
    for length in piece.lengths:
        texts.append(piece.text[begin : begin + length])
        begin += length
    if texts:
        texts[-1] += piece.text[begin:]
    return texts
