"""A decode step's attention, composed of torch's own ops."""

from __future__ import annotations

from ridgeline.kernels.attention.decode.op import composed, rounding_after
from ridgeline.kernels.attention.paged.torch_ops import paged_attention
from ridgeline.kernels.small.rotary.torch_ops import rope_kv

decode_attention = composed(rope_kv, rounding_after(paged_attention))
