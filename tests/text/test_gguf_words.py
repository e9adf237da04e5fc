# ruff: noqa: RUF001 (texts of many languages have letters that look alike)
"""The ways in which GGUF files' vocabularies cut text, against the patterns that others have for the same models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.bert.tokenization_bert import BertTokenizer
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from ridgeline.text.byte_level import byte_level_alphabet
from ridgeline.text.gguf_words import WAYS
from ridgeline.text.tokenizer import Tokenizer
from tests.text.test_gguf_tokenizer import byte_level_values, trained, write

regex = pytest.importorskip("regex")

LANGUAGES = """
en I've told them: it's 12,345 dollars (and 67¢)… We'LL see!  No—really?
de Größere Änderungen an „Straßen“ kosteten 2024 über 1.234,56 € – schön!
fr L’été dernier, où êtes-vous allés ? J'ai dépensé 3 000 €.
es ¿Dónde está el niño? ¡Mañana será otro día!
pt Não há ações amanhã; são só três opções.
pl Zażółć gęślą jaźń, proszę państwa.
cs Příliš žluťoučký kůň úpěl ďábelské ódy.
tr İstanbul'da ışık ILIK mı? Çok güzel!
fi Älä lyö, ääliö! Öljyä läikkyi yöllä.
vi Tiếng Việt có rất nhiều dấu: ẵ, ộ, ữ.
ru Съешь ещё этих мягких французских булок, да выпей чаю.
uk Щастям б'єш жук їх глицю в фон й ґедзь пріч.
el Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· Ἀθῆναι.
he דג סקרן שט בים מאוכזב ולפתע מצא חברה
ar صِف خَلقَ خَودِ كَمِثلِ الشَمسِ ١٢٣٤
fa همهٔ مردم می‌خواهند در آرامش زندگی کنند ۱۲۳
hi ऋषियों को सताने वाले दुष्ट राक्षसों के राजा १२३
bn আমার সোনার বাংলা, আমি তোমায় ভালোবাসি ১২
ta யாமறிந்த மொழிகளிலே தமிழ்மொழி போல்
th เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓
ko 키스의 고유조건은 입술끼리 만나야 하고 123개
ja いろはにほへと ちりぬるを。カタカナ・漢字とﾊﾝｶｸ、１２３
zh 我能吞下玻璃而不伤身体,共有３４５个。HTTPServer版本２
ka ვეპხის ტყაოსანი შოთა რუსთაველი
hy Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ
xx camelCaseHTTPServer __init__ $x+=y/2;//z\t\t{"a": [1]} 😀👩‍👩‍👧 e\u0301cole ﬁn ǅ ª º ¹²³ ½ Ⅻ
"""
_O200K = "|".join(  # OpenAI's own, as tiktoken writes it
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_CL100K = TikTokenConverter().pattern
_BY_REGEX: dict[str, list[str]] = {
    "llama-bpe": [_CL100K],
    "qwen2": [_CL100K.replace("{1,3}", "")],
    "qwen35": [PRETOKENIZE_REGEX],
    "gpt-4o": [_O200K],
    "tekken": [_O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")],
    "deepseek-coder": [
        "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
    ],
    # DeepSeek lists letters one by one: those with two cases, but for the small ones of Armenian and Georgian
    "deepseek-llm": [
        "[\r\n]",
        r"\s?(?:(?![\u0560-\u0588\u10d0-\u10ff])[\p{Lu}\p{Ll}\p{Lt}])+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "exaone-moe": [
        _CL100K.replace(r"\p{L}+", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+").replace("{1,3}", "")
        .replace(r"]+[\r\n]*", r"]+[\r\n/]?").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
    ],
    "kimi-k2": [
        r"\p{Han}+|" + _O200K.replace(r"[\p{Lu}", r"(?!\p{Han})[\p{Lu}").replace(r"[\p{Ll}", r"(?!\p{Han})[\p{Ll}")
        .replace(r"\p{M}]*", r"\p{M}])*").replace(r"\p{M}]+", r"\p{M}])+")
        .replace(r"(?!\p{Han})", r"(?:(?!\p{Han})").replace(r"[\r\n/]*", r"[\r\n]*"),
    ],
}  # fmt: skip
_BYTES = byte_level_alphabet()
_OF_LANGUAGES = st.sampled_from([line[3:] for line in LANGUAGES.strip().split("\n")])


def cut(text: str, patterns: list[str]) -> list[str]:
    """What each pattern in turn makes of the pieces that the one before left."""
    pieces = [text]
    for pattern in patterns:
        found = list[str]()
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


def ours(text: str, name: str) -> list[str]:
    pieces = WAYS[name].pre_tokenizer().pre_tokenize_str(text)
    return [bytes(_BYTES[char] for char in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("name", _BY_REGEX)
def test_words_are_those_of_the_reference_in_many_languages(name: str) -> None:
    assert LANGUAGES.count("\n") > 21
    for text in (LANGUAGES, *LANGUAGES.split("\n"), LANGUAGES.replace(" ", "  \r\n"), LANGUAGES.upper()):
        assert ours(text, name) == cut(text, _BY_REGEX[name])


@pytest.mark.parametrize("name", [name for name in _BY_REGEX if name != "deepseek-llm"])
def test_words_of_any_text_are_those_of_the_reference(name: str) -> None:
    """In alphabets that both libraries' tables of Unicode have."""
    characters = st.sampled_from("aZé'ÉsÅǅªλΣжЖאاहि்กアー漢한１٣¹½ \t\r\n.,/$€_=+«»’\u0301😀(%")

    @settings(max_examples=150, deadline=None)
    @given(st.lists(_OF_LANGUAGES | st.text(characters, max_size=8), max_size=4).map("".join))
    def check(text: str) -> None:
        assert ours(text, name) == cut(text, _BY_REGEX[name])

    check()


