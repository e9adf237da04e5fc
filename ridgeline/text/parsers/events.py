"""The events that a reader finds in a model's text, in the order in which it was written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The new part of a tool call.

    index: the call's place among the answer's calls, from 0.
    name: the function's name, which comes with the call's first delta and never again.
    arguments: JSON text to be joined.
    id: the call's name in the conversation, which comes with its function's.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    id: str | None = None


Event = Content | Reasoning | CallDelta
