"""Text survives tokenizing, and packing neither loses nor repeats a token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from ridgeline.core.errors import InvalidConfig
from ridgeline.training.data import PackedTokens
from ridgeline.training.tokenizer import SEPARATOR, SEPARATOR_ID, encode_documents, save_tokenizer
from tests.training.conftest import TEXTS, VOCAB

ODD_TEXT = f"\ttab\n\n\n    π = '{SEPARATOR}'   # 12345\n\x00\r\n  "


def test_any_text_comes_back_and_text_like_the_separator_stays_text(tokenizer: Tokenizer) -> None:
    for text, ids in zip([*TEXTS, ODD_TEXT], encode_documents(tokenizer, [*TEXTS, ODD_TEXT]), strict=True):
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        assert SEPARATOR_ID not in ids
        assert ids.dtype == np.uint16
        assert ids.max() < VOCAB


def test_a_new_line_and_its_indentation_are_one_token(tokenizer: Tokenizer) -> None:
    assert "Ċ" + "Ġ" * 4 in tokenizer.encode("def f(x):\n    return x").tokens


def test_a_prompt_begins_with_the_separator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, max_length=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("def add(a, b):\n")["input_ids"]
    assert ids == tokenizer.encode("def add(a, b):\n").ids
    assert ids[0] == theirs.bos_token_id == theirs.eos_token_id == SEPARATOR_ID


def test_packing_keeps_every_token_once_and_in_order(token_file: Path, tokenizer: Tokenizer) -> None:
    stream = np.fromfile(token_file, dtype=np.uint16)
    expected = [np.append(SEPARATOR_ID, ids) for ids in encode_documents(tokenizer, TEXTS)]
    assert np.array_equal(stream, np.append(np.concatenate(expected), SEPARATOR_ID))

    data = PackedTokens(token_file, seq_len=16, batch_size=3, seed=5)
    epoch = [data.sequence(position) for position in range(data.num_sequences)]
    starts = [data._order(0)[position] for position in range(data.num_sequences)]
    in_order = [epoch[i] for i in np.argsort(starts)]
    targets = np.concatenate([sequence[1:] for sequence in in_order])
    assert np.array_equal(targets, stream[1 : 1 + len(targets)])
    assert len(stream) - 1 - len(targets) < 16  # only a tail is left
    assert all(a[-1] == b[0] for a, b in pairwise(in_order))


def test_batches_depend_on_seed_and_step_alone(token_file: Path) -> None:
    def data(seed: int) -> PackedTokens:
        return PackedTokens(token_file, seq_len=16, batch_size=3, seed=seed)

    assert np.array_equal(data(1).batch(40), data(1).batch(40))
    assert not np.array_equal(data(1).batch(40), data(2).batch(40))
    one = data(1)
    first, second = ([one.sequence(e * one.num_sequences + i) for i in range(one.num_sequences)] for e in (0, 1))
    assert not np.array_equal(first, second)  # another order,
    assert sorted(map(bytes, first)) == sorted(map(bytes, second))  # the same sequences


def test_too_little_text_is_a_mistake(token_file: Path) -> None:
    with pytest.raises(InvalidConfig, match="below one sequence of 100000"):
        PackedTokens(token_file, seq_len=100_000, batch_size=1, seed=0)
