"""The errors of ops, and the base of all errors that a caller can act on."""

from __future__ import annotations

from unicodedata import category

MAX_LENGTH = 800  # characters of an error's sentence


class RidgelineError(Exception):
    """The base of every error that is meant for the user. Its message is one line that a terminal can show, whatever a
    model's file or a library put into it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class InvalidConfig(RidgelineError, ValueError):
    """The engine cannot be built as asked (unknown dtype, no such device, no room for the KV cache)."""


def one_line(text: str) -> str:
    """Return `text` with unprintable characters escaped. A long text is cut in the middle, since its end says what to
    do."""
    half = MAX_LENGTH // 2
    if len(text) > MAX_LENGTH:
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() or category(c) == "Zs" else repr(c)[1:-1] for c in text)
