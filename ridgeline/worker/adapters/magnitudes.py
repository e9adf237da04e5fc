"""Magnitudes of adapters (DoRA, Liu et al., arXiv 2402.09353) as factors of outputs.

The adapted weight's rows W + BA have given norms m. With f = m / |W + BA| that is f (W x) + (f B) (A x): a factor for
the map's outputs, and another B. The map's bias must not be multiplied, so (1 - f) of it is added.

Legend:
    I  inputs of a module
    O  outputs of a module
    R  the adapter's rank there
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.adapted import AdaptedWeight
from ridgeline.weights.adapters.places import ModulePlace, linear_of
from ridgeline.weights.adapters.reader import Factors, ReadAdapter
from ridgeline.weights.adapters.stacks import ThinPair

ROWS = 1024  # of a weight that are looked at together


def with_factors(adapter: ReadAdapter, decoder: Decoder) -> ReadAdapter:
    """Return an adapter whose magnitudes have become factors, but those of rows that ranks divide: `of_ranks` makes
    factors of these."""
    if all(pair.magnitude_O is None for pair in adapter.pairs):
        return adapter
    pairs, factors, device = list[ThinPair](), list[Factors](), next(decoder.parameters()).device
    for pair in adapter.pairs:
        linear = linear_of(decoder, pair.place.map.name)
        assert isinstance(linear, Linear | nn.Linear | Embedding | ExpertStack)
        if pair.magnitude_O is None or (isinstance(linear, Linear) and linear.over.size > 1):
            pairs.append(pair)
            continue
        assert isinstance(linear, Linear | nn.Linear)
        squares_O = _squares(_own(numbers_of(linear, device), pair.place), pair)
        product, factor = _factored(pair, squares_O.cpu(), linear)
        pairs.append(product)
        factors.append(factor)
    return replace(adapter, pairs=tuple(pairs), factors=(*adapter.factors, *factors))


@torch.inference_mode()
def of_ranks(pair: ThinPair, decoder: Decoder) -> tuple[ThinPair, Factors]:
    """Return the product and the factors of a pair with magnitudes, on the device. Ranks have some columns of each row,
    and add their squares up here, so all of them must come at the same point of their steps."""
    linear, device = decoder.get_submodule(pair.place.map.name), next(decoder.parameters()).device
    assert isinstance(linear, Linear)
    squares_O = decoder.tp.all_reduce(_squares(_own(numbers_of(linear, device), pair.place), pair))
    return _factored(pair, squares_O, linear)


def _factored(pair: ThinPair, squares_O: Tensor, linear: Linear | nn.Linear) -> tuple[ThinPair, Factors]:
    """Return the product and the factors of a pair, where its squares are. squares_O: of the adapted weight's rows."""
    assert pair.magnitude_O is not None
    device = squares_O.device
    factor_O = pair.magnitude_O.to(device) / squares_O.sqrt()
    bias_O = None if linear.bias is None else _own(linear.bias.detach(), pair.place).float().to(device)
    added_O = None if bias_O is None else (1 - factor_O) * bias_O
    up_OR = (pair.up_OR.to(device).float() * factor_O[:, None]).to(pair.up_OR.dtype)
    return ThinPair(pair.place, pair.down_RI, up_OR), Factors(pair.place, None, factor_O[:, None], added_O)


@torch.inference_mode()
def numbers_of(linear: Linear | nn.Linear, device: torch.device) -> Tensor:
    """Return the weight of a linear map, [O, I]: the numbers that a quantized one stands for."""
    if linear.weight is not None:
        return linear.weight.detach()
    assert isinstance(linear, Linear)
    matrix = linear.matrix.inner if isinstance(linear.matrix, AdaptedWeight) else linear.matrix
    columns = torch.arange(linear.inputs, device=device)
    found = list[Tensor]()
    for column_i in columns.split(ROWS):  # products with unit vectors are columns, whatever the form
        unit_iI = (column_i[:, None] == columns).to(linear.dtype)
        found.append(matrix.linear(unit_iI, None).T)
    return torch.cat(found, dim=1)


def _own(of_map: Tensor, place: ModulePlace) -> Tensor:
    return of_map[place.first : place.first + place.outputs]


@torch.inference_mode()
def _squares(weight_OI: Tensor, pair: ThinPair) -> Tensor:
    """Return the squares of the norms of the adapted weight's rows, float32, on the weight's device."""
    down_RI, found = pair.down_RI.to(weight_OI.device).float(), list[Tensor]()
    for rows_oI, up_oR in zip(weight_OI.split(ROWS), pair.up_OR.split(ROWS), strict=True):
        adapted_oI = rows_oI.float().addmm(up_oR.to(weight_OI.device).float(), down_RI)
        found.append(adapted_oI.square().sum(dim=1))
    return torch.cat(found)
