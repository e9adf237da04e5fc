"""One checkpoint's weight in the tensors of its files, and the method by which they are read.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.quantization.held import dequantized
from ridgeline.weights.stored import StoredTensor

Files = Callable[[str], Tensor]  # the name of a tensor → the tensor
Read = Callable[[Files], Tensor]
Stored = Mapping[str, StoredTensor]

FLOATS = ("F32", "BF16", "F16")
HALVES = ("F16", "BF16", "F32")
PLAIN_FIELD = "weight_OI"


@dataclass(frozen=True)
class Wanted:
    """A tensor that a weight needs. shapes: any of these. optional: it may be absent."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A weight in a checkpoint, before it is read.

    held: the form that it gets; None: plain numbers, where no form can say what the files do. Then `read` has them.
    tensors: the tensors that it consists of, by name.
    read: how to read each field of the form from them. Fields that all outputs share are single numbers, or the order.
    plain: returns the weight as plain numbers, where there is a faster way than by the form.
    label: the format's name.
    """

    held: Held | None
    tensors: Mapping[str, Wanted]
    read: Mapping[str, Read]
    label: str
    plain: Read | None = None

    def numbers(self, files: Files) -> Tensor:
        """Return the numbers that it stands for."""
        if self.plain is not None:
            return self.plain(files)
        if self.held is None:
            return self.read[PLAIN_FIELD](files)
        return dequantized(self.held, {name: read(files) for name, read in self.read.items()})

    def alone(self) -> Piece:
        """Return it as the matrix of a linear map: as plain numbers if it has a form that experts' products alone
        take."""
        how = None if self.held is None else self.held.format
        if not isinstance(how, CodedFormat) or how.values != "e4m3":
            return self
        return replace(self, held=None, read={PLAIN_FIELD: self.numbers})

    def problem(self, stored: Stored) -> str | None:
        """Return a sentence about what is wrong with its tensors by the files' headers, or None."""
        for name, wanted in self.tensors.items():
            if name not in stored:
                if wanted.optional:
                    continue
                return f"lacks {name}, which config.json's {self.label} weights need"
            shape, dtype = tuple(stored[name].shape), stored[name].dtype
            if dtype not in wanted.dtypes:
                return f"holds {name} as {dtype}, and {self.label} weights have {' or '.join(wanted.dtypes)} there"
            if shape not in wanted.shapes:
                shapes = " or ".join(str(list(each)) for each in wanted.shapes)
                return f"holds {name} of the shape {list(shape)}, wanted {shapes}"
        return None


def times_inputs(piece: Piece, factor: str, inputs: int) -> Piece:
    """Return a weight whose inputs are multiplied by a factor of their own first, as plain numbers with these in
    them. factor: the name of the tensor that holds them."""
    check = finite_scales(factor, above=False)

    def numbers(files: Files) -> Tensor:
        return piece.numbers(files).float() * check(files).float().reshape(1, inputs)

    tensors = {**piece.tensors, factor: Wanted(((inputs,), (1, inputs)), FLOATS)}
    return Piece(held=None, tensors=tensors, read={PLAIN_FIELD: numbers}, label=piece.label)


class Method(Protocol):
    """A quantization method, made from the config that a checkpoint has.

    tied: the embedding's table can be quantized. An output layer that shares it then has its own copy in that form.
    """

    label: str
    tied: bool

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        """Return the form in which a weight is stored, or None if it is stored as plain numbers.

        name: the module's name in the checkpoint; shape: [outputs, inputs] of its weight, or [experts, outputs, inputs]
        of a stack. stored: the files' tensors; None: there are none to look at.
        """


@dataclass(frozen=True)
class Section:
    """A quantization config, or one nested in it, with checked access."""

    values: Mapping[str, Any]
    place: str = "quantization_config"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, known: tuple[int, ...], default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value not in known:
            raise self.wrong(name, value, f"one of {', '.join(map(str, known))}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def choice(self, name: str, known: tuple[str, ...], default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, value, f"one of {', '.join(known)}")
        return value

    def names(self, *entries: str) -> tuple[str, ...]:
        """Return the list of texts under any of these names, or nothing."""
        for name in entries:
            value = self.get(name)
            if value is not None:
                if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                    raise self.wrong(name, value, "a list of texts")
                return tuple(value)
        return ()

    def section(self, name: str) -> Section | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return Section(value, f"{self.place}.{name}")

    def wrong(self, name: str, value: object, want: str) -> ModelLoadError:
        return ModelLoadError(f"config.json sets {self.place}.{name} to {repr(value)[:80]}; it must be {want}.")


def group_size(section: Section, name: str, default: int) -> int:
    """Return the inputs of a group, 0 for a whole row, which configs write as -1."""
    value = section.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and (value < 8 or value % 8)):
        raise section.wrong(name, value, "a multiple of 8, or -1 for whole rows")
    return max(value, 0)


def check_divides(name: str, inputs: int, group: int) -> None:
    """Raise ModelLoadError if groups do not divide a weight's inputs."""
    if group and inputs % group:
        raise ModelLoadError(f"{name} has {inputs} inputs, which groups of {group} do not divide; correct group_size.")


def finite_scales(name: str, *, above: bool = True, zero: bool = False) -> Read:
    """Return a reader of scales, which raises ModelLoadError unless they are numbers above 0.

    above: False lets negative numbers pass. zero: zeros pass.
    """

    def read(files: Files) -> Tensor:
        return checked_scales(name, files(name), above=above, zero=zero)

    return read


def checked_scales(name: str, scale: Tensor, *, above: bool = True, zero: bool = False) -> Tensor:
    """Return the scales. Raise ModelLoadError unless they are numbers above 0."""
    values = scale.float()
    bad = ~values.isfinite()
    if above:
        bad |= values < 0
    if not zero:
        bad |= values == 0
    if bad.any():
        value = values[bad][0].item()
        what = "numbers above 0" if above and not zero else "numbers from 0" if above else "numbers"
        raise ModelLoadError(
            f"{name} holds {int(bad.sum())} scales like {value}; scales must be {what}: copy it again."
        )
    return scale


def as_number(read: Read) -> Read:
    """Return a reader of a tensor with one value, as a number without dimensions, in float32."""
    return lambda files: read(files).float().reshape(())


def per_output(read: Read, outputs: int) -> Read:
    """Return a reader that repeats a weight's one scale for each output: [O, 1]. Others stay as they are."""

    def repeated(files: Files) -> Tensor:
        return read(files).float().reshape(-1, 1).expand(outputs, 1)

    return repeated


def dtype_of(stored: Stored | None, name: str, default: str) -> str:
    """Return torch's name of a stored tensor's dtype, or `default` if there is none."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
    return default if stored is None or name not in stored else names.get(stored[name].dtype, default)


def coded(held: Held) -> CodedFormat:
    """Return the format of codes."""
    assert isinstance(held.format, CodedFormat)
    return held.format


def little_endian_bytes(words: Tensor) -> Tensor:
    """Return int32 words as bytes, the low one first: [..., 4 · words]."""
    # Flat, since a last dimension of one word need not count as contiguous
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
