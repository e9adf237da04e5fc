"""A tensor in a model's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _no_blocks() -> Tensor:
    raise AssertionError("only GGUF's tensors have blocks")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    dtype: the name in the file's format.
    read: returns the tensor. Blocks of GGUF are dequantized.
    part: returns one index of its first dimension. None in files that are read whole.
    blocks: returns the bytes of GGUF's blocks, a block in a row.
    sliced: returns only these slices. None in files of which more would be read.
    """

    shape: list[int]
    dtype: str
    read: Callable[[], Tensor]
    part: Callable[[int], Tensor] | None = None
    blocks: Callable[[], Tensor] = _no_blocks
    sliced: Callable[[tuple[slice, ...]], Tensor] | None = None
