"""A sentencepiece vocabulary as a `tokenizers` object, which gives the same ids for the same text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.components import check_charsmap
from ridgeline.weights.formats.sentencepiece_file import Piece, PieceType, SentencePieceModel

SPACE = "▁"
MAX_PIECE = (
    512  # characters of a piece that text is cut into, as in sentencepiece's trainer; time grows with its square
)
# Runs of spaces, as Oniguruma reads patterns. At the end sentencepiece takes its own sign for one too.
BEGINNING, END = r"\A ++", rf"(?<![ {SPACE}])[ {SPACE}]++\z"


def sentencepiece_backend(
    model: SentencePieceModel, *, prefix_each: bool = False, add_bos: bool = True, add_eos: bool = False
) -> tokenizers.Tokenizer:
    """Return a backend that is equal to sentencepiece's own encoder on text without special tokens.

    Special tokens are found as transformers finds them. With `prefix_each` the space before a text also stands after
    each special token (transformers' `legacy`), and not only at the text's beginning.
    """
    _check_lengths(model.pieces)
    backend = tokenizers.Tokenizer(_bpe(model) if model.kind == "bpe" else _unigram(model))
    backend.normalizer = normalizers.Sequence(_normalizers(model))
    backend.pre_tokenizer = _prefix(model, prefix_each)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    special = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(piece.text, special=special[piece.type], normalized=not special[piece.type])
            for piece in model.pieces
            if piece.type in special
        ]
    )
    backend.post_processor = framed(
        backend,
        model.pieces[model.ids["bos"]].text if add_bos and "bos" in model.ids else None,
        model.pieces[model.ids["eos"]].text if add_eos and "eos" in model.ids else None,
    )
    return backend


def framed(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing | None:
    """Return the processor that puts these tokens around a prompt, or None if there are none."""
    ids = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    if not ids:
        return None
    template = " ".join(part for part in (bos, "$A", eos) if part is not None)
    return processors.TemplateProcessing(single=template, special_tokens=ids)


def merges_by_score(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return the merges in the order of their scores.

    sentencepiece merges the neighbours whose union scores highest, and a list of merges says the same by its order. A
    piece that can be made in several ways is listed with all of them, in the order of their parts' ids.
    """
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    ways: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in pieces:
        if (
            piece.type not in (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED)
            or len(piece.text) > MAX_PIECE
        ):
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                ways.append((-piece.score, ids[left], ids[right], (left, right)))
    return [way[-1] for way in sorted(ways)]


def _check_lengths(pieces: Sequence[Piece]) -> None:
    for i, piece in enumerate(pieces):
        if len(piece.text) > MAX_PIECE and piece.type not in (PieceType.CONTROL, PieceType.USER_DEFINED):
            raise ModelLoadError(
                f"the vocabulary's piece {i} has {len(piece.text)} characters, of at most {MAX_PIECE}; copy the file "
                "again from the model's source."
            )


def _bpe(model: SentencePieceModel) -> models.BPE:
    return models.BPE(
        vocab={piece.text: i for i, piece in enumerate(model.pieces)},
        merges=merges_by_score(model.pieces),
        unk_token=_unknown(model),
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    scored = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(scored, unk_id=model.ids.get("unk"), byte_fallback=_has_bytes(model))


def _unknown(model: SentencePieceModel) -> str | None:
    return model.pieces[model.ids["unk"]].text if "unk" in model.ids else None


def _has_bytes(model: SentencePieceModel) -> bool:
    return sum(piece.type == PieceType.BYTE for piece in model.pieces) == 256


def _normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        check_charsmap(model.charsmap)
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        # The prefix puts the one space before a text that belongs there. A run is tried from its first space alone:
        # from each of them, a long run that is not at the end would take time that grows with the square of its length.
        ends = END if model.add_dummy_prefix else f"{BEGINNING}|{END}"
        steps += [normalizers.Replace(Regex(ends), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return [*steps, normalizers.Replace(" ", SPACE)]


def _prefix(model: SentencePieceModel, each: bool) -> pre_tokenizers.PreTokenizer:
    """Return the step that puts a space before a text.

    Metaspace leaves the space out if the text begins with its own sign for a space. sentencepiece does so only if it
    removes extra spaces. Otherwise a first Metaspace puts a bare space, which no text has any more at this step, and a
    second turns it into the sign.
    """
    scheme = "never" if not model.add_dummy_prefix else "always" if each else "first"
    if model.remove_extra_whitespaces:
        return pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    put = pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False)
    return pre_tokenizers.Sequence([put, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)])
