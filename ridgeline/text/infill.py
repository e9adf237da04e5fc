"""Prompts that ask a model to fill the middle of a text, by the special tokens that it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.text.tokenizer import Tokenizer

# The tokens before the beginning, before the end, and before the middle, which is written last (Bavarian et al., arXiv
# 2207.14255, in the order prefix, suffix, middle): Qwen's, StarCoder's and Granite's, SantaCoder's, DeepSeek's, Code
# Llama's.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)

# The tokens before the name of a repository, and before a file of it (Qwen's; StarCoder's; Granite's)
FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<file_sep>"))
REPOSITORY, FILE = "myproject\n", "filename\n"  # the names where none is known, as llama.cpp has them
SNIPPET = "\n\n--- snippet ---\n\n"  # before another file, for a model without such tokens


def marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """Return the ids of the model's three tokens, or None if it has none that are known."""
    for names in MARKS:
        begin, hole, end = (tokenizer.backend.token_to_id(name) for name in names)
        if begin is not None and hole is not None and end is not None:
            return begin, hole, end
    return None


def infill(tokenizer: Tokenizer, prefix: str, suffix: str, marked: tuple[int, int, int]) -> list[int]:
    """Return the prompt after which the model writes what stands between `prefix` and `suffix`."""
    begin, hole, end = marked
    first = tokenizer.bos_id
    opening = [first] if first is not None and tokenizer.encode("")[:1] == [first] else []
    return [
        *opening,
        *(begin, *tokenizer.encode(prefix, add_special_tokens=False)),
        *(hole, *tokenizer.encode(suffix, add_special_tokens=False)),
        end,
    ]


class Fitted(NamedTuple):
    """A prompt that fits. cut: something of its texts was left out."""

    ids: list[int]
    cut: bool


def infill_within(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    marked: tuple[int, int, int],
    others: Sequence[tuple[str, str]],
    room: int,
) -> Fitted:
    """Return a prompt of at most `room` tokens, as `infill`, after texts of other files, which have a name each. What
    is next to the gap stays: three quarters of the room are the prefix's where both are long, and other files have what
    is left, the last of them first."""
    before = tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    bare = infill(tokenizer, "", "", marked)
    left = max(0, room - len(bare))
    tail = min(len(after), max(left - len(before), left // 4))
    head = min(len(before), left - tail)
    begin, hole, end = marked
    opening = bare[: bare.index(begin)]
    extra = _others(tokenizer, others) if others else []
    found, most = len(extra), max(0, left - head - tail)
    extra = extra[max(0, found - most) :]
    ids = [*opening, *extra, begin, *before[len(before) - head :], hole, *after[:tail], end]
    return Fitted(ids, head < len(before) or tail < len(after) or len(extra) < found)


def _others(tokenizer: Tokenizer, others: Sequence[tuple[str, str]]) -> list[int]:
    """Return the tokens of other files, and of the beginning of this one."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    found = [tuple(tokenizer.backend.token_to_id(name) for name in names) for names in FILES]
    repository, separator = next((each for each in found if None not in each), (None, None))
    if repository is None or separator is None:
        return [i for _, text in others for i in encode(SNIPPET + text)]
    ids = [repository, *encode(REPOSITORY)]
    for name, text in others:
        ids += [separator, *encode(f"{name}\n{text}")]
    return [*ids, separator, *encode(FILE)]
