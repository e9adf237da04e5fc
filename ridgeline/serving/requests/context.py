"""Checks that requests fit a model's context. API servers judge it here and nowhere else, before a request is admitted.
The engine judges requests again, for callers in its own process and because another engine may have taken its place."""

from __future__ import annotations

from ridgeline.serving.errors import TooLong

CHARS_PER_TOKEN = 128  # more than any token has: a text longer than this times the context cannot fit

USUAL_CHARS = 16  # of a token, more than texts have: of a longer text so many are tokenized first
SURE = 2  # times the context: a beginning with so many tokens is none of a text that fits


def check_text(context: int, length: int, param: str) -> None:
    """Raise TooLong, before any work, for a text of so many characters that could never fit. `param` is its field."""
    if length > context * CHARS_PER_TOKEN:
        raise TooLong(
            f"This model's maximum context length is {context} tokens. However, your {param} has {length} "
            f"characters. Please reduce the length of the {param}.",
            param=param,
        )


def beginning_of(context: int, text: str) -> str | None:
    """Return the beginning of a long text that should be tokenized before the rest, or None."""
    most = SURE * USUAL_CHARS * context
    return text[:most] if len(text) > most else None


def check_beginning(context: int, chars: int, tokens: int, length: int, param: str) -> None:
    """Raise TooLong for a text of `length` characters whose first `chars` have so many tokens that it cannot fit.
    (Tokens at the cut may be other ones in the whole text, so the beginning must have more than enough.)"""
    if tokens > SURE * context:
        raise TooLong(
            f"This model's maximum context length is {context} tokens. However, the first {chars} of the {length} "
            f"characters of your {param} have {tokens} tokens. Please reduce the length of the {param}.",
            param=param,
        )


def check_prompt(context: int, length: int, wanted: int, param: str) -> None:
    """Raise TooLong unless a prompt of so many tokens leaves room for `wanted` tokens of output."""
    if length + wanted > context:
        raise TooLong(
            f"This model's maximum context length is {context} tokens. However, you requested {length + wanted} tokens "
            f"({length} in the {param}, {wanted} in the completion). Please reduce the length of the {param} or "
            "completion.",
            param=param,
        )


def check_negative(context: int, length: int) -> None:
    """Raise TooLong unless a negative prompt of so many tokens leaves room for an output."""
    if length >= context:
        raise TooLong(
            f"the negative prompt has {length} tokens and the context holds {context} including the output; shorten "
            "it.",
            param="negative_prompt",
        )


def check_input(context: int, length: int, param: str = "input") -> None:
    """Raise TooLong unless an input of so many tokens can be pooled, or read by an encoder, which writes nothing.
    `param` is its field."""
    if length > context:
        raise TooLong(
            f"This model's maximum context length is {context} tokens. However, your {param} has {length} tokens. "
            f"Please reduce the length of the {param}, or set truncate_prompt_tokens.",
            param=param,
        )
