"""The header of a GGUF file: what it says about its model, and where its tensors lie.

The layout is ggml's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): little-endian, named values, a list of
tensors, then their data. It is read with `struct`, because a vocabulary's hundred thousand texts must be fast.

A model may lie in several files, which llama-gguf-split calls NAME-00001-of-00003.gguf and so on. The first one has the
model's values; each has some of its tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError


@dataclass(frozen=True)
class TensorType:
    """A type of tensor. Its values come in blocks of `block` values, in `bytes` bytes each."""

    name: str
    block: int
    bytes: int


TENSOR_TYPES = {  # by ggml's numbers
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in its `file` (`start`). `shape` has the outermost dimension first, as in torch; the file
    has it the other way round."""

    shape: tuple[int, ...]
    type: TensorType
    start: int
    file: Path

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.bytes


@dataclass(frozen=True)
class GGUF:
    """The content of a header: `values` ("general.architecture" → "llama") and `tensors`, in the order of the file.

    path: the file, or the first one of several.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def floats(self, name: str) -> list[float] | None:
        """Return a small float32 tensor's values, or None if there is no tensor of that name."""
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.type.name != "F32" or prod(info.shape) > _MAX_SMALL:
            raise ModelLoadError(
                f"{self.path} stores {name} as {prod(info.shape)} values of {info.type.name}; it must be F32, and at "
                f"most {_MAX_SMALL} of them."
            )
        with info.file.open("rb") as file:
            file.seek(info.start)
            return list(struct.unpack(f"<{prod(info.shape)}f", file.read(info.num_bytes)))


