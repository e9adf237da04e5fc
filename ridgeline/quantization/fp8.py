"""The schemes "fp8" and "fp8-block": weights are E4M3 numbers, and activations are rounded to E4M3 when they arrive.
On a CPU, which multiplies no FP8 numbers, activations stay as they are."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.op import anywhere
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS, to_fp8
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.layout import laid_out
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import Weight


def _rounding_to(fp8: Fp8Format, name: str) -> Scheme:
    def prepare(ops: Ops, weight_OI: Tensor) -> Weight:
        return laid_out(ops, to_fp8(weight_OI.detach(), fp8), weight_OI.dtype)

    return Scheme(
        name=name, prepare=prepare, supports=anywhere, needs="nothing",
        weight_bytes=1, product_bytes=1.0, product_rate="fp8",
    )  # fmt: skip


FP8 = _rounding_to(BY_TOKEN, "fp8")
FP8_BLOCK = _rounding_to(IN_BLOCKS, "fp8-block")
