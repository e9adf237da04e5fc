"""Codes of a few bits in 32-bit words.

Legend:
    N  codes
    X  any other dimension
    W  words
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig


def words(code_NX: Tensor, bits: int, what: str) -> Tensor:
    """Return the codes one after the other in int32 words, the first in the lowest bits: [N * bits / 32, X]. A code of
    3 bits may lie in two words. Raise InvalidConfig, naming `what`, if they do not fill whole words."""
    per = 32 // gcd(32, bits)  # codes of the fewest whole words
    if len(code_NX) % per:
        raise InvalidConfig(
            f"{what} has {len(code_NX)} codes of {bits} bits to a row, no multiple of {per}; "
            "leave it out with --ignore."
        )
    pieces = code_NX.to(torch.int64).unflatten(0, (-1, per))
    found = torch.zeros(len(pieces), per * bits // 32, *code_NX.shape[1:], dtype=torch.int64, device=code_NX.device)
    for index in range(per):
        word, shift = divmod(index * bits, 32)
        found[:, word] |= pieces[:, index] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            found[:, word + 1] |= pieces[:, index] >> 32 - shift
    return torch.where(found >= 1 << 31, found - (1 << 32), found).flatten(0, 1).to(torch.int32)


def nibbles(code_OI: Tensor, *, first_high: bool) -> Tensor:
    """Return two codes of 4 bits in a byte: uint8 [O, I / 2]."""
    first, second = code_OI[:, 0::2].to(torch.uint8), code_OI[:, 1::2].to(torch.uint8)
    return first << 4 | second if first_high else first | second << 4
