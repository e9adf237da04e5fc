"""Linear maps through torch's own products, between norms and gates that have gradients in one kernel each. The legend
is that of op.py."""

from __future__ import annotations

from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.gemm.plain.torch_ops import learnt_linear as linear
from ridgeline.kernels.small.activation.triton_training import gated_activation
from ridgeline.kernels.small.norm.triton_training import rms_norm

norm_linear = in_three(rms_norm, linear, gated_activation)
