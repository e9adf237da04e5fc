"""Speculative decoding, as a user asks for it: the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from ridgeline.core.errors import InvalidConfig

METHODS = ("ngram",)
MOST_DRAFTS = 16
LOOKUP = 5  # tokens that prompt lookup compares, unless the user says otherwise
LONGEST_LOOKUP = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The way in which drafts of tokens to come are made.

    method: "ngram": prompt lookup. What followed the last tokens where they stood before is drafted.
    num_speculative_tokens: the most drafts that a step verifies of a request.
    prompt_lookup_min, prompt_lookup_max: how many of the last tokens must have stood there at least, and are compared
        at most.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = LOOKUP
    prompt_lookup_max: int = LOOKUP


def speculation_of(given: Mapping[str, object] | None) -> Speculation | None:
    """Return what a user's object asks for, or None if there is none. Raise InvalidConfig."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidConfig(
            'speculative_config must be an object, as {"method": "ngram", "num_speculative_tokens": 4}, '
            f"got {given!r}."
        )
    names = [field.name for field in fields(Speculation)]
    for name in given:
        if name not in (*names, "model"):
            near = get_close_matches(str(name), names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}."
            raise InvalidConfig(f"speculative_config has no {name!r}{meant}")
    method = given.get("method", given.get("model"))  # as the model's name it is an old form
    if not isinstance(method, str) or method.strip("[]") not in METHODS:
        said = "names no method" if method is None else f"asks for the method {method!r}, which is not supported"
        raise InvalidConfig(f"speculative_config {said}; supported: {', '.join(METHODS)}.")
    if "method" in given and given.get("model") is not None:
        raise InvalidConfig('speculative_config has a "model", and the method ngram needs none; leave it out.')
    drafts = _whole(given, "num_speculative_tokens", MOST_DRAFTS)
    named = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if given.get(name) is not None]
    lengths = [_whole(given, name, LONGEST_LOOKUP) for name in named] or [LOOKUP]
    shortest, longest = lengths[0], lengths[-1]
    if shortest > longest:
        raise InvalidConfig(
            f"prompt_lookup_min ({shortest}) is above prompt_lookup_max ({longest}); lower it or raise that."
        )
    return Speculation(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=shortest, prompt_lookup_max=longest
    )


def _whole(given: Mapping[str, object], name: str, most: int) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        said = "is missing" if value is None else f"is {value!r}"
        raise InvalidConfig(f"{name} of speculative_config {said}; give a whole number from 1 to {most}.")
    return value
