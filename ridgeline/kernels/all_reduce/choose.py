"""The choice of the way that a sum over the GPUs of a machine takes, by its bytes: the one place that knows.

words     triton.py: bytes doubled, no flag. For small sums, and for the numbers that ranks tell each other of a row.
direct    direct.py: rows and a flag.
library   NCCL.

`benchmarks/sweep_all_reduce.py` measures all of them; the limits are where its columns cross.
"""

from __future__ import annotations

from typing import Literal

KIB = 1024

WORDS_BYTES = 256 * KIB  # the most that fits (triton.LARGEST); predicted to lose to `direct` from about 128 KiB on
DIRECT_BYTES = 0  # off until it was seen right on GPUs; predicted to win up to 4 MiB among two, where NCCL's ring fills

Way = Literal["words", "direct", "library"]


def way(nbytes: int, *, words: bool, direct: bool) -> Way:
    """Return the way of a sum of so many bytes. words, direct: these kernels could make it."""
    if words and nbytes <= WORDS_BYTES:
        return "words"
    return "direct" if direct and nbytes <= DIRECT_BYTES else "library"
