"""Texts that cannot fit are refused by their beginning, before all of them is tokenized."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.serving.errors import TooLong
from ridgeline.serving.requests.validation import encode

CONTEXT = 100


class Words:
    """A tokenizer of words that counts the characters it is given."""

    def __init__(self) -> None:
        self.chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return [len(word) for word in text.split()]


def encoded(text: str, **options: Any) -> tuple[list[int], int]:
    tokenizer = Words()
    facts = SimpleNamespace(max_model_len=CONTEXT, encodes=0)
    api: Any = SimpleNamespace(service=SimpleNamespace(facts=lambda: facts), tokenizer=tokenizer)
    return asyncio.run(encode(api, text, **options)), tokenizer.chars


def test_only_the_beginning_of_a_text_that_cannot_fit_is_tokenized() -> None:
    text = "word " * (CONTEXT * 128 // 5)
    with pytest.raises(TooLong, match=r"first 3200 of the 12800 characters of your prompt have 640 tokens"):
        encoded(text, must_fit=True)


def test_a_text_of_long_tokens_is_tokenized_and_so_is_one_that_is_to_be_cut() -> None:
    long = f"{'x' * 126} " * CONTEXT
    assert len(encoded(long, must_fit=True)[0]) == CONTEXT
    words = "word " * (CONTEXT * 128 // 5)
    ids, chars = encoded(words)
    assert (len(ids), chars) == (len(words.split()), len(words))


def test_a_text_of_usual_length_is_tokenized_once() -> None:
    text = "word " * (2 * CONTEXT)
    assert encoded(text, must_fit=True) == ([4] * 2 * CONTEXT, len(text))
