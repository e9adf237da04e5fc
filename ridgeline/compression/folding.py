"""The places of a layer where the inputs of linear maps can be divided by factors, because what lies before them
absorbs the division: the norm, the projection to values, or the half of a gated pair that is not gated.

Fused projections and whatever else reads the same inputs (routers, shared experts) share factors.

Legend:
    I  inputs
    G  key/value heads
    D  head width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ridgeline.compression.modules import Matrix
from ridgeline.compression.schemes import MakeConfig
from ridgeline.layers.attention import Attention
from ridgeline.layers.experts import Experts
from ridgeline.layers.gated_delta import GatedDelta
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import MLP, GatedMLP
from ridgeline.layers.norm import Norm
from ridgeline.quantization.make.factors import searched_factors, smoothing_factors
from ridgeline.quantization.make.grids import NumberGrid
from ridgeline.quantization.make.statistics import InputStatistics

_LINEAR_IN_UP = ("silu", "gelu", "gelu_tanh")  # gated activations: act(gate) * up

Divide = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A place for factors.

    consumers: the weights that read the inputs, [..., I].
    divide: divides what makes the inputs, and returns the factors as they took effect.
    tie: makes factors equal where they must be.
    """

    consumers: Sequence[Tensor]
    divide: Divide
    tie: Callable[[Tensor], Tensor] = lambda factor_I: factor_I


def fold_layer(
    layer: Layer,
    found: Sequence[Matrix],
    seen: Mapping[str, InputStatistics],
    grids: Mapping[str, NumberGrid],
    config: MakeConfig,
    dtype: torch.dtype,
) -> int:
    """Move factors as the method says, in the weights of the layer and in what was `seen` of their inputs. Return the
    number of places.

    grids: of each matrix by name; a matrix that stays as it is has none.
    """
    count = 0
    for fold in folds(layer, dtype):
        ours = [m for m in found if m.name in grids and any(_within(m, weight) for weight in fold.consumers)]
        if not ours or not any(seen[m.name].tokens for m in ours):
            continue
        weights, statistics = [m.weight_OI for m in ours], [seen[m.name] for m in ours]
        if config.folding == "smoothquant":
            factor_I = fold.tie(smoothing_factors(weights, statistics, config.alpha))
        else:
            factor_I, _ = searched_factors(weights, statistics, grids[ours[0].name], fold.tie)
        if bool((factor_I == 1).all()):
            continue
        factor_I = fold.divide(factor_I)
        for weight in fold.consumers:
            weight.mul_(factor_I)
        for m in found:
            if any(_within(m, weight) for weight in fold.consumers):
                seen[m.name].divide(factor_I)
        count += 1
    return count


def _within(matrix: Matrix, weight: Tensor) -> bool:
    """Return True if `weight` is, or contains, the matrix's."""
    first, size = weight.data_ptr(), weight.numel() * weight.element_size()
    return first <= matrix.weight_OI.data_ptr() < first + size


def folds(layer: Layer, dtype: torch.dtype) -> Iterator[Fold]:
    """Yield the places of a layer. `dtype` is that of the files, to which a divided norm is rounded."""
    if isinstance(layer.mixer, Attention | GatedDelta) and layer.mixer_norm is not None:
        first = layer.mixer.qkv if isinstance(layer.mixer, Attention) else layer.mixer.delta_in
        yield _behind_norm(layer.mixer_norm, [_weight(first)], dtype)
    if isinstance(layer.mixer, Attention):
        yield from _values(layer.mixer)
    yield from _feed_forward(layer.feed_forward, layer.feed_forward_norm, dtype)


def _weight(linear: Linear) -> Tensor:
    assert linear.weight is not None
    return linear.weight.detach()


def _feed_forward(part: nn.Module | None, norm: Norm | None, dtype: torch.dtype) -> Iterator[Fold]:
    if isinstance(part, Experts):
        if norm is not None and part.norms is None:
            yield _behind_norm(norm, list(_readers(part)), dtype)
        yield from _inside_experts(part)
        if isinstance(part.shared, GatedMLP):
            yield from _ups(part.shared)
        return
    if isinstance(part, (GatedMLP, MLP)) and norm is not None:
        yield _behind_norm(norm, [_weight(part.gate_up if isinstance(part, GatedMLP) else part.up)], dtype)
    if isinstance(part, GatedMLP):
        yield from _ups(part)


def _readers(part: Experts) -> Iterator[Tensor]:
    """Yield the weights that read the normalized input of a mixture."""
    assert part.gate_up.weight is not None
    yield part.gate_up.weight.detach()
    yield part.router.detach()
    if isinstance(part.shared, (GatedMLP, MLP)):
        yield _weight(part.shared.gate_up if isinstance(part.shared, GatedMLP) else part.shared.up)
    if part.shared_gate is not None:
        yield _weight(part.shared_gate)


def _behind_norm(norm: Norm, consumers: Sequence[Tensor], dtype: torch.dtype) -> Fold:
    def divide(factor_I: Tensor) -> Tensor:
        """Round the divided weight as files will, and return what it was really divided by."""
        with torch.no_grad():
            new_I = (norm.weight / factor_I - norm.offset).to(dtype).to(norm.weight.dtype) + norm.offset
            real_I = torch.where((new_I == 0) | (norm.weight == 0), 1.0, norm.weight / new_I)
            norm.weight.copy_(torch.where(new_I == 0, norm.weight, new_I))
            if norm.bias is not None:
                norm.bias.div_(real_I)
        return real_I

    return Fold(consumers=consumers, divide=divide)


def _values(attention: Attention) -> Iterator[Fold]:
    """Yield the place between the projection to values and that of the output. Queries of a group share values, so they
    share factors."""
    spec = attention.spec
    if spec.v_norm or spec.values_are_keys:
        return
    shape = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)

    def tie(factor_I: Tensor) -> Tensor:
        each = factor_I.view(shape).log().mean(1, keepdim=True).exp()
        return each.expand(shape).reshape(-1)

    def divide(factor_I: Tensor) -> Tensor:
        _divide_rows(attention.qkv, slice(-spec.kv_size, None), factor_I.view(shape)[:, 0].reshape(-1))
        return factor_I

    yield Fold(consumers=[_weight(attention.out)], divide=divide, tie=tie)


def _ups(part: GatedMLP) -> Iterator[Fold]:
    if part.kind in _LINEAR_IN_UP:
        size = part.gate_up.parts[0]
        yield Fold(consumers=[_weight(part.down)], divide=partial(_divide_rows, part.gate_up, slice(size, None)))


def _inside_experts(part: Experts) -> Iterator[Fold]:
    if part.spec.activation not in _LINEAR_IN_UP:
        return
    assert part.gate_up.weight is not None
    assert part.down.weight is not None
    size = part.spec.intermediate_size
    for expert, down in enumerate(part.down.weight.detach()):
        bias = None if part.gate_up.bias is None else part.gate_up.bias.detach()[expert, size:]
        yield Fold(consumers=[down], divide=partial(_divide, part.gate_up.weight.detach()[expert, size:], bias))


def _divide_rows(linear: Linear, rows: slice, factor_I: Tensor) -> Tensor:
    return _divide(_weight(linear)[rows], None if linear.bias is None else linear.bias.detach()[rows], factor_I)


def _divide(weight: Tensor, bias: Tensor | None, factor_I: Tensor) -> Tensor:
    weight.div_(factor_I[:, None])
    if bias is not None:
        bias.div_(factor_I)
    return factor_I
