"""The reader of a chat's answer, by what the model writes and what the request asks for.

reader = parser_for(api, body, asked.prompt)
async for piece in run:
    events = await read_piece(reader, run, piece)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.service import GenerationRequest, Piece, Run
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.tools import forces_calls, schemas_of, with_allowed_tools
from ridgeline.serving.shares import off_loop
from ridgeline.text.parsers.events import Content, Event
from ridgeline.text.parsers.reader import AnswerReader
from ridgeline.text.parsers.thinking import thinking_of

INLINE_CHARS = 16 << 10  # text that is read within the event loop, which takes a few hundredths of a second at most


def parser_for(api: ApiServer, body: ChatBody, prompt: str | None) -> AnswerReader:
    """Return the reader of one choice. `prompt` is the text that the model continues."""
    body = with_allowed_tools(body)
    return api.forms.reader(
        prompt or "",
        schemas_of(body),
        calls=reads_calls(body),
        forced=forces_calls(body),
        most=1 if body.parallel_tool_calls is False else None,
        added=api.tokenizer.added,
    )


async def read_text(reader: AnswerReader, text: str, *, ended: bool, tokens: Sequence[int] = ()) -> list[Event]:
    """Return the events that a text adds. A long one, such as an argument that has just ended, is read in a thread."""
    read = partial(reader.read, text, ended=ended, tokens=tokens)
    return await off_loop(reader.waiting + len(text), INLINE_CHARS, read)


async def read_piece(reader: AnswerReader, run: Run, piece: Piece) -> list[Event]:
    """Return the events that a piece of a choice adds, and count the run's tokens of reasoning."""
    if reader.plain:
        return [Content(piece.text)] if piece.text else []
    before = reader.reasoning_tokens
    events = await read_text(reader, piece.text, ended=piece.output.finished, tokens=piece.lengths)
    run.reasoning_tokens += reader.reasoning_tokens - before
    return events


def readable(api: ApiServer, body: ChatBody, asked: GenerationRequest) -> GenerationRequest:
    """Return a chat's request with what its reader needs: special tokens that show, and where the reasoning ends.

    Raise BadRequest for a budget of reasoning that cannot be kept.
    """
    tokenizer, forms = api.tokenizer, api.forms
    if reads_calls(body) or forms.reasoning is not None:
        tags = forms.tags + (forms.forced(schemas_of(with_allowed_tools(body))).tags if forces_calls(body) else ())
        asked = replace(asked, shown=tokenizer.special_ids.intersection(tokenizer.added.get(tag, -1) for tag in tags))
    form, budget = forms.reasoning, body.thinking_token_budget
    budget = None if budget == -1 else budget
    if budget is not None and form is None:
        raise BadRequest(
            "thinking_token_budget needs to know how the model reasons; start the server with --reasoning-parser.",
            param="thinking_token_budget",
        )
    inside = forms.inside(asked.prompt or "")
    if form is None or inside is False or (budget is None and asked.grammar is None):
        return asked
    thinking = thinking_of(
        form,
        tokenizer,
        inside=bool(inside),
        budget=budget,
        forced=forces_calls(body),
        may_stop=form.channels and bool(body.tools) and not forces_calls(body),
    )
    return replace(asked, thinking=thinking)


def reads_calls(body: ChatBody) -> bool:
    """Return True if calls are looked for in the answer."""
    return forces_calls(body) or (bool(body.tools) and body.tool_choice != "none")
