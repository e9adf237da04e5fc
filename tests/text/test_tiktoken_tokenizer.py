"""A folder with a `tiktoken.model` gives the ids of tiktoken itself, and the special tokens of Kimi's models."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.request import SamplingParams
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.convert.convert import copy_beside
from ridgeline.weights.formats import tiktoken_file
from ridgeline.weights.formats.tiktoken_file import read_tiktoken
from tests.damaged_files import damaged_bytes
from tests.text.sample_tokenizers import CORPUS

# As Moonshot publishes it; tiktoken compiles it with an engine of its own.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCES = [
    *CORPUS[:4],
    "你好，世界！中文English混合，２０２６年 3.14159，第12345章 々〇",  # noqa: RUF001
    "I'll say he'd've THEY'RE It'S don't  O'Neil  naïveTÉ ǅungla",
    "\r\n\n  \t x\u00a0\u3000y \n\n z   ",
    "👩‍👩‍👧‍👦 🇨🇳 e\u0301 कि ไทย ひらがなカタカナ 한국어 !!!\n??",
]
PIECES = st.sampled_from(
    [*" '\n\r\t1a中", "'s", "'LL", "'\u017f", "  ", "Ab", "AB", "世界", "é", "🎉", "ー", "々", "12345", "\u0301"]
)
# Characters that this Python knows, since the newest ones are letters to one library and not yet to another.
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=5), max_size=12).map("".join)
SIZE = 500
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 7: "<|tool_call_begin|>", 255: "[PAD]"}


def trained(size: int) -> list[bytes]:
    """Tokens in the order of ranks, as training finds them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES * 3, trainer)
    spelled = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    visible = {chr(byte): byte for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    hidden = {chr(256 + n): byte for n, byte in enumerate(set(range(256)) - set(visible.values()))}
    return [bytes((visible | hidden)[char] for char in token) for token, _ in spelled]


def scattered(seed: int) -> list[bytes]:
    """Bytes and words of few letters, in any order: parts may come after what they make, or not be there at all."""
    numbers = random.Random(seed)
    letters = [b"a", b"b", b" ", b"\xe4\xb8", b"\xad"]
    words = {
        b"".join(numbers.choices(letters[: numbers.randrange(1, 6)], k=numbers.randrange(2, 9))) for _ in range(60)
    }
    tokens = [*(bytes([byte]) for byte in range(256)), *sorted(word for word in words if len(word) > 1)]
    numbers.shuffle(tokens)
    return tokens


def write(folder: Path, tokens: Sequence[bytes], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    listed = {
        str(len(tokens) + i): {"content": text, "special": "tool" not in text, "normalized": False}
        for i, text in SPECIAL.items()
    }
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def oracle_of(folder: Path, reserved: int = 256) -> Any:
    """tiktoken's encoding, put together as the code beside Kimi's files does."""
    tiktoken = pytest.importorskip("tiktoken")
    # Its own loader keeps what it once read from a path.
    lines = (folder / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    listed = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    names = {int(i): fields["content"] for i, fields in listed.items()}
    special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + reserved)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kimi"), trained(SIZE))


def test_ids_and_text_equal_tiktoken(folder: Path) -> None:
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)
    assert ours.vocab_size == oracle.n_vocab == SIZE + 256

    @settings(max_examples=500)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = oracle.encode_ordinary(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == text

    for text in SENTENCES:
        check.hypothesis.inner_test(text)
    check()


@pytest.mark.parametrize("size", [256, 300, 560])
def test_vocabularies_of_any_size_equal_tiktoken(size: int, tmp_path: Path) -> None:
    folder = write(tmp_path, trained(size))
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)
    text = " ".join(SENTENCES)
    assert ours.encode(text) == oracle.encode_ordinary(text)


def test_vocabularies_that_no_training_makes_equal_tiktoken(tmp_path: Path) -> None:
    numbers = random.Random(0)
    for seed in range(40):
        folder = write(tmp_path, scattered(seed))
        ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)
        for _ in range(100):
            text = "".join(numbers.choices("aab 中", k=numbers.randrange(1, 30)))
            assert ours.encode(text) == oracle.encode_ordinary(text), (seed, text)


def test_every_character_is_cut_as_tiktoken_cuts_it(tmp_path: Path) -> None:
    """In a vocabulary of all pairs of bytes the pairs that are made tell where words begin and end."""
    single = [bytes([byte]) for byte in range(256)]
    pairs = [one + other for one in single for other in single]
    random.Random(0).shuffle(pairs)
    folder = write(tmp_path, [*single, *pairs])
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)
    known = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]
    for char in known:
        text = f"The{char}he 1{char}1  {char} 中{char}Ab'{char}\n"
        assert ours.encode(text) == oracle.encode_ordinary(text), hex(ord(char))


def test_special_tokens_follow_the_vocabulary(folder: Path) -> None:
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)
    text = "a[BOS]b<|im_end|>\n <|tool_call_begin|><|reserved_token_504|>[PAD]<|reserved_token_1|>"
    ids = oracle.encode(text, allowed_special="all")
    assert ours.encode(text) == ids
    assert {500, 502, 504, 507, 755} <= set(ids)
    assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text
    assert ours.decode(ids) == "ab\n <|tool_call_begin|><|reserved_token_1|>"  # tools' are not special, as listed
    assert ours.special_tokens == {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    assert (ours.bos_id, ours.eos_ids) == (500, {501})
    assert ours.token_string(504) == "<|reserved_token_504|>"
    assert [ours.token_bytes(i) for i in range(SIZE)] == [oracle.decode_single_token_bytes(i) for i in range(SIZE)]


def test_more_special_tokens_than_are_reserved_may_be_listed(tmp_path: Path) -> None:
    listed = {str(300 + i): {"content": f"<|{i}|>"} for i in (0, 1, 257)}
    folder = write(
        tmp_path, trained(300), added_tokens_decoder=listed, bos_token="<|0|>", eos_token="<|1|>", pad_token=None
    )
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder, 258)
    text = "<|257|><|reserved_token_556|><|reserved_token_558|>"
    assert ours.encode(text) == oracle.encode(text, allowed_special="all")
    assert ours.vocab_size == 558


