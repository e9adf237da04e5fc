"""GPTQ's codes in the order of the Marlin kernel (`checkpoint_format` "marlin"): 4 bits without zeros.

A word has eight codes that one thread of a warp multiplies in one `mma` of 16 inputs by 8 outputs, and in the next
one. Thread t has the inputs 2 (t % 4) + {0, 1, 8, 9} of the outputs t // 4 and t // 4 + 8; its words of four
neighbouring tiles of 16 outputs follow each other. Within a word the even places (those of both outputs' first and
third inputs) come first. Scales are in the order in which threads take them.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
    W  words of 32 bits
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import packed, unpacked
from ridgeline.weights.quantized.piece import (
    HALVES,
    Piece,
    Stored,
    Wanted,
    check_divides,
    dtype_of,
    finite_scales,
    little_endian_bytes,
)

TILE, CHUNK = 16, 64  # inputs and outputs of a tile; outputs whose tiles are stored together


def marlin_piece(name: str, shape: tuple[int, ...], group: int, stored: Stored | None) -> Piece | None:
    """Return a weight in Marlin's order, or None if its tiles are not whole, which AutoGPTQ leaves as they are."""
    outputs, inputs = shape
    check_divides(name, inputs, group)
    if outputs % CHUNK or inputs % TILE:
        return None
    groups = inputs // (group or inputs)
    return Piece(
        held=Held(format=CodedFormat(bits=4, group=group), scales=dtype_of(stored, f"{name}.s", "float16")),
        tensors={
            f"{name}.B": Wanted(((inputs // TILE, outputs * 2),), ("I32",)),
            f"{name}.s": Wanted(((groups, outputs),), HALVES),
            f"{name}.workspace": Wanted(((outputs // 128 * 16,),), ("I32",), optional=True),
        },
        read={
            "code_OB": lambda files: packed(_codes(files(f"{name}.B")), 4),
            "scale_OG": lambda files: _scales(finite_scales(f"{name}.s")(files)).T,
        },
        label="Marlin",
    )


def _codes(words: Tensor) -> Tensor:
    """Return the codes of words [I / 16, 2 · O], uint8 [O, I]."""
    code = unpacked(little_endian_bytes(words), 4)
    # by tile of inputs, chunk, output t // 4, inputs t % 4, tile of the chunk, odd input, output's half, inputs' half
    places = code.view(len(words), -1, 8, 4, 4, 2, 2, 2)
    # outputs: chunk, tile, half, t // 4; inputs: tile, half, t % 4, odd
    return places.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(words.shape[1] // 2, -1)


def _scales(scale_GO: Tensor) -> Tensor:
    """Return scales in the order of the outputs. Those of whole rows are for threads with two outputs of each of four
    tiles' halves, others for threads with one of each."""
    if len(scale_GO) > 1:
        return scale_GO.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1)
    return scale_GO.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)
