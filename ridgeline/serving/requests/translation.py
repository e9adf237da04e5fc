"""The common part of APIs whose requests are put into a chat's words: messages as they grow, texts that come in parts,
and the names of fields at fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, RequestFailed
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.requests.bodies import SampledBody
from ridgeline.serving.requests.context import check_prompt
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.shares import TEMPLATES

INSTRUCTING = ("system", "developer")
BETWEEN = "\n"  # stands between the parts of a text
MEDIA = ("image", "audio", "file", "video", "document", "search_result", "container_upload")
MOST_KIND = 64  # characters of a part's type
KIND = re.compile(rf"[a-z][a-z0-9_]{{0,{MOST_KIND - 1}}}")  # what types look like, those of later APIs too

Message = dict[str, Any]
Piece = str | dict[str, Any]  # text, or a part of a chat that is a picture, a video or a sound
Media = Callable[[Mapping[str, Any], str], dict[str, Any] | None]


class Transcript:
    """The messages of a chat as they grow. What the model said in parts (reasoning, text, calls) becomes one message,
    as long as the parts come in this order.

    later: the template shows instructions that come within a conversation.
    """

    def __init__(self, *, later: bool) -> None:
        self._messages: list[Message] = []  # contents are lists of texts and media
        self._later = later
        self._begun = False  # something was said besides instructions
        self._rank = -1  # that of the newest part of an answer that may still grow

    def say(self, role: str, *pieces: Piece, **more: Any) -> None:
        """Add a message."""
        self._messages.append({"role": role, "content": [*pieces], **more})
        self._begun = self._begun or role not in INSTRUCTING
        self._rank = -1

    def ask(self, piece: Piece) -> None:
        """Add what the user says or shows. Pieces in a row are one message."""
        if self._last == "user":
            self._grow(piece)
        else:
            self.say("user", piece)

    def instruct(self, role: str, text: str) -> None:
        """Add instructions. Those at the beginning are one message. Later ones are a part of what they come after, if
        the template would not show them."""
        folds = self._begun and not self._later
        if self._last in (("user", "tool") if folds else () if self._begun else (role,)):
            self._grow(text)
        else:
            self.say("user" if folds else role, text)

    def think(self, text: str) -> None:
        self._answer(0)["reasoning_content"] = text

    def answer(self, text: str) -> None:
        self._answer(1)["content"].append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool. `arguments` is JSON."""
        function = {"name": name, "arguments": arguments}
        calls = self._answer(2).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def whole(self) -> list[Message]:
        """Return all messages."""
        return [message | {"content": _content(message)} for message in self._messages]

    @property
    def _last(self) -> str | None:
        return str(self._messages[-1]["role"]) if self._messages else None

    def _grow(self, piece: Piece) -> None:
        self._messages[-1]["content"].append(piece)

    def _answer(self, rank: int) -> Message:
        """Return the message that a part of an answer belongs to. There may be several calls, and one of the others."""
        if not (self._rank < rank or self._rank == rank == 2) or self._rank == -1:
            self._messages.append({"role": "assistant", "content": []})
            self._begun = True
        self._rank = rank
        return self._messages[-1]


def _content(message: Message) -> Any:
    """Return the content of a message: text, or parts if media are among them."""
    pieces = message["content"]
    if all(isinstance(piece, str) for piece in pieces):
        return BETWEEN.join(pieces) or (None if "tool_calls" in message else "")
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces if piece]


def pieces_of(content: object, path: str, kinds: Mapping[str, str], media: Media) -> list[Piece]:
    """Return the texts and media of a user's message, as `text_of` does. `media` turns a part that the model can see or
    hear into a chat's, and any other into None."""
    if not isinstance(content, list):
        return [text_of(content, path, kinds)]
    found: list[Piece] = []
    for index, part in enumerate(content):
        shown = media(part, f"{path}.{index}") if isinstance(part, dict) else None
        if shown is not None:
            found.append(shown)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            refuse_part(part, f"{path}.{index}", tuple(kinds))
        text = text_at(part, kinds[kind], f"{path}.{index}")
        if found and isinstance(found[-1], str):
            found[-1] += BETWEEN + text
        else:
            found.append(text)
    return found