def test_any_ids_stream_as_tiktoken_decodes_them(folder: Path) -> None:
    """Ids may begin and end in the middle of a character, and follow one another as no text's do."""
    ours, oracle = Tokenizer.from_folder(folder), oracle_of(folder)

    @settings(max_examples=200)
    @given(st.lists(st.integers(0, SIZE + 255) | st.integers(0, 255), max_size=20))
    def check(ids: list[int]) -> None:
        expected = oracle.decode(ids, errors="replace")
        assert ours.decode(ids, skip_special_tokens=False) == expected
        stream = Detokenizer(ours, SamplingParams(skip_special_tokens=False), [])
        assert "".join([*map(stream.push, ids), stream.finish()]) == expected

    check()
    for text in SENTENCES:
        check.hypothesis.inner_test(oracle.encode_ordinary(text)[1:])


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_chat_template_is_found_and_its_tokens_are_special(place: str, tmp_path: Path) -> None:
    source = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}{{ eos_token }}"
    inside = {"chat_template": source} if place.endswith("json") else {}
    folder = write(tmp_path, trained(300), **inside)
    if not inside:
        (folder / place).write_text(source)
    ours = Tokenizer.from_folder(folder)
    prompt = ChatTemplate.from_folder(folder, ours.special_tokens).render([{"role": "user", "content": "你"}])
    assert prompt == "<|im_user|>你<|im_end|>[EOS]"
    ids = ours.encode(prompt, add_special_tokens=False)
    assert [i for i in ids if i >= 300] == [303, 302, 301]


def test_a_tokenizer_json_is_taken_first_and_both_are_copied(folder: Path, tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(folder)
    copy_beside(folder, tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"damaged")
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    saved, text = Tokenizer.from_folder(tmp_path), f"[BOS]{SENTENCES[4]}"
    assert saved.encode(text) == ours.encode(text)


LINES = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
DAMAGED = {
    "base64": ([*LINES, "a*b= 256"], r"line 257 of .* is no base64 \('a\*b='"),
    "padding": ([*LINES, "YQ 256"], "line 257 of .* is no base64"),
    "words": ([*LINES, "YWE= 256 1"], "line 257 of .* is no token with its rank"),
    "rank": ([*LINES, "YWE= -1"], "line 257 of .* is no token with its rank"),
    "long line": ([*LINES, "YWFh" * 1000 + " 256"], "line 257 of .* is no token with its rank"),
    "long token": ([*LINES, "YWFh" * 86 + " 256"], "gives the rank 256 to a token of 258 bytes, of 1 to 256"),
    "rank twice": ([*LINES, "YWE= 255"], "gives the rank 255 twice, again in line 257"),
    "token twice": ([*LINES, "YQ== 256"], r"holds the token b'a' with the ranks 97 and 256"),
    "gap": ([*LINES, "YWE= 257"], "has 257 tokens and none of rank 256"),
    "byte": (LINES[:-1], "has no token for the byte 0xFF"),
    "empty": ([], "has no token for the byte 0x00"),
    "pointer": (["version https://git-lfs.github.com/spec/v1"], "line 1 of .* is no token with its rank"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_sentence(damage: str, tmp_path: Path) -> None:
    lines, sentence = DAMAGED[damage]
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(lines))
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        read_tiktoken(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_too_large_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_file, "MAX_BYTES", 100)
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"x" * 101)
    with pytest.raises(ModelLoadError, match="has 101 bytes, of at most 100"):
        read_tiktoken(path)


def test_random_damage_is_read_or_refused(tmp_path: Path) -> None:
    numbers = random.Random(0)
    path = write(tmp_path, trained(300)) / "tiktoken.model"
    whole = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged_bytes(whole, numbers))
        with suppress(ModelLoadError):
            Tokenizer.from_folder(tmp_path)


SPECIAL_DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_class": "QWenTokenizer"}, "tokenizer class 'QWenTokenizer', whose way .* we do not know"),
    ({"tokenizer_class": None}, "whose way to cut text into words we do not know"),
    ({"added_tokens_decoder": {"5": {"content": "[BOS]"}}}, "lists the special token 5, and .* from 300 to 4395"),
    ({"added_tokens_decoder": {str(10**9): {"content": "[BOS]"}}}, "lists the special token 1000000000"),
    ({"added_tokens_decoder": {"x": {"content": "[BOS]"}}}, "cannot be read"),
    ({"added_tokens_decoder": {"301": "[BOS]"}}, "cannot be read"),
    ({"added_tokens_decoder": {"301": {"content": "a"}}}, r"special token 301 in .* no name of its own \('a'\)"),
    ({"added_tokens_decoder": {"301": {"content": ""}}}, "special token 301 in .* no name of its own"),
    ({"added_tokens_decoder": {"301": {"content": "x|"}, "303": {"content": "x|"}}}, "special token 303"),
]


@pytest.mark.parametrize(("config", "sentence"), SPECIAL_DAMAGES)
def test_an_unknown_class_and_odd_special_tokens_are_refused(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        Tokenizer.from_folder(write(tmp_path, trained(300), **config))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
