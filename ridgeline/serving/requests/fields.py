"""The fields of OpenAI's, Anthropic's and vLLM's bodies that no body of ours has: refused where they would change the
answer, or accepted as harmless. `examine` reads a body by these lists, and docs/api-fields.md shows them.

An unknown field is refused, because most are misspelled: `temprature` alone would leave the temperature at its
default without a word. OpenAI refuses it too. vLLM ignores it, and says so at the log's level debug alone;
`--unknown-fields ignore` does that here, and names the field in a header.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.refusals import shortened

LONGEST_NAME = 64  # characters of a name that near ones are looked for


class Refusal(NamedTuple):
    """The sentence for a field that is refused, unless its value is one of `idle`, which ask for nothing."""

    sentence: str
    idle: tuple[object, ...] = ()


# Fields without which the answer would not be the one that was asked for. What is empty or false asks for nothing.
REFUSED: dict[str, Refusal] = {
    "functions": Refusal("functions is not supported; use tools."),
    "function_call": Refusal("function_call is not supported; use tool_choice.", ("none",)),
    "audio": Refusal("audio output is not supported; leave audio out."),
    "modalities": Refusal('modalities may be ["text"] alone: the model writes nothing else.', (["text"],)),
    "service_tier": Refusal("service_tier may be auto or default: there is one tier.", ("auto", "default")),
    "verbosity": Refusal("verbosity is not supported; ask for it in a message.", ("medium",)),
    "web_search_options": Refusal("web search is not supported; leave web_search_options out."),
    "moderation": Refusal("moderation is not supported; leave it out."),
    "logits_processors": Refusal("logits_processors is not supported; leave it out."),
    "watermarking": Refusal("watermarking is not supported; leave it out."),
    "vllm_xargs": Refusal("vllm_xargs is not supported: there are no extensions that would read it."),
    "kv_transfer_params": Refusal("kv_transfer_params is not supported: caches are not handed between servers."),
    "ec_transfer_params": Refusal("ec_transfer_params is not supported: caches are not handed between servers."),
    "routed_experts_prompt_start": Refusal("routed experts are not reported; leave routed_experts_prompt_start out."),
    "thinking_token_budget": Refusal("thinking_token_budget is not supported; leave it out.", (-1,)),
    "return_token_offsets": Refusal("return_token_offsets is not supported; leave it out."),
    "mm_payload": Refusal("mm_payload is not supported: pictures and sound come as parts of messages; leave it out."),
    "return_mm_kwargs": Refusal(
        "return_mm_kwargs is not supported: what processors make is not returned; leave it out."
    ),
    **{
        f"guided_{kind}": Refusal(f"guided_{kind} is not supported; use structured_outputs: {{{kind}: …}}.")
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    },
}

# Fields that change nothing of the answer, and why. They are named in the header `ridgeline-ignored`.
HARMLESS: dict[str, str] = {
    "metadata": "for dashboards of the provider",
    "store": "answers are not kept",
    "user": "names a user to the provider",
    "safety_identifier": "names a user to the provider",
    "session_id": "names a conversation to a router; the prefix cache finds what it has in common",
    "prompt_cache_key": "the prefix cache finds its own; cache_salt separates tenants",
    "prompt_cache_retention": "the prefix cache keeps what it has room for",
    "prompt_cache_options": "the prefix cache keeps what it has room for",
    "prediction": "a guess at the answer, which would only make it faster",
    "spaces_between_special_tokens": "the tokenizers' library puts no spaces there either way",
    "media_io_kwargs": "for pictures, video and sound, which are parts of chats alone",
    "mm_processor_kwargs": "for pictures and video, which are parts of chats alone",
    "guided_decoding_backend": "one library does all grammars",
}
# Other servers' names for fields of ours that spelling alone would not find.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "num_beams": "use_beam_search",
    "do_sample": "temperature",
}


def examine(model: type[BaseModel], data: Mapping[str, Any], *, lenient: bool = False) -> list[str]:
    """Return the fields of a body that are ignored, as dotted paths, sorted. Raise BadRequest for one that is refused,
    or unknown, which `lenient` ignores. Null asks for nothing."""
    ignored: list[str] = []
    _examine(model, data, "", lenient, ignored)
    return sorted(ignored)


def _examine(model: type[BaseModel], data: Mapping[str, Any], path: str, lenient: bool, ignored: list[str]) -> None:
    known, inner, harmless = _shape(model)
    refusals = {**REFUSED, **refused_by(model)} if not path else refused_by(model)
    for name in sorted(data.keys() - known):
        value = data[name]
        if value is None:
            continue
        if name in refusals:
            refused = refusals[name]
            if value and value not in refused.idle:
                raise BadRequest(refused.sentence, param=path + name)
        elif lenient or name in harmless or (not path and name in HARMLESS):
            ignored.append(path + name)
        else:
            raise _unknown(name, path, known)
    for name in inner.keys() & data.keys():
        if isinstance(data[name], Mapping):
            _examine(inner[name], data[name], f"{path}{name}.", lenient, ignored)


def _unknown(name: str, path: str, known: frozenset[str]) -> BadRequest:
    near = [each for each in [RENAMED.get(name)] if each in known] or get_close_matches(name[:LONGEST_NAME], known, 1)
    hint = f"; did you mean {path}{near[0]}?" if near else "; leave it out."
    shown = name if len(name) <= LONGEST_NAME else shortened(name)
    return BadRequest(f"Unrecognized request argument supplied: {path}{shown}{hint}", param=f"{path}{shown}")


@lru_cache
def _shape(model: type[BaseModel]) -> tuple[frozenset[str], dict[str, type[BaseModel]], frozenset[str]]:
    """Return a model's names, its fields that are bodies of their own, and the names it takes as harmless."""
    inner = {}
    for name, field in model.model_fields.items():
        found = [each for each in (field.annotation, *_members(field.annotation)) if _is_checked(each)]
        if found:
            inner[field.alias or name] = found[0]
    return known_names(model), inner, frozenset(getattr(model, "harmless", ()))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _is_checked(annotation: Any) -> bool:
    """Return True for a model that does not take other fields as they are."""
    return (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and annotation.model_config.get("extra") != "allow"
    )


def refused_by(model: type[BaseModel]) -> Mapping[str, Refusal]:
    """Return the fields that this body refuses, beside those that every body does."""
    return getattr(model, "refused", {})


@lru_cache
def known_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a body's own fields."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())