def is_gguf(model: Path) -> bool:
    """Return True if this model is a GGUF file, by its name."""
    return model.suffix.lower() == ".gguf"


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of the model of which this is one, in order, by their names alone."""
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named["count"]) <= _MAX_PARTS:
        return [path]
    count = named["count"]
    return [path.with_name(f"{named['name']}-{part:05}-of-{count}{named['end']}") for part in range(1, int(count) + 1)]


_MAGIC = b"GGUF"
_PART = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.IGNORECASE)
_MAX_PARTS = 4096
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4
_MAX_SMALL = 1 << 16  # values of the largest tensor that is read into a list
_MAX_NAME = 256  # characters of a value's or a tensor's name, which sentences then hold; llama.cpp's tensors have 63
_MAX_ENTRIES = 1 << 18  # values, and tensors; large models have some thousands of tensors
_MAX_HEADER = 1 << 26  # bytes; the largest real ones have a quarter of it. As Python's objects they take ten times that


def read_gguf(path: Path) -> GGUF:
    """Return the header of a file, or of the whole model if the file is a part of one. Raise ModelLoadError if a file
    is missing or damaged, or needs what we do not have."""
    files = gguf_parts(path)
    if missing := [file.name for file in files if not file.is_file()]:
        if len(files) == 1:
            raise ModelLoadError(f"{path} cannot be read as a GGUF file (it does not exist); download it again.")
        raise ModelLoadError(
            f"{path} is one of {len(files)} parts, and {len(missing)} of them are missing ({missing[0]}, …); download "
            "them into the same folder."
        )
    try:
        status = [file.stat() for file in files]
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read as a GGUF file ({error}); download it again.") from error
    return _read(tuple(files), *((each.st_mtime_ns, each.st_size, each.st_ino) for each in status))


@lru_cache(maxsize=1)  # one load asks four times, and reading a vocabulary takes a third of a second
def _read(files: tuple[Path, ...], *_versions: tuple[int, ...]) -> GGUF:
    parts = [_read_file(file) for file in files]
    for index, part in enumerate(parts):
        _check_part(part, index, len(parts))
    tensors = dict[str, TensorInfo]()
    for part in parts:
        if twice := next((name for name in part.tensors if name in tensors), None):
            raise ModelLoadError(
                f"{part.path} holds {twice}, as {tensors[twice].file.name} does; they are parts of two models, so "
                "download all parts again."
            )
        tensors |= part.tensors
    promised = parts[0].values.get("split.tensors.count")
    if len(parts) > 1 and promised is not None and promised != len(tensors):
        raise ModelLoadError(
            f"{files[0]} promises {promised} tensors, and its {len(parts)} parts hold {len(tensors)}; download all "
            "parts again."
        )
    return replace(parts[0], tensors=tensors)


def _read_file(path: Path) -> GGUF:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path} cannot be read as a GGUF file ({error}); download it again.") from error


def _check_part(part: GGUF, index: int, count: int) -> None:
    """Raise ModelLoadError unless a file says of itself what its name says."""
    says, number = part.values.get("split.count", 0), part.values.get("split.no", 0)
    if not isinstance(says, int) or not isinstance(number, int):
        raise ModelLoadError(f"{part.path} says that it is part {number!r} of {says!r}; download it again.")
    if count == 1 and says > 1:
        raise ModelLoadError(
            f"{part.path} is part {number + 1} of {says}, and the others are found by their names; call it "
            f"NAME-{number + 1:05}-of-{says:05}.gguf, with the others beside it."
        )
    if count > 1 and (says, number) != (count, index):
        raise ModelLoadError(
            f"{part.path} is part {number + 1} of {max(says, 1)}, though its name says {index + 1} of {count}; "
            "download it again."
        )


class _Header:
    """A reader from front to back. Raise ValueError and struct.error if the file ends too early."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> GGUF:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, known are 2 and 3 in little-endian order")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise ValueError(
                f"it promises {num_tensors} tensors and {num_values} values, at most {_MAX_ENTRIES} are read"
            )
        values = {self._name(): self._value(self._number("I")) for _ in range(self._count(num_values, 12))}
        if len(values) != num_values:
            raise ValueError("a value is in it twice")
        infos = [self._tensor() for _ in range(self._count(num_tensors, 24))]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {name: replace(info, start=begin + info.start) for name, info in infos}
        if len(tensors) != num_tensors:
            raise ValueError("a tensor is in it twice")
        free = begin
        for name, info in sorted(tensors.items(), key=lambda each: (each[1].start, each[1].num_bytes)):
            if info.start + info.num_bytes > len(self._data):
                raise ValueError(f"it ends before the data of {name}")
            if info.start < free:  # else a small file could hold more than the machine's memory
                raise ValueError(f"the data of {name} lie over those of another tensor")
            free = info.start + info.num_bytes
        return GGUF(self._path, values, tensors)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name, num_dimensions = self._name(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = struct.unpack_from(f"<{num_dimensions}Q", self._data, self._skip(8 * num_dimensions))
        number, offset = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ModelLoadError(f"{self._path} stores {name} as ggml's type {number}; we read {known}.")
        if shape[0] % kind.block:
            raise ValueError(f"{name} has rows of {shape[0]} values, no multiple of {kind.name}'s {kind.block}")
        return name, TensorInfo(shape[::-1], kind, offset, self._path)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            number = self._number(self._format(kind))
            return _shortest(number) if kind == _FLOAT else number
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return [self._text() for _ in range(self._count(count, 8))]
        form = self._format(kind)
        size = struct.calcsize(form) * self._count(count, struct.calcsize(form))
        return list(struct.unpack_from(f"<{count}{form}", self._data, self._skip(size)))

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return _NUMBERS[kind]

    def _number(self, form: str) -> Any:
        return struct.unpack_from("<" + form, self._data, self._skip(struct.calcsize(form)))[0]

    def _name(self) -> str:
        name = self._text()
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"it names a value or a tensor {name[:80]!r}")
        return name

    def _text(self) -> str:
        length = self._number("Q")
        return self._data[self._skip(length) : self._at].decode()

    def _count(self, count: int, least: int) -> int:
        """Return the number of entries, each of at least `least` bytes. A damaged count must not make us allocate or
        loop for long."""
        if count * least > len(self._data) - self._at:
            raise ValueError(f"it promises {count} entries, more than it has room for")
        return count

    def _skip(self, size: int) -> int:
        """Skip so many bytes and return where they begin."""
        start = self._at
        if start + size > len(self._data):
            raise ValueError("it ends too early")
        if start + size > _MAX_HEADER:
            raise ValueError(f"its header is longer than {_MAX_HEADER} bytes")
        self._at = start + size
        return start


def _shortest(number: float) -> float:
    """Return the float32 as a person wrote it: 1e-06, not 9.999999974752427e-07."""
    spelled = (float(f"{number:.{digits}g}") for digits in range(1, 10 if abs(number) < 1e38 else 1))
    return next((each for each in spelled if struct.pack("<f", each) == struct.pack("<f", number)), number)
