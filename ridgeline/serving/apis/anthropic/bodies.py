"""The body of POST /v1/messages, Anthropic's API, put into a chat's words.

    chat, ignored = chat_of(body, api.forms, later=True)

A message's content is text or a list of blocks: text, thinking, calls of tools and what these returned. Tools that
Anthropic runs itself, and what they did, are left out by name. Documents that a user sends are refused, and so are
pictures where the model sees none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import (
    LAX_INT,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    ChatBody,
    Name,
    Object,
    SampledBody,
    text_or_objects,
)
from ridgeline.serving.requests.fields import Refusal
from ridgeline.serving.requests.kept import KEPT
from ridgeline.serving.requests.media import CLIENT_PATH
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import (
    BETWEEN,
    KIND,
    Transcript,
    refuse_part,
    result_text,
    sampled,
    text_at,
    text_of,
    unused,
)
from ridgeline.serving.requests.validation import parse
from ridgeline.text.parsers.choose import Forms

BILLING = "x-anthropic-billing-header"
HOUR = 3600.0  # seconds
TEXT = {"text": "text"}
REFERENCE = "tool_reference"
OF_USER, OF_ASSISTANT = ("text", "tool_result"), ("text", "thinking", "tool_use")
USED = (
    "type",
    "name",
    "description",
    "input_schema",
    "cache_control",
)  # of a tool; schemas hold where tool_choice forces calls
# Fields of a chat, and those of this body that they come from.
NAMES = {
    r"messages.*": "messages",
    r"max_(completion_)?tokens": "max_tokens",
    r"response_format(\.json_schema)?(.*)": r"output_config.format\2",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function(.*)": r"tools.\1\2",
    r"reasoning_effort": "output_config.effort",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"stop": "stop_sequences",
}


_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "maxItems": MOST_PARTS}]}
Blocks = Annotated[Any, BeforeValidator(text_or_objects("a content", "blocks", MOST_PARTS)), WithJsonSchema(_BLOCKS)]


class Turn(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "ctx", "msg"]  # the last two are users' too, as Claude Code has them
    content: Blocks


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Body):
    effort: Name | None = None
    format: OutputFormat | None = None


class Thinking(Body):
    """The choice to think before the answer or not, and for how long."""

    harmless: ClassVar[Mapping[str, str]] = {"display": "thinking is returned in full"}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CacheControl(Body):
    """The mark of a prefix whose next use is expected. ttl: 5 minutes, or an hour."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CountMessagesBody(Body):
    """The body of POST /v1/messages/count_tokens: what decides the prompt."""

    harmless: ClassVar[Mapping[str, str]] = {
        "billing_policy": "there are no bills",
        "cache_control": "the prefix cache finds its own",
        "compaction": "nothing is left out of a conversation",
        "context_management": "nothing is left out of a conversation",
        "diagnostics": "the prefix cache finds its own",
        "fallback_credit_token": "there are no bills",
        "fallbacks": "the model that is asked for answers",
        "inference_geo": "the server is where it is",
        "speed": "there is one speed",
        "user_profile_id": "names a user to the provider",
        "workspace_id": "names a workspace to the provider",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        "container": Refusal("container is not supported, because the server runs no tools; leave it out."),
        "mcp_servers": Refusal("mcp_servers is not supported, because the server runs no tools; leave it out."),
        "thread": Refusal("thread is not supported: no conversations are kept for it; send all messages."),
        "service_tier": Refusal("service_tier may be auto or standard_only: there is one.", ("auto", "standard_only")),
    }

    model: str | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: Object | None = None


class MessagesBody(CountMessagesBody, SampledBody):
    """The body of POST /v1/messages. Beside Anthropic's fields stand those of sampling that chats have too."""

    max_tokens: Annotated[int, Field(ge=1), LAX_INT]
    cache_control: CacheControl | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


