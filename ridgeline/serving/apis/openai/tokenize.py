"""The routes POST /tokenize and /detokenize, and GET /tokenizer_info, which are vLLM's. The first two have llama.cpp's
fields too."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.http.answers import LlamaTokens, PieceOfText, Text, TokenizerInfo, Tokens
from ridgeline.serving.http.describe import answers, described
from ridgeline.serving.http.exchange import is_chat, read_body
from ridgeline.serving.http.pieces import json_response, later
from ridgeline.serving.requests.bodies import ContentBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from ridgeline.serving.requests.validation import check_model, encode, render
from ridgeline.serving.shares import TEXTS


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    bodies = (TokenizeBody, TokenizeChatBody, ContentBody)

    @routes.post(
        "/tokenize",
        **described(
            TokenizeBody | TokenizeChatBody | ContentBody,
            "Text, or a conversation, as token ids",
            (Tokens, LlamaTokens),
        ),
    )
    async def tokenize(request: Request) -> Response:
        body: TokenizeBody | TokenizeChatBody | ContentBody = await read_body(request, *bodies, choose=_shape)
        check_model(api, body.model)
        if isinstance(body, ContentBody):
            return await _pieces(api, body)
        if isinstance(body, TokenizeChatBody):
            ids = await encode(api, await render(api, body), bool(body.add_special_tokens), "messages")
        else:
            ids = await encode(api, body.prompt, body.add_special_tokens is not False)
        length = api.service.facts().max_model_len

        def answer() -> Tokens:
            strings = api.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            return Tokens(count=len(ids), max_model_len=length, tokens=ids, token_strs=strings)

        return await json_response(len(ids), answer)

    @routes.post("/detokenize", **described(DetokenizeBody, "Token ids as text, special tokens included", Text))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        check_model(api, body.model)
        text = await TEXTS.run(partial(api.tokenizer.decode, body.tokens, skip_special_tokens=False))
        return await json_response(len(body.tokens), lambda: Text(prompt=text, content=text))

    @routes.get("/tokenizer_info", summary="What the tokenizer is like", responses=answers(TokenizerInfo))
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer, facts = api.tokenizer, api.service.facts()
        return {
            "tokenizer_class": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": facts.max_model_len,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_ids": sorted({*tokenizer.eos_ids, *facts.eos_ids}),
            **tokenizer.special_tokens,  # as tokenizer_config.json has them: bos_token, eos_token, …
            "chat_template": api.chat_template.source,
        }

    return routes


def _shape(data: Any) -> int:
    """Return the place of a body's model: llama.cpp's has a content, and no prompt."""
    if isinstance(data, dict) and "content" in data and "prompt" not in data and "messages" not in data:
        return 2
    return int(is_chat(data))


async def _pieces(api: ApiServer, body: ContentBody) -> Response:
    """Return the answer to llama.cpp's clients, who get the text of each token too if they ask for it."""
    ids = await encode(api, body.content, bool(body.add_special), "content")

    def piece(token_id: int) -> PieceOfText:
        text, whole = api.tokenizer.spelled(token_id)
        return PieceOfText(id=token_id, piece=text if whole else list(api.tokenizer.token_bytes(token_id)))

    def answer() -> LlamaTokens:
        return LlamaTokens(tokens=later(map(piece, ids)) if body.with_pieces else list(ids))

    return await json_response(len(ids), answer)