@pytest.mark.parametrize("way", ["tekken", "gpt-4o", "deepseek-llm", "qwen35", "deepseek-v3"])
def test_ids_are_those_of_a_tokenizer_with_the_reference_s_patterns(way: str, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=way == "tekken"))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in _BY_REGEX[way]]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, plain])
    if way == "qwen35":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(LANGUAGES.split("\n") * 3, trainer)
    tokenizer = Tokenizer.from_folder(write(tmp_path / "x.gguf", **byte_level_values(backend, way)))
    for text in (*LANGUAGES.split("\n"), LANGUAGES):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_no_way_is_given_that_cannot_be_built() -> None:
    for name in WAYS:
        assert "".join(ours(LANGUAGES, name)) == LANGUAGES


def test_word_pieces_are_bert_s(tmp_path: Path) -> None:
    """The file's words begin with a mark, and BERT's other pieces do."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(LANGUAGES.split("\n"), trainer)
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    stored = [t if t in specials else t[2:] if t.startswith("##") else f"\u2581{t}" for t in tokens]
    oracle = BertTokenizer(vocab={token: i for i, token in enumerate(tokens)})
    path = write(
        tmp_path / "x.gguf",
        ggml__model="bert",
        ggml__tokens=stored,
        ggml__token_type=[3 if token in specials else 1 for token in tokens],
        ggml__cls_token_id=2,
        ggml__seperator_token_id=3,
        ggml__unknown_token_id=1,
        ggml__padding_token_id=0,
    )
    tokenizer = Tokenizer.from_folder(path)
    for text in LANGUAGES.split("\n"):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
    assert tokenizer.special_tokens["cls_token"] == "[CLS]"


def test_merges_on_characters_are_gemma_s(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    spelled = tokenizers.Tokenizer(models.BPE())
    spelled.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
    spelled.train_from_iterator(LANGUAGES.replace("\n", "\n\n").split("\n")[:20], trainer)
    spec = json.loads(spelled.to_str())["model"]
    oracle = GemmaTokenizer(vocab=spec["vocab"], merges=[tuple(merge) for merge in spec["merges"]])
    path = write(
        tmp_path / "x.gguf",
        ggml__model="gemma4",
        ggml__tokens=sorted(spec["vocab"], key=spec["vocab"].__getitem__),
        ggml__token_type=[3, 3, 3, 2] + [6] * 256 + [1] * (len(spec["vocab"]) - 260),
        ggml__merges=[" ".join(merge) for merge in spec["merges"]],
        **{f"ggml__{name}_token_id": i for i, name in enumerate(("padding", "eos", "bos", "unknown"))},
    )
    tokenizer = Tokenizer.from_folder(path)
    for text in LANGUAGES.split("\n"):
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a")[0] == 2


def test_a_merge_may_begin_with_a_space(tmp_path: Path) -> None:
    values = byte_level_values(trained("gpt-2"), "gpt-2")
    values["ggml__tokens"] = [*values["ggml__tokens"], " b", " b!"]
    values["ggml__token_type"] = [*values["ggml__token_type"], 1, 1]
    values["ggml__merges"] = [*values["ggml__merges"], " b !"]
    Tokenizer.from_folder(write(tmp_path / "x.gguf", **values))
