"""A decode step's attention, composed of torch's own ops."""

from __future__ import annotations

from ridgeline.kernels.attention.torch_ops import paged_attention
from ridgeline.kernels.decode_attention.op import composed, rounding_after
from ridgeline.kernels.rotary.torch_ops import rope_kv

decode_attention = composed(rope_kv, rounding_after(paged_attention))
