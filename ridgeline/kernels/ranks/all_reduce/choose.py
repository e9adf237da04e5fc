"""The choice of the way that a sum over the GPUs of a machine takes, by its bytes: the one place that knows.

words     triton.py: bytes doubled, no flag. For small sums, and for the numbers that ranks tell each other of a row.
direct    direct.py: rows and a flag.
library   NCCL.

`ridgeline comm bench` measures all of them; the limits are where its columns cross. µs in a graph, two H200s
(2026-11-22 and 23, benchmarks/results/h200-all-reduce.jsonl):

    KiB             8    16    32    64   256   512  1024  2048  4096  8192
    words         1.8   1.9   2.0   2.3
    direct        4.0   4.1   4.1   4.3   6.0   6.6   8.6  12.0  19.1  32.5
    library      10.3  11.4  11.0  11.8  13.4  15.4  19.1  30.9  35.3  49.5
    words+norm    2.9   2.9   2.9   3.0              10.0
    direct+norm   5.0   4.9   4.9   5.1   5.8   7.2  11.1  13.4  22.2  43.0
    library+norm  8.2   8.2   8.2   8.6   9.9  11.6  17.6  29.7  35.9  56.8
"""

from __future__ import annotations

from typing import Literal

KIB = 1024

# The largest sums that take each way: words, then direct ones, then the library. Direct ones of more than two ranks
# take two shots. These were never measured, so they are left out.
WORDS_BYTES = 256 * KIB
NORM_WORDS_BYTES = 1024 * KIB
DIRECT_BYTES = {2: 8192 * KIB}

Way = Literal["words", "direct", "library"]


def way(nbytes: int, ranks: int, *, words: bool, direct: bool, norm: bool = False) -> Way:
    """Return the way of a sum of so many bytes over so many ranks. words, direct: these kernels could make it. norm:
    with a norm behind it."""
    most = NORM_WORDS_BYTES if norm else WORDS_BYTES
    if words and nbytes <= most:
        return "words"
    return "direct" if direct and nbytes <= DIRECT_BYTES.get(ranks, 0) else "library"
