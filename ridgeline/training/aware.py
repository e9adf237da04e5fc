"""Quantization-aware training: products are made with rounded weights (and activations, where the scheme rounds them),
while the gradient passes as if nothing had been rounded.

That is the straight-through estimator (Bengio et al., arXiv 1308.3432; Jacob et al., arXiv 1712.05877). Weights stay in
float32 and are rounded anew in every step, by the grids with which `ridgeline quantize --method rtn` rounds them, so
what is trained is what will be served.

Legend:
    T  tokens
    I  inputs
    O  outputs
    E  experts
    P  pairs of a token and one of its experts
    F  an expert's inner width
    M  model width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.compression.rounding import grid_of
from ridgeline.compression.schemes import SCHEMES, MakeConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.fp8.op import rounded as rounded_to_fp8
from ridgeline.kernels.gemm.plain.levels import LEVELS
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.make.grids import Fp8Grid, NumberGrid, dequantized
from ridgeline.quantization.make.rtn import round_to_nearest
from ridgeline.quantization.weight import Weight

Rounding = Callable[[Tensor], Tensor]
FEW_BITS = 3  # up to which groups have zeros: with so few numbers, a range around zero wastes one of them


def config_of(scheme: str, group: int, method: str = "rtn") -> MakeConfig:
    """Return the configuration by which a scheme is made here. The same numbers come from `ridgeline quantize`, with
    --asymmetric for the schemes of up to FEW_BITS bits."""
    symmetric = False if scheme in SCHEMES and SCHEMES[scheme].bits <= FEW_BITS else None
    return MakeConfig(schemes=(scheme,), method=method, group=group, symmetric=symmetric)


def make_aware(decoder: Decoder, scheme: str, group: int) -> None:
    """Let all matrices of the layers multiply as they will when a scheme of `ridgeline quantize` has rounded them.

    Raise InvalidConfig for an unknown scheme, and where groups do not divide the inputs.
    """
    if scheme not in SCHEMES:
        raise InvalidConfig(f"unknown scheme {scheme!r} to train for; known: {', '.join(SCHEMES)}.")
    grid = grid_of(config_of(scheme, group), scheme, torch.bfloat16)
    inputs = _rounding_of_inputs(scheme, grid)
    for name, module in decoder.named_modules():
        if not name.startswith("layers.") or not isinstance(module, Linear | ExpertStack):
            continue
        if name.endswith("shared_gate"):
            continue
        assert module.weight is not None
        if grid.group and module.weight.shape[-1] % grid.group and not isinstance(grid, Fp8Grid):
            raise InvalidConfig(
                f"{name} has {module.weight.shape[-1]} inputs, which groups of {grid.group} do not divide; "
                "give a smaller --group."
            )
        if isinstance(module, ExpertStack):
            module.matrices = AwareStack(module.ops, module.weight, module.parts, grid, inputs)
        else:
            module.multiply_with(AwareWeight(module.ops, module.weight, module.parts, grid, inputs))


def _rounding_of_inputs(scheme: str, grid: NumberGrid) -> Rounding | None:
    """Return a scheme's rounding of activations, or None."""
    if isinstance(grid, Fp8Grid):
        how: Fp8Format = grid.format
        return lambda x_TI: straight_through(x_TI, lambda x: rounded_to_fp8(x, how, None))
    return (lambda x_TI: straight_through(x_TI, _to_int8)) if scheme == "w8a8" else None


def _to_int8(x_TI: Tensor) -> Tensor:
    scale_T1 = x_TI.float().abs().amax(-1, keepdim=True) / LEVELS
    scale_T1 = torch.where(scale_T1 == 0, 1.0, scale_T1)
    return (x_TI.float() / scale_T1).round() * scale_T1


def straight_through(x: Tensor, rounding: Rounding) -> Tensor:
    """Return rounding(x), in the dtype of x, with the gradient of x itself."""
    with torch.no_grad():
        change = rounding(x.detach()).to(x.dtype) - x
    return x + change


def _rounded_weight(weight_OI: Tensor, parts: Sequence[int], grid: NumberGrid) -> Tensor:
    """Return the weight of fused projections after rounding. Blocks of FP8 do not reach from one into the next."""

    def rounding(weight: Tensor) -> Tensor:
        own = grid.fitted(weight)
        blocks = isinstance(own, Fp8Grid) and own.format.block
        pieces = weight.split(list(parts)) if blocks else [weight]
        return torch.cat([dequantized(own, round_to_nearest(piece, own)) for piece in pieces])

    return straight_through(weight_OI, rounding)


@dataclass(frozen=True)
class AwareWeight(Weight):
    """A `Weight` that is rounded whenever it multiplies.

    weight_OI: the parameter that is trained.
    parts: the rows of each fused projection.
    """

    ops: Ops
    weight_OI: Tensor
    parts: Sequence[int]
    grid: NumberGrid
    inputs: Rounding | None

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight_OI

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # this weight gives no room for others
        x_TI = x_TI if self.inputs is None else self.inputs(x_TI)
        return self.ops.linear(x_TI, _rounded_weight(self.weight_OI, self.parts, self.grid), bias_O)


@dataclass(frozen=True)
class AwareStack:
    """`ExpertWeights` that are rounded whenever they multiply, each expert's matrix by itself."""

    ops: Ops
    weight_EOI: Tensor
    parts: Sequence[int]
    grid: NumberGrid
    inputs: Rounding | None

    @property
    def nbytes(self) -> int:
        return self.weight_EOI.nbytes

    def _weights(self) -> Tensor:
        return torch.stack([_rounded_weight(weight_OI, self.parts, self.grid) for weight_OI in self.weight_EOI])

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        x_TM = x_TM if self.inputs is None else self.inputs(x_TM)
        return self.ops.grouped_gate_up(x_TM, self._weights(), bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        h_PF = h_PF if self.inputs is None else self.inputs(h_PF)
        return self.ops.grouped_down(h_PF, self._weights(), bias_EM, routes, add_TM)
