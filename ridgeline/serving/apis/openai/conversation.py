"""The conversation that a request to /v1/responses goes on from: found among what is kept, and cut until it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.json import encode

from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.response_bodies import CountBody, ResponsesBody, chat_of, input_items
from ridgeline.serving.errors import BadRequest, TooLong
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.kept.kept import NAME
from ridgeline.serving.requests.bodies import ChatBody, ChatMessage
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, Size, decode
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import INSTRUCTING, later_instructions
from ridgeline.serving.requests.validation import chat_request
from ridgeline.serving.shares import off_loop

MOST_REFERENCES = 256  # answers that the items of one request may be found in

Items = list[dict[str, Any]]


class PreviousNotFound(BadRequest):
    code = "previous_response_not_found"


class Conversation:
    """The conversation that a request goes on from, and what it adds to it.

    before: the turns that are kept, as JSON. items: the request's own, without references. known: both. size: the bytes
    of what is kept in both, about.
    """

    def __init__(self, before: tuple[bytes, ...], items: Items, known: Items, size: int) -> None:
        self.before, self.items, self.known, self._size = before, items, known, size

    @classmethod
    async def of(cls, api: ApiServer, body: CountBody) -> Conversation:
        """Return a request's conversation. Raise BadRequest for an earlier answer that is not kept."""
        tenant, before = owner.tenant(), tuple[bytes, ...]()
        previous = body.previous_response_id
        if previous is not None:
            found = await api.kept.find(previous, tenant)
            if found is None:
                raise PreviousNotFound(
                    f"no response {shortened(previous)} is kept here; send the whole conversation as input.",
                    param="previous_response_id",
                )
            if found.runs:
                raise BadRequest(f"the response {previous} is still being written.", param="previous_response_id")
            before = found.turns
            length, most = sum(map(len, before)), api.config.max_body_bytes
            if length > most:
                raise TooLong(
                    f"the conversation before has {length} bytes, of at most {most}; send what matters of it as input.",
                    param="previous_response_id",
                )
        items, size = await _resolved(api, input_items(body), tenant)
        return cls(before, items, [*await decoded(before), *items], size + sum(map(len, before)))

    async def chat(self, api: ApiServer, body: CountBody) -> tuple[ChatBody, list[str]]:
        size = self._size + (len(body.input) if isinstance(body.input, (str, list)) else 0)
        later = await later_instructions(api, (item.get("role") for item in self.known[1:]))
        return await off_loop(size, INLINE_BYTES, lambda: chat_of(body, self.known, later=later, media=api.modalities))


async def _resolved(api: ApiServer, items: Items, tenant: str) -> tuple[Items, int]:
    """Return the items with those in place that were only referred to, and the bytes of these. Together they are
    bounded as a body is: an item may be referred to many times."""
    wanted: dict[str, list[int]] = {}  # by the answer that holds them
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            known = NAME.fullmatch(str(item.get("id"))[:64])
            if known is None:
                raise _no_item(item, index)
            wanted.setdefault(f"resp_{known[1]}{known[2]}", []).append(index)
    if len(wanted) > MOST_REFERENCES:
        message = f"input refers to items of {len(wanted)} responses, of at most {MOST_REFERENCES}; send the items."
        raise BadRequest(message, param="input")
    items, size, most = list(items), 0, api.config.max_body_bytes
    for name, indices in wanted.items():
        found = await api.kept.find(name, tenant)
        ended = [] if found is None or found.runs else [found.turns[-1]]
        asked = [] if found is None else found.turns[: len(found.turns) - len(ended)][-1:]
        held = {item.get("id"): item for item in await decoded([*asked, *ended])}
        for index in indices:
            if items[index]["id"] not in held:
                raise _no_item(items[index], index)
            items[index] = held[items[index]["id"]]
        work = partial(_bytes_of, [items[index] for index in indices])
        size += await off_loop(sum(map(len, [*asked, *ended])), INLINE_BYTES, work)
        if size > most:
            raise TooLong(
                f"input refers to items of more than {most} bytes together; send what matters of them.", param="input"
            )
    return items, size


def _bytes_of(items: Items) -> int:
    """Return the bytes of items as JSON, of which one may be there many times."""
    counts, distinct = Counter(map(id, items)), {id(item): item for item in items}
    return sum(count * len(encode(distinct[key])) for key, count in counts.items())


def _no_item(item: dict[str, Any], index: int) -> BadRequest:
    message = f"input.{index} refers to {shortened(item.get('id'))}, which is not kept here; send the item."
    return BadRequest(message, param=f"input.{index}.id")


async def fitted(api: ApiServer, body: ResponsesBody, chat: ChatBody, name: str) -> GenerationRequest:
    """Return the request. With truncation "auto" the oldest messages are left out until it fits, from one of a user to
    the next, and instructions stay."""
    try:
        return await chat_request(api, chat, name)
    except TooLong:
        messages = chat.messages
        first = next((i for i, each in enumerate(messages) if each.role not in INSTRUCTING), len(messages))
        cuts = [i for i in range(first + 1, len(messages)) if messages[i].role == "user"]
        if body.truncation != "auto" or not cuts:
            raise
    low, high, best = 0, len(cuts) - 1, None
    while low < high:
        middle = (low + high) // 2
        try:
            best = middle, await chat_request(api, _without(chat, first, cuts[middle]), name)
            high = middle
        except TooLong:
            low = middle + 1
    if best is not None and best[0] == low:
        return best[1]
    return await chat_request(api, _without(chat, first, cuts[low]), name)


def _without(chat: ChatBody, first: int, end: int) -> ChatBody:
    messages: list[ChatMessage] = [*chat.messages[:first], *chat.messages[end:]]
    return chat.model_copy(update={"messages": messages})


async def decoded(turns: Sequence[bytes]) -> Items:
    """Return the items of some turns, which are bounded together as one body is."""

    def work() -> Items:
        size = Size()
        return [item for turn in turns for item in decode(turn, size)]

    return await off_loop(sum(map(len, turns)), INLINE_BYTES, work)
