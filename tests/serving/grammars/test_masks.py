"""What a grammar's mask allows is what the library takes, one request at a time or many at once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import ridgeline
from ridgeline.core.plan.token_bits import unpacked

pytest.importorskip("llguidance")
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ridgeline.core.errors import InvalidRequest
from ridgeline.engine.masks import prepare
from ridgeline.serving.grammars.kept import Compiled
from ridgeline.serving.grammars.masks import WORTH_THREADS, GrammarMask
from ridgeline.text.tokenizer import Tokenizer

FOLDER = Path(ridgeline.__file__).parent / "assets" / "embedded"
VOCAB = 4099  # not a multiple of 32, and more than the tokenizer has
GRAMMAR = LLMatcher.grammar_from_regex(r"(ab|cd)+[0-9]{9}")


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(Tokenizer.from_folder(FOLDER).backend.to_str(), VOCAB, [0])


def allowed(mask: GrammarMask) -> list[int]:
    return np.flatnonzero(unpacked(mask.allowed(), VOCAB)).tolist()


def taken(matcher: LLMatcher) -> list[int]:
    """Every token tried on a copy."""
    return [token for token in range(VOCAB) if matcher.deep_copy().consume_token(token)]


@pytest.mark.few(1)
@pytest.mark.parametrize("together", [1, 3 * WORTH_THREADS])
def test_masks_found_together_are_what_each_matcher_takes(tokenizer: LLTokenizer, together: int) -> None:
    draw, executor = random.Random(together), LLExecutor(2)
    matchers = [LLMatcher(tokenizer, GRAMMAR, log_level=0) for _ in range(together)]
    masks = [GrammarMask(Compiled(matcher, tokenizer), executor) for matcher in matchers]
    seen = set()
    for _ in range(4):
        prepare(masks)
        seen |= {tuple(allowed(mask)) for mask in masks}
        for mask, matcher in zip(masks, matchers, strict=True):
            token = draw.choice(allowed(mask))
            mask.accept(token)
            assert matcher.consume_token(token)
    for chosen in {0, together - 1}:
        assert allowed(masks[chosen]) == taken(matchers[chosen])
    assert len(seen) > 3, "the texts never were in different places"


def test_a_matcher_that_fails_is_one_requests_matter(tokenizer: LLTokenizer) -> None:
    executor = LLExecutor(2)
    masks = [GrammarMask(Compiled(LLMatcher(tokenizer, GRAMMAR, log_level=0), tokenizer), executor) for _ in range(6)]
    forbidden = next(token for token in range(VOCAB) if token not in allowed(masks[2]))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        masks[2].accept(forbidden)
    prepare(masks)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        masks[2].allowed()
    assert len({tuple(allowed(mask)) for mask in masks[:2] + masks[3:]}) == 1
