"""Compiled grammars are kept within a number of bytes, and what a grammar takes is never estimated too low."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
from llguidance import LLExecutor, LLTokenizer

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.token_bits import unpacked
from ridgeline.serving.grammars import grammar as grammars
from ridgeline.serving.grammars import kept as limits
from ridgeline.serving.grammars.kept import Compiled, Kept
from ridgeline.serving.grammars.masks import SLOW_TOGETHER, GrammarMask
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar
from ridgeline.weights.folder import EMBEDDED_MODEL

COUNTS = r"((((k{}z{{990}}){{999}}){{999}}){{999}})"  # its text has a million million characters
LARGE = r".*[a-f].{25}x{}.*"  # its lexer has a state for each set of places where the text may be in it
VOCAB = 4096
EXECUTOR = LLExecutor(1)


def regex(pattern: str, number: int = 0) -> Grammar:
    return Grammar(kind="regex", text=pattern.replace("{}", str(number)).replace("{{", "{").replace("}}", "}"))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(Tokenizer.from_folder(EMBEDDED_MODEL).backend.to_str(), VOCAB, [0])


def compiled(grammar: Grammar, tokenizer: LLTokenizer, owner: str = "a", kept: Kept | None = None) -> Compiled:
    return Compiled(grammars.matcher(grammar, tokenizer), tokenizer, owner, kept)


def write(one: Compiled, tokens: int, seed: int = 0) -> GrammarMask:
    """Draw tokens within a grammar."""
    mask, draw = GrammarMask(one, EXECUTOR), random.Random(seed)
    for _ in range(tokens):
        allowed = np.flatnonzero(unpacked(mask.allowed(), VOCAB))
        mask.accept(int(draw.choice(allowed[allowed != 0].tolist())))
    return mask


MEASURE = """
import gc, json, sys
from tests.serving.grammars.test_kept import *
known = LLTokenizer(Tokenizer.from_folder(EMBEDDED_MODEL).backend.to_str(), VOCAB, [0])
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
write(compiled(regex("[a-z]*"), known), 20)
found = {}
for name, (grammar, tokens) in MEASURED.items():
    gc.collect(); before = resident()
    one = compiled(grammar, known)
    for seed in range(3):
        write(one, tokens, seed)
    found[name] = [resident() - before, one.bytes]
    keep = one
print(json.dumps(found))
"""
OBJECT = {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 200} for n in range(40)}}
MEASURED = {
    "counts": (regex(COUNTS), 60),
    "large": (regex(LARGE), 60),
    "words": (regex(r"(\\w{1,50} ){1,100}".replace("\\\\", "\\")), 60),
    "object": (Grammar(kind="json", text=json.dumps(OBJECT)), 60),
    "enum": (Grammar(kind="json", text=json.dumps({"enum": [f"{n * 7919} of {n}" * 30 for n in range(900)]})), 9),
}


def test_no_grammar_takes_more_than_its_estimate() -> None:
    """In a process of its own, where nothing else takes memory."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    for name, (taken, estimate) in json.loads(done.stdout).items():
        assert taken <= estimate < limits.MOST_BYTES, name


def test_the_work_of_a_mask_does_not_grow_with_the_text_that_must_come(tokenizer: LLTokenizer) -> None:
    one = compiled(regex(COUNTS), tokenizer)
    before = one.bytes
    write(one, 32)
    assert one.bytes - before < 4 << 20


def test_kept_grammars_have_room_for_so_many_bytes(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_BYTES", 16 << 20)
    kept = Kept()
    for number in range(40):
        kept.add(regex(COUNTS, number), compiled(regex(COUNTS, number), tokenizer, kept=kept))
        assert kept.bytes <= 16 << 20
    assert len(kept) > 2
    assert kept.find("a", regex(COUNTS, 39)) is not None
    assert kept.find("a", regex(COUNTS, 0)) is None
    assert kept.find("another", regex(COUNTS, 39)) is None, "an owner's texts concern nobody else"


def test_a_grammar_that_grew_or_failed_is_compiled_again(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, letters = Kept(), regex("[a-z]*")
    one = compiled(letters, tokenizer, kept=kept)
    kept.add(letters, one)
    mask = GrammarMask(one, EXECUTOR)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        mask.accept(tokenizer.greedy_tokenize("7")[0])
    assert one.failed
    assert kept.find("a", letters) is None

    grown = compiled(regex(LARGE), tokenizer, kept=kept)
    kept.add(regex(LARGE), grown)
    assert kept.find("a", regex(LARGE)) is grown
    monkeypatch.setattr(limits, "REUSED_BYTES", grown.bytes)
    write(grown, 32)
    assert kept.find("a", regex(LARGE)) is None


def test_a_text_that_makes_its_grammar_too_large_ends(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES", 4 << 20)
    with pytest.raises(InvalidRequest, match="more than 4 MiB of memory"):
        write(compiled(regex(LARGE), tokenizer), 200)


def test_an_owners_grammars_have_a_bound_together(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OWNERS_BYTES", 60 << 20)
    kept = Kept()

    def asked(owner: str, number: int) -> Compiled:
        one = compiled(regex(LARGE, number), tokenizer, owner, kept)
        kept.add(regex(LARGE, number), one)
        return one

    hostile = [asked("hostile", number) for number in range(9)]

    def write_all() -> None:
        for one in hostile:
            write(one, 64)

    with pytest.raises(InvalidRequest, match="this client's requests"):
        write_all()
    write(asked("neighbour", 0), 32)
    small = compiled(regex("[a-z]*"), tokenizer, "hostile", kept)
    kept.add(regex("[a-z]*"), small)
    write(small, 32)


def test_slow_masks_share_a_time_and_quick_ones_never_end(tokenizer: LLTokenizer) -> None:
    slow = [GrammarMask(compiled(regex(LARGE, n), tokenizer, "hostile"), EXECUTOR) for n in range(3)]
    quick = GrammarMask(compiled(regex("[a-z]*"), tokenizer), EXECUTOR)
    for mask in slow:
        mask._alone, mask._took = True, SLOW_TOGETHER  # as such a mask measures itself on a large vocabulary
    first = GrammarMask(compiled(regex(LARGE, 9), tokenizer, "another"), EXECUTOR)
    first._alone, first._took = True, SLOW_TOGETHER / 2
    find, found = GrammarMask._find_alone, list[GrammarMask]()

    def find_slowly(self: GrammarMask, bits_RW: Any, n: int) -> None:
        took = self._took
        find(self, bits_RW, n)
        found.append(self)
        self._alone, self._took = took > 0, took

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMask, "_find_alone", find_slowly)
        GrammarMask.prepare([*slow, quick, first])
    assert found == [quick, first], "first comes the owner who took the least"
    for mask in (quick, first):
        assert mask.allowed().any()
    for mask in slow:
        with pytest.raises(InvalidRequest, match="takes 40 ms to be checked"):
            mask.allowed()
