"""The tokenizer and the chat templates that a GGUF file brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.arguments import short
from ridgeline.text.gguf_words import WAYS
from ridgeline.text.sentencepiece_tokenizer import framed, sentencepiece_backend
from ridgeline.weights.formats.gguf_file import GGUF
from ridgeline.weights.formats.sentencepiece_file import Piece, PieceType, SentencePieceModel

_NAMES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "cls": "cls",
    "mask": "mask",
}
_USUAL = {  # ids by kind of tokenizer, if the file does not say
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"cls": 101, "sep": 102, "unk": 100, "pad": 0},
}


def gguf_tokenizer(gguf: GGUF) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the backend and the special tokens (name → text). Raise ModelLoadError for an unknown kind of
    tokenizer."""
    kind = gguf.values.get("tokenizer.ggml.model")
    build = _KINDS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise ModelLoadError(f"{gguf.path} has a tokenizer of kind {short(kind)}; we read {', '.join(_KINDS)}.")
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
    kind = gguf.values["tokenizer.ggml.model"]
    if kind == "bert":  # older files call its first token BOS
        found["cls"] = found.pop("bos") if found["cls"] is None else found["cls"]
    usual = _USUAL.get(kind, {})
    found = {name: usual.get(name) if i is None else i for name, i in found.items()}
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
    values, name = gguf.values, gguf.values.get("tokenizer.ggml.pre", "default")
    way = WAYS.get(name) if isinstance(name, str) else None
    if way is None:
        raise ModelLoadError(
            f"{gguf.path} cuts text into words in the way {short(name)}, which we do not know; known: "
            f"{', '.join(sorted(WAYS))}."
        )
    backend = tokenizers.Tokenizer(_bpe(values, ignore_merges=way.whole_first))
    if way.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = way.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, gguf, ids, add_bos=way.add_bos)


def _spaced_bpe(gguf: GGUF, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Return Gemma 4's: merges on characters, "▁" for a space, bytes by their names, and words that end at lines."""
    backend = tokenizers.Tokenizer(_bpe(gguf.values, byte_fallback=True, fuse_unk=True, unk_token=_unknown(gguf, ids)))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(backend, gguf, ids, add_bos=True)


def _unknown(gguf: GGUF, ids: dict[str, int]) -> str | None:
    return gguf.values["tokenizer.ggml.tokens"][ids["unk"]] if "unk" in ids else None


def _bpe(values: Mapping[str, Any], **how: Any) -> models.BPE:
    merges = [_merge(text) for text in values["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(values["tokenizer.ggml.tokens"])}
    return models.BPE(vocab=vocab, merges=merges, **how)


def _merge(text: str) -> tuple[str, str]:
    """Return the two parts, of which the first may begin with the space that else divides them."""
    cut = text.index(" ", 1)
    return text[:cut], text[cut + 1 :]


def _finished(backend: tokenizers.Tokenizer, gguf: GGUF, ids: dict[str, int], *, add_bos: bool) -> tokenizers.Tokenizer:
    """Return the backend with the file's special tokens, and those that it puts around a prompt."""
    tokens = gguf.values["tokenizer.ggml.tokens"]
    special = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, _types(gguf), strict=True)
            if kind in special
        ]
    )
    framing = _framing(gguf.values, add_bos=add_bos, add_eos=False)
    ends = {name: tokens[ids[name]] if framing[f"add_{name}"] and name in ids else None for name in ("bos", "eos")}
    backend.post_processor = framed(backend, ends["bos"], ends["eos"])
    return backend


def _word_pieces(gguf: GGUF, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Return BERT's: the longest pieces of each word. The file marks pieces that begin one, where BERT marks others."""
    values, types = gguf.values, _types(gguf)
    tokens = [_piece(token, kind) for token, kind in zip(values["tokenizer.ggml.tokens"], types, strict=True)]
    named = {name: tokens[ids[name]] for name in ("cls", "sep", "unk")}
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=named["unk"]))
    lower = bool(values.get("tokenizer.ggml.normalizer.lowercase", True))
    strip = bool(values.get("tokenizer.ggml.normalizer.strip_accents", lower))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [tokens[i] for i, kind in enumerate(types) if kind == PieceType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{named['cls']} $A {named['sep']}",
        pair=f"{named['cls']} $A {named['sep']} $B:1 {named['sep']}:1",
        special_tokens=[(named[name], ids[name]) for name in ("cls", "sep")],
    )
    return backend


def _piece(token: str, kind: PieceType) -> str:
    if kind == PieceType.CONTROL:
        return token
    return token[1:] if token.startswith("\u2581") else f"##{token}"


_KINDS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _sentencepiece,
    "gemma4": _spaced_bpe,
    "bert": _word_pieces,
}
