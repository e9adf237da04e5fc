"""Rotations on a CPU that give a token the same bits, however many stand beside it. The legend is that of op.py."""

from __future__ import annotations

from ridgeline.kernels.small.norm.fixed_tiles import rms_norm
from ridgeline.kernels.small.rotary.torch_ops import rope_kv_with

rope_kv = rope_kv_with(rms_norm)