def chat_of(
    body: CountMessagesBody, forms: Forms, *, later: bool, pictures: bool = False
) -> tuple[ChatBody, list[str]]:
    """Return the request as a chat's, and what of it is ignored. Raise BadRequest that names the field at fault.

    The chat has no `max_tokens`, because an answer may fill the context here. `forms` are the model's, and
    `later` is as in `Transcript`. `pictures` are taken by the model or not.
    """
    ignored = unused(body.tools or [], USED)
    found: dict[str, Any] = {"messages": _messages(body, ignored, later=later, pictures=pictures)}
    last = found["messages"][-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):  # the answer goes on from there
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    found["tools"] = _tools(body.tools or [], ignored) or None
    if body.tool_choice is not None and (found["tools"] or not body.tools):
        found |= _choice(body.tool_choice)
        left_out = {tool.get("name") for tool in body.tools or [] if (tool.get("type") or "custom") != "custom"}
        if body.tool_choice.type == "tool" and body.tool_choice.name in left_out:
            found["tool_choice"] = "auto"
            ignored.append("tool_choice")
    config = body.output_config
    form = (config.format if config else None) or body.output_format
    if form is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    found["reasoning_effort"] = config.effort if config else None
    kwargs = _thinking(body.thinking, forms, found, ignored)
    if isinstance(body, MessagesBody):
        found |= sampled(body) | {"stop": body.stop_sequences}
        found["prompt_cache_ttl"] = body.prompt_cache_ttl or _expected(body)
    else:
        found["model"] = body.model
    found["chat_template_kwargs"] = kwargs | (body.chat_template_kwargs or {}) or None
    return parse(ChatBody, {name: value for name, value in found.items() if value is not None}), ignored


def _expected(body: MessagesBody) -> float | None:
    """Return for how many seconds the next turn is expected, by the marks of all blocks; None if there are none. The
    cache finds prefixes by itself, so the places of the marks mean nothing."""
    contents = [body.system, *(turn.content for turn in body.messages), body.tools]
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    marks = [mark for block in blocks if isinstance(mark := block.get("cache_control"), dict)]
    ttls = [mark.get("ttl") for mark in marks] + ([body.cache_control.ttl] if body.cache_control else [])
    return max((HOUR if ttl == "1h" else KEPT for ttl in ttls), default=None)


def _thinking(asked: Thinking | None, forms: Forms, found: Object, ignored: list[str]) -> Object:
    """Put the budget into the chat, and return the template's arguments. They mean nothing to a model that does not
    think."""
    if asked is None:
        return {}
    if forms.reasoning is None:
        ignored.append("thinking")
        return {}
    if asked.type == "enabled":
        found["thinking_token_budget"] = asked.budget_tokens
    thinks = asked.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks}  # templates know it by one name or the other


def _messages(body: CountMessagesBody, ignored: list[str], *, later: bool, pictures: bool) -> list[Object]:
    said = Transcript(later=later)
    if body.system:
        _instruct(said, body.system, "system", ignored)
    for index, turn in enumerate(body.messages):
        path = f"messages.{index}.content"
        if turn.role == "assistant":
            _answer(said, turn.content, path, ignored)
        elif turn.role == "system":
            _instruct(said, turn.content, path, ignored)
        else:
            _ask(said, turn.content, path, ignored, pictures=pictures)
    messages = said.whole()
    if not messages:
        raise BadRequest("messages are empty; send at least one block.", param="messages")
    return messages


