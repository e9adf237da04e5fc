"""The bodies of Ollama's API, put into the words of chats and completions.

    chat, ignored = chat_of(api, body)

Fields that mean nothing here are left out by name, as Ollama does with options that it does not know. Sampling that
`options` do not set has the server's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.by_model import LATEST
from ridgeline.serving.requests.bodies import (
    LAX_INT,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    ChatBody,
    CompletionBody,
    Name,
    NotNegative,
    Object,
    Penalty,
    Positive,
    Share,
    Stop,
    Unit,
)
from ridgeline.serving.requests.fields import Refusal
from ridgeline.serving.requests.media import CLIENT_PATH
from ridgeline.serving.requests.pooling import Input
from ridgeline.serving.requests.validation import parse

LOADING = "models are loaded as the server's flags say"
MIROSTAT = "mirostat is not known; top_p and min_p are"
OF_LOADING = """embedding_only f16_kv logits_all low_vram main_gpu num_batch num_gpu num_thread numa use_mlock use_mmap
vocab_only"""
PICTURES = "for models that draw images"
STAYS = "a model stays as long as its server"
IMAGES = "images are not supported: the model reads text alone; leave images out."
SWITCHES = ("enable_thinking", "thinking")  # the names that templates have for it
# Options that chats have under another name
OPTIONS = {"repeat_penalty": "repetition_penalty"}
SAMPLED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)


def _check_form(value: object) -> object:
    """Check the form of an answer: "json", a schema, or neither."""
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('format is "json" or a JSON schema')


def _check_think(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and len(value) <= 32):
        return value
    raise ValueError("think is true, false, or a level such as high, medium or low")


_FORM = {"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}]}
Form = Annotated[Any, BeforeValidator(_check_form), WithJsonSchema(_FORM)]
Think = Annotated[
    Any,
    BeforeValidator(_check_think),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 32}]}),
]
Pictures = Annotated[list[str], Field(fail_fast=True, max_length=MOST_PARTS)] | None  # in base64
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), LAX_INT]


class Options(Body):
    """The rules by which tokens are drawn, and their number. `num_predict` of -1 or -2 is as many as there is room for.
    `num_ctx` bounds prompt and output together, where it is less than the server's context."""

    lenient = True
    harmless: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OF_LOADING.split(), LOADING),
        **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau"), MIROSTAT),
        "draft_num_predict": "the server chooses how many drafts pay",
        "num_keep": "nothing is dropped from a full context",
        "penalize_newline": "a new line is a token as others",
        "repeat_last_n": "a penalty counts the whole text",
        "tfs_z": "tail-free sampling is not known; min_p is",
    }

    temperature: NotNegative | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None
    top_p: Share | None = None
    min_p: Unit | None = None
    typical_p: Share | None = None
    repeat_penalty: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31), LAX_INT] | None = None
    num_ctx: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None


class OllamasBody(Body):
    """The fields that all of these bodies have."""

    lenient = True
    harmless: ClassVar[Mapping[str, str]] = {"keep_alive": STAYS}

    model: str | None = None


class GeneratingBody(OllamasBody):
    """The fields of both bodies that generate. Without `stream` the answer comes in lines."""

    harmless: ClassVar[Mapping[str, str]] = {
        "keep_alive": STAYS,
        "truncate": "a prompt that does not fit is refused",
        "shift": "an answer ends where the context is full",
    }
    options: Options | None = None
    format: Form | None = None
    think: Think | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), LAX_INT] | None = None


class OllamasChatMessage(Body):
    """A message. Tools' answers name the tool, and calls have their arguments as an object."""

    role: Name
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Pictures = None


