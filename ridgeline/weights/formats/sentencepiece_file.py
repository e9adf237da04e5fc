"""The reader of a `tokenizer.model`: sentencepiece's vocabulary, a protobuf message (sentencepiece_model.proto).

It is read here because that takes one page: the wire format is tags, varints and lengths
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from ridgeline.core.errors import ModelLoadError

Field = int | bytes | float

MAX_BYTES = 1 << 26  # the largest real files have a tenth of it


class PieceType(IntEnum):
    """The types of pieces, numbered as in sentencepiece and in GGUF after it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # such as <s>; sentencepiece itself never finds these in text
    USER_DEFINED = 4  # found in text before anything else
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its index is its id."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """A vocabulary, and how text is prepared for it.

    `kind` "bpe" merges the neighbours whose union has the highest score, and "unigram" finds the split with the highest
    sum. `charsmap` is a compiled table of replacements ("" for none). With `add_dummy_prefix` a text begins with a
    space. `ids` maps "bos", "eos", "unk" and "pad" to ids, where the vocabulary has them.
    """

    pieces: Sequence[Piece]
    kind: Literal["bpe", "unigram"]
    ids: dict[str, int]
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


# The field numbers of the messages, from sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_IS_SUFFIX = 3, 24
# name → field number, and the id if the field is absent
_IDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_EXTRA, _ESCAPE = 2, 3, 4, 5
_KINDS: dict[object, Literal["bpe", "unigram"]] = {1: "unigram", 2: "bpe"}


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Return the vocabulary. Raise ModelLoadError if the file is no such message, or needs what we do not have."""
    try:
        fields = list(_fields(_content(path)))
        pieces = [_piece(_bytes(value)) for number, value in fields if number == _PIECES]
        trainer = dict(_fields(_bytes(_last(fields, _TRAINER, b""))))
        normalizer = dict(_fields(_bytes(_last(fields, _NORMALIZER, b""))))
    except (OSError, ValueError, IndexError, TypeError, struct.error) as error:
        raise ModelLoadError(f"{path} cannot be read as a sentencepiece model ({error}); copy it again.") from error
    kind = _KINDS.get(trainer.get(_MODEL_TYPE, 1))
    if not pieces or kind is None:
        raise ModelLoadError(f"{path} is no sentencepiece model of the kinds bpe or unigram; copy it again.")
    if trainer.get(_SPACE_IS_SUFFIX) or not normalizer.get(_ESCAPE, 1):
        raise ModelLoadError(f"{path} puts spaces behind words or keeps them bare, which is not supported.")
    ids = {name: _signed(trainer.get(number, absent)) for name, (number, absent) in _IDS.items()}
    return SentencePieceModel(
        pieces=pieces,
        kind=kind,
        ids={name: i for name, i in ids.items() if 0 <= i < len(pieces)},
        charsmap=_bytes(normalizer.get(_CHARSMAP, b"")),
        add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_EXTRA, 1)),
    )


def _content(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {size} bytes, of at most {MAX_BYTES}")
    return path.read_bytes()


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    score = fields.get(_SCORE, 0.0)
    if not isinstance(score, float):
        raise TypeError("a score is no float")
    return Piece(_bytes(fields.get(_TEXT, b"")).decode(), score, PieceType(int(fields.get(_TYPE, 1))))


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """Yield (number, value) of one message's fields: varints, four bytes as a float, bytes. Raise ValueError or
    IndexError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: Field
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = data[at : at + 8], at + 8
            case 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            case 5:
                value, at = struct.unpack_from("<f", data, at)[0], at + 4
            case wire:
                raise ValueError(f"wire type {wire}")
        if at > len(data):
            raise ValueError("the file ends too early")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _signed(value: Field) -> int:
    """Return the signed value. A negative int32 is written as its 64-bit complement."""
    number = int(value) if not isinstance(value, bytes) else -1
    return number - (1 << 64) if number >= 1 << 63 else number


def _last(fields: Sequence[tuple[int, Field]], wanted: int, absent: Field) -> Field:
    return next((value for number, value in reversed(fields) if number == wanted), absent)


def _bytes(value: Field) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number stands where a message should")
    return value
