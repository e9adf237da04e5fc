"""The time for a text grows with its length, and not with its square: parsers of calls and reasoning, tokenizers, chat
templates, and the readers of files that come with a model. What is registered is tried without being named here."""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ridgeline.text import gguf_tokenizer, tiktoken_tokenizer
from ridgeline.text.byte_level import byte_level_alphabet
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.components import check_text
from ridgeline.text.gguf_words import WAYS
from ridgeline.text.parsers.choose import Forms
from ridgeline.text.parsers.forms import Form, ReasoningForm, ToolForm
from ridgeline.text.parsers.literals import python_literal
from ridgeline.text.parsers.reasoning import REASONING_FORMS
from ridgeline.text.parsers.scanner import Scanner
from ridgeline.text.parsers.tools import TOOL_FORMS
from ridgeline.text.parsers.xml import types_of
from ridgeline.text.sandbox import renderer
from ridgeline.text.sentencepiece_tokenizer import merges_by_score, sentencepiece_backend
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.gguf_file import read_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.mistral_files import config_of_params
from ridgeline.weights.formats.sentencepiece_file import Piece, PieceType, SentencePieceModel, read_sentencepiece
from ridgeline.weights.formats.tiktoken_file import read_tiktoken
from tests.growth import check_growth
from tests.text.sample_tokenizers import FAMILIES, write_folder

FORMS: list[Form] = [*TOOL_FORMS, *REASONING_FORMS]
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "array"}, "s": {"type": "string"}, "n": {"type": "number"}}}
}
MARKS = [
    "<",
    "[",
    "{",
    "(",
    '"',
    "'",
    "\\",
    '\\"',
    " ",
    "\n",
    "a",
    ",",
    "=",
    "`",
    "f(",
    "{}",
    "[[",
    '{"name": "',
    "a =",
]
CALLS = ['{"name": "', '{"name": "f", "arguments": ', "[", "f(", "f(a=", 'f(a="', "f{", '{"', "f(a=[", "f(a=f'{"]


def reader_of(form: Form) -> Any:
    tools = form if isinstance(form, ToolForm) else None
    reasoning = form if isinstance(form, ReasoningForm) else None
    return Forms(tools=tools, reasoning=reasoning).reader("", TOOLS, calls=True)


def texts_of(form: Form) -> list[tuple[str, str]]:
    """Beginnings and what may be repeated behind each: the form's tags and whatever opens something."""
    tags = [*form.tags] if isinstance(form, ToolForm) else []
    if isinstance(form, ReasoningForm):
        tags += [*form.begins, *form.ends]
    begun = ["", *tags, *CALLS, *(tag + call for tag in tags[:3] for call in CALLS)]
    if isinstance(form, ToolForm) and (frame := form.frame) is not None:
        call = frame.call.replace("$NAME", "f").replace("$QUOTED", '"f"').replace("$INDEX", "0")
        call = frame.start + call.partition("$ARGS")[0]
        begun += [call, call + '{"a": "', call + '{"a": [']
        for name, opening in itertools.product("asn" if frame.argument else "", ("", "[", '"', "f'{")):
            begun.append(call + frame.argument.replace("$KEY", name).partition("$VALUE")[0] + opening)
    units = [*tags, *(a + b for a, b in itertools.permutations(tags, 2)), *MARKS]
    return list(itertools.product(dict.fromkeys(begun), dict.fromkeys(units)))


def some(form: Form, count: int) -> list[tuple[str, str]]:
    texts = texts_of(form)
    return random.Random(form.name).sample(texts, min(count, len(texts)))


