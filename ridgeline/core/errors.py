"""Errors a caller can act on.

Each carries one sentence: what was wrong, with the value, and what to do. Anything else that escapes
is a bug in Ridgeline, not in its input.
"""

from __future__ import annotations

from unicodedata import category

MAX_LENGTH = 800  # characters of an error's sentence


class RidgelineError(Exception):
    """The base of every error that is meant for the user. Its message is one line that a terminal can show, whatever a
    model's file or a library put into it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class InvalidRequest(RidgelineError, ValueError):
    """One request is wrong; the engine goes on. `param` names the offending field, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfig(RidgelineError, ValueError):
    """The engine cannot be built as asked (unknown dtype, no such device, no room for the KV cache)."""


class ModelLoadError(RidgelineError):
    """A model folder is missing, damaged, or does not hold the tensors its config promises."""


class DeviceLost(RidgelineError):
    """The device has stopped working, and will not work again until its process is restarted."""


class ContractViolation(RidgelineError):
    """Engine and worker disagree about a plan. Never caused by a request; always worth a bug report."""


def one_line(text: str) -> str:
    """Return `text` with unprintable characters escaped. A long text is cut in the middle, since its end says what to
    do."""
    half = MAX_LENGTH // 2
    if len(text) > MAX_LENGTH:
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() or category(c) == "Zs" else repr(c)[1:-1] for c in text)
