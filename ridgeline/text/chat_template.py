"""Conversion of conversations to prompts by the template that a model brings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.core.confined import Confined, OverLimit
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.text.arguments import short
from ridgeline.text.gguf_tokenizer import gguf_templates
from ridgeline.weights.formats.gguf_file import is_gguf, read_gguf
from ridgeline.weights.formats.json_file import bounded_text, read_json

Message = Mapping[str, Any]

SECONDS = 6.0  # the sandbox itself gives up after 5 s and says so
# A template that asks for a content that is none: DeepSeek's first ones write calls there alone
TESTS_NONE = re.compile(r"""content(?:['"]\])?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)
MARK = "\ue000the text goes on from here\ue001 "  # no conversation has it, and no template takes it apart
MEDIA = ("image", "video", "audio")  # the parts of messages that stand for items beside the text
MOST = 3  # children at once
MEMORY = 512 << 20  # bytes; an ordinary conversation takes a few thousand


def template_processes() -> Confined:
    """Return the renderer in a process of its own, because the author of a template may have meant harm."""
    return Confined("ridgeline.text.sandbox:renderer", seconds=SECONDS, memory=MEMORY, most=MOST)


class ChatTemplate:
    """A renderer of messages that does what transformers' `apply_chat_template` does, in a sandbox in a process of its
    own.

    `source` is the template, or None for a model without one. Of several templates by name "tool_use" serves requests
    with tools and "default" all others. `special_tokens` are what the template sees as bos_token, eos_token, ….
    `processes` are as in `template_processes`.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        processes: Confined | None = None,
    ) -> None:
        self._templates = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens)
        self._render = processes or template_processes()

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Return the template of a folder or a GGUF file. In a folder it stands in chat_template.jinja (and
        additional_chat_templates/), tokenizer_config.json or chat_template.json."""
        folder = Path(folder)
        if is_gguf(folder):
            return cls(gguf_templates(read_gguf(folder)), special_tokens)
        return cls(_templates_of(folder), special_tokens)

    def of_adapter(self, path: Path) -> ChatTemplate:
        """Return the template in an adapter's folder, with the same special tokens and processes, or this one if there
        is none. Raise ModelLoadError for one that cannot be read."""
        found = _templates_of(path) if path.is_dir() else None
        return ChatTemplate(found, self._special_tokens, self._render) if found else self

    @property
    def available(self) -> bool:
        return bool(self._templates)

    @property
    def source(self) -> str | None:
        """The template of requests without tools, or None."""
        return self._templates.get("default")

    @property
    def sources(self) -> list[str]:
        """All templates."""
        return list(self._templates.values())

    def warm(self) -> None:
        """Start a process for the first conversation, without waiting for it."""
        if self.available:
            self._render.warm()

    def mentions(self, word: str) -> bool:
        """Return True if the word stands in any of the templates, whole. A role that does not is unknown to them."""
        found = re.compile(rf"\b{re.escape(word)}\b").search
        return any(found(source) for source in self._templates.values())

    @cached_property
    def shows_later_systems(self) -> bool:
        """True if a system message may also stand within a conversation. It is tried once, which takes a moment."""
        turns = (("system", "a"), ("user", "b"), ("assistant", "c"), ("system", MARK), ("user", "d"))
        try:
            return MARK.strip() in self.render([{"role": role, "content": text} for role, text in turns])
        except InvalidRequest:
            return False

    def render(
        self,
        /,  # a template's own variable may be called self
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt with its special tokens. Encode it with add_special_tokens=False.

        Other keywords reach the template as they are (`enable_thinking=False`). Raise InvalidRequest if messages or
        tools have the wrong form, and with the template's words if it refuses them.
        """
        source = self._choose(tools)
        check_messages(messages)
        _check_tools(tools)
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": messages if TESTS_NONE.search(source) else [_with_content(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            answer = self._render({"source": source, "variables": variables})
        except OverLimit as limit:
            raise InvalidRequest(f"the model's chat template was stopped: {limit}.", param="messages") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the arguments of a chat template must be JSON ({error}).", param="messages"
            ) from error
        if "text" not in answer:
            raise _failure(answer["kind"], answer["words"].rstrip("."))
        return str(answer["text"])

    def render_open(
        self, /, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """Return the prompt up to the end of the last message's text, so that the model goes on with that.

        A mark is put behind the text, and the prompt is cut where the template wrote it. A template that trims texts
        takes the mark's last space away too, and then the text before the mark is trimmed. Raise InvalidRequest as
        `render` does, and if the last message has no text or the template does not show it.
        """
        check_messages(messages)
        *before, last = messages
        content = last.get("content")
        if isinstance(content, list) and content:
            marked: Any = [*content[:-1], {**content[-1], "text": content[-1]["text"] + MARK}]
        elif isinstance(content, str):
            marked = content + MARK
        else:
            raise InvalidRequest("the last message has no text to go on with.", param="continue_final_message")
        prompt = self.render([*before, {**last, "content": marked}], False, tools, **kwargs)
        at = prompt.rfind(MARK.strip())
        if at < 0:
            raise InvalidRequest(
                "the chat template does not show the last message as it is, so it cannot be gone on with.",
                param="continue_final_message",
            )
        return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()

    def with_source(self, source: str) -> ChatTemplate:
        """Return another template with the same special tokens and processes."""
        return ChatTemplate(source, self._special_tokens, self._render)

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest(
                f"the model's chat templates ({names}) include none named default; give one that name."
            )
        raise InvalidRequest(
            "the model has no chat template; send a plain prompt instead, or put a chat_template.jinja into its folder."
        )


def _failure(kind: str, words: str) -> InvalidRequest:
    match kind:
        case "syntax":
            return InvalidRequest(f"the model's chat template is broken: {words}.")
        case "refusal":
            return InvalidRequest(f"the model's chat template says: {words}.", param="messages")
        case _:
            message = f"the model's chat template failed on these messages ({words})."
            return InvalidRequest(message, param="messages")


def check_messages(messages: object) -> None:
    """Raise InvalidRequest unless `messages` is a list of {role, content}, with text or a list of text parts as
    content."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a list with at least one message.", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"{where} must be an object with role and content, got {short(message)}.", param="messages"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{where}.role must be a non-empty string, got {short(role)}.", param="messages")
        _check_content(f"{where}.content", message)


def _with_content(message: Message) -> Message:
    """Return the message with "" in place of a missing content beside calls. Clients send null or an empty list there,
    which templates write as it is, or fail on; but those that ask whether it is none mean what they ask."""
    return message if message.get("content") or not message.get("tool_calls") else {**message, "content": ""}


def _check_content(where: str, message: Message) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} must be a string or a list of text parts, got {short(content)}.", param="messages"
        )
    for part in content:
        if isinstance(part, Mapping) and part.keys() == {"type"} and part["type"] in MEDIA:
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wanted = "{'type': 'text', 'text': '…'}"
            raise InvalidRequest(f"{where} may hold only parts like {wanted}, got {short(part)}.", param="messages")


def _check_tools(tools: object) -> None:
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)):
        raise InvalidRequest("tools must be a list of JSON objects, one for each function.", param="tools")


def _templates_of(folder: Path) -> dict[str, str]:
    return (
        _template_files(folder)
        or _templates_in(folder / "tokenizer_config.json")
        or _templates_in(folder / "chat_template.json")
    )


def _template_files(folder: Path) -> dict[str, str]:
    main = folder / "chat_template.jinja"
    paths = {"default": main} if main.is_file() else {}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        return {name: bounded_text(path) for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"a chat template in {folder} cannot be read ({error}); copy it again.") from error


def _templates_in(path: Path) -> dict[str, str]:
    """Return the `chat_template` entry of a JSON file by name. It is a string, a list of {name, template}, or an
    object."""
    entry = read_json(path).get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list) and all(isinstance(item, dict) for item in entry):
        entry = {item.get("name"): item.get("template") for item in entry}
    if isinstance(entry, dict) and all(isinstance(part, str) for pair in entry.items() for part in pair):
        return entry
    if entry is None:
        return {}
    raise ModelLoadError(f"chat_template in {path} must be a string or a list of named strings; copy the file again.")