def repeated(start: str, unit: str, end: str = "") -> Callable[[int], str]:
    return lambda size: start + unit * (size // len(unit)) + end


def check_form(form: Form, texts: list[tuple[str, str]], size: int, step: int | None) -> None:
    def read(text: str) -> None:
        reader = reader_of(form)
        for place in range(0, len(text), step or len(text)):
            reader.read(text[place : place + (step or len(text))], ended=False)
        reader.read("", ended=True)

    for start, unit in texts:
        check_growth(repeated(start, unit), read, size, (form.name, start, unit, step))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{type(form).__name__}-{form.name}")
def test_forms_read_long_texts(form: Form) -> None:
    check_form(form, some(form, 6), 16_000, None)
    check_form(form, some(form, 4), 400, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{type(form).__name__}-{form.name}")
def test_forms_read_every_long_text(form: Form) -> None:
    check_form(form, texts_of(form), 16_000, None)
    check_form(form, some(form, 200), 2_000, 1)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{type(form).__name__}-{form.name}")
def test_forms_hold_no_more_than_a_tag_of_what_came(form: Form) -> None:
    """Each piece would be copied together with what is held."""
    for start, unit in some(form, 60):
        reader = reader_of(form)
        scanners = [stage for stage in reader._stages if isinstance(stage, Scanner)]
        assert scanners
        for char in start + unit * (400 // len(unit)):
            reader.read(char, ended=False)
            assert all(scanner.left <= 128 for scanner in scanners), (start, unit)  # a name is looked for so far


@pytest.mark.parametrize(
    ("start", "unit", "end"),
    [
        ('f"', "{1}", '"'),
        ("[", "1,", "]"),
        ("1", "<1", ""),
        ("", "'a' ", ""),
        ("'", "\\n", "'"),
        ("{", "'a': 1, ", "}"),
        ("[", "# c\n", "]"),
        ("", "\\\n", ""),
        ("[", "0x1_0,", "]"),
        ("", "1", ""),
        ("1e", "1", ""),
        ("[", "''''''", ""),
        ("", "-", "1"),
        ("{", f"{2**61 - 1}0: 1, ", "}"),
    ],
)
def test_literals_are_read_in_one_pass(start: str, unit: str, end: str) -> None:
    def read(text: str) -> None:
        with suppress(ValueError):
            python_literal(text)

    check_growth(repeated(start, unit, end), read, 4_000, (start, unit))


def test_types_of_an_argument_are_found_once_for_each_part_of_a_schema() -> None:
    """Each part refers to all parts, so the ways through them are more than can be counted."""

    def schema(size: int) -> dict[str, Any]:
        parts = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in range(size)]} for n in range(8)}
        return {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": parts}

    check_growth(schema, lambda whole: types_of(whole, "a"), 50)


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def byte_level(cut: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A byte-level vocabulary with long tokens of repeated characters."""
    vocab, merges = {char: i for i, char in enumerate(byte_level_alphabet())}, []
    for char in "a1Ġ<.ĊÃ":
        for length in (1, 2, 4, 8, 16):
            vocab[char * 2 * length] = len(vocab)
            merges.append((char * length, char * length))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<|x|>", special=True, normalized=False), AddedToken("<tool>", normalized=True)])
    return backend


def from_words(words: str) -> tokenizers.Tokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), whole]))


def pieces(*, fallback: bool) -> list[Piece]:
    kinds = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL, PieceType.USER_DEFINED]
    found = [Piece(text, 0.0, kind) for text, kind in zip(("<unk>", "<s>", "</s>", "<tool>"), kinds, strict=True)]
    found += [Piece(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256 if fallback else 0)]
    words = ["▁", "▁▁", "▁" * 4, "▁" * 8, "a", "b", "aa", "a" * 4, "a" * 8, "▁a", "1", "11", "ab", "aba", "<"]
    return found + [Piece(word, -1.0 - n, PieceType.NORMAL) for n, word in enumerate(words)]


def every_tokenizer() -> Iterator[Any]:
    for way, name in {way: name for name, way in WAYS.items()}.items():
        yield pytest.param(lambda way=way: byte_level(way.pre_tokenizer(), normalizers.NFC()), id=f"gguf-{name}")
    for name, words in tiktoken_tokenizer._WORDS.items():
        yield pytest.param(lambda words=words: from_words(words), id=name)
    for kind, prefix, extra in itertools.product(("bpe", "unigram"), (True, False), (True, False)):

        def make(kind: Any = kind, prefix: bool = prefix, extra: bool = extra, each: bool = prefix != extra) -> Any:
            model = SentencePieceModel(
                pieces=pieces(fallback=each),
                kind=kind,
                ids={"unk": 0, "bos": 1},
                add_dummy_prefix=prefix,
                remove_extra_whitespaces=extra,
            )
            return sentencepiece_backend(model, prefix_each=each)

        yield pytest.param(make, id=f"{kind}-{prefix}-{extra}")
    for name, family in FAMILIES.items():
        yield pytest.param(family, id=name)


UNITS = [
    *("a", "aA", "1", " ", "  a", "\t", "\r\n", " \n", "\u00a0", "é", "e\u0301", "\u0301", "中", "ﬁ", "👨\u200d", "'s"),
    *("<", "<|x|>", "<tool>", "<|x", " <tool> ", ".", "▁", "▁a", "\0", "\ufffd", "가", "!?\n", "a'"),
]


@pytest.mark.parametrize("make", list(every_tokenizer()))
def test_tokenizers_encode_long_texts(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(make(), {})
    for unit, end in itertools.product(UNITS, ("", "x")):
        check_growth(repeated("a", unit, end), tokenizer.encode, 600, (unit, end))
    ids = tokenizer.encode("a  1 é中<tool>\n")
    check_growth(lambda size: ids * (size // len(ids)), tokenizer.decode, 600)


@pytest.mark.parametrize("pattern", [r"\s+$", " +$", r"\p{N}+$"])
def test_runs_at_the_end_are_looked_for_in_one_pass(tmp_path: Path, pattern: str) -> None:
    """DeepSeek's first tokenizers have such a pattern. What it finds stays the same."""
    theirs = byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"))
    ours = Tokenizer.from_folder(write_folder(tmp_path, theirs))
    numbers = random.Random(0)
    for _ in range(300):
        text = "".join(numbers.choices("  \n\r\t1a", k=numbers.randrange(12)))
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
    for unit in " 1":
        check_growth(repeated("a", unit, "x"), ours.encode, 600, (pattern, unit))


# ---- files --------------------------------------------------------------------------------------------------------


def tiktoken_lines(count: int) -> bytes:
    words = [bytes([byte]) for byte in range(256)] + [b"a" * (n % 99) + b"%d." % n for n in range(count)]
    return b"".join(base64.b64encode(word) + b" %d\n" % n for n, word in enumerate(words))


def varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found, number = found + bytes([number & 0x7F | 0x80]), number >> 7
    return found + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def sentencepiece_file(count: int) -> bytes:
    return b"".join(field(1, field(1, b"a%d" % n)) for n in range(count))


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_file(count: int) -> bytes:
    values = b"".join(gguf_text(b"v%d" % n) + struct.pack("<If", 6, n / 3) for n in range(count))
    words = gguf_text(b"w") + struct.pack("<IIQ", 9, 8, count) + b"".join(gguf_text(b"%d" % n) for n in range(count))
    tensors = b"".join(gguf_text(b"t%d" % n) + struct.pack("<IQIQ", 1, 1, 0, 32 * n) for n in range(count))
    return b"GGUF" + struct.pack("<IQQ", 3, count, count + 1) + values + words + tensors + bytes(32 * count + 32)


def json_file(count: int) -> bytes:
    return json.dumps({"a": [{"b": [n, str(n)]} for n in range(count)]}).encode()


def mistral_params(count: int) -> bytes:
    moe = {"num_shared_experts": 1, **{f"n{i}": i for i in range(count)}}
    return json.dumps({"kv_lora_rank": 8, "moe": moe}).encode()


READERS: dict[str, tuple[Callable[[Path], object], Callable[[int], bytes], int]] = {
    "tiktoken_file": (read_tiktoken, tiktoken_lines, 1_000),
    "sentencepiece_file": (read_sentencepiece, sentencepiece_file, 1_000),
    "gguf_file": (read_gguf, gguf_file, 250),
    "json_file": (read_json, json_file, 2_000),
    "mistral_files": (lambda path: config_of_params(read_json(path)), mistral_params, 2_000),
}


def test_every_reader_of_files_is_among_these() -> None:
    folder = Path(gguf_tokenizer.__file__).parents[1] / "weights" / "formats"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == READERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_readers_read_large_files(name: str, tmp_path: Path) -> None:
    read, content, size = READERS[name]
    numbers = itertools.count()

    def write(size: int) -> Path:
        path = tmp_path / f"{next(numbers)}"
        path.write_bytes(content(size))
        return path

    check_growth(write, read, size)


def test_merges_are_found_in_large_vocabularies() -> None:
    def vocabulary(size: int) -> list[Piece]:
        texts = ["a", "b", *(f"a{n:b}".replace("0", "a").replace("1", "b") for n in range(size))]
        return [Piece(text, -float(n), PieceType.NORMAL) for n, text in enumerate(dict.fromkeys(texts))]

    check_growth(vocabulary, merges_by_score, 400)
    check_growth(lambda size: [Piece("a" * size, 0.0, PieceType.NORMAL)], merges_by_score, 2_000)


def test_tokens_are_taken_apart_in_large_vocabularies() -> None:
    def vocabulary(size: int) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b"a" * (n % 199 + 2) + b"%d" % n for n in range(size)]

    check_growth(vocabulary, tiktoken_tokenizer._cuts, 100)


def test_special_tokens_are_listed_in_large_configs(tmp_path: Path) -> None:
    numbers = itertools.count()

    def write(size: int) -> Path:
        listed = {str(10_000 + n): {"content": f"<{n}>", "special": True} for n in range(size)}
        return write_folder(tmp_path / f"{next(numbers)}", FAMILIES["byte_level"](), added_tokens_decoder=listed)

    check_growth(write, Tokenizer.from_folder, 200)


def test_parts_of_a_tokenizer_within_others_are_checked_once() -> None:
    def text(size: int) -> str:
        return '{"decoder": ' * size + str([0] * 20_000) + "}" * size

    check_growth(text, check_text, 10)


# ---- templates ----------------------------------------------------------------------------------------------------


TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_render_long_conversations(path: Path) -> None:
    """The rendering itself, which runs in a child."""
    source, render = path.read_text(), renderer()

    def asked(size: int) -> dict[str, Any]:
        turns = [{"role": role, "content": "a {} : \\ " * 4} for role in ("user", "assistant") * (size // 2)]
        messages = [*turns, {"role": "user", "content": "<a {" * size}]
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        variables = {"messages": messages, "tools": None, "add_generation_prompt": True, **tokens}
        return {"source": source, "variables": variables}

    assert "text" in render(asked(10)), render(asked(10))
    check_growth(asked, render, 100)


def test_conversations_travel_to_a_child_and_back() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render([{"role": "user", "content": "a"}])
    check_growth(lambda size: [{"role": "user", "content": "a" * size}], template.render, 100_000)