def _instruct(said: Transcript, content: str | list[Object], path: str, ignored: list[str]) -> None:
    """Add instructions, without the line that Claude Code puts before them for the bill. It is another in each request,
    so the prefix cache would find nothing."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    told = [block for block in blocks if not _is_bill(block.get("text"))]
    if len(told) < len(blocks) and BILLING not in ignored:
        ignored.append(BILLING)
    if told:
        said.instruct("system", text_of(told, path, TEXT))


def _is_bill(text: object) -> bool:
    return isinstance(text, str) and text.startswith(BILLING)


def _ask(said: Transcript, content: str | list[Object], path: str, ignored: list[str], *, pictures: bool) -> None:
    """Add what the user says, and what tools returned."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        place = f"{path}.{index}"
        match block.get("type"):
            case "text":
                said.ask(text_at(block, "text", place))
            case "image" if pictures:
                said.ask(_picture(block, place))
            case "tool_result":
                content = _shown(block.get("content") or "", f"{place}.content")
                text = result_text(content, f"{place}.content", TEXT, ignored, "tool_result", sees=pictures)
                more = {"is_error": True} if block.get("is_error") else {}
                said.say("tool", text, tool_call_id=text_at(block, "tool_use_id", place), **more)
            case _:
                refuse_part(block, place, OF_USER)


def _picture(block: Object, path: str) -> Object:
    """Return a block with a picture as a chat's part."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url", "file"):
        message = f"{path}.source has the type base64, url or file, got {shortened(kind or source)}."
        raise BadRequest(message, param=f"{path}.source")
    named = {"uuid": block["uuid"]} if "uuid" in block else {}
    if kind == "file":
        name = text_at(source, "file_id", f"{path}.source")
        return {"type": "input_image", "file_id": name, CLIENT_PATH: f"{path}.source", **named}
    url = text_at(source, "url" if kind == "url" else "data", f"{path}.source")
    if kind == "base64":
        url = "data:;base64," + url
    return {"type": "image_url", "image_url": {"url": url}, CLIENT_PATH: path, **named}


def _shown(content: Any, path: str) -> Any:
    """Return a result with the names of tools that a client has found as text, one on a line."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": text_at(part, "tool_name", f"{path}.{index}")}
        if isinstance(part, dict) and part.get("type") == REFERENCE
        else part
        for index, part in enumerate(content)
    ]


def _answer(said: Transcript, content: str | list[Object], path: str, ignored: list[str]) -> None:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts: list[str] = []  # in a row
    for index, block in enumerate(blocks):
        place = f"{path}.{index}"
        kind = block.get("type")
        if kind == "text":
            texts.append(text_at(block, "text", place))
            continue
        if isinstance(kind, str) and kind not in OF_ASSISTANT and KIND.fullmatch(kind):
            # of tools that Anthropic runs itself, what only it can read, and what is not known here
            if kind not in ignored:
                ignored.append(kind)
            continue
        if texts:
            said.answer(BETWEEN.join(texts))
            texts = []
        if kind == "thinking":
            said.think(text_at(block, "thinking", place))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                message = f"{place}.input must be an object, got {shortened(arguments)}."
                raise BadRequest(message, param=f"{place}.input")
            call_id, name = text_at(block, "id", place), text_at(block, "name", place)
            said.call(call_id, name, msgspec.json.encode(arguments).decode())
        else:
            refuse_part(block, place, OF_ASSISTANT)
    if texts:
        said.answer(BETWEEN.join(texts))


def _tools(tools: Sequence[Object], ignored: list[str]) -> list[Object]:
    """Return the tools as chats have them. Those that a provider runs itself are left out by name."""
    found = []
    for index, tool in enumerate(tools):
        kind, path = tool.get("type") or "custom", f"tools.{index}"
        if kind != "custom":
            ignored.append(f"tools.{kind}")
            continue
        text_at(tool, "name", path)
        if not isinstance(tool.get("input_schema"), dict):
            message = f"{path}.input_schema must be a JSON schema, got {shortened(tool.get('input_schema'))}."
            raise BadRequest(message, param=f"{path}.input_schema")
        known = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        found.append({"type": "function", "function": {**known, "parameters": tool["input_schema"]}})
    return found


def _choice(choice: ToolChoice) -> Object:
    """Return tool_choice as chats have it, and whether there may be several calls."""
    found: Object = {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)}
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("a tool_choice of type tool needs name.", param="tool_choice.name")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is not None:
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found
