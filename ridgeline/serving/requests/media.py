"""Parts of messages that are pictures, videos or sounds, in the forms that OpenAI's API and vLLM have for them.

    body, items = await with_items(api, body)

In the messages that come back {"type": "image"}, {"type": "video"} and {"type": "audio"} stand for the items, in their
order, as chat templates take them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ridgeline.media.items import HeardVectors, Item, SeenVectors
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.media import LONGEST_UUID, MediaPart
from ridgeline.serving.requests.bodies import ChatMessage, TemplateBody
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.stored.records import FILE_ID
from ridgeline.text.requests import check_media_width

# Types of parts, and the field that holds what they bring
KINDS = {
    **{"image_url": "image", "input_image": "image", "image": "image", "image_embeds": "image", "image_pil": "image"},
    **{"video_url": "video", "video": "video", "input_video": "video"},
    **{"audio_url": "audio", "input_audio": "audio", "audio": "audio", "audio_embeds": "audio"},
}
FILES = ("file", "input_file")  # types of parts that are what the file's content says
FIELDS = {
    **{"image_url": "image_url", "input_image": "image_url", "video_url": "video_url", "input_video": "video_url"},
    **{"audio_url": "audio_url", "input_audio": "input_audio"},
}
VECTORS = ("image_embeds", "audio_embeds")  # parts that are base64 of a safetensors file
DETAILS = ("auto", "low", "high", "original")
CLIENT_PATH = "path"  # of a part in a body that was put into a chat's words
NAMES = {"image": "pictures", "video": "video", "audio": "sound"}

_Body = TypeVar("_Body", bound=TemplateBody)


async def with_items(api: ApiServer, body: _Body) -> tuple[_Body, list[Item]]:
    """Return the body with marks in place of its pictures, videos and sounds, and these. Raise RequestFailed, with the
    place of a part that the model does not take."""
    if not any(isinstance(message.content, list) for message in body.messages):
        return body, []
    parts: list[MediaPart] = []
    files = await _opened(api, body.messages)
    messages = [
        _marked(api, message, f"messages.{index}.content", parts, files) for index, message in enumerate(body.messages)
    ]
    if not parts:
        return body, []
    salt = getattr(body, "cache_salt", None) or ""
    options = _options(getattr(body, "media_io_kwargs", None))
    processor = api.adjusted_processor(body.mm_processor_kwargs)
    on_cpu = api.service.facts().device == "cpu"
    items = await api.media.read(parts, salt=salt, processor=processor, options=options, on_cpu=on_cpu)
    for part, item in zip(parts, items, strict=True):
        if isinstance(item, (SeenVectors, HeardVectors)):
            check_media_width(item, api.media_width(part.kind), part.path)
    return body.model_copy(update={"messages": messages}), items


def refuse_media(api: ApiServer, body: TemplateBody) -> None:
    """Raise BadRequest for a picture, video or sound where texts alone are taken."""
    for index, message in enumerate(body.messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            kind = part.get("type")
            if isinstance(kind, str) and (kind in KINDS or kind in FILES):
                path = f"messages.{index}.content.{place}"
                check_kind(api, KINDS.get(kind), kind, path)
                raise BadRequest(f"{path}: {kind} is not taken here; leave it out.", param=path)


async def _opened(api: ApiServer, messages: Sequence[ChatMessage]) -> Iterator[MediaPart]:
    """Return the parts that are files of any kind, in their order. Raise BadRequest for one that the model does not
    take."""
    found: list[MediaPart] = []
    for index, each in enumerate(messages):
        for place, part in enumerate(each.content if isinstance(each.content, list) else ()):
            if isinstance(part.get("type"), str) and part["type"] in FILES:
                path = str(part.get(CLIENT_PATH) or f"messages.{index}.content.{place}")[:64]
                check_kind(api, None, part["type"], path)
                found.append(_file(part, path))
    most = sum(map(api.config.most_media, NAMES))
    if len(found) > most:
        message = f"the request has {len(found)} files, of at most {most} (--limit-mm-per-prompt)."
        raise BadRequest(message, param=found[most].path)
    kinds = await api.media.kinds(found, api.modalities) if found else []
    return (part._replace(kind=kind) for part, kind in zip(found, kinds, strict=True))


def _file(part: Mapping[str, Any], path: str) -> MediaPart:
    """Return a part that is a file of a kind that is not known yet."""
    field = "file" if part["type"] == "file" else ""
    given = part.get(field) if field else part
    if not isinstance(given, Mapping):
        raise BadRequest(f"{path}.file is an object with file_id or file_data, got {shortened(given)}.", param=path)
    within = ".".join(filter(None, (path, field)))
    if given.get("file_url") is not None:
        message = f"{within}.file_url is not taken; send image_url, video_url or audio_url."
        raise BadRequest(message, param=f"{within}.file_url")
    name, data = given.get("file_id"), given.get("file_data")
    if name is not None and data is not None:
        raise BadRequest(f"{within} has file_id and file_data; send one of them.", param=within)
    if name is not None:
        return MediaPart("", path, file=_file_id(name, within))
    if not isinstance(data, str) or not data:
        message = f"{within}.file_data is a data: URL or base64, got {shortened(data)}."
        raise BadRequest(message, param=f"{within}.file_data")
    return MediaPart("", path, url=data) if data[:5].lower() == "data:" else MediaPart("", path, base64=data)


def _file_id(name: object, path: str) -> str:
    """Return the id of an uploaded file, which becomes part of a path on the disk."""
    if not isinstance(name, str) or FILE_ID.fullmatch(name) is None:
        message = f"{path}.file_id is the id of a file of /v1/files, got {shortened(name)}."
        raise BadRequest(message, param=f"{path}.file_id")
    return name


def _marked(
    api: ApiServer, message: ChatMessage, path: str, parts: list[MediaPart], files: Iterator[MediaPart]
) -> ChatMessage:
    """Return the message with marks, and add its parts to those before. files: those of `_opened`."""
    content = message.content
    if not isinstance(content, list):
        return message
    marked: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        name = part.get("type") if isinstance(part.get("type"), str) else None
        kind = KINDS.get(name or "")
        if name in FILES:
            parts.append(next(files))
            marked.append({"type": parts[-1].kind})
            continue
        if kind is None:
            marked.append(part)
            continue
        place = str(part.get(CLIENT_PATH) or f"{path}.{index}")[:64]
        check_kind(api, kind, str(part["type"]), place)
        parts.append(_part(part, kind, place))
        marked.append({"type": kind})
    return message.model_copy(update={"content": marked})


def check_kind(api: ApiServer, kind: str | None, name: str, path: str) -> None:
    """Raise BadRequest if the model does not take parts of this kind, or of any if it is None."""
    taken = api.modalities
    if kind is not None and name in VECTORS and not api.media_width(kind):
        others = any(api.media_width(each) for each in NAMES)
        why = "the model has none" if others else "the operator starts the server with --enable-mm-embeds"
        message = f"{path}: {name} is not taken here; {why}."
        raise BadRequest(message, param=path)
    if kind in taken or name in VECTORS or (taken and kind is None):
        return
    if not taken:
        raise BadRequest(f"{path}: {name} is not supported, because the model reads text alone.", param=path)
    known = " and ".join(NAMES[each] for each in taken)
    raise BadRequest(f"{path}: {name} is not supported, because the model reads text and {known} alone.", param=path)


def _part(part: Mapping[str, Any], kind: str, path: str) -> MediaPart:
    name = str(part["type"])
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= LONGEST_UUID):
        message = f"{path}.uuid is text of 1 to {LONGEST_UUID} characters, got {shortened(uuid)}."
        raise BadRequest(message, param=f"{path}.uuid")
    if part.get("file_id") is not None:
        if uuid is not None or name in VECTORS or part.get(FIELDS.get(name, "")) is not None:
            message = f"{path}.file_id stands by itself; leave out uuid, and what else the part brings."
            raise BadRequest(message, param=f"{path}.file_id")
        return MediaPart(kind, path, file=_file_id(part["file_id"], path))
    if name in VECTORS:
        data = part.get(name)
        if not isinstance(data, str) or not data:
            message = f"{path}.{name} is base64 of a safetensors file, got {shortened(data)}."
            raise BadRequest(message, param=f"{path}.{name}")
        return MediaPart(kind, path, base64=data, uuid=uuid, vectors=True)
    if name not in FIELDS:
        others = ", ".join(sorted(each for each in FIELDS if KINDS[each] == kind))
        raise BadRequest(f"{path}: {name} is not taken; send one of {others}.", param=path)
    given, field = part.get(FIELDS[name]), f"{path}.{FIELDS[name]}"
    if given is None and uuid is not None:
        return MediaPart(kind, path, uuid=uuid)
    if name == "input_audio":
        data = given.get("data") if isinstance(given, Mapping) else None
        if not isinstance(data, str):
            raise BadRequest(f"{field} is an object with data in base64, got {shortened(given)}.", param=field)
        return MediaPart(kind, path, base64=data, uuid=uuid)
    url = given.get("url") if isinstance(given, Mapping) else given
    detail = (given.get("detail") if isinstance(given, Mapping) else None) or part.get("detail")
    if not isinstance(url, str):
        raise BadRequest(f"{field} is a URL or an object with url, got {shortened(given)}.", param=field)
    if detail is not None and detail not in DETAILS:
        raise BadRequest(f"{field}.detail is one of {', '.join(DETAILS)}, got {shortened(detail)}.", param=field)
    return MediaPart(kind, path, url=url, uuid=uuid)


def _options(given: object) -> Mapping[str, Mapping[str, Any]]:
    """Return a request's media_io_kwargs: an object of settings for each kind."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        kind in NAMES and isinstance(each, Mapping) and len(each) <= 16 for kind, each in given.items()
    ):
        message = f"media_io_kwargs is an object of settings for {', '.join(NAMES)}, got {shortened(given)}."
        raise BadRequest(message, param="media_io_kwargs")
    return given
