"""A folder with a `tokenizer.model` gives the ids of sentencepiece itself, and transformers' special tokens."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.sentencepiece_file import read_sentencepiece
from tests.text.sample_tokenizers import CORPUS

spm = pytest.importorskip("sentencepiece")

Trained = Callable[..., Path]
KINDS = [("bpe", "identity", True), ("bpe", "nmt_nfkc", False), ("unigram", "identity", True)]
TRIMMED = [("bpe", "identity", True, True), ("unigram", "identity", True, True)]  # with line breaks, unlike nmt_nfkc
PIECES = st.sampled_from([" ", "  ", "▁", "\n", "é", "fibonacci", "over the lazy dog", "n - 1", "ﬁ①", "<tool>", "…"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained(kind, rule, byte_fallback, trimmed)`: a folder with nothing but a sentencepiece model."""

    @cache
    def train(kind: str, rule: str, byte_fallback: bool, trimmed: bool = False) -> Path:
        written = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=written,
            model_type=kind,
            vocab_size=420,
            hard_vocab_limit=False,
            normalization_rule_name=rule,
            remove_extra_whitespaces=trimmed or rule != "identity",
            byte_fallback=byte_fallback,
            allow_whitespace_only_pieces=True,
            control_symbols=["<turn>"],
            user_defined_symbols=["<tool>"],
            minloglevel=2,
        )
        folder = tmp_path_factory.mktemp(f"{kind}-{rule}")
        (folder / "tokenizer.model").write_bytes(written.getvalue())
        return folder

    return train


def with_config(folder: Path, to: Path, **config: Any) -> Path:
    (to / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", **config}
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("kind", [*KINDS, *TRIMMED], ids=lambda kind: "-".join(map(str, kind)))
def test_ids_and_text_equal_sentencepiece(trained: Trained, kind: tuple[Any, ...]) -> None:
    folder = trained(*kind)
    ours = Tokenizer.from_folder(folder)
    oracle = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert ours.vocab_size == len(oracle)
    assert [ours.token_string(i) for i in range(len(oracle))] == [oracle.id_to_piece(i) for i in range(len(oracle))]
    scalars = st.characters(exclude_categories=["Cs"])
    text = st.lists(PIECES | st.text(scalars, max_size=6), max_size=12).map("".join)

    def begins_with_a_symbol(text: str) -> bool:
        """Before one sentencepiece puts a space, transformers and we do not. A rule may remove what stands first. The
        same goes for the sign of a space."""
        before, symbol, _ = text.partition("<tool>")
        if kind in TRIMMED and text.lstrip(" ").startswith("▁"):
            return True
        return bool(symbol) and oracle.normalize(f"a{before}a") == oracle.normalize("aa")

    @settings(max_examples=300)
    @given(text.filter(lambda text: not begins_with_a_symbol(text)))
    def check(text: str) -> None:
        ids, got = oracle.encode(text), ours.encode(text, add_special_tokens=False)
        if got != ids and kind[0] == "unigram":  # several splits may have the best score: "▁▁" and "▁" in either order
            assert len(got) == len(ids)
            assert sum(map(oracle.get_score, got)) == pytest.approx(sum(map(oracle.get_score, ids)), rel=1e-5)
            assert oracle.decode(got) == oracle.decode(ids)
        else:
            assert got == ids
        if kind[1:] == ("identity", True) and oracle.unk_id() not in ids:
            assert ours.decode(ids) == oracle.decode(ids)

    check()


def test_repeated_characters_merge_as_sentencepiece_merges_them(trained: Trained) -> None:
    """Where pieces overlap in many ways the order of merges decides."""
    folder = trained("bpe", "identity", True)
    ours = Tokenizer.from_folder(folder)
    oracle = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    numbers = random.Random(0)
    for _ in range(500):
        text = "".join(numbers.choice(" n.o") for _ in range(numbers.randrange(1, 40)))
        assert ours.encode(text, add_special_tokens=False) == oracle.encode(text)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("ends", [(True, False), (True, True), (False, False)])
def test_special_tokens_equal_transformers(
    trained: Trained, tmp_path: Path, legacy: bool, ends: tuple[bool, bool]
) -> None:
    source = trained("bpe", "identity", True)
    folder = with_config(source, tmp_path, legacy=legacy, add_bos_token=ends[0], add_eos_token=ends[1], pad_token="<p>")
    ours, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens == oracle.special_tokens_map
    for text in ("hello world", "a<s>b</s>c <turn>d<tool>e", "<turn>x<p>", "n - 1  n\n"):
        for add in (True, False):
            ids = oracle.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_without_a_config_the_vocabulary_names_the_special_tokens(trained: Trained) -> None:
    ours = Tokenizer.from_folder(trained("bpe", "identity", True))
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.encode("n")[0] == ours.bos_id == 1
    assert ours.eos_ids == {2}


def test_a_damaged_model_is_one_sentence(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    data = (trained("bpe", "identity", True) / "tokenizer.model").read_bytes()
    numbers = random.Random(0)
    for cut in [b"", b"version https://git-lfs", data[:100], data[: len(data) // 2], numbers.randbytes(400)]:
        path.write_bytes(cut)
        with pytest.raises(ModelLoadError) as caught:
            read_sentencepiece(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
