"""The reader of a chat's answer, by what the model writes and what the request asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.kept import cut_short
from ridgeline.serving.requests.tools import forces_calls, schemas_of
from ridgeline.text.parsers.thinking import thinking_of


def readable(api: ApiServer, body: ChatBody, asked: GenerationRequest) -> GenerationRequest:
    """Return a chat's request with its reader and what that needs: special tokens that show, and where the reasoning
    ends. Tools are those that are allowed.

    Raise BadRequest for a budget of reasoning that cannot be kept.
    """
    tokenizer, schemas = api.tokenizer, schemas_of(body)
    forms = api.forms.switched({**(api.config.default_chat_template_kwargs or {}), **(body.chat_template_kwargs or {})})
    calls, forced, most = reads_calls(body), forces_calls(body), 1 if body.parallel_tool_calls is False else None
    read = partial(forms.reader, asked.prompt or "", schemas, calls=calls, forced=forced, most=most)
    asked = replace(asked, reader=partial(read, added=tokenizer.added))
    if calls or forms.reasoning is not None:
        tags = forms.tags + (forms.forced(schemas).tags if forced else ())
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
        forced=forced,
        may_stop=form.channels and bool(body.tools) and not forced,
    )
    return replace(asked, thinking=thinking)


def unread(api: ApiServer, body: ChatBody) -> list[str]:
    """Return the entries of the answer's header for what is not looked for: calls, if the model takes tools in a form
    that is not known, and none are forced. A time that is cut short is among them."""
    unknown = api.forms.tools is None and api.chat_template.mentions("tools")
    left_as_text = unknown and reads_calls(body) and not forces_calls(body)
    return [*(["tool_calls"] if left_as_text else []), *cut_short(api, body)]


def reads_calls(body: ChatBody) -> bool:
    """Return True if calls are looked for in the answer."""
    return forces_calls(body) or (bool(body.tools) and body.tool_choice != "none")
