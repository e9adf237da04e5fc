"""Weights of plain files that are rounded to NF4 while they are read, so that never more than one of them is there in
more bits (QLoRA: Dettmers et al., arXiv 2305.14314).

Scales are rounded too ("double quantization"): they are whole numbers of 8 bits, and every 256 inputs have one scale of
these in float16. That is 4 + 8 / 64 + 16 / 256 = 4.19 bits a number.

Legend:
    O  outputs
    I  inputs
    B  bytes of a row of codes
    G  groups of a row
    S  runs of 256 inputs of a row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from ridgeline.core.specs.model import WeightMap
from ridgeline.kernels.base.weight_format import SUPER, CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import TABLES, packed
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.weights.quantized.piece import FLOATS, Files, Piece, Wanted
from ridgeline.weights.quantized.plan import Pieces, matrices

GROUP = 64  # inputs that share a scale
SCALES = 127  # the largest scale of 256 inputs
PIECE = 1 << 23  # numbers that are rounded at once, since rounding takes several copies of them


def nf4_format(inputs: int) -> CodedFormat | None:
    """Return the format for rows of so many inputs; None: groups do not divide them, so they stay plain numbers. Scales
    stay in float32 where runs of 256 inputs do not."""
    if inputs % GROUP:
        return None
    return CodedFormat(bits=4, group=GROUP, values="nf4", nested=inputs % SUPER == 0)


def nf4_rounded(weight_OI: Tensor) -> dict[str, Tensor]:
    """Return the fields of a weight of these numbers in NF4: code_OB (uint8), scale_OG and, where 256 divides the
    inputs, outer_OS (float16), by which scale_OG (int8) is multiplied; else scale_OG is float32."""
    rows = max(1, PIECE // weight_OI.shape[1])
    pieces = [_rounded(part) for part in weight_OI.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _rounded(weight_OI: Tensor) -> dict[str, Tensor]:
    how = nf4_format(weight_OI.shape[1])
    assert how is not None
    groups = weight_OI.float().unflatten(1, (-1, GROUP))
    largest_OG = groups.abs().amax(2)
    found = {"scale_OG": largest_OG}
    if how.nested:
        most_OS = largest_OG.unflatten(1, (-1, SUPER // GROUP)).amax(2)
        outer_OS = (most_OS / SCALES).half()
        wide_OG = outer_OS.float().repeat_interleave(SUPER // GROUP, 1)
        level_OG = (largest_OG / torch.where(wide_OG > 0, wide_OG, 1.0)).round().clamp(0, SCALES)
        found = {"scale_OG": level_OG.to(torch.int8), "outer_OS": outer_OS}
        largest_OG = level_OG * wide_OG
    values, codes = torch.tensor(TABLES["nf4"], device=weight_OI.device).sort()
    middles = (values[1:] + values[:-1]) / 2
    scaled = groups / torch.where(largest_OG > 0, largest_OG, 1.0)[..., None]
    code_OI = codes.to(torch.uint8)[torch.bucketize(scaled.flatten(1).contiguous(), middles, out_int32=True)]
    return {"code_OB": packed(code_OI, 4), **found}


def rounded_pieces(decoder: Decoder, weights: WeightMap, device: torch.device) -> Pieces:
    """Return the linear maps of a model's layers as weights that are rounded when they are read. Experts, embeddings
    and heads are none of them.

    decoder: a plain one, for its shapes. device: where they are rounded.
    """
    found: dict[str, Piece] = {}
    for module, owner, sources in matrices(decoder, weights, tied=False):
        if not isinstance(owner, Linear) or not module.startswith("layers.") or any(each.row for each in sources):
            continue
        rows = owner.parts if len(sources) == len(owner.parts) else (sum(owner.parts),)
        if (how := nf4_format(owner.inputs)) is None or len(rows) != len(sources):
            continue
        for source, outputs in zip(sources, rows, strict=True):
            shape = (owner.inputs, outputs) if source.transpose else (outputs, owner.inputs)
            fields = _Fields(source.name, source.transpose, device)
            names = ("code_OB", "scale_OG", *(("outer_OS",) if how.nested else ()))
            found[source.name] = Piece(
                held=Held(format=how, scales="int8" if how.nested else "float32"),
                tensors={source.name: Wanted((shape,), FLOATS)},
                read={name: partial(fields.read, name) for name in names},
                label="NF4",
            )
    return found


class _Fields:
    """The fields of one weight, which are made together and read one by one."""

    def __init__(self, name: str, transpose: bool, device: torch.device) -> None:
        self.name, self.transpose, self.device = name, transpose, device
        self._made: dict[str, Tensor] = {}
        self._lock = Lock()

    def read(self, field: str, files: Files) -> Tensor:
        with self._lock:  # several threads read
            if field not in self._made:
                numbers = files(self.name).to(self.device)
                self._made = nf4_rounded(numbers.T.contiguous() if self.transpose else numbers)
            return self._made.pop(field)


Rounding = Callable[[Decoder, WeightMap], Mapping[str, Piece]]
