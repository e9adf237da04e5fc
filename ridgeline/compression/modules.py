"""The linear maps of a decoder by the names that checkpoints give them.

Legend:
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.weights.loader import stored_view
from ridgeline.weights.rows import in_their_order

_SUFFIX = ".weight"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of the decoder: a (fused) linear map, or that of one expert.

    name: the module in the decoder, with the expert's number if it is one's.
    owner: the module that multiplies.
    expert: the number of the expert, or None.
    parts: the checkpoint's modules, one below the other, and how many rows each has.
    sources: how the checkpoint holds them.
    """

    name: str
    owner: Linear | ExpertStack
    expert: int | None
    parts: tuple[tuple[str, int], ...]
    sources: tuple[Source, ...]

    @property
    def unit(self) -> str:
        """The name of what has one scheme: a (fused) linear map, or all experts of a layer, since engines multiply
        their gates, ups and downs with one kernel."""
        return self.name if self.expert is None else self.name.rsplit(".", 2)[0]

    @property
    def weight_OI(self) -> Tensor:
        """The weight as it was loaded."""
        assert self.owner.weight is not None
        weight = self.owner.weight.detach()
        return weight if self.expert is None else weight[self.expert]

    @property
    def stored_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)


def split(matrix: Matrix, weight_OI: Tensor) -> list[tuple[str, Tensor]]:
    """Return the checkpoint's modules with their rows, in the checkpoint's order of rows."""
    pieces = weight_OI.split([rows for _, rows in matrix.parts])
    found = zip(matrix.stored_names, matrix.sources, pieces, strict=True)
    return [(name, piece[stored_rows(source, len(piece)).to(piece.device)]) for name, source, piece in found]


def stored_rows(source: Source, rows: int) -> Tensor:
    """Return, for each row of the checkpoint's tensor, the index of our row."""
    return in_their_order(stored_view(torch.arange(rows)[:, None], source), source).reshape(-1)


def matrices(decoder: Decoder, weights: WeightMap) -> Iterator[tuple[int, Matrix]]:
    """Yield each layer's matrices that can be quantized, with the number of the layer. Routers, gates of shared
    experts, and what lies outside of layers cannot."""
    for name, module in decoder.named_modules():
        if not name.startswith("layers.") or not isinstance(module, (Linear, ExpertStack)):
            continue
        layer, sources = int(name.split(".")[1]), weights[f"{name}.weight"]
        if isinstance(module, ExpertStack):
            yield from ((layer, expert) for expert in _experts(name, module, sources))
        elif not name.endswith("shared_gate"):
            yield layer, _linear(name, module, sources)


def stacked(decoder: Decoder, weights: WeightMap) -> list[str]:
    """Return the stacks whose experts a checkpoint holds in one tensor, which no format of ours quantizes."""
    stacks = (name for name, module in decoder.named_modules() if isinstance(module, ExpertStack))
    return [name for name in stacks if weights[f"{name}.weight"][0].stacked]


def _linear(name: str, module: Linear, sources: Sequence[Source]) -> Matrix:
    if sources[0].transpose:
        raise InvalidConfig(
            f"{sources[0].name} is stored as [inputs, outputs], and no format of quantized weights has such modules; "
            "this architecture cannot be quantized."
        )
    rows = module.parts if len(sources) > 1 else (sum(module.parts),)
    return _matrix(name, module, None, sources, rows)


def _experts(name: str, module: ExpertStack, sources: Sequence[Source]) -> Iterator[Matrix]:
    if sources[0].stacked:
        return
    each = len(module.parts)
    for expert in range(len(sources) // each):
        own = sources[expert * each : (expert + 1) * each]
        yield _matrix(f"{name}.{expert}", module, expert, own, module.parts)


def _matrix(
    name: str, owner: Linear | ExpertStack, expert: int | None, sources: Sequence[Source], rows: Sequence[int]
) -> Matrix:
    parts = tuple((source.name.removesuffix(_SUFFIX), count) for source, count in zip(sources, rows, strict=True))
    return Matrix(name=name, owner=owner, expert=expert, parts=parts, sources=tuple(sources))


def ignored(matrix: Matrix, patterns: Sequence[str]) -> bool:
    """Return True if a pattern names one of the checkpoint's modules. Fused ones stay together."""
    return any(fnmatchcase(name, pattern) for name in matrix.stored_names for pattern in patterns)
