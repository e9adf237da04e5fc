"""The number formats of a KV cache, as data.

A quantized cache holds *levels* of 8 bits, and a number is a level times a scale. With scales of kind "row" every token
and key head has one scale for its key and one for its value, which are set when these are written: the largest number
of a row becomes the largest level. So nothing needs calibration, and nothing saturates. They lie behind the levels in
the same block, so whatever moves blocks moves them too. With kind "model" the checkpoint brings the scales, one for
each layer or key head; numbers beyond the largest level saturate, and are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ridgeline.kernels.base.errors import InvalidConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEVEL_TYPES = ("fp8_e4m3", "fp8_e5m2", "int8")  # of one byte each
SCALE_BYTES = 2  # a row's scale is a bfloat16: levels are rounded after it was, so its digits cost no precision
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", *LEVEL_TYPES)


@dataclass(frozen=True)
class KVFormat:
    """The format of one layer's cached keys and values.

    dtype: one of LEVEL_TYPES, "bfloat16", or None for the activations' own.
    scales: what a level is multiplied by, see above; "none" for numbers that are no levels.
    """

    dtype: str | None = None
    scales: Literal["none", "model", "row"] = "none"

    def __post_init__(self) -> None:
        if (self.dtype in LEVEL_TYPES) != (self.scales != "none"):
            raise InvalidConfig(f"a KV cache of {self.dtype or 'activations'} with scales of kind {self.scales!r}.")

    def __str__(self) -> str:
        return f"{self.dtype}{' with scales of the model' if self.scales == 'model' else ''}"

    @property
    def quantized(self) -> bool:
        return self.scales != "none"

    def head_bytes(self, head_dim: int, dtype: str) -> int:
        """Return the bytes of one key or value, its scale included. dtype: that of the activations."""
        item = 1 if self.quantized else DTYPE_BYTES[self.dtype or dtype]
        return head_dim * item + (SCALE_BYTES if self.scales == "row" else 0)

    def itemsize(self, head_dim: int, dtype: str) -> float:
        """Return the bytes of one number, with its part of the scale."""
        return self.head_bytes(head_dim, dtype) / head_dim

    def alignment(self, head_dim: int) -> int:
        """Return the number of which a block's bytes are a multiple, by padding. With scales behind the levels, blocks
        then begin at whole heads and at whole vectors of 16 bytes."""
        return math.lcm(head_dim, 16) if self.scales == "row" else 1


def kv_format(name: str) -> KVFormat:
    """Return the format called `name`, with scales of its own. Raises InvalidConfig for an unknown name."""
    if name not in KV_CACHE_DTYPES:
        raise InvalidConfig(f"unknown kv_cache_dtype {name!r}; use {', '.join(KV_CACHE_DTYPES)}.")
    if name == "auto":
        return KVFormat()
    name = "fp8_e4m3" if name == "fp8" else name
    return KVFormat(name, "row" if name in LEVEL_TYPES else "none")
