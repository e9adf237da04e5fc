"""The tokenizer and the chat templates that a GGUF file brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.sentencepiece_tokenizer import framed, sentencepiece_backend
from ridgeline.weights.formats.gguf_file import GGUF
from ridgeline.weights.formats.sentencepiece_file import Piece, PieceType, SentencePieceModel

_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # if the file does not say

# How models cut text into words, which no merge crosses: letters with the character before them, digits, the rest,
# spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words("{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _words("")


# The names in tokenizer.ggml.pre. Families of models that cut in the same way have names of their own.
_WAYS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jina-v2-en"), _gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral", "lfm2"), _llama3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _qwen2),
    **dict.fromkeys(("refact", "command-r", "smollm", "starcoder", "codeshell"), _single_digits),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")


def gguf_tokenizer(gguf: GGUF) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the backend and the special tokens (name → text). Raise ModelLoadError for an unknown kind of
    tokenizer."""
    kind = gguf.values.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _sentencepiece}.get(str(kind))
    if build is None:
        raise ModelLoadError(f"{gguf.path} has a tokenizer of kind {kind!r}; we read gpt2, llama and t5.")
    try:
        ids = _special_ids(gguf)
        tokens = gguf.values["tokenizer.ggml.tokens"]
        return build(gguf, ids), {f"{name}_token": tokens[i] for name, i in ids.items()}
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises plain Exception
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"the tokenizer in {gguf.path} cannot be read ({reason}); download it again.") from error


def gguf_templates(gguf: GGUF) -> dict[str, str]:
    """Return the chat templates by name."""
    main = gguf.values.get("tokenizer.chat_template")
    named = {name: gguf.values.get(f"tokenizer.chat_template.{name}") for name in _listed_templates(gguf)}
    return {name: text for name, text in {"default": main, **named}.items() if isinstance(text, str)}


def _listed_templates(gguf: GGUF) -> list[str]:
    names = gguf.values.get("tokenizer.chat_templates")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _special_ids(gguf: GGUF) -> dict[str, int]:
    found = {name: gguf.values.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _NAMES.items()}
    if gguf.values["tokenizer.ggml.model"] == "llama":
        found = {name: _SENTENCEPIECE_IDS.get(name) if i is None else i for name, i in found.items()}
    size = len(gguf.values["tokenizer.ggml.tokens"])
    return {name: i for name, i in found.items() if isinstance(i, int) and 0 <= i < size}


def _types(gguf: GGUF) -> list[PieceType]:
    tokens = gguf.values["tokenizer.ggml.tokens"]
    types = gguf.values.get("tokenizer.ggml.token_type", [PieceType.NORMAL] * len(tokens))
    return [PieceType(each) for each in types]


def _sentencepiece(gguf: GGUF, ids: dict[str, int]) -> tokenizers.Tokenizer:
    values = gguf.values
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    is_unigram = values["tokenizer.ggml.model"] == "t5"
    model = SentencePieceModel(
        pieces=[Piece(*each) for each in zip(tokens, scores, _types(gguf), strict=True)],
        kind="unigram" if is_unigram else "bpe",
        ids=ids,
        charsmap=bytes(byte & 0xFF for byte in values.get("tokenizer.ggml.precompiled_charsmap", ())),
        add_dummy_prefix=bool(values.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=is_unigram and bool(values.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    return sentencepiece_backend(model, **_framing(values, add_bos=not is_unigram, add_eos=is_unigram))


def _framing(values: Any, *, add_bos: bool, add_eos: bool) -> dict[str, bool]:
    """Return the flags for BOS and EOS around a prompt: as the file says, or else as given."""
    return {
        "add_bos": bool(values.get("tokenizer.ggml.add_bos_token", add_bos)),
        "add_eos": bool(values.get("tokenizer.ggml.add_eos_token", add_eos)),
    }


def _byte_level(gguf: GGUF, ids: dict[str, int]) -> tokenizers.Tokenizer:
    values = gguf.values
    tokens, way = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.pre", "default")
    if way not in _WAYS:
        known = ", ".join(sorted(_WAYS))
        raise ModelLoadError(
            f"{gguf.path} cuts text into words in the way {way!r}, which we do not know; known: {known}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=way in _LLAMA3_NAMES))
    if _WAYS[way] is _qwen2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _WAYS[way]()
    backend.decoder = decoders.ByteLevel()
    special = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, _types(gguf), strict=True)
            if kind in special
        ]
    )
    framing = _framing(values, add_bos=way in _LLAMA3_NAMES, add_eos=False)
    ends = {name: tokens[ids[name]] if framing[f"add_{name}"] and name in ids else None for name in ("bos", "eos")}
    backend.post_processor = framed(backend, ends["bos"], ends["eos"])
    return backend
