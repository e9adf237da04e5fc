"""The body of POST /v1/responses, OpenAI's newer API, put into a chat's words.

    items = input_items(body)
    chat, ignored = chat_of(body, [*earlier, *items], later=True)

Items of a conversation are messages, reasoning, calls of functions and custom tools, searches for tools, and what these
returned. What OpenAI's own tools did, and what is not known here, is left out by name. Pictures, video, sound and files
that a user sends are refused by name where the model takes none, and so are a user's parts of unknown types.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ridgeline.core.plan.request import MAX_LOGPROBS
from ridgeline.serving.apis.openai.response_tools import (
    ADDING,
    SEARCH,
    as_arguments,
    called_name,
    choice_of,
    found_names,
    functions_of,
    offered,
)
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import (
    LAX_INT,
    MOST_MESSAGES,
    MOST_TEMPLATE,
    MOST_TOOLS,
    Body,
    ChatBody,
    Name,
    Object,
    SampledBody,
    Stop,
    text_or_objects,
)
from ridgeline.serving.requests.fields import Refusal
from ridgeline.serving.requests.media import CLIENT_PATH, FILES, KINDS
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import (
    INSTRUCTING,
    KIND,
    Media,
    Transcript,
    pieces_of,
    refuse_part,
    result_text,
    sampled,
    text_at,
    text_of,
)
from ridgeline.serving.requests.validation import parse

MOST_METADATA, LONGEST_ENTRY = 16, (64, 512)  # entries; characters of a name and of a value
LOGPROBS = "message.output_text.logprobs"
# What may be asked for of things that are not there, and of reasoning, which is plain text here.
NOTHING_TO_INCLUDE = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "item_reference"),
)
ROLES = ("user", "assistant", "system", "developer")
# Fields of a chat, and those of this body that they come from.
NAMES = {
    r"messages.*": "input",
    r"max_(completion_)?tokens": "max_output_tokens",
    r"response_format\.json_schema(.*)": r"text.format\1",
    r"response_format(.*)": r"text.format\1",
    r"tools\.(\d+)\.function(.*)": r"tools.\1\2",
    r"reasoning_effort": "reasoning.effort",
    r"logprobs": "include",
}


def _check_metadata(value: object) -> object:
    if value is None:
        return None
    most_name, most_value = LONGEST_ENTRY
    if not isinstance(value, dict) or len(value) > MOST_METADATA:
        raise ValueError(f"metadata is an object with at most {MOST_METADATA} entries")
    if not all(
        isinstance(text, str) and len(text) <= most_value and len(name) <= most_name for name, text in value.items()
    ):
        raise ValueError(f"metadata has names of at most {most_name} characters and texts of at most {most_value}")
    return value


Input = Annotated[
    Any,
    BeforeValidator(text_or_objects("input", "items", MOST_MESSAGES)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
_ENTRIES = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MOST_METADATA}
Metadata = Annotated[
    dict[str, str] | None,
    BeforeValidator(_check_metadata),
    WithJsonSchema({"anyOf": [_ENTRIES, {"type": "null"}]}),
]


class TextFormat(Body):
    """The form of the answer's text: any, JSON, or what a schema says."""

    harmless: ClassVar[Mapping[str, str]] = {"description": "is not shown to the model"}

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    harmless: ClassVar[Mapping[str, str]] = {"verbosity": "no template knows it; ask for it in a message"}

    format: TextFormat | None = None


class Reasoning(Body):
    """The effort of the reasoning. Reasoning is returned in full, so no summary of it is made."""

    harmless: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning is returned in full",
        "generate_summary": "reasoning is returned in full",
        "context": "the template decides which earlier reasoning is shown",
    }

    effort: Name | None = None


class ResponseStreamOptions(Body):
    harmless = frozenset({"include_obfuscation"})


class CountBody(Body):
    """The body of POST /v1/responses/input_tokens: what decides the prompt."""

    harmless: ClassVar[Mapping[str, str]] = {
        "client_metadata": "is the client's own",
        "max_tool_calls": "counts calls of tools that the server runs itself, and it runs none",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        "prompt": Refusal("prompt is not supported: no prompts are stored here; send input."),
        "conversation": Refusal("conversation is not supported; use previous_response_id."),
        "context_management": Refusal("context_management is not supported; use truncation."),
        "background_options": Refusal("background_options is not supported; leave it out."),
        "image": Refusal("image is not supported, because the model reads text alone."),
        "access_programs": Refusal("access_programs is not supported; leave it out."),
        "enable_response_messages": Refusal(
            "enable_response_messages is not supported; /v1/chat/completions/render shows a prompt."
        ),
        "previous_input_messages": Refusal("previous_input_messages is not supported; send them as input."),
        "previous_response": Refusal("previous_response is not supported; use previous_response_id, or send input."),
        "personality": Refusal("personality is not supported; ask for it in instructions."),
    }

    model: str | None = None
    input: Input = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesBody(CountBody, SampledBody):
    """The body of POST /v1/responses.

    Beside OpenAI's fields stand those of sampling that chats have too, `stop`, and what templates take.
    """

    input: Input
    max_output_tokens: Annotated[int, Field(ge=1), LAX_INT] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), LAX_INT] | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=len(NOTHING_TO_INCLUDE) + 1)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata = None
    stop: Stop = None
    chat_template: Annotated[str, Field(max_length=MOST_TEMPLATE)] | None = None
    chat_template_kwargs: Object | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None
    include_reasoning: bool | None = None