class OllamasChatBody(GeneratingBody):
    """The body of POST /api/chat. Without messages nothing is generated."""

    messages: Annotated[list[OllamasChatMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


class OllamasGenerateBody(GeneratingBody):
    """The body of POST /api/generate. The prompt is what a user says, or with `raw` the text that the model continues.
    With a suffix the model writes what stands between. Without a prompt nothing is generated."""

    harmless: ClassVar[Mapping[str, str]] = {
        **GeneratingBody.harmless,
        **dict.fromkeys(("height", "steps", "width"), PICTURES),
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        "template": Refusal("template is not supported: the model's own is used; send the whole prompt with raw."),
        "context": Refusal("context is not supported; send the whole conversation to /api/chat."),
    }

    prompt: str | None = None
    images: Pictures = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedBody(OllamasBody):
    """The body of POST /api/embed. A text that is too long loses its end, unless `truncate` is false."""

    input: Input
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None


class OldEmbedBody(OllamasBody):
    """The body of POST /api/embeddings, which is older."""

    prompt: str
    options: Options | None = None


class ShowBody(OllamasBody):
    """The body of POST /api/show. `name` is the older word for the model."""

    name: str | None = None
    verbose: bool | None = None


def known_name(api: ApiServer, name: str | None) -> str | None:
    """Return the server's word for a model: Ollama's clients add a tag to a name that has none."""
    return name.removesuffix(LATEST) if name is not None and name not in api.all_names else name


def chat_of(api: ApiServer, body: OllamasChatBody | OllamasGenerateBody) -> tuple[ChatBody, list[str]]:
    """Return the request as a chat's, without a bound of its length, and what of it is ignored. Raise BadRequest."""
    ignored = _beyond(api, body)
    if isinstance(body, OllamasChatBody):
        found: Object = {"messages": _messages(api, body.messages or ()), "tools": body.tools}
    else:
        said = {"system": body.system or None, "user": body.prompt or ("" if body.images else None)}
        found = {"messages": [{"role": role, "content": text} for role, text in said.items() if text is not None]}
        if body.images:
            found["messages"][-1]["content"] = _with_pictures(api, body.images, body.prompt or "", "images")
    found |= _drawn(api, body) | _thought(api, body.think, ignored)
    if body.logprobs:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return parse(ChatBody, {name: value for name, value in found.items() if value is not None}), ignored


def completion_of(api: ApiServer, body: OllamasGenerateBody) -> tuple[CompletionBody, list[str]]:
    """Return the request for what follows a text, as a completion's, and what of it is ignored. Raise BadRequest."""
    if body.images:
        raise BadRequest("images are not taken with raw or suffix; leave one out.", param="images")
    ignored = [*_beyond(api, body), *(["think"] if body.think else [])]
    text = f"{body.system}\n{body.prompt}" if body.system and not body.raw else body.prompt
    found = {"prompt": text, "suffix": body.suffix, **_drawn(api, body)}
    if body.logprobs:
        found["logprobs"] = body.top_logprobs or 0
    return parse(CompletionBody, {name: value for name, value in found.items() if value is not None}), ignored


def length_of(body: GeneratingBody) -> tuple[int | None, int | None]:
    """Return the most tokens of output, and of prompt and output together; None is no bound of the request's."""
    options = body.options or Options()
    return (options.num_predict if (options.num_predict or -1) > 0 else None), options.num_ctx or None


def _drawn(api: ApiServer, body: GeneratingBody) -> Object:
    """Return the fields that say how tokens are drawn, and the form that they have."""
    options = body.options or Options()
    found: Object = {name: getattr(options, name) for name in SAMPLED}
    found |= {ours: getattr(options, theirs) for theirs, ours in OPTIONS.items()}
    if options.seed is not None and options.seed < 0:
        found["seed"] = None
    if body.format == "json":
        found["response_format"] = {"type": "json_object"}
    elif body.format:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.format}}
    return found | {"model": known_name(api, body.model)}


def _beyond(api: ApiServer, body: GeneratingBody) -> list[str]:
    """Return the names of options that ask for more than there is."""
    context = (body.options or Options()).num_ctx or 0
    return ["options.num_ctx"] if context > api.service.facts().max_model_len else []


def _thought(api: ApiServer, think: bool | str | None, ignored: list[str]) -> Object:
    """Return the fields that say whether, and how long, the model thinks, in words that its template reads."""
    mentions = api.chat_template.mentions
    switches = [name for name in SWITCHES if mentions(name)]
    if think is None:
        return {}
    if isinstance(think, str) and (switches or mentions("reasoning_effort")):
        return {"reasoning_effort": think}
    if switches and isinstance(think, bool):
        return {"chat_template_kwargs": dict.fromkeys(switches, think)}
    if not (think is True and api.forms.reasoning is not None):  # such a model thinks always
        ignored.append("think")
    return {}


def _with_pictures(api: ApiServer, images: Sequence[str], text: str, path: str) -> list[Object]:
    """Return the parts of a message: pictures come before its text, as in Ollama. Raise BadRequest."""
    if not api.modalities:
        raise BadRequest(IMAGES, param=path)
    shown = [
        {
            "type": "image_url",
            "image_url": {"url": data if data[:5] == "data:" else f"data:;base64,{data}"},
            CLIENT_PATH: f"{path}.{index}",
        }
        for index, data in enumerate(images)
    ]
    return [*shown, *([{"type": "text", "text": text}] if text else [])]


def _messages(api: ApiServer, messages: Sequence[OllamasChatMessage]) -> list[Object]:
    """Return messages as chats have them. Calls without an id get one, and so do the answers to these: of the first
    call of that tool that waits for one, or of the first of all. Raise BadRequest."""
    found: list[Object] = []
    waiting: list[tuple[str, object]] = []  # ids and names of calls
    for index, message in enumerate(messages):
        content: Any = message.content or (None if message.tool_calls else "")  # it may be absent, as in Ollama
        if message.images:
            content = _with_pictures(api, message.images, message.content or "", f"messages.{index}.images")
        told: Object = {"role": message.role, "content": content}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if message.role == "tool":
            same = [call for call in waiting if message.tool_name in (None, call[1])] or waiting[:1]
            name = message.tool_call_id or (same[0][0] if same else None)
            waiting = [call for call in waiting if call[0] != name]
            told |= {} if name is None else {"tool_call_id": name}
            told |= {} if message.tool_name is None else {"name": message.tool_name}
        if message.tool_calls:
            told["tool_calls"] = [_call(call, f"call_{index}_{place}") for place, call in enumerate(message.tool_calls)]
            waiting = [(call["id"], call["function"].get("name")) for call in told["tool_calls"]]
        found.append(told)
    return found


def _call(call: Object, name: str) -> Object:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest("a call in tool_calls has a function with name and arguments.", param="messages")
    return {"id": name, "type": "function", **call}
