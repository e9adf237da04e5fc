"""The scheme "plain": weights keep the dtype of the activations. On a CPU they are packed for oneDNN where that is
faster."""

from __future__ import annotations

from ridgeline.kernels.base.op import anywhere
from ridgeline.kernels.gemm.plain.onednn import pack
from ridgeline.quantization.scheme import PlainWeight, Scheme, Weight


def prepare(loaded: PlainWeight) -> Weight:
    """Pack the weight if both ops that read it run on oneDNN. Other implementations get the weight as it was loaded."""
    chosen = loaded.ops.chosen
    if {chosen["linear"], chosen["norm_linear"]} != {"onednn"}:
        return loaded
    packed_OI = pack(loaded.weight_OI)
    return loaded if packed_OI is loaded.weight_OI else PlainWeight(loaded.ops, packed_OI)


PLAIN = Scheme(name="plain", prepare=prepare, supports=anywhere, needs="nothing")
