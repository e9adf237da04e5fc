"""The schemes "fp8" and "fp8-block": weights are E4M3 numbers, and activations are rounded to E4M3 when they arrive.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.core.weight_format import Fp8Format
from ridgeline.kernels.fp8_gemm.op import BY_TOKEN, IN_BLOCKS, Fp8, to_fp8
from ridgeline.kernels.op import anywhere
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.panels import prepare_fp8_on_cpu
from ridgeline.quantization.scheme import PlainWeight, Scheme, Weight


@dataclass(frozen=True)
class Fp8Weight:
    """A `Weight` in FP8."""

    ops: Ops
    weight: Fp8

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight.weight_OI

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.ops.fp8_linear(x_TI, self.weight, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        return self.ops.fp8_norm_linear(x_TI, residual_TI, norm_weight_I, eps, self.weight, bias_O, gate)


def _rounding_to(fp8: Fp8Format, name: str) -> Scheme:
    def prepare(loaded: PlainWeight) -> Weight:
        weight = to_fp8(loaded.weight_OI.detach(), fp8)
        if loaded.ops.platform.device_type == "cpu":
            return prepare_fp8_on_cpu(loaded.ops, weight, loaded.weight_OI.dtype)
        return Fp8Weight(loaded.ops, weight)

    return Scheme(name=name, prepare=prepare, supports=anywhere, needs="nothing", weight_bytes=1)


FP8 = _rounding_to(BY_TOKEN, "fp8")
FP8_BLOCK = _rounding_to(IN_BLOCKS, "fp8-block")
