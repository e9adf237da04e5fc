"""The scheme "plain": weights keep the dtype of the activations. On a CPU they are packed for oneDNN where that is
faster."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.op import anywhere
from ridgeline.kernels.gemm.plain.onednn import pack
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import Weight, weight_of


def prepare(ops: Ops, weight_OI: Tensor) -> Weight:
    """Pack the weight if both ops that read it run on oneDNN. Other implementations get the weight as it was loaded."""
    both_on_onednn = {ops.chosen["linear"], ops.chosen["norm_linear"]} == {"onednn"}
    return weight_of(ops, pack(weight_OI) if both_on_onednn else weight_OI)


PLAIN = Scheme(name="plain", prepare=prepare, supports=anywhere, needs="nothing")
