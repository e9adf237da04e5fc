"""The tokens that begin and end a model's reasoning, for the engine, which knows no text."""

from __future__ import annotations

from itertools import product

from ridgeline.core.plan.request import Thinking
from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.tokenizer import Tokenizer

# Texts beside a tag. A tag that is no token of its own may share tokens with them, and is then spelled in other ways.
BEFORE, AFTER = ("\n", "", ".", " ", ".\n", "\n\n"), ("", "\n", "\n\n", " ", "a", ' {"')


def thinking_of(
    form: ReasoningForm, tokenizer: Tokenizer, *, inside: bool, budget: int | None, forced: bool, may_stop: bool
) -> Thinking:
    """Return the bounds of an answer's reasoning for the engine. `forced` says that the answer is held to calls, and
    the others are as in `core.plan.request.Thinking`."""
    ends = form.call_ends if forced and form.call_ends else form.ends
    before_end = "" if forced and form.call_ends else form.before_end
    opening = form.opening if forced else ""
    return Thinking(
        inside=inside,
        begins=tuple(dict.fromkeys(ids for tag in form.begins for ids in spellings(tag, tokenizer))),
        ends=tuple(dict.fromkeys(ids for tag in ends for ids in spellings(tag, tokenizer))),
        opening=spellings(opening, tokenizer)[0] if opening else (),
        closing=spellings(before_end + ends[0], tokenizer)[0],
        budget=budget,
        may_stop=may_stop,
    )


def spellings(tag: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ways in which tokens spell a tag, the one on a line of its own first."""
    found: dict[tuple[int, ...], None] = {}
    whole = any(tag.startswith(token) for token in tokenizer.added) and any(tag.endswith(t) for t in tokenizer.added)
    for before, after in [("", "")] if whole else product(BEFORE, AFTER):
        encoding = tokenizer.backend.encode(before + tag + after, add_special_tokens=False)
        start, end = len(before), len(before) + len(tag)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        found[tuple(token for token, (first, last) in places if last > start and first < end)] = None
    return list(found)
