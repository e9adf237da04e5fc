"""Conversations that are embedded: with their pictures, through the model's template; or a text or a picture by itself,
for models whose pictures have vectors of their own."""

from __future__ import annotations

from typing import Any

from ridgeline.core.specs.pooling import PoolingParams
from ridgeline.media.items import Item
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pooling import pooling_facts
from ridgeline.serving.requests.bodies import ChatMessage, TemplateBody
from ridgeline.serving.requests.context import check_text
from ridgeline.serving.requests.media import with_items
from ridgeline.serving.requests.validation import check_decoded, encode, media_prompt, render
from ridgeline.serving.shares import TEXTS
from ridgeline.text.media_prompt import lone_picture
from ridgeline.text.pooled import Encoded, listed_tokens


async def encoded_chat(api: ApiServer, body: TemplateBody, params: PoolingParams, *, special: bool) -> Encoded:
    """Return a conversation as a prompt. special: special tokens are added to what its template writes. Raise
    RequestFailed or InvalidRequest."""
    body, items = await with_items(api, body)
    if pooling_facts(api.service).apart:
        return await _apart(api, body, items, params)
    if items:
        if params.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens is not for prompts with pictures; leave it out."
            raise BadRequest(message, param="truncate_prompt_tokens")
        made = await media_prompt(api, body, items)
        check_decoded(made.inserted)
        return Encoded(made.token_ids, inserted=made.inserted)
    ids = await encode(api, await render(api, body), add_special_tokens=special, param="messages")
    return listed_tokens(ids, params, api.service.facts().max_model_len)


async def _apart(api: ApiServer, body: TemplateBody, items: list[Item], params: PoolingParams) -> Encoded:
    """Return the one text, or the one picture, of a conversation with one message."""
    if len(body.messages) != 1:
        raise BadRequest(
            f"this model embeds a text or a picture, and there are {len(body.messages)} messages; send one.",
            param="messages",
        )
    parts = _parts(body.messages[0])
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if len(parts) != 1 or len(texts) + len(items) != 1:
        raise BadRequest(
            f"this model embeds a text or a picture by itself, and the message has {len(texts)} texts and "
            f"{len(items)} pictures; send a request for each.",
            param="messages.0.content",
        )
    if texts:
        if params.truncate_prompt_tokens is None:
            check_text(api.service.facts().max_model_len, len(texts[0]), "messages")
        return await TEXTS.run(lambda: api.encoder.one(texts[0], params))
    processor = api.adjusted_processor(body.mm_processor_kwargs)

    def work() -> Encoded:
        try:
            return lone_picture(processor, items)
        finally:
            items.clear()

    made = await TEXTS.run(work)
    check_decoded(made.inserted)
    return made


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    """Return the parts of a message that is a text or a list of parts."""
    content = message.content
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
