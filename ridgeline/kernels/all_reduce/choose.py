"""The choice of the way that a sum over the GPUs of a machine takes, by its bytes: the one place that knows.

words     triton.py: bytes doubled, no flag. For small sums, and for the numbers that ranks tell each other of a row.
direct    direct.py: rows and a flag.
library   NCCL.

`benchmarks/sweep_all_reduce.py` measures all of them; the limits are where its columns cross. µs in a graph, two H200s
(2026-11-22, benchmarks/results/h200-all-reduce.jsonl):

    KiB             8    16    32    64   256   512  1024  2048  4096  8192
    words         4.9   4.0   4.7   8.0  11.8
    direct        4.7   4.1   4.1   5.3   6.0   6.6   9.5  12.0  19.1  32.5
    library      10.6  11.4  11.0  12.7  13.4  15.4  18.7  30.9  35.3  49.5
    words+norm    6.7   6.6   5.8   8.8  15.0  20.6  33.4
    direct+norm   4.9   5.1   5.0   5.5   5.8   7.2  11.4  13.4  22.2  43.0
    library+norm  9.3   8.4   8.4   9.1   9.9  11.6  18.0  29.7  35.9  56.8

(Words have been mended since: a thread waited three times for each of its words.)
"""

from __future__ import annotations

from typing import Literal

KIB = 1024

# The largest sums that take each way. Words come before direct ones up to the first number, and where these do not fit
# up to the second. Measured for two ranks; more take two shots, which nobody has measured, so they keep to words.
WORDS_FIRST = {2: 0}  # more ranks: up to what fits
WORDS_BYTES = 256 * KIB
NORM_WORDS_BYTES = 1024 * KIB
DIRECT_BYTES = {2: 8192 * KIB}

Way = Literal["words", "direct", "library"]


def way(nbytes: int, ranks: int, *, words: bool, direct: bool, norm: bool = False) -> Way:
    """Return the way of a sum of so many bytes over so many ranks. words, direct: these kernels could make it. norm:
    with a norm behind it."""
    most = NORM_WORDS_BYTES if norm else WORDS_BYTES
    if words and nbytes <= min(most, WORDS_FIRST.get(ranks, most)):
        return "words"
    if direct and nbytes <= DIRECT_BYTES.get(ranks, 0):
        return "direct"
    return "words" if words and nbytes <= most else "library"