def input_items(body: CountBody) -> list[Object]:
    """Return the items of the input. Text is a user's message."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return list(body.input or [])


def chat_of(
    body: CountBody, items: Sequence[Object], *, later: bool, media: Collection[str] = ()
) -> tuple[ChatBody, list[str]]:
    """Return the request as a chat's, and what of it is ignored. Raise BadRequest that names the field at fault.

    `items` is the conversation, with what came before this request and without references. `later` is as in
    `Transcript`. `media` are the kinds that the model takes.
    """
    ignored: list[str] = []
    tools, choice = functions_of(offered(body.tools or [], items), ignored), choice_of(body.tool_choice, ignored)
    found: dict[str, Any] = {"tools": tools or None, "tool_choice": choice if tools or choice != "required" else None}
    found["parallel_tool_calls"] = body.parallel_tool_calls
    found["messages"] = messages_of(items, body.instructions, later=later, ignored=ignored, media=media)
    if body.reasoning is not None:
        found["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        found["response_format"] = _format(body.text.format)
    if isinstance(body, ResponsesBody):
        found |= sampled(body) | _asked(body, ignored)
    else:
        found["model"] = body.model
    return parse(ChatBody, {name: value for name, value in found.items() if value is not None}), ignored


def messages_of(
    items: Sequence[Object],
    instructions: str | None = None,
    *,
    later: bool = True,
    ignored: list[str] | None = None,
    media: Collection[str] = (),
) -> list[Object]:
    """Return the conversation as a chat's messages. Items that are left out are named in `ignored`. `media` are the
    kinds of pictures, videos and sounds that the model takes."""
    left_out: list[str] = []
    said, shown = Transcript(later=later), partial(_shown, media)
    if instructions:
        said.instruct("system", instructions)
    for index, item in enumerate(items):
        _say(said, item, f"input.{index}", left_out, shown)
    if ignored is not None:
        ignored += dict.fromkeys(left_out)
    messages = said.whole()
    if not messages:
        raise BadRequest("input is empty; send at least one item.", param="input")
    return messages


def _shown(media: Collection[str], part: Mapping[str, Any], path: str) -> Object | None:
    """Return a part that is a picture, video or sound as a chat's, or None if the model takes none of that kind."""
    name = part.get("type")
    taken = isinstance(name, str) and (KINDS.get(name) in media or (name in FILES and bool(media)))
    return {**part, CLIENT_PATH: path} if taken else None


def _say(said: Transcript, item: Object, path: str, left_out: list[str], media: Media) -> None:
    """Add an item to the conversation, or its name to what is left out."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            _say_message(said, item, path, left_out, media)
        case "function_call":
            call_id, name = text_at(item, "call_id", path), called_name(item, path)
            said.call(call_id, name, text_at(item, "arguments", path))
        case "custom_tool_call":
            call_id, name = text_at(item, "call_id", path), called_name(item, path)
            said.call(call_id, name, as_arguments(text_at(item, "input", path)))
        case "function_call_output" | "custom_tool_call_output":
            text = result_text(item.get("output"), f"{path}.output", TEXTS, left_out, f"input.{kind}")
            said.say("tool", text, tool_call_id=text_at(item, "call_id", path))
        case "tool_search_call" if isinstance(item.get("call_id"), str):
            said.call(item["call_id"], SEARCH, json.dumps(item.get("arguments") or {}, ensure_ascii=False))
        case "tool_search_output" if isinstance(item.get("call_id"), str):
            said.say("tool", found_names(item), tool_call_id=item["call_id"])
        case "reasoning":
            parts = item.get("content") or item.get("summary")
            if parts:
                kinds = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
                said.think(result_text(parts, f"{path}.content", kinds, left_out, "input.reasoning"))
            elif item.get("encrypted_content"):
                left_out.append("input.reasoning.encrypted_content")
        case str() if KIND.fullmatch(kind):  # of tools that OpenAI or a client runs by itself, and notes of clients
            left_out += [] if kind in ADDING else [f"input.{kind}"]
        case _:
            refuse_part(item, path, ITEMS)


def _say_message(said: Transcript, item: Object, path: str, left_out: list[str], media: Media) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role is one of {', '.join(ROLES)}, got {shortened(role)}.", param=f"{path}.role")
    content = item.get("content")
    if role == "assistant":
        return said.answer(result_text(content, f"{path}.content", TEXTS, left_out, "input"))
    if role in INSTRUCTING:
        said.instruct(str(role), text_of(content, f"{path}.content", TEXTS))
    else:
        said.say(str(role), *pieces_of(content, f"{path}.content", TEXTS, media))


def _asked(body: ResponsesBody, ignored: list[str]) -> Object:
    """Return the fields of a request that bodies which only count tokens do not have."""
    include = body.include or []
    for name in include:
        if name != LOGPROBS and name not in NOTHING_TO_INCLUDE:
            known = ", ".join((LOGPROBS, *NOTHING_TO_INCLUDE))
            raise BadRequest(f"include takes {known}, got {shortened(name)}.", param="include")
    ignored += [f"include.{name}" for name in include if name != LOGPROBS]
    if body.top_logprobs and LOGPROBS not in include:
        raise BadRequest(f'top_logprobs needs include to hold "{LOGPROBS}".', param="top_logprobs")
    if body.background and body.store is False:
        raise BadRequest("background needs store, because the answer is asked for later.", param="background")
    found: Object = {"max_completion_tokens": body.max_output_tokens, "stop": body.stop}
    if LOGPROBS in include:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    for name in ("chat_template", "chat_template_kwargs", "thinking_token_budget"):
        found[name] = getattr(body, name)
    return found


def _format(form: TextFormat) -> Object:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise BadRequest("a text.format of type json_schema needs schema.", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}
