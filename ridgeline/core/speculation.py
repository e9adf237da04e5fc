"""Speculative decoding, as a user asks for it: the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from ridgeline.core.errors import InvalidConfig

NGRAM, DRAFT_MODEL, EAGLE, EAGLE3, MTP, MEDUSA = "ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa"
HEADS = (EAGLE, EAGLE3, MTP, MEDUSA)  # they read the hidden states of the model that they draft for
METHODS = (NGRAM, DRAFT_MODEL, *HEADS)
MOST_DRAFTS = 16
MOST_VERIFIED = 512  # tokens of a step whose rows verify drafts on a GPU; larger steps are bound by products anyway
LOOKUP = 5  # tokens that prompt lookup compares, unless the user says otherwise
LONGEST_LOOKUP = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The way in which drafts of tokens to come are made.

    method: "ngram": prompt lookup. What followed the last tokens where they stood before is drafted. "draft_model": a
        smaller model with the same vocabulary goes on. "eagle", "eagle3": a head of a layer goes on from the model's
        hidden states. "mtp": the layer for multi-token prediction, which the checkpoint itself holds, does. "medusa":
        heads guess one token each.
    num_speculative_tokens: the most drafts that a step verifies of a request.
    model: the folder or hub id of the draft model or head; None: the one that ships with the embedded model.
    prompt_lookup_min, prompt_lookup_max: how many of the last tokens must have stood there at least, and are compared
        at most.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
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
        if name not in names:
            near = get_close_matches(str(name), names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}."
            raise InvalidConfig(f"speculative_config has no {name!r}{meant}")
    method, model = given.get("method"), given.get("model")
    if method is None and model is not None:
        method = NGRAM if model in (NGRAM, f"[{NGRAM}]") else DRAFT_MODEL  # as the model's name it is an old form
        model = None if method == NGRAM else model
    if isinstance(method, str) and method.endswith("_mtp"):  # vLLM's names of the layer in each family's checkpoints
        method = MTP
    if not isinstance(method, str) or method.strip("[]") not in METHODS:
        said = "names no method" if method is None else f"asks for the method {method!r}, which is not supported"
        raise InvalidConfig(f"speculative_config {said}; supported: {', '.join(METHODS)}.")
    method = method.strip("[]")
    drafts = _whole(given, "num_speculative_tokens", MOST_DRAFTS)
    named = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if given.get(name) is not None]
    if method != NGRAM and named:
        raise InvalidConfig(f"{named[0]} of speculative_config is for the method ngram; leave it out.")
    if method in (NGRAM, MTP) and model is not None:
        raise InvalidConfig(f'speculative_config has a "model", and the method {method} needs none; leave it out.')
    if method != NGRAM:
        if model is not None and not (isinstance(model, str | Path) and str(model)):
            raise InvalidConfig(
                f"model of speculative_config is {model!r}; give the folder or hub id of what is to draft."
            )
        return Speculation(method=method, num_speculative_tokens=drafts, model=None if model is None else str(model))
    lengths = [_whole(given, name, LONGEST_LOOKUP) for name in named] or [LOOKUP]
    shortest, longest = lengths[0], lengths[-1]
    if shortest > longest:
        raise InvalidConfig(
            f"prompt_lookup_min ({shortest}) is above prompt_lookup_max ({longest}); lower it or raise that."
        )
    return Speculation(
        method=NGRAM, num_speculative_tokens=drafts, prompt_lookup_min=shortest, prompt_lookup_max=longest
    )


def _whole(given: Mapping[str, object], name: str, most: int) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        said = "is missing" if value is None else f"is {value!r}"
        raise InvalidConfig(f"{name} of speculative_config {said}; give a whole number from 1 to {most}.")
    return value
