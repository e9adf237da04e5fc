"""Text that is also an added token (`<think>`, `<tool_call>`) stands in a grammar like any other text: whatever a model
draws within the grammar, what it has written when it stops is valid."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
import jsonschema
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLExecutor, LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ridgeline.core.plan.token_bits import unpacked
from ridgeline.serving.grammars import grammar as grammars
from ridgeline.serving.grammars.grammar import usable
from ridgeline.serving.grammars.kept import Compiled
from ridgeline.serving.grammars.masks import GrammarMask
from ridgeline.serving.requests.structure import _one_of
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.engine.profiles import quick_settings

ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[CALLS]", "  \n")
SPECIAL = ("<|im_end|>", "<s>")
EXECUTOR = LLExecutor(1)
pieces = st.sampled_from((*ADDED, *SPECIAL, "<", "think", ">", "a", " b", '"', "\\", "é", "🎃", "<[7]>", "\n"))
texts = st.lists(pieces, min_size=1, max_size=5).map("".join)


def with_added(backend: Backend) -> Tokenizer:
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@cache
def tokenizer(kind: str) -> tuple[Tokenizer, LLTokenizer]:
    if kind == "byte level":
        made = with_added(Backend.from_str(Tokenizer.from_folder(EMBEDDED_MODEL).backend.to_str()))
    else:
        words = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abthink<>/", "th", "in", "thin", "think", "<t", "▁b"]
        merges = [("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("<", "t"), ("▁", "b")]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
        backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        made = with_added(backend)
    return made, LLTokenizer(made.backend.to_str(), made.vocab_size, sorted(made.eos_ids))


def written(kind: str, grammar: Grammar, seed: int, *, greedy: bool) -> str | None:
    """Return the text of a model that draws evenly, or always takes its favourite. None: it did not stop."""
    texts, known = tokenizer(kind)
    draw, likes_V = random.Random(seed), np.random.default_rng(seed).random(texts.vocab_size)
    mask = GrammarMask(Compiled(grammars.matcher(usable(grammar), known), known), EXECUTOR)
    [eos], taken = texts.eos_ids, list[int]()
    while len(taken) < 400:
        allowed = np.flatnonzero(unpacked(mask.allowed(), texts.vocab_size))
        assert len(allowed)
        assert set(mask.forced()) <= set(allowed.tolist())
        if eos in allowed and (greedy or len(allowed) == 1 or draw.random() < 0.5):
            return texts.decode(taken, skip_special_tokens=False)
        others = allowed[allowed != eos]
        taken.append(int(others[likes_V[others].argmax()] if greedy else draw.choice(others.tolist())))
        mask.accept(taken[-1])
    return None


@st.composite
def schemas(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(["enum", "object", "pattern", "array"]))
    if kind == "enum":
        return {"enum": draw(st.lists(texts, min_size=1, max_size=4))}
    if kind == "object":
        names = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
        values = {
            name: draw(st.sampled_from([{"const": name}, {"type": "boolean"}, {"enum": [name, 7]}])) for name in names
        }
        return {"type": "object", "properties": values, "required": names, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": {"const": draw(texts)}, "minItems": 1, "maxItems": 3}
    return {
        "type": "string",
        "pattern": f"^{draw(st.sampled_from(ADDED[:5])).replace('[', chr(92) + '[')}[a-c]{{1,3}}$",
    }


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@quick_settings(40)
@given(schema=schemas(), seed=st.integers(0, 999), greedy=st.booleans())
def test_a_schemas_answer_is_valid_when_it_stops(kind: str, schema: dict[str, Any], seed: int, greedy: bool) -> None:
    text = written(kind, Grammar(kind="json", text=json.dumps(schema)), seed, greedy=greedy)
    if text is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@quick_settings(40)
@given(choices=st.lists(texts, min_size=1, max_size=4), seed=st.integers(0, 999), greedy=st.booleans())
def test_a_choice_is_one_of_the_texts(kind: str, choices: list[str], seed: int, greedy: bool) -> None:
    assert written(kind, Grammar(kind="grammar", text=_one_of(choices)), seed, greedy=greedy) in choices


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@quick_settings(40)
@given(parts=st.lists(texts, min_size=1, max_size=3), seed=st.integers(0, 999), greedy=st.booleans())
def test_a_regex_matches_what_is_written(kind: str, parts: list[str], seed: int, greedy: bool) -> None:
    regex = "([a-c]{1,3}|<think>)?".join(map(re.escape, parts))
    text = written(kind, Grammar(kind="regex", text=regex.replace("\\\n", "\\n")), seed, greedy=greedy)
    assert text is not None
    assert re.fullmatch(regex, text)