def text_of(content: object, path: str, kinds: Mapping[str, str]) -> str:
    """Return the text of a message's content, which is text or a list of parts.

    `kinds` has the types of parts that are text, and for each the field that holds it. Raise BadRequest that names a
    part of another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{path} is text or a list of parts, got {shortened(content)}.", param=path)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            refuse_part(part, f"{path}.{index}", tuple(kinds))
        texts.append(text_at(part, kinds[kind], f"{path}.{index}"))
    return BETWEEN.join(texts)


def result_text(
    content: object, path: str, kinds: Mapping[str, str], ignored: list[str], place: str, *, sees: bool = False
) -> str:
    """Return the text of what a tool returned or the model said, as `text_of` does.

    A note stands in place of an image, a file or a part of an unknown type, whose name is added to `ignored` behind
    `place`: the conversation would end if it were refused, since clients send all of it each time. `sees`: the
    model takes pictures elsewhere.
    """
    if isinstance(content, list):
        content = [_noted(part, kinds, ignored, place, sees=sees) for part in content]
    return text_of(content, path, kinds)


def _noted(part: object, kinds: Mapping[str, str], ignored: list[str], place: str, *, sees: bool) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in kinds:
        return part
    media = any(word in kind for word in MEDIA)
    if not media and not KIND.fullmatch(kind):
        return part
    kind = kind[:MOST_KIND]
    ignored.append(f"{place}.{kind}")
    reader = "only text is read here" if sees else "the model reads text alone"
    why = reader if media else "this server does not know it"
    return {"type": "text", "text": f"[{kind}: left out, because {why}]"}


def text_at(part: Mapping[str, Any], field: str, path: str) -> str:
    """Return a text field of a part. Raise BadRequest if it is none."""
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{field} must be text, got {shortened(text)}.", param=f"{path}.{field}")
    return text


def refuse_part(part: object, path: str, kinds: tuple[str, ...]) -> NoReturn:
    """Raise BadRequest for a part that is none of these kinds."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(word in kind for word in MEDIA):
        raise BadRequest(f"{path}: {shortened(kind)} is not supported, because the model reads text alone.", param=path)
    raise BadRequest(f"{path} has one of the types {', '.join(kinds)}, got {shortened(kind or part)}.", param=path)


def unused(tools: Sequence[Mapping[str, Any]], used: Collection[str]) -> list[str]:
    """Return the fields of tools that change nothing here, as they are named to the client."""
    return sorted({f"tools.{name}" for tool in tools for name, value in tool.items() if value and name not in used})


def sampled(body: SampledBody) -> dict[str, Any]:
    """Return the fields that chats have under the same name."""
    found = {name: getattr(body, name) for name in SampledBody.model_fields}
    return {name: value for name, value in found.items() if value is not None and name != "stream"}


def bounded(
    api: ApiServer, asked: GenerationRequest, most: int | None, context: int | None = None
) -> GenerationRequest:
    """Return the request with at most `most` tokens of output, or as many as there is room for: clients of some APIs
    ask for more than small contexts hold, and learn of the end by its reason.

    most: None leaves what the request has. context: tokens that prompt and output may be together. Raise TooLong for a
    prompt that fills it.
    """
    facts, length = api.service.facts(), len(asked.prompt_token_ids)
    if context is not None:
        check_prompt(min(context, facts.max_model_len), length, 1, "prompt")
    room = max(min(facts.max_model_len, facts.cache_tokens, context or facts.max_model_len) - length, 1)
    wanted = asked.params.max_tokens if most is None else most
    return replace(asked, params=replace(asked.params, max_tokens=room if wanted is None else min(wanted, room)))


async def later_instructions(api: ApiServer, roles: Iterable[object]) -> bool:
    """Return False if one of these roles instructs, and the model's template would not show it within a
    conversation."""
    if not any(role in INSTRUCTING for role in roles):
        return True
    return await TEMPLATES.run(lambda: api.chat_template.shows_later_systems)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Let failures name the field of the client's own body. `names` maps patterns of a chat's fields to those."""
    try:
        yield
    except (RequestFailed, InvalidRequest) as error:
        for pattern, own in names.items():
            if error.param is not None and (found := re.fullmatch(pattern, error.param)):
                error.param = found.expand(own)
                break
        raise
