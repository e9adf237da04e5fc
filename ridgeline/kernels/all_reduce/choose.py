"""The choice of the way that a sum over the GPUs of a machine takes, by its bytes: the one place that knows.

words     triton.py: bytes doubled, no flag. For small sums, and for the numbers that ranks tell each other of a row.
direct    direct.py: rows and a flag.
library   NCCL.

`benchmarks/sweep_all_reduce.py` measures all of them; the limits are where its columns cross.
"""

from __future__ import annotations

from typing import Literal

KIB = 1024

# Words took 4.0 / 3.9 / 6.2 / 9.2 µs for 8 / 16 / 32 / 64 KiB (two H200s, 2026-11-22, programs of 512 words), NCCL took
# 11 to 15. With a norm they are used up to a row of every program, as they were then.
WORDS_BYTES = 256 * KIB
NORM_WORDS_BYTES = 1024 * KIB
DIRECT_BYTES = 0  # off until it was seen right on GPUs; predicted to beat words from 64 KiB on, and NCCL up to 4 MiB

Way = Literal["words", "direct", "library"]


def way(nbytes: int, *, words: bool, direct: bool, norm: bool = False) -> Way:
    """Return the way of a sum of so many bytes. words, direct: these kernels could make it. norm: with a norm behind
    it."""
    if words and nbytes <= (NORM_WORDS_BYTES if norm else WORDS_BYTES):
        return "words"
    return "direct" if direct and nbytes <= DIRECT_BYTES else "library"
