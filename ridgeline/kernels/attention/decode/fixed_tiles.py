"""A decode step's attention on a CPU that gives a request the same bits, whatever runs beside it."""

from __future__ import annotations

from ridgeline.kernels.attention.decode.op import composed, rounding_after
from ridgeline.kernels.attention.paged.fixed_tiles import paged_attention
from ridgeline.kernels.small.rotary.fixed_tiles import rope_kv

decode_attention = composed(rope_kv, rounding_after(paged_attention))
