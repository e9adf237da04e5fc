"""Prompts that ask a model to fill the middle of a text, by the special tokens that it was trained with."""

from __future__ import annotations

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
